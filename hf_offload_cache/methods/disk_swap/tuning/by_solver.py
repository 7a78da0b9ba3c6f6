"""Tunes by the paper's solver, from tables and profiles measured here (KVSwap, section 3.5, figure 4a, appendix A)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ....errors import BudgetError, ConfigError
from ....history.records import RecordFormat
from ....model.fingerprint import fingerprint
from ....stores.base import DEVICE_BLOCK
from ....stores.engines import choose_engine
from ....tuning.sample import Progress, rows_for, sample_sizes
from ....tuning.task import Task, Tuned, refuse
from ..adapter import Adapter
from ..cache import DiskSwapCache
from ..config import DiskSwapConfig
from ..low_rank_keys import default_rank
from .lookup import Reader, code_sizes
from .profile import measure_io, measure_model
from .solve import CompressionTable, IoProfile, Limits, ModelProfile, ReuseTable, Solution, solve

_READING, _DISK, _MODEL = 0.5, 0.15, 0.34
"""Shares of the time."""
_ENOUGH, _LEAST = 0.998, 0.99
"""Shares of the attention mass kept by the largest codes. The solver tries code sizes between the smallest that keep
these shares. For SmolLM2-135M these are 24, and 16 or 12 bytes."""
_SOLVED = ("group_size", "rank", "summary_bytes", "reuse_capacity", "adapter")
"""Fields that the solver decides."""


def tune_by_solver(
    task: Task, settings: DiskSwapConfig, alpha: float, delta: int | None, sigma_max: float, max_group_size: int
) -> Tuned:
    """Measure, and solve for each row; the arguments are those of `tune`.

    The smallest group is the largest whose record is one block of the disk (4 KiB), because a smaller one reads the
    same bytes for fewer tokens. For coded keys, σ lies between those of the smallest codes that keep .998 and .99 of
    the attention mass on the sample; slots for one selection come first as far as the former fit next to them. For
    truncated keys (`summary_dtype`), the smallest σ is that of the default rank, and the search begins with slots for
    one selection while σ stays within twice that: up to there no loss of accuracy was seen.
    """
    inner, measured, quick = task.model, task.measured, task.quick
    assert issubclass(measured, DiskSwapCache)
    refuse((*_SOLVED, "heads_apart"), task.fields)
    if task.fields.get("look_ahead") is False:
        raise ConfigError("look_ahead=False reads nothing ahead, so there is nothing to hide: leave it out")
    engine, store = choose_engine(settings.engine, task.directory)
    sizes = group_sizes(max(task.geometry.forms(1), key=lambda form: form.entry_bytes), max_group_size)
    delta = max(1, settings.num_selected // 4) if delta is None else delta
    limits = Limits(settings.num_selected, settings.num_sinks, sizes, sigma_max, alpha, delta)
    task = dataclasses.replace(task, fields={**task.fields, "summary_dtype": settings.summaries})
    _fitted(task, task.max_batch, task.max_context, limits)  # fails early, before minutes of work
    capacities = sorted({0, *range(0, 4 * settings.num_selected + 1, max(limits.delta, 1))})
    context, steps = sample_sizes(inner, settings.num_selected, task.max_context, 16 if quick else 48)
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
        reads = {size: task.max_batch * limits.groups(size) for size in sizes}
        io = measure_io(reader.form, reads, engine, task.directory, 0.5 * _DISK * task.seconds, bar.done,
                        4 if quick else 8, settings.write_queue)  # fmt: skip
        bar.begin("decoder block: ", _MODEL)
        batches, contexts = rows_for(task.max_batch, task.max_context)
        block = measure_model(
            inner, reader.form, coarse(batches, 2 if quick else 4), coarse(contexts, 2 if quick else 4),
            sorted({tried.sizes[0], tried.sizes[-1]}), sorted({0, settings.num_selected, capacities[-1]}), settings,
            sizes[-1], 0.8 * _MODEL * task.seconds, bar.done, measured, limits.size_field,
        )  # fmt: skip
        bar.begin("solving ", 1 - _READING - _DISK - _MODEL)
        reuse = reader.reuse_table()
        pairs = [(batch, context) for batch in reversed(batches) for context in reversed(contexts)]
        rows, left_out = _solve_all(task, limits, pairs, reuse, tried, io, block, bar.done)
    results = {
        "limits": dataclasses.asdict(limits),
        "tables": {"reuse": dataclasses.asdict(reuse), "compression": dataclasses.asdict(compression)},
        "profiles": {"io": dataclasses.asdict(io), "model": dataclasses.asdict(block)},
        "rows": rows,
        "left_out": left_out,
    }
    sample = {"texts": reader.samples, "context": len(stretches[0]) - steps, "steps": steps}
    return Tuned(task.values(store, sample, results), adapter)


def _solve_all(
    task: Task, limits: Limits, pairs: list[tuple[int, int]], reuse: ReuseTable, compression: CompressionTable,
    io: IoProfile, block: ModelProfile, on_step: Callable[[float, str], object],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """A row for each of `pairs` (batch, context), and the pairs whose share of the budget is too small. Both ascend.

    `pairs` descend. Raises `BudgetError` if the first does not fit.
    """
    fitted: dict[int, dict[str, Any]] = {}

    def memory(solved: dict[str, Any], context: int, batch: int) -> int:
        config = task.measured.config_class.load(None, {**fitted[solved["group_size"]], **solved})
        return task.measured.plan(task.geometry, config, context, batch).peak_bytes

    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for index, (batch, context) in enumerate(pairs):
        on_step(index / len(pairs), f"{batch} x {context:,} tokens")
        try:
            fitted = _fitted(task, batch, context, limits)
            fitting = dataclasses.replace(limits, group_sizes=tuple(fitted))
            solution = solve(batch, context, task.share(batch), reuse, compression, io, block, memory, fitting)
        except BudgetError as error:
            if not index:
                raise
            left_out.append({"batch": batch, "context": context, "why": str(error)})
            continue
        rows.append(_row(solution, fitted[solution.group_size], limits.size_field))
    return rows[::-1], left_out[::-1]


def _fitted(task: Task, batch: int, context: int, limits: Limits) -> dict[int, dict[str, Any]]:
    """For each group size that fits: the user's fields and those that the solver does not decide, with queues and
    buffers as large as the budget allows. Raises `BudgetError` if none fits."""
    fitting, refusals = {}, []
    names = ("write_queue", "block_tokens", "num_recent", "summary_dtype", "candidates")
    for size in limits.group_sizes:
        fixed = {"num_selected": limits.num_selected, "group_size": size}
        given = {"look_ahead": None, "remainder": False, **task.fields, **fixed}
        try:
            config = task.measured.fit(task.geometry, task.share(batch), context, batch, given, "speed")
        except BudgetError as error:
            refusals.append(error)
        else:
            fitting[size] = {**{name: getattr(config, name) for name in names}, **given}
    if not fitting:
        if task.fields["summary_dtype"] == "coded":
            refusals[0].add_note('truncated keys can be tuned for less: summary_dtype="int8"')
        try:
            raise refusals[0]
        finally:
            refusals.clear()  # as in `fit_goal`
    return fitting


def _row(solution: Solution, fitted: dict[str, Any], size_field: str) -> dict[str, Any]:
    solved = solution.to_dict()
    fields = {**fitted, "group_size": solved.pop("group_size"), "reuse_capacity": solved.pop("reuse_capacity")}
    fields[size_field] = solved.pop("size")
    if size_field == "rank":
        fields["adapter"] = None  # `Tuned.save` knows its file name
    return {
        "batch": solved.pop("batch"),
        "context": solved.pop("context"),
        "fields": fields,
        **{name: round(value, 9) if isinstance(value, float) else value for name, value in solved.items()},
    }


# Candidates

def coarse(values: list[int], count: int) -> list[int]:
    """At most `count` of ascending `values`, evenly spread, including the first and the last."""
    if len(values) <= count:
        return values
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def group_sizes(form: RecordFormat, most: int) -> tuple[int, ...]:
    """Powers of two up to `most`, from the largest whose record is one block, or else from 1."""
    sizes = [1 << power for power in range(most.bit_length())]
    fits = [size for size in sizes if size * form.entry_bytes <= DEVICE_BLOCK]
    return tuple(size for size in sizes if size >= max(fits, default=1))


def sizes_of(form: RecordFormat, settings: DiskSwapConfig, sigma_max: float) -> list[int]:
    """Candidate sizes of compact keys, descending: bytes of coded ones as the planner tries them; else ranks, in steps
    of at least 4, from the library's default down to that of σ_max."""
    if settings.summaries == "coded":
        return code_sizes(form)
    component = getattr(torch, settings.summaries).itemsize
    most = default_rank(form.key_width)
    least = min(most, max(1, -(-form.key_width * form.dtype.itemsize // int(sigma_max * component))))
    return sorted({*range(most, least, -max(4, (most - least) // 24)), most, least}, reverse=True)
