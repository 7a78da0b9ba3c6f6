"""Case s9: Ctrl-C at any moment while a context opens, by a timer and not between two Python calls."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import prompt
from long_llama import feed, long_model, some
from nothing_left import no_threads_and_descriptors

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache

CACHES = (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache)
TIMES = 60


def descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
        except OSError:  # of the listing itself
            continue
    return found


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("cls", [DiskSwapCache, *(pytest.param(cls, marks=pytest.mark.slow) for cls in CACHES[1:])])
def test_a_timer_leaves_no_descriptor(cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each interrupted opening, and the next one works."""
    fields = {} if cls in (SpecCache, ClusterCache) else {**some(cls), "engine": "auto"}
    with cls(long_model(), path=tmp_path, **fields) as cache:
        feed(cache, prompt(long_model(), 1, 300))
        cache.save(tmp_path / "context")

    def opened() -> Any:
        return cls.open(tmp_path / "context", long_model(), path=tmp_path)

    for _ in range(2):  # the second time everything is imported
        start = time.perf_counter()
        opened().close()
        took = time.perf_counter() - start
    draw, hits = random.Random(4), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with no_threads_and_descriptors():
            known = descriptors()
            for _ in range(TIMES):
                cache = None
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.random() * took + 1e-4)
                    try:
                        cache = opened()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
                if cache is not None:
                    cache.close()
                cache = None
                gc.collect()
                assert not descriptors() - known
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > TIMES // 4
    opened().close()
