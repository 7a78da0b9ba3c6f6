"""Drives caches through decoding steps and takes their times, side by side: step and store apart, overlap on and off.

A replay has cache layers of a large model's shape (Llama-3.1-8B, 4 KiB a token and layer) next to a model that is next
to nothing, so that the disk is used as the large model would use it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from hf_offload_cache.core import OffloadCache, Pace, SelectiveLayer

from .contenders import FULL, IN_MEMORY, SLOW, Setting, in_turns, make, models, needs, reason_against
from .synthetic import LLAMA_1B, LLAMA_8B, SMOLLM2, Inputs, Shape, decode_step, fill

LIKENESS = 0.97
"""Likeness of successive inputs of a shape with a model's weights. It gives about the hit rate of the real model on
text, 0.75."""
REPLAY_LIKENESS = 0.95
"""Likeness of successive inputs (see `Inputs`) of a replay. It gives about the hit rate of a real model on text, 0.75,
with as many tokens of reuse as are selected, 400."""


@contextlib.contextmanager
def reads_waited_for(cache: OffloadCache) -> Iterator[dict[str, float]]:
    """Overlap off: nothing is read ahead, and every read is waited for at once. Yields the "seconds" in the store so
    far."""
    prefetcher = cache.storage.prefetcher
    original, spent = prefetcher.read, {"seconds": 0.0}

    def read(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        ticket = original(*args, **kwargs)
        ticket.wait()
        spent["seconds"] += time.perf_counter() - start
        return ticket

    patched: list[tuple[Any, str]] = [(prefetcher, "read")]
    prefetcher.read = read  # type: ignore[method-assign]
    for layer in cache.offloaded:
        if isinstance(layer, SelectiveLayer):
            layer.ahead = lambda choice: None  # type: ignore[method-assign]
            patched.append((layer, "ahead"))
    try:
        yield spent
    finally:
        for owner, name in patched:
            delattr(owner, name)


class Replay:
    """One cache with its context, for one thread; `close` frees everything. `plain`, `attached`: what
    `contenders.models` gave for the setting. `likeness`: of successive inputs."""

    def __init__(self, name: str, setting: Setting, plain: Any, attached: Any, likeness: float) -> None:
        self.name, self.setting = name, setting
        self.cache: Cache = make(name, setting, plain, attached)
        self.own = self.cache if isinstance(self.cache, OffloadCache) else None
        self.model = plain if self.own is None else attached
        self.taken: dict[str, tuple[list[list[float]], list[np.ndarray]]] = {}
        """By mode: seconds of each repetition's steps, and each step's counts."""
        self._inputs = Inputs(setting.shape, likeness, batch=setting.batch)
        try:
            fill(self.cache, self.model, setting.shape, setting.tokens, setting.batch)
            if self.own is not None:
                self.own.storage.prefetcher.flush()
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Decode steps that do not count: until the cache knows whether to look ahead, and the machine is warm."""
        looks = self.own is not None and getattr(self.own.config, "look_ahead", False) is None
        light = self.name in (FULL, *IN_MEMORY)
        self.steps(2 if light else 3 + (2 * Pace.TRIAL if looks else 0))
        self.taken.clear()
        if self.own is not None:
            self.own.storage.reset_counters()

    def steps(self, count: int, overlap: str = "on") -> None:
        """Decode `count` steps as one repetition, with `overlap` "on" or "off"."""
        repetitions, counts = self.taken.setdefault(overlap, ([], []))
        repetitions.append([])
        waits = overlap == "off" and self.own is not None
        with reads_waited_for(self.own) if waits else contextlib.nullcontext({"seconds": 0.0}) as spent:  # type: ignore[arg-type]
            for _ in range(count):
                embedding, before, start = self._inputs.next(), self._counts(spent), time.perf_counter()
                decode_step(self.model, self.cache, embedding)
                repetitions[-1].append(time.perf_counter() - start)
                counts.append(self._counts(spent) - before)

    def _counts(self, spent: dict[str, float]) -> np.ndarray:
        """Stalled seconds, bytes read, reads, and seconds in the store until now."""
        if self.own is None:
            return np.zeros(4)
        stores, stalled = self.own.storage.stores, self.own.storage.counters.stall_seconds
        read = sum(one.bytes_read for one in stores), sum(one.reads for one in stores)
        return np.array([stalled, *read, spent["seconds"]])

    def _row(self, mode: str) -> dict[str, Any]:
        """Medians over all steps, and the spread of the repetitions' medians over their median."""
        repetitions, counts = self.taken[mode]
        every, medians = np.concatenate(repetitions), [statistics.median(one) for one in repetitions]
        middle = float(np.median(every))
        row = {"median_seconds": middle, "p95_seconds": float(np.percentile(every, 95)), "steps": len(every)}
        row |= {"tokens_per_second": self.setting.batch / middle}
        row["spread"] = (max(medians) - min(medians)) / statistics.median(medians)
        if self.own is not None:
            stalled, nbytes, reads, _ = np.mean(counts, 0).tolist()
            row |= {"stall_share": stalled / float(every.mean()), "bytes_read": nbytes, "reads": reads}
            row |= {"store_seconds": float(np.median(counts, 0)[3])} if mode == "off" else {}
        return row

    def summary(self) -> dict[str, Any]:
        """A row for each mode, and the cache's bytes and share of the full KV; peaks are since `settle`."""
        row: dict[str, Any] = {mode: self._row(mode) for mode in self.taken}
        full = self.setting.full_kv_bytes
        if self.own is None:
            return row | {"cold": "in memory", "peak_memory_bytes": full, "share_of_full_kv": 1.0}
        report, form = self.own.report(), self.own.offloaded[0].history.form
        for name in ("hit_rate", "prefetch_hit_rate", "selected_fraction", "disk_bytes", "peak_memory_bytes"):
            row[name] = getattr(report, name)
        row |= {"cold": report.store, "share_of_full_kv": report.peak_memory_bytes / full}
        return row | {"group_size": form.group_size, "record_bytes": form.record_bytes}

    def close(self) -> None:
        """Free files, threads and buffers. Idempotent."""
        if self.own is not None:
            self.own.close()


