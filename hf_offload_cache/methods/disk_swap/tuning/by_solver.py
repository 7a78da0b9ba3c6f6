"""Rows by the paper's solver, of tables and profiles that are measured here (KVSwap, section 3.5, figure 4a, and
appendix A)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ....errors import BudgetError, ConfigError
from ....history.records import RecordFormat
from ....model.fingerprint import fingerprint
from ....model.geometry import Geometry
from ....stores.base import DEVICE_BLOCK
from ....stores.engines import choose_engine
from ....tuning.sample import Progress, rows_for, sample_sizes
from ....tuning.task import Task, refuse
from ....tuning.tuned import Tuned
from ..adapter import Adapter
from ..cache import DiskSwapCache
from ..compact_keys import default_rank
from ..config import DiskSwapConfig
from .lookup import Reader, code_sizes
from .profile import measure_io, measure_model
from .solve import CompressionTable, IoProfile, Limits, ModelProfile, ReuseTable, Solution, solve

_READING, _DISK, _MODEL = 0.5, 0.15, 0.34
"""Shares of the time."""
_ENOUGH, _LEAST = 0.998, 0.99
"""Shares of the attention mass that the largest codes keep: more bytes than keep the first are not tried, fewer than
keep the second neither. For SmolLM2-135M these are 24, and 16 or 12 bytes."""


_SOLVED = ("group_size", "rank", "summary_bytes", "reuse_capacity", "adapter")
"""Fields that the solver decides."""


def tune_by_solver(
    task: Task, settings: DiskSwapConfig, alpha: float, delta: int | None, sigma_max: float, max_group_size: int
) -> Tuned:
    """Measure, solve, and hand back rows; the arguments are those of `tune`.

    The smallest group is the largest whose record is one block of the disk (4 KiB): a smaller one reads the same bytes
    for less. Of coded keys σ lies between those of the fewest bytes that keep .998 and .99 of the attention mass that
    the most do, measured on the sample; slots for one selection come first as far as the former fits beside them. Of
    truncated ones (`summary_dtype`) the smallest σ is that of the library's default rank, and the search begins with
    slots for one selection as far as σ stays within twice that: no accuracy was seen to be lost up to there.
    """
    inner, measured, quick, fields = task.model, task.measured, task.quick, task.fields
    assert issubclass(measured, DiskSwapCache)
    refuse(_SOLVED, fields)
    if fields.get("look_ahead") is False:
        raise ConfigError("look_ahead=False reads nothing ahead, so there is nothing to hide: leave it out")
    geometry, max_context, max_batch = task.geometry, task.max_context, task.max_batch
    engine, store = choose_engine(settings.engine, task.directory)
    sizes = group_sizes(largest_form(geometry), max_group_size)
    delta = max(1, settings.num_selected // 4) if delta is None else delta
    limits = Limits(settings.num_selected, settings.num_sinks, sizes, sigma_max, alpha, delta)
    kind = {**fields, "summary_dtype": settings.summaries}
    _rest(measured, geometry, task.budget, max_context, max_batch, limits, kind)  # fails early, before minutes of work
    capacities = sorted({0, *range(0, 4 * settings.num_selected + 1, max(limits.delta, 1))})
    context, steps = sample_sizes(inner, settings.num_selected, max_context, 16 if quick else 48)
    wanted = task.samples or (3 if quick else 20)
    stretches = task.stretches(wanted, 2 * settings.num_selected + steps, context + steps)
    with Progress(task.seconds, task.progress) as bar:
        bar.begin("sample text: ", _READING)
        reader = Reader(inner, sizes, capacities, settings, measured)
        for index, ids in enumerate(stretches):
            before = bar.seconds_left
            reader.read(ids, len(ids) - steps, bar.within(index, len(stretches)))
            if reader.samples >= 2 and bar.seconds_left < before - bar.seconds_left:
                break
        assert reader.form is not None
        coded = settings.summaries == "coded"
        compression = reader.compression_table(sizes_of(reader.form, settings, limits.sigma_max))
        tried = compression
        if coded:
            within = [size for size in compression.sizes if compression.sigma(size) <= limits.sigma_max]
            tried = compression.up_to(max(compression.enough(_ENOUGH), min(within or compression.sizes[:1])))
            most = min(limits.sigma_max, compression.sigma(compression.enough(_LEAST)))
            limits = dataclasses.replace(limits, sigma_max=most, size_field="summary_bytes")
        sigma = (1 if coded else 2) * tried.sigma(tried.sizes[0])
        limits = dataclasses.replace(limits, first_capacity=settings.num_selected, first_sigma=sigma)
        adapter = None if coded else Adapter(reader.moments.projections(tried.sizes[0]), fingerprint(inner))
        bar.begin("disk: ", _DISK)
        reads = {size: max_batch * limits.groups(size) for size in sizes}
        io = measure_io(reader.form, reads, engine, task.directory, 0.5 * _DISK * task.seconds, bar.done,
                        4 if quick else 8, settings.write_queue)  # fmt: skip
        bar.begin("decoder block: ", _MODEL)
        batches, contexts = rows_for(max_batch, max_context)
        block = measure_model(
            inner, reader.form, coarse(batches, 2 if quick else 4), coarse(contexts, 2 if quick else 4),
            sorted({tried.sizes[0], tried.sizes[-1]}), sorted({0, settings.num_selected, capacities[-1]}), settings,
            sizes[-1], 0.8 * _MODEL * task.seconds, bar.done, measured, limits.size_field,
        )  # fmt: skip
        bar.begin("solving ", 1 - _READING - _DISK - _MODEL)
        reuse = reader.reuse_table()
        rows, left_out = _solve_all(
            measured, geometry, kind, task.budget, max_batch, batches, contexts, reuse, tried, io, block, limits,
            bar.done,
        )  # fmt: skip
    found = {
        "limits": dataclasses.asdict(limits),
        "tables": {"reuse": reuse.to_dict(), "compression": compression.to_dict()},
        "profiles": {"io": io.to_dict(), "model": block.to_dict()},
        "rows": rows,
        "left_out": left_out,
    }
    sample = {"texts": reader.samples, "context": len(stretches[0]) - steps, "steps": steps}
    return Tuned(task.values(store, sample, found), adapter)


def _solve_all(
    measured: type[DiskSwapCache],
    geometry: Geometry,
    fields: dict[str, Any],
    budget: int,
    max_batch: int,
    batches: list[int],
    contexts: list[int],
    reuse: ReuseTable,
    compression: CompressionTable,
    io: IoProfile,
    block: ModelProfile,
    limits: Limits,
    on_step: Callable[[float, str], object],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, and the pairs that the budget is too little for; the largest pair is none of these."""
    rest: dict[int, dict[str, Any]] = {}

    def memory(found: dict[str, Any], context: int, batch: int) -> int:
        config = measured.config_class.load(None, {**rest[found["group_size"]], **found})
        return measured.plan(geometry, config, context, batch).peak_bytes

    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    pairs = [(batch, context) for batch in reversed(batches) for context in reversed(contexts)]
    for index, (batch, context) in enumerate(pairs):
        on_step(index / len(pairs), f"{batch} x {context:,} tokens")
        share = budget * batch // max_batch
        try:
            rest = _rest(measured, geometry, share, context, batch, limits, fields)
            own = dataclasses.replace(limits, group_sizes=tuple(rest))
            solution = solve(batch, context, share, reuse, compression, io, block, memory, own)
        except BudgetError as error:
            if not index:
                raise
            left_out.append({"batch": batch, "context": context, "why": str(error)})
            continue
        rows.append(_row(solution, rest[solution.group_size], limits.size_field))
    return rows[::-1], left_out[::-1]


