"""Drives one cache through decoding steps and takes its times: step and store apart, overlap on and off.

A replay has cache layers of a large model's shape (Llama-3.1-8B: 32 query heads, 8 key heads of 128 in 16 bits, 4 KiB a
token and layer) beside a model that is next to nothing, so that the disk is used as the large model would use it. Data
go the whole way: `OffloadLayer.update` and `attend`, `Fetcher`, `Prefetcher`, `Store`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_offload_cache.core import OffloadCache, Pace, SelectiveLayer

from .contenders import FULL, IN_MEMORY, Setting, make, synchronise
from .synthetic import LLAMA_8B, Inputs, Shape, decode_step, fill

REPLAY_LAYERS = 2
REPLAY_LIKENESS = 0.95
"""Of successive inputs (see `Inputs`) of a replay: gives about the hit rate of a real model on text, 0.75, with as many
tokens of reuse as are selected, 400."""


def replay_shape(layers: int = REPLAY_LAYERS) -> Shape:
    """Llama-3.1-8B's cache layers without its weights."""
    return LLAMA_8B.light(layers)


@contextlib.contextmanager
def reads_waited_for(cache: OffloadCache) -> Iterator[dict[str, float]]:
    """Overlap off: nothing is read ahead, and every read is waited for where it is issued.

    Yields the "seconds" in the store so far.
    """
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


@dataclass
class Taken:
    """What the steps of one mode took: seconds of each repetition, and stalls, bytes and counts of each step."""

    repetitions: list[list[float]] = field(default_factory=list)
    steps: list[tuple[float, int, int, float]] = field(default_factory=list)
    """Stalled seconds, bytes read, reads, and seconds in the store."""

    def summary(self, batch: int) -> dict[str, Any]:
        """Medians over all steps, and the spread of the repetitions' medians over their median."""
        every = [second for repetition in self.repetitions for second in repetition]
        medians = [statistics.median(repetition) for repetition in self.repetitions]
        middle = statistics.median(every)
        row: dict[str, Any] = {"median_seconds": middle, "p95_seconds": float(np.percentile(every, 95))}
        row |= {"tokens_per_second": batch / middle, "steps": len(every)}
        row["spread"] = (max(medians) - min(medians)) / statistics.median(medians)
        if self.steps:
            stalls, nbytes, reads, store = zip(*self.steps, strict=True)
            row |= {"stall_share": sum(stalls) / sum(every), "bytes_read": statistics.mean(nbytes)}
            row |= {"reads": statistics.mean(reads), "mean_request_bytes": sum(nbytes) / max(1, sum(reads))}
            row |= {"store_seconds": statistics.median(store)} if any(store) else {}
        return row


class Replay:
    """One cache with its context, for one thread; `close` frees everything.

    Args:
        name: of `contenders.METHODS`.
        setting: shape, context, batch, memory and device.
        plain, attached: what `contenders.models` gave for the setting.
        likeness: of successive inputs.
        room: steps that a `StaticCache` has room for.
    """

    def __init__(
        self, name: str, setting: Setting, plain: LlamaForCausalLM, attached: LlamaForCausalLM,
        likeness: float = REPLAY_LIKENESS, room: int = 1024,
    ) -> None:  # fmt: skip
        self.name, self.setting = name, setting
        self.cache: Cache = make(name, setting, plain, attached, setting.tokens + room)
        self.own = self.cache if isinstance(self.cache, OffloadCache) else None
        self.model = plain if self.own is None else attached
        self.taken: dict[str, Taken] = {}
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
        self.steps(2 if light else 3 + (2 * Pace.TRIAL if looks else 0), "on", keep=False)
        if self.own is not None:
            self.own.storage.reset_counters()

    def steps(self, count: int, overlap: str = "on", keep: bool = True) -> None:
        """Decode `count` steps as one repetition, with `overlap` "on" or "off"."""
        taken = Taken() if not keep else self.taken.setdefault(overlap, Taken())
        with contextlib.ExitStack() as stack:
            spent, seconds = {"seconds": 0.0}, []
            if overlap == "off" and self.own is not None:
                spent = stack.enter_context(reads_waited_for(self.own))
            for _ in range(count):
                embedding, before, in_store = self._inputs.next(), self._counts(), spent["seconds"]
                start = time.perf_counter()
                decode_step(self.model, self.cache, embedding)
                synchronise(self.setting.device)
                seconds.append(time.perf_counter() - start)
                if self.own is not None:
                    stalled, nbytes, reads = (now - then for now, then in zip(self._counts(), before, strict=True))
                    taken.steps.append((stalled, int(nbytes), int(reads), spent["seconds"] - in_store))
            taken.repetitions.append(seconds)

    def _counts(self) -> tuple[float, int, int]:
        if self.own is None:
            return 0.0, 0, 0
        stores = self.own.storage.stores
        counters = self.own.storage.counters
        return counters.stall_seconds, sum(one.bytes_read for one in stores), sum(one.reads for one in stores)

    def summary(self) -> dict[str, Any]:
        """A row for each mode, and the cache's bytes and share of the full KV; peaks are since `settle`."""
        row: dict[str, Any] = {mode: taken.summary(self.setting.batch) for mode, taken in self.taken.items()}
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
