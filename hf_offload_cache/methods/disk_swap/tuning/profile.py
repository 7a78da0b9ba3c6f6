"""The profiles of appendix A.3, measured on this machine: times of a disk's reads, and of a decoder block.

Both are measured separately: reads with nothing to overlap, the block with records in memory.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....config import parse_size
from ....errors import UnsupportedModelError
from ....fetch.prefetcher import Prefetcher
from ....history.records import RecordFormat
from ....memory.account import MemoryAccount
from ....model.config_values import config_value
from ....model.place import decoder_blocks, inner_model
from ....stores.base import Store, aligned_empty
from ....stores.engines import open_store
from ....tuning.fill import attention_modules, fill
from ..cache import DiskSwapCache
from ..config import DiskSwapConfig
from .solve import IoProfile, ModelProfile

OnStep = Callable[[float, str], object]
"""Gets the finished share of the work, from 0 to 1, and the current measurement."""

_PIECE_BYTES = 4 << 20
"""Bytes written to the scratch file at a time."""
_LEAST_FILE, _MOST_FILE = 64 << 20, 512 << 20
"""Bounds on a scratch file's bytes. Between them, it is this many times as large as the largest read, so that reads are
scattered:"""
_TIMES_A_READ = 16
_LIKENESS = 0.97
"""Correlation of one step's input with the next's: gives about the hit rate of a real model on text."""
_WARM_UP = 3


def measure_io(
    form: RecordFormat,
    most_records: dict[int, int],
    engine: str,
    path: Path,
    seconds: float,
    on_step: OnStep,
    points: int = 6,
    write_queue: int | str = "4MiB",
) -> IoProfile:
    """Time cold reads, through the prefetcher and the engine that a cache would use, each waited for at once.

    Args:
        form: of the records; its own group size does not count.
        most_records: the largest read of one layer in one step, by the group sizes to measure.
        engine: as `choose_engine` returned it for `path`.
        path: folder of the scratch file, which has no name there.
        seconds: target duration, without writing the files.
        points: sizes of reads for each size of a record, from one record to the largest read.

    Each figure is the median over at least three reads of records drawn at random each time. Raises `StoreError`;
    nothing is left behind.
    """
    record_bytes = {size: dataclasses.replace(form, group_size=size).record_bytes for size in most_records}
    largest: dict[int, int] = {}
    for size, count in most_records.items():
        largest[record_bytes[size]] = max(count, largest.get(record_bytes[size], 1))
    counts: dict[int, list[int]] = {}
    times: dict[int, list[float]] = {}
    generator = np.random.default_rng(0)
    prefetcher = Prefetcher(MemoryAccount(), parse_size(write_queue))
    try:
        for index, (size, most) in enumerate(largest.items()):
            counts[size] = sorted({round(most ** (step / max(1, points - 1))) for step in range(points)} | {most})
            on_step(index / len(largest), f"writing records of {size / 1024:g} KiB")
            store, exist = _scratch(prefetcher, engine, path, size, most)
            try:
                share = seconds / len(largest) / len(counts[size])
                on_step((index + 0.3) / len(largest), f"records of {size / 1024:g} KiB")
                times[size] = [_read_time(prefetcher, store, exist, n, share, generator) for n in counts[size]]
            finally:
                prefetcher.cancel(store)
                store.close()
    finally:
        prefetcher.close()
    return IoProfile(counts, times, record_bytes)


def _scratch(prefetcher: Prefetcher, engine: str, path: Path, record_bytes: int, most: int) -> tuple[Store, int]:
    """A store full of random bytes, many times as large as the largest read, and its number of records."""
    file_bytes = max(2 * most * record_bytes, min(_MOST_FILE, max(_LEAST_FILE, _TIMES_A_READ * most * record_bytes)))
    store = open_store(engine, path, record_bytes, "the tuner's scratch file")
    try:
        ids = store.allocate(-(-file_bytes // record_bytes))
        generator = np.random.default_rng(1)
        content = generator.integers(0, 256, (max(1, _PIECE_BYTES // record_bytes), record_bytes), dtype=np.uint8)
        for start in range(0, len(ids), len(content)):
            part = ids[start : start + len(content)]
            records = aligned_empty(len(part), record_bytes)  # the prefetcher takes it over
            records.numpy()[:] = content[: len(part)]
            prefetcher.write(store, part, records)
        prefetcher.flush(store)
    except BaseException:
        prefetcher.cancel(store)
        store.close()
        raise
    return store, len(ids)


def _read_time(
    prefetcher: Prefetcher, store: Store, exist: int, count: int, seconds: float, generator: np.random.Generator
) -> float:
    """Median time of reading `count` of the records 0 to `exist`."""
    out = aligned_empty(count, store.record_bytes)
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < 4 or (time.perf_counter() < deadline and len(taken) < 200):
        ids = np.sort(generator.choice(exist, count, replace=False)).astype(np.int64)
        start = time.perf_counter()
        prefetcher.read(store, ids, out).wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])  # the first starts threads


def measure_model(
    model: Any,
    form: RecordFormat,
    batches: list[int],
    contexts: list[int],
    sizes: list[int],
    capacities: list[int],
    settings: DiskSwapConfig,
    group_size: int,
    seconds: float,
    on_step: OnStep,
    cache_class: type[DiskSwapCache] = DiskSwapCache,
    size_field: str = "rank",
) -> ModelProfile:
    """Time one decoder block in a decoding step, with prediction, look-ahead and reuse buffer, without I/O.

    The first two blocks of `model` run as a separate model on random contexts whose records are in host memory; the
    time is from the entry of the first block to that of the second. All axes ascend. Contexts beyond an eighth of the
    free memory are left out, except the shortest. `seconds` is the target duration. Each figure is the lower quartile
    of at least eight steps, because other work on the machine only adds to it.
    """
    twin = two_blocks(model)
    device = next(twin.parameters()).device
    contexts = _that_fit(contexts, batches[-1], form)
    middle = min(capacities, key=lambda capacity: abs(capacity - settings.num_selected))
    plan = [(b, s, r, middle) for b in batches for s in contexts for r in sizes]
    # small differences are measured one after the other, because other work on the machine varies
    plan += [(b, contexts[0], sizes[0], c) for b in batches for c in capacities]
    weights = [batch * context for batch, context, _, _ in plan]
    times: list[float] = []
    deadline, done = time.perf_counter() + seconds, 0
    clock = _BlockClock(twin, device)
    try:
        for (batch, context, size, capacity), weight in zip(plan, weights, strict=True):
            on_step(done / sum(weights), f"{batch} x {context:,} tokens, {size_field} {size}, reuse {capacity}")
            share = (deadline - time.perf_counter()) * weight / (sum(weights) - done) if sum(weights) > done else 0.0
            fields: dict[str, Any] = {"reuse_capacity": capacity, size_field: size, "group_size": group_size}
            fields |= {"engine": "memory", "look_ahead": True}
            config = dataclasses.replace(settings, **fields)
            times.append(_block_time(twin, clock, cache_class, config, form, batch, context, share))
            done += weight
    finally:
        clock.close()
    points = len(batches) * len(contexts) * len(sizes)
    grid = np.array(times[:points]).reshape(len(batches), len(contexts), len(sizes))
    reuse = np.array(times[points:]).reshape(len(batches), len(capacities))
    reuse -= reuse[:, [capacities.index(middle)]]
    return ModelProfile(batches, contexts, sizes, grid.tolist(), capacities, reuse.tolist())


def _that_fit(contexts: list[int], batch: int, form: RecordFormat) -> list[int]:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # the platform does not tell
        free = 4 << 30
    return [context for context in contexts if 2 * batch * context * form.entry_bytes <= free // 8] or contexts[:1]


class _BlockClock:
    """Times between the entries of a model's first and second block."""

    def __init__(self, twin: Any, device: torch.device) -> None:
        self.taken: list[float] = []
        self._device = device
        self._entered = 0.0
        blocks = [module for module in twin.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == 2]
        first, second = blocks[0]
        self._handles = [first.register_forward_pre_hook(self._enter), second.register_forward_pre_hook(self._leave)]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _enter(self, *arguments: Any) -> None:
        self._entered = self._now()

    def _leave(self, *arguments: Any) -> None:
        self.taken.append(self._now() - self._entered)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _block_time(
    twin: Any, clock: _BlockClock, cache_class: type[DiskSwapCache], settings: DiskSwapConfig, form: RecordFormat,
    batch: int, context: int, seconds: float,
) -> float:  # fmt: skip
    device = next(twin.parameters()).device
    dtype = next(parameter.dtype for parameter in twin.parameters() if parameter.is_floating_point())
    modules = attention_modules(twin)
    start = time.perf_counter()
    with warnings.catch_warnings(), cache_class(twin, config=settings) as cache:
        warnings.simplefilter("ignore", UserWarning)
        cache.weighs = False  # two blocks hold less than the areas shared by all blocks
        for layer in cache.offloaded:
            keys, values = random_keys_and_values(form, context, device, layer.layer_idx)
            fill(layer, modules[layer.layer_idx], keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1))
        cache.storage.prefetcher.flush()
        del keys, values
        deadline = max(time.perf_counter(), start + seconds)
        generator = torch.Generator().manual_seed(1)
        hidden = twin.config.get_text_config(decoder=True).hidden_size
        step = torch.randn(batch, 1, hidden, generator=generator, dtype=torch.float32, device="cpu")
        clock.taken.clear()
        with torch.no_grad():
            while len(clock.taken) < _WARM_UP + 8 or (time.perf_counter() < deadline and len(clock.taken) < 100):
                noise = torch.randn(batch, 1, hidden, generator=generator, dtype=torch.float32, device="cpu")
                step = _LIKENESS * step + (1 - _LIKENESS**2) ** 0.5 * noise
                twin(inputs_embeds=step.to(device, dtype), past_key_values=cache, use_cache=True)
        return float(np.quantile(clock.taken[_WARM_UP:], 0.25))