# Methods side by side

SHAPES: dict[str, Shape] = {"smollm2": SMOLLM2, "llama-1b": LLAMA_1B, "replay": LLAMA_8B.light(2)}
"""The last has two of Llama-3.1-8B's cache layers, without its weights."""


def setting_of(name: str, tokens: int, batch: int = 1, **fields: Any) -> Setting:
    """A setting on one of `SHAPES`; a replay's staging buffers are shared by as many layers as the large model has."""
    depth = LLAMA_8B.layers if name == "replay" else None
    return Setting(SHAPES[name], tokens, batch, depth=depth, **fields)


def compare(
    setting: Setting, methods: Iterable[str], overlaps: tuple[str, ...] = ("on", "off"), steps: int = 20,
    reload_steps: int = 3, repetitions: int = 5, disk_limit: int = 20 << 30, memory_limit: int = 8 << 30,
    say: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """All methods on one model's weights and one context, in turns (ABBA); a row a method. What cannot run, or would
    take more disk or memory than the limits besides those before it, is named in "left_out" with the reason. Times are
    cold: each row's "cold" says by which means."""
    likeness = REPLAY_LIKENESS if setting.shape.hidden <= 8 * setting.shape.heads else LIKENESS
    room = 32 + steps * (repetitions * len(overlaps) + 1)
    setting = replace(setting, room=max(setting.room, room))
    left_out: dict[str, str] = {}
    memory, disk = 0, 0
    with contextlib.ExitStack() as stack:
        plain, attached = models(setting)
        contenders: list[Replay] = []
        for name in methods:
            own_memory, own_disk = needs(name, setting)
            reason = reason_against(name, setting)
            if reason is None and (memory + own_memory > memory_limit or disk + own_disk > disk_limit):
                reason = f"takes {own_memory >> 20:,} MiB of memory and {own_disk >> 20:,} of disk besides the others"
            if reason is not None:
                left_out[name] = reason
                continue
            memory, disk = memory + own_memory, disk + own_disk
            say(f"{name}: a context of {setting.batch} x {setting.tokens:,} tokens")
            contenders.append(Replay(name, setting, plain, attached, likeness))
            stack.callback(contenders[-1].close)
        for one in contenders:
            one.settle()
        for one, _ in in_turns(contenders, repetitions, 1):
            for overlap in overlaps:
                one.steps(reload_steps if one.name in SLOW else steps, overlap)
        rows = {one.name: one.summary() for one in contenders}
        for name, row in rows.items():
            for mode in overlaps:
                say(f"{name}, overlap {mode}: {_shown(row[mode])}")
    return {
        **{key: value for key, value in asdict(setting).items() if key not in ("shape", "memory")},
        "shape": asdict(setting.shape), "memory": str(setting.memory),
        "full_kv_bytes": setting.full_kv_bytes, "likeness": likeness, "threads": torch.get_num_threads(), "rows": rows,
        "left_out": left_out,
    }  # fmt: skip


def _shown(row: dict[str, Any]) -> str:
    text = f"{1e3 * row['median_seconds']:.1f} ms a step"
    text += f" (p95 {1e3 * row['p95_seconds']:.1f}, spread {row['spread']:.0%})"
    if "store_seconds" in row:
        text += f", in the store {1e3 * row['store_seconds']:.2f} ms"
    elif "stall_share" in row:
        text += f", waited {row['stall_share']:.1%}"
    return text
