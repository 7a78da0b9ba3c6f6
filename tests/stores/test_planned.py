"""What stores and rings say they will hold, against what they hold."""

from __future__ import annotations

import errno
import mmap
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pairwise import combinations
from store_cases import fails, needs

from hf_offload_cache.errors import BudgetError
from hf_offload_cache.fetch import WriteQueue
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.stores import (
    DEPTH,
    IO_RING,
    DryStore,
    Ring,
    make_guard,
    open_store,
    planned_ring,
    ring_bytes,
)
from hf_offload_cache.stores.uring import queues
from hf_offload_cache.testing import open_descriptors


@pytest.mark.parametrize(
    ("engine", "record_bytes", "encrypted"),
    combinations(["memory", "mapped", "direct", "uring"], [4096, 3 * 4096, 2**20], [False, True], strength=2),
)
def test_a_store_holds_what_was_planned_at_most(
    tmp_path: Path, engine: str, record_bytes: int, encrypted: bool
) -> None:
    """Taken in steps of any size, freed and taken again: never more than planned, and at the end not far from it."""
    if encrypted:
        pytest.importorskip("cryptography")
    needs(engine, tmp_path)
    generator = np.random.default_rng(record_bytes)
    guard = make_guard(bytes(32) if encrypted else None, verify=True)
    with closing(open_store(engine, tmp_path, record_bytes, "layer 3", guard=guard)) as store:
        records = 2000 if record_bytes < 2**20 else 40
        planned = DryStore(record_bytes, engine, encrypted, records=records)
        taken = np.empty(0, dtype=np.int64)
        while len(taken) < records:
            taken = np.r_[taken, store.allocate(min(int(generator.integers(1, 200)), records - len(taken)))]
            if generator.random() < 0.3:
                store.free(taken[-5:])
                taken = taken[:-5]
            assert store.tables_bytes <= planned.tables_bytes
            assert store.memory_bytes <= planned.memory_bytes
        assert store.tables_bytes > 0.8 * planned.tables_bytes or record_bytes == 2**20
        if engine == "memory":
            assert store.memory_bytes == planned.memory_bytes


@pytest.mark.parametrize("depth", [1, 2, 5, 100, DEPTH])
def test_a_ring_is_in_the_account_until_it_is_closed(depth: int) -> None:
    account = MemoryAccount()
    try:
        ring = Ring(depth, account=account)
    except OSError as error:
        pytest.skip(str(error))
    with closing(ring):
        assert ring._memory is not None
        entries, completions = ring._memory.entries, ring._memory.completions
        queues = entries.nbytes + completions.nbytes + 4 * len(entries)
        assert account.by_owner[IO_RING] == ring_bytes(depth)
        assert queues < ring_bytes(depth) <= queues + 3 * mmap.PAGESIZE
    ring.close()
    assert account.current == 0


def test_a_ring_that_does_not_fit_or_opens_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, account = open_descriptors(), MemoryAccount(ring_bytes(DEPTH) - 1)
    with pytest.raises(BudgetError, match="io ring needs"):
        Ring(account=account)
    assert (open_descriptors(), account.current) == (before, 0)
    monkeypatch.setattr(queues, "open_ring", fails(errno.EPERM))
    account = MemoryAccount()
    with pytest.raises(PermissionError):
        Ring(account=account)
    assert account.current == 0


def test_what_is_planned() -> None:
    """Only one engine has a ring; a batch that is larger than the queue counts."""
    assert planned_ring("uring") == ring_bytes(DEPTH) > 0
    assert [planned_ring(engine) for engine in ("direct", "mapped", "memory")] == [0] * 3
    assert planned_ring("auto") == planned_ring("uring"), "which it may become"
    assert (WriteQueue.planned(100, 30), WriteQueue.planned(100, 300)) == (100, 300)