def random_keys_and_values(
    form: RecordFormat, tokens: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (1, Hk, T, Dk) and values (1, Hv, T, Dv) of one sequence, the same for the same arguments; never zeros.

    Keys are a mean, a low-rank part that drifts slowly from token to token, so that neighbours are similar as in text,
    and noise: a compact copy keeps most of their energy, not all. Values are noise.
    """
    rank, span = 24, 64
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    corners = torch.randn(tokens // span + 2, rank, **options)
    drift = torch.nn.functional.interpolate(corners.T[None], size=tokens, mode="linear", align_corners=True)[0].T
    keys = drift @ (torch.randn(rank, form.key_width, **options) / rank**0.5)
    keys += torch.randn(form.key_width, **options)
    keys += 0.5 * torch.randn(tokens, form.key_width, **options)
    values = torch.randn(tokens, form.num_value_heads * form.value_dim, **options)
    shaped = [
        part.view(1, tokens, heads, -1).transpose(1, 2).to(device=device, dtype=form.dtype).contiguous()
        for part, heads in ((keys, form.num_key_heads), (values, form.num_value_heads))
    ]
    return shaped[0], shaped[1]


def two_blocks(model: Any) -> Any:
    """A model without head, of the first two decoder blocks of `model`, which does not change; the weights are shared.

    Raises `UnsupportedModelError` if the blocks are not in one list, or fewer than two.
    """
    backbone: Any = inner_model(model).base_model
    blocks = [block for _, block, _ in decoder_blocks(backbone)]
    lists = [
        module
        for module in backbone.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) >= 2 and list(module) == blocks
    ]
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} does not keep its decoder blocks in one list of two or more: a block cannot be "
            "timed alone, so it cannot be tuned; choose the fields by hand, or with for_budget"
        )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
    memo[id(lists[0])] = torch.nn.ModuleList([copy.deepcopy(block, memo) for block in blocks[:2]])
    twin = copy.deepcopy(backbone, memo)
    config = twin.config.get_text_config(decoder=True)
    config.num_hidden_layers = 2
    if isinstance(config_value(config, "layer_types"), list):
        config.layer_types = config.layer_types[:2]
    return twin.eval()