def _rest(
    measured: type[DiskSwapCache], geometry: Geometry, share: int, context: int, batch: int, limits: Limits,
    fields: dict[str, Any],
) -> dict[int, dict[str, Any]]:  # fmt: skip
    """By group size that fits: the fields that the solver does not decide, the user's, and queues and buffers as large
    as the budget allows. Raises `BudgetError` where none fits."""
    found, refusals = {}, []
    names = ("write_queue", "block_tokens", "num_recent", "summary_dtype")
    for size in limits.group_sizes:
        given = {"look_ahead": None, **fields}
        given |= {"num_selected": limits.num_selected, "group_size": size}
        try:
            fitted = measured.fit(geometry, share, context, batch, given)
        except BudgetError as error:
            refusals.append(error)
        else:
            found[size] = {**{name: getattr(fitted, name) for name in names}, **given}
    if not found:
        if fields.get("summary_dtype") == "coded":
            refusals[0].add_note('truncated keys can be tuned for less: summary_dtype="int8"')
        raise refusals[0]
    return found


def _row(solution: Solution, rest: dict[str, Any], size_field: str) -> dict[str, Any]:
    found = solution.to_dict()
    decided = ("group_size", "size", "reuse_capacity")
    fields = {**rest, "group_size": found["group_size"], "reuse_capacity": found["reuse_capacity"]}
    fields[size_field] = found["size"]
    if size_field == "rank":
        fields["adapter"] = None  # `Tuned.save` knows its file name
    kept = {name: value for name, value in found.items() if name not in decided}
    return {
        "batch": kept.pop("batch"),
        "context": kept.pop("context"),
        "fields": fields,
        **{name: round(value, 9) if isinstance(value, float) else value for name, value in kept.items()},
    }


# Candidates

def coarse(values: list[int], count: int) -> list[int]:
    """At most `count` of ascending `values`, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def largest_form(geometry: Geometry) -> RecordFormat:
    """How the largest entries of the model's layers lie, one a record."""
    forms = geometry.forms(1)
    return max(forms, key=lambda form: form.entry_bytes)


def group_sizes(form: RecordFormat, most: int) -> tuple[int, ...]:
    """Powers of two up to `most`, from the largest whose record is one block, or else from 1."""
    sizes = [1 << power for power in range(most.bit_length())]
    fits = [size for size in sizes if size * form.entry_bytes <= DEVICE_BLOCK]
    return tuple(size for size in sizes if size >= max(fits, default=1))


def sizes_of(form: RecordFormat, settings: DiskSwapConfig, sigma_max: float) -> list[int]:
    """Sizes of compact keys to choose from, descending: all bytes of coded ones that the planner tries, or ranks."""
    return code_sizes(form) if settings.summaries == "coded" else _ranks_of(form, settings, sigma_max)


def _ranks_of(form: RecordFormat, settings: DiskSwapConfig, sigma_max: float) -> list[int]:
    """Ranks to choose from, descending, in steps of at least 4: from the library's default down to that of σ_max."""
    component = getattr(torch, settings.summaries).itemsize
    most = default_rank(form.key_width)
    least = max(1, -(-form.key_width * form.dtype.itemsize // int(sigma_max * component)))
    least = min(least, most)
    return sorted({*range(most, least, -max(4, (most - least) // 24)), most, least}, reverse=True)
