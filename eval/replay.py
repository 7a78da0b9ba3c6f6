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

from .baselines.paged import PagedCache
from .contenders import IN_MEMORY, RELOADS, Setting, make, models, synchronise
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
    """What the steps of one mode took: seconds, bytes and counts, one entry a step, lists one a repetition."""

    repetitions: list[list[float]] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)

    def summary(self, batch: int) -> dict[str, Any]:
        """Medians over all steps, and the spread of the repetitions' medians over their median."""
        every = [second for repetition in self.repetitions for second in repetition]
        medians = [statistics.median(repetition) for repetition in self.repetitions]
        middle = statistics.median(every)
        row: dict[str, Any] = {
            "median_seconds": middle,
            "p95_seconds": float(np.percentile(every, 95)),
            "tokens_per_second": batch / middle,
            "repetition_medians": medians,
            "spread": (max(medians) - min(medians)) / statistics.median(medians),
            "steps": len(every),
        }
        if self.stalls:
            row["stall_seconds"] = statistics.median(self.stalls)
            row["stall_share"] = sum(self.stalls) / sum(every)
            row["bytes_read"] = statistics.mean(self.bytes_read)
            row["reads"] = statistics.mean(self.reads)
            row["mean_request_bytes"] = sum(self.bytes_read) / max(1, sum(self.reads))
        if self.store:
            row["store_seconds"] = statistics.median(self.store)
            row["store_bytes_per_second"] = sum(self.bytes_read) / max(sum(self.store), 1e-9)
        return row


class Replay:
    """One cache with its context. For one thread; `close` gives everything back.

    Args:
        name: of `contenders.METHODS`.
        setting: shape, context, batch, memory and device.
        plain, attached: what `contenders.models` gave for the setting.
        likeness: of successive inputs.
        room: steps that a `StaticCache` has room for.
    """

    def __init__(
        self,
        name: str,
        setting: Setting,
        plain: LlamaForCausalLM,
        attached: LlamaForCausalLM,
        likeness: float = REPLAY_LIKENESS,
        room: int = 1024,
    ) -> None:
        self.name, self.setting = name, setting
        self.cache: Cache = make(name, setting, plain, attached, setting.tokens + room)
        self.model = attached if self.own is not None else plain
        self.taken: dict[str, Taken] = {}
        self._inputs = Inputs(setting.shape, likeness, batch=setting.batch)
        try:
            fill(self.cache, self.model, setting.shape, setting.tokens, setting.batch)
            if self.own is not None:
                self.own.storage.prefetcher.flush()
        except BaseException:
            self.close()
            raise

    @property
    def own(self) -> OffloadCache | None:
        """The cache, if it is one of this library's."""
        return self.cache if isinstance(self.cache, OffloadCache) else None

    def settle(self) -> None:
        """Steps that do not count: until the cache knows whether to look ahead, and the machine is warm."""
        looks = self.own is not None and getattr(self.own.config, "look_ahead", False) is None
        light = self.name in RELOADS or self.name in IN_MEMORY
        self.steps(2 if light else 3 + (2 * Pace.TRIAL if looks else 0), "on", keep=False)
        if self.own is not None:
            self.own.storage.reset_counters()

    def steps(self, count: int, overlap: str = "on", keep: bool = True) -> None:
        """Decode `count` steps as one repetition, with `overlap` "on" or "off"."""
        if overlap not in ("on", "off"):
            raise ValueError(f"overlap must be 'on' or 'off', got {overlap!r}")
        taken = Taken() if not keep else self.taken.setdefault(overlap, Taken())
        with contextlib.ExitStack() as stack:
            spent = {"seconds": 0.0}
            if overlap == "off" and self.own is not None:
                spent = stack.enter_context(reads_waited_for(self.own))
            seconds = []
            for _ in range(count):
                embedding = self._inputs.next()
                before, in_store = self._counts(), spent["seconds"]
                start = time.perf_counter()
                decode_step(self.model, self.cache, embedding)
                synchronise(self.setting.device)
                seconds.append(time.perf_counter() - start)
                after = self._counts()
                if self.own is not None:
                    taken.stalls.append(after[0] - before[0])
                    taken.bytes_read.append(int(after[1] - before[1]))
                    taken.reads.append(int(after[2] - before[2]))
                    if overlap == "off":
                        taken.store.append(spent["seconds"] - in_store)
            taken.repetitions.append(seconds)

    def _counts(self) -> tuple[float, int, int]:
        if self.own is None:
            return 0.0, 0, 0
        storage = self.own.storage
        return (
            storage.counters.stall_seconds,
            sum(store.bytes_read for store in storage.stores),
            sum(store.reads for store in storage.stores),
        )

    def summary(self) -> dict[str, Any]:
        """A row for each mode, and what the cache holds: bytes, and its share of the full KV; peak since `settle`."""
        row: dict[str, Any] = {mode: taken.summary(self.setting.batch) for mode, taken in self.taken.items()}
        full = self.setting.full_kv_bytes
        if self.own is not None:
            report = self.own.report()
            for name in ("hit_rate", "prefetch_hit_rate", "selected_fraction", "store", "disk_bytes"):
                row[name] = getattr(report, name)
            row["cold"] = report.store
            row["peak_memory_bytes"] = report.peak_memory_bytes
            row["memory_by_owner"] = report.memory_by_owner
            row["share_of_full_kv"] = report.peak_memory_bytes / full
            row["share_at_depth"] = self._share_at_depth(report.memory_by_owner)
            names = ("rank", "reuse_capacity", "num_selected", "summary_dtype", "exact")
            row["fields"] = {name: getattr(self.own.config, name, None) for name in names}
            form = self.own.offloaded[0].history.form
            row |= {"group_size": form.group_size, "record_bytes": form.record_bytes}
        elif isinstance(self.cache, PagedCache):
            row |= {"cold": "pages dropped between layers", "peak_memory_bytes": self.cache.limit}
            row |= {"share_of_full_kv": self.cache.limit / full, "disk_bytes": full}
        else:
            row |= {"cold": "in memory", "peak_memory_bytes": full, "share_of_full_kv": 1.0}
        return row

    def _share_at_depth(self, owners: dict[str, int]) -> float:
        """The share, had the cache as many layers as the model that it stands for: what layers have in common counts
        once there too."""
        shared = ("staging", "selection", "scores", "stream buffers", "write queue", "token ids")
        common = sum(owners.get(name, 0) for name in shared)
        times = (self.setting.depth or self.setting.shape.layers) / self.setting.shape.layers
        total = common + times * (sum(owners.values()) - common)
        return total / (times * self.setting.full_kv_bytes)

    def close(self) -> None:
        """Give files, threads and buffers back. Idempotent."""
        closing = getattr(self.cache, "close", None)
        if closing is not None:
            closing()


def replay(name: str, setting: Setting, **arguments: Any) -> Replay:
    """One `Replay` with models of its own."""
    return Replay(name, setting, *models(setting), **arguments)
