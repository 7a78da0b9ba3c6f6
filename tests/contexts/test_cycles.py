"""Hundreds of contexts opened, forked, saved and removed: descriptors, threads, maps and counted bytes stay as many."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import saved_contexts
from hostile_files import manifest_of
from saved_contexts import answer, feed, ids, opened, same

from hf_offload_cache.contexts import remove
from hf_offload_cache.testing import file_maps, open_descriptors

CYCLES, FIRST = 81, 15
"""Cycles, and those before the first count: what is made once for good is made in them."""
GROWTH = 10 * 2**20
"""Bytes that resident memory may grow by. Cycles that kept their 200 KiB of tables, slots and staging would take
13 MiB; what malloc holds back for later varies by some MiB."""


def resident() -> int:
    """Bytes of memory that this process has now; 0 where nobody tells."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def books(folder: Path) -> tuple[Any, ...]:
    """What has to stay as it is."""
    return open_descriptors(), threading.active_count(), file_maps(folder), sorted(os.listdir(folder))


@pytest.fixture
def context(saved_once: Path, tmp_path: Path) -> Path:
    (tmp_path / "contexts").mkdir()
    return Path(shutil.copytree(saved_once, tmp_path / "contexts" / "context"))


@pytest.mark.parametrize("engine", ["auto", "mapped", pytest.param("memory", marks=pytest.mark.slow)])
def test_opened_forked_and_closed(context: Path, engine: str) -> None:
    with opened(context) as cache:
        expected = answer(cache, 1)
    before, memory = (), 0
    for cycle in range(CYCLES):
        cache = opened(context, engine=engine)
        held = cache.memory_bytes
        twin = cache.fork()
        if cycle % 2:
            cache.close()
        found = answer(twin, 1)
        twin.close()
        cache.close()
        assert same(found, expected)
        assert (cache.storage.account.current, twin.shared.storage.account.current) == (0, 0) and held > 0
        del cache, twin
        if cycle == FIRST:
            gc.collect()
            before, memory = books(context.parent), resident()
    gc.collect()
    assert books(context.parent) == before
    assert resident() < memory + GROWTH


def test_saved_overwritten_and_removed(context: Path) -> None:
    """One cache goes on; a fork of the first takes its place now and then, so that it does not grow without end."""
    target, more = context.parent / "target", ids(8, seed=3)
    before, memory, own = (), 0, 0
    with opened(context) as first:
        cache = first.fork()
        for cycle in range(CYCLES):
            feed(cache, more[:, cycle % 8 : cycle % 8 + 1])
            cache.save(target, overwrite=cycle % 3 != 0)
            if cycle % 3 == 2:
                remove(target)
            if cycle % 25 == FIRST:
                cache.close()
                cache = first.fork()
            if cycle == FIRST:
                gc.collect()
                before, memory, own = books(context.parent), resident(), cache.memory_bytes
        cache.close()
        cache = first.fork()
        gc.collect()
        assert cache.memory_bytes == own
        assert books(context.parent) == (*before[:3], ["context"])
        assert resident() < memory + GROWTH
        cache.close()
    assert manifest_of(context)["tokens"] == saved_contexts.LONG
