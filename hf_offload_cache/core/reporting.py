"""The data that a cache puts into its report."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from ..memory.account import GRAPHS
from ..model.place import untested
from ..report.report import CacheReport, size_text


def report_of(cache: Any) -> CacheReport:
    """Activity of `cache` since construction or `reset`, and its present contents."""
    storage, offloaded = cache.storage, cache.offloaded
    states = {"unknown": 0, "tagged": 0, "full": 0, "kept": len(cache.layers) - len(offloaded)}
    for layer in offloaded:
        states[layer.state] += 1
    return CacheReport.of(
        cache=type(cache).__name__,
        tokens=cache.tokens,
        full_kv_bytes=sum(layer.full_bytes for layer in offloaded) + cache.contents.kept_bytes(),
        memory_bytes=cache.memory_bytes,  # before the account's peak is read
        account=storage.account,
        disk_bytes=cache.disk_bytes,
        replica_bytes=sum(layer.replica_bytes for layer in offloaded if layer.is_initialized),
        counters=storage.counters,
        stores=storage.stores,
        store=storage.description,
        device="cuda" if storage.pinned else "cpu",
        steps=_steps(cache),
        layers=states,
        chosen_by_model=sum(layer.keeps_more for layer in offloaded),
        chosen_ahead=sum(getattr(layer, "read_early", False) for layer in offloaded),
        warnings=[*cache.warnings, *_notes(cache)],
    )


def _steps(cache: Any) -> str:
    """Where the layers' latest steps that select ran, with a model on a GPU; empty before the first one."""
    if not cache.storage.pinned or not cache.storage.counters.tokens_visible:
        return ""
    layers = [one for one in cache.offloaded if getattr(one, "selects", False) and one.state == "tagged"]
    found = Counter(layer.why_over_host() for layer in layers if layer.is_initialized)
    alone = found.pop(None, 0)
    parts = [f"{alone} of {len(layers)} layers on the GPU alone"] if alone else []
    if cache.storage.account.by_owner[GRAPHS]:
        parts.append("a CUDA graph also has the model's activations, which are not counted")
    return "; ".join([*parts, *(f"{count} of {len(layers)} over the host: {why}" for why, count in found.items())])


def _notes(cache: Any) -> list[str]:
    """Notes for the user on how the cache runs on this machine."""
    notes = [] if (newer := untested()) is None else [newer]
    if cache.storage.engine == "direct" and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        notes.append("set OMP_WAIT_POLICY=PASSIVE before importing torch: waiting threads take the readers' cores")
    if pageable := sum(store.pageable_bytes for store in cache.storage.stores):
        notes.append(
            f"{size_text(pageable)} of the records in host memory are not pinned, because the system pins no more: the "
            "device waits for their copies"
        )
    if (failure := cache.storage.timeline.failure) is not None:
        notes.append(f"trace {str(cache.config.trace)!r} ends early, it could not be written: {failure.strerror}")
    return notes
