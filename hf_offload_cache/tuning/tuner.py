"""`tune`: measures, solves, and hands back a `Tuned` (KVSwap, section 3.5, figure 4a, and appendix A)."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..caches.adapter import Adapter
from ..caches.disk_swap import DiskSwapCache
from ..config import parse_memory
from ..core.load_config import FORMAT
from ..errors import BudgetError, UnsupportedModelError
from ..model.fingerprint import fingerprint
from ..model.geometry import Geometry
from ..model.inner_model import inner_model
from ..stores.engines import choose_engine
from .grid import coarse, group_sizes, largest_form, rows_for, sample_sizes, sizes_of
from .lookup import Reader
from .profile import measure_io, measure_model
from .progress import Progress
from .sample import sample_ids, windows
from .solve import Limits, Solution, solve
from .tables import CompressionTable, IoProfile, ModelProfile, ReuseTable
from .tunable import at_least, settings_of, tunable
from .tuned import Tuned

_SECONDS, _QUICK_SECONDS = 1500.0, 120.0
_READING, _DISK, _MODEL = 0.5, 0.15, 0.34
"""Shares of the time."""
_ENOUGH, _LEAST = 0.998, 0.99
"""Shares of the attention mass that the largest codes keep: more bytes than keep the first are not tried, fewer than
keep the second neither. For SmolLM2-135M these are 24, and 16 or 12 bytes."""


def tune(
    model: Any,
    tokenizer: Any = None,
    *,
    cache: str | type[Any] = "disk-swap",
    memory: int | str,
    max_context: int,
    max_batch: int = 1,
    texts: Iterable[Any] | str | None = None,
    path: str | Path | None = None,
    quick: bool = False,
    samples: int | None = None,
    alpha: float = 0.15,
    delta: int | None = None,
    sigma_max: float = 32.0,
    max_group_size: int = 16,
    time_limit: float | None = None,
    progress: bool = True,
    **fields: Any,
) -> Tuned:
    """Fields of a cache for each batch size and context, chosen for this model, machine and disk.

    `tune(model, tokenizer, memory="1/13", max_context=32768, max_batch=8).save("config.json")`, and later
    `DiskSwapCache(model, config="config.json")`. Nothing is written but an unnamed scratch file, which is gone on
    return and after an interruption.

    Args:
        model: a decoder `PreTrainedModel` whose layers all have full attention.
        tokenizer: the model's; needed unless `texts` are token ids.
        cache: a registered name, "module:Class", or the class: `DiskSwapCache`, or one that inherits from it.
        memory: for `max_batch` sequences: bytes, "300MiB", or a fraction of the full KV of `max_context` x `max_batch`
            such as "1/13". Each row gets its share for each of its sequences.
        max_context, max_batch: the largest to tune for, tokens a sequence and sequences.
        texts: what to measure reuse and compact keys on: a string, or strings, or token ids; None: Python's help texts.
        path: folder on the disk to tune for; None: the temporary folder.
        quick: under 3 minutes for a small model on two cores, instead of under 30: fewer samples, a coarser grid.
        samples: stretches of text, 20 by default (quick: 3). Fewer are read when the time does not suffice; at least
            two, if there may be as many.
        alpha, delta, sigma_max: see `Limits`; `delta` None: a quarter of `num_selected`.
        max_group_size: G_max, tokens.
        time_limit: seconds to aim at in all, instead of the above.
        progress: show a bar on stderr, where that is a terminal.
        **fields: fields of the configuration that every row is to have, such as `num_selected` or `engine`.

    The smallest group is the largest whose record is one block of the disk (4 KiB): a smaller one reads the same bytes
    for less. Of coded keys σ lies between those of the fewest bytes that keep .998 and .99 of the attention mass that
    the most do, measured on the sample; slots for one selection come first as far as the former fits beside them. Of
    truncated ones (`summary_dtype`) the smallest σ is that of the library's default rank, and the search begins with
    slots for one selection as far as σ stays within twice that: no accuracy was seen to be lost up to there.

    Raises `ConfigError`, `UnsupportedModelError`, `StoreError`, and `BudgetError` where the memory does not do for
    the largest context and batch.
    """
    measured = tunable(cache)
    settings = settings_of(measured, fields)
    inner = inner_model(model)
    at_least(max_context=max_context, max_batch=max_batch, max_group_size=max_group_size, samples=samples or 1)
    if delta is None:
        delta = max(1, settings.num_selected // 4)
    seconds = time_limit or (_QUICK_SECONDS if quick else _SECONDS)
    geometry = Geometry.of(inner)
    if geometry.kept or not geometry.layers:
        raise UnsupportedModelError(
            f"{type(inner).__name__} keeps {len(geometry.kept)} of its layers in memory (sliding windows or linear "
            "states): only models whose layers all have full attention can be tuned; use for_budget, or choose the "
            "fields by hand"
        )
    budget = parse_memory(memory, geometry.full_kv_bytes(max_context, max_batch))
    directory = Path(tempfile.gettempdir() if path is None else path)
    engine, store = choose_engine(settings.engine, directory)
    sizes = group_sizes(largest_form(geometry), max_group_size)
    limits = Limits(settings.num_selected, settings.num_sinks, sizes, sigma_max, alpha, delta)
    kind = {**fields, "summary_dtype": settings.summaries}
    _rest(measured, geometry, budget, max_context, max_batch, limits, kind)  # before minutes of work
    capacities = sorted({0, *range(0, 4 * settings.num_selected + 1, max(delta, 1))})
    context, steps = sample_sizes(inner, settings, max_context, quick)
    wanted = samples or (3 if quick else 20)
    stretches = windows(sample_ids(texts, tokenizer), wanted, 2 * settings.num_selected + steps, context + steps)
    started = time.perf_counter()
    with Progress(seconds, progress) as bar:
        bar.begin("sample text: ", _READING)
        reader = Reader(inner, sizes, capacities, settings, measured)
        for index, ids in enumerate(stretches):
            before = bar.seconds_left
            name = f"{index + 1} of {len(stretches)}, "
            reader.read(ids, len(ids) - steps, _within(bar, index, len(stretches), name))
            if reader.samples >= 2 and bar.seconds_left < before - bar.seconds_left:
                break
        assert reader.form is not None
        coded = settings.summaries == "coded"
        compression = reader.compression_table(sizes_of(reader.form, settings, sigma_max))
        tried = compression
        if coded:
            within = [size for size in compression.sizes if compression.sigma(size) <= sigma_max]
            tried = compression.up_to(max(compression.enough(_ENOUGH), min(within or compression.sizes[:1])))
            most = compression.sigma(compression.enough(_LEAST))
            limits = dataclasses.replace(limits, sigma_max=min(sigma_max, most), size_field="summary_bytes")
        sigma = (1 if coded else 2) * tried.sigma(tried.sizes[0])
        limits = dataclasses.replace(limits, first_capacity=settings.num_selected, first_sigma=sigma)
        adapter = None if coded else Adapter(reader.moments.projections(tried.sizes[0]), fingerprint(inner))
        bar.begin("disk: ", _DISK)
        reads = {size: max_batch * limits.groups(size) for size in sizes}
        io = measure_io(reader.form, reads, engine, directory, 0.5 * _DISK * seconds, bar.done,
                        4 if quick else 8, settings.write_queue)  # fmt: skip
        bar.begin("decoder block: ", _MODEL)
        batches, contexts = rows_for(max_batch, max_context)
        block = measure_model(
            inner, reader.form, coarse(batches, 2 if quick else 4), coarse(contexts, 2 if quick else 4),
            sorted({tried.sizes[0], tried.sizes[-1]}), sorted({0, settings.num_selected, capacities[-1]}), settings,
            sizes[-1], 0.8 * _MODEL * seconds, bar.done, measured, limits.size_field,
        )  # fmt: skip
        bar.begin("solving ", 1 - _READING - _DISK - _MODEL)
        reuse = reader.reuse_table()
        rows, left_out = _solve_all(
            measured, geometry, {**fields, "summary_dtype": settings.summaries}, budget, max_batch, batches, contexts,
            reuse, tried, io, block, limits, bar.done,
        )  # fmt: skip
    return Tuned(
        {
            "format": FORMAT,
            "cache": measured.__name__,
            "model": fingerprint(inner),
            "memory": budget,
            "max_context": max_context,
            "max_batch": max_batch,
            "limits": dataclasses.asdict(limits),
            "machine": _machine(inner, store),
            "sample": {"texts": reader.samples, "context": len(stretches[0]) - steps, "steps": steps,
                       "source": "bundled" if texts is None else "given"},
            "quick": quick,
            "seconds": round(time.perf_counter() - started, 1),
            "tables": {"reuse": reuse.to_dict(), "compression": compression.to_dict()},
            "profiles": {"io": io.to_dict(), "model": block.to_dict()},
            "rows": rows,
            "left_out": left_out,
        },
        adapter,
    )  # fmt: skip


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
    names = ("write_queue", "block_tokens", "num_recent", "layer_budgets", "summary_dtype")
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
        fields["adapter"] = None  # its place is known when it is saved
    kept = {name: value for name, value in found.items() if name not in decided}
    return {
        "batch": kept.pop("batch"),
        "context": kept.pop("context"),
        "fields": fields,
        **{name: round(value, 9) if isinstance(value, float) else value for name, value in kept.items()},
    }


def _within(bar: Progress, index: int, count: int, before: str) -> Callable[[float, str], None]:
    return lambda fraction, detail: bar.done((index + fraction) / count, before + detail)


def _machine(model: Any, store: str) -> dict[str, Any]:
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "system": platform.system(),
        "device": device.type,
        "processor": name,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "store": store,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
