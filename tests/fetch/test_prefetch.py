"""The prefetcher over slow, broken and real stores. Order is asserted through events, never through elapsed time."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from background import LONG, Gate, SlowWrites, in_background, join_threads, memory, rows, skip_without, threads_of_ours
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import in_full

from hf_offload_cache.errors import BudgetError, CacheClosedError, StoreError
from hf_offload_cache.fetch import Prefetcher, Staging, split, write_queue
from hf_offload_cache.fetch.prefetcher import _end
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.report import Timeline
from hf_offload_cache.stores import Ring, Store, UringStore, aligned_empty, open_store, runs
from hf_offload_cache.stores.uring import queues as io_uring
from hf_offload_cache.testing import (
    RECORD_BYTES,
    FaultyStore,
    LatencyStore,
    WrapperStore,
    fill,
    open_descriptors,
    pattern,
    read,
)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    descriptors = open_descriptors()
    yield
    if threads_of_ours():
        gc.collect()  # a test that failed keeps its prefetcher alive in cycles
    join_threads()
    assert threads_of_ours() == []
    assert open_descriptors() == descriptors


@pytest.fixture
def account() -> MemoryAccount:
    return MemoryAccount()


@pytest.fixture
def prefetcher(account: MemoryAccount) -> Iterator[Prefetcher]:
    prefetcher = Prefetcher(account, 16 * RECORD_BYTES)
    yield prefetcher
    prefetcher.close()
    assert account.current == 0


@pytest.fixture(params=["memory", "mapped", "direct", "uring"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    skip_without(request.param, tmp_path)
    store = open_store(request.param, tmp_path, RECORD_BYTES, "layer 3")
    yield store
    store.close()


def test_reads_what_was_asked_for(prefetcher: Prefetcher, store: Store) -> None:
    ids, records = fill(store, 200)
    for chosen in (ids, ids[::3], ids[[7]], np.r_[ids[3:9], ids[50:120], ids[[199]]]):
        out = rows(len(chosen))
        ticket = prefetcher.read(store, chosen, out)
        assert ticket.wait() > 0
        assert ticket.done()
        assert torch.equal(out, records[chosen])
        out.zero_()
        ticket.wait()
        assert not out.any(), "waiting again reads nothing"


def test_nothing_to_read(prefetcher: Prefetcher, store: Store) -> None:
    ticket = prefetcher.read(store, np.empty(0, dtype=np.int64), rows(0))
    assert ticket.done()
    assert ticket.wait() >= 0
    prefetcher.write(store, np.empty(0, dtype=np.int64), rows(0))
    assert threads_of_ours() == [], "nothing needed a thread"


def test_reads_overlap_the_callers_work(prefetcher: Prefetcher) -> None:
    gate = Gate()
    store = LatencyStore(memory(), 1.0, sleep=gate.pass_through)
    ids, records = fill(store, 16)
    out = rows(8)
    ticket = prefetcher.read(store, ids[::2], out)  # eight runs: eight threads, all of which stop at the gate
    gate.wait_for(8)
    assert not ticket.done(), "the caller is here while eight reads are under way"
    assert (out == 0xEE).all()
    gate.open()
    assert ticket.wait() > 0
    assert torch.equal(out, records[::2])


def test_advised_reads_run_on_the_thread_that_waits(prefetcher: Prefetcher) -> None:
    class Recording(WrapperStore):
        def advise(self, ids: np.ndarray) -> None:
            calls.append(("advise", ids.tolist(), threading.current_thread()))

        def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
            calls.append(("read", ids.tolist(), threading.current_thread()))
            super().read(ids, out)

    calls: list[tuple[str, list[int], threading.Thread]] = []
    store = Recording(memory())
    ids, _ = fill(store, 4)
    ticket = prefetcher.read(store, ids, rows(4))
    me = threading.current_thread()
    assert calls == [("advise", [0, 1, 2, 3], me)]
    assert not ticket.done()
    ticket.wait()
    assert calls[1:] == [("read", [0, 1, 2, 3], me)]
    assert ticket.done()
    assert threads_of_ours() == []


def test_threads_are_as_many_as_needed(account: MemoryAccount) -> None:
    gate = Gate()
    store = LatencyStore(memory(), 1.0, sleep=gate.pass_through)
    ids, _ = fill(store, 40)
    gate.open()
    prefetcher = Prefetcher(account, 0, threads=3)
    prefetcher.read(store, ids[:1], rows(1)).wait()
    assert threads_of_ours() == ["hf_offload_cache-reader-0"]
    prefetcher.read(store, ids[::2], rows(20)).wait()
    assert len(threads_of_ours()) == 3
    prefetcher.close()


@given(ids=st.sets(st.integers(0, 300), min_size=1), most=st.integers(1, 9), kib=st.sampled_from([4, 16, 256, 1024]))
def test_split_covers_everything_once(ids: set[int], most: int, kib: int) -> None:
    array = np.array(sorted(ids))
    pieces = split(array, kib * 1024, most)
    assert pieces[0][0] == 0 and pieces[-1][1] == len(array)
    assert all(start < stop for start, stop in pieces)
    assert all(before[1] == after[0] for before, after in pairwise(pieces))
    assert len(pieces) <= most
    edges = {start for start, _ in runs(array)}
    for start, stop in pieces:
        inside_a_run = start not in edges
        assert not inside_a_run or any(
            first < start < last and (last - first) * kib >= 512 for first, last in runs(array)
        ), f"{start, stop} cuts a run that is too short"


def test_a_long_run_is_shared() -> None:
    assert split(np.arange(512), 4096, 8) == [(i * 64, i * 64 + 64) for i in range(8)]
    assert split(np.arange(63), 4096, 8) == [(0, 63)]


def test_third_read_fails_and_others_do_not(prefetcher: Prefetcher) -> None:
    store = FaultyStore(memory(), "read", 3)
    ids, records = fill(store, 10)
    outs = [rows(1) for _ in range(5)]
    tickets = []
    for index, out in enumerate(outs):
        tickets.append(prefetcher.read(store, ids[[index]], out))
        while not tickets[-1].done():  # one after the other, so that the third call is the third ticket's
            pass
    for index in (4, 3, 1, 0):
        tickets[index].wait()
        assert torch.equal(outs[index], records[[index]])
    for _ in range(2):
        with pytest.raises(StoreError, match="read was made to fail") as caught:
            tickets[2].wait()
    assert caught.value.errno == errno.EIO
    prefetcher.read(store, ids[[2]], outs[2]).wait()
    assert torch.equal(outs[2], records[[2]])


def test_out_is_free_when_a_failed_read_raises(prefetcher: Prefetcher) -> None:
    gate = Gate()

    class OneFails(WrapperStore):
        def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
            if ids[0] == 0:
                gate.wait_for(3)  # the three other pieces are under way
                raise StoreError(errno.EIO, "the first run fails")
            gate.pass_through()
            super().read(ids, out)

    store = OneFails(memory())
    store.advises = False
    ids, records = fill(store, 8)
    out = rows(4)
    ticket = prefetcher.read(store, ids[::2], out)
    thread, outcome = in_background(ticket.wait)
    thread.join(0.05)
    assert not ticket.done() and outcome == [], "a piece may still be writing to out"
    gate.open()
    thread.join(LONG)
    assert "the first run fails" in str(outcome[0])
    assert torch.equal(out[1:], records[2::2]), "the others had finished when it raised"


def test_errors_of_an_advised_read(prefetcher: Prefetcher) -> None:
    store = FaultyStore(memory(), "read", 1, advises=True)
    ids, records = fill(store, 2)
    ticket, out = prefetcher.read(store, ids, rows(2)), rows(2)
    for _ in range(2):
        with pytest.raises(StoreError, match="made to fail"):
            ticket.wait()
    prefetcher.read(store, ids, out).wait()
    assert torch.equal(out, records)


def test_an_error_is_not_limited_to_store_errors(prefetcher: Prefetcher) -> None:
    def interrupt(_: float) -> None:
        raise SystemExit("from a worker")

    store = LatencyStore(memory(), 1.0, sleep=interrupt)
    ids, _ = fill(store, 1)
    with pytest.raises(SystemExit, match="from a worker"):
        prefetcher.read(store, ids, rows(1)).wait()


@pytest.mark.parametrize("operation", ["read", "write", "flush", "flush all", "wait"])
def test_a_failed_write_surfaces_once(prefetcher: Prefetcher, operation: str) -> None:
    store = FaultyStore(memory(), "write", 1, errno.ENOSPC)
    ids = store.allocate(4)
    other = memory()
    good, _ = fill(store.inner, 1)
    gate = Gate()
    slow = LatencyStore(store, 1.0, sleep=gate.pass_through)
    ticket = prefetcher.read(slow, good, rows(1)) if operation == "wait" else None
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: prefetcher.read(slow, good, rows(1)),
        "write": lambda: prefetcher.write(slow, ids[2:], pattern(2)),
        "flush": lambda: prefetcher.flush(slow),
        "flush all": lambda: prefetcher.flush(),
        "wait": lambda: ticket.wait(),
    }
    prefetcher.write(slow, ids[:2], pattern(2))
    prefetcher.write(other, other.allocate(1), pattern(1))
    prefetcher.flush(other)  # first in, first out: the failing write is over
    gate.open()
    with pytest.raises(StoreError, match="write was made to fail") as caught:
        calls[operation]()
    assert caught.value.errno == errno.ENOSPC
    calls[operation]() if operation != "wait" else None
    with pytest.raises(StoreError, match=r"records 0\.\.1 \(2\) could not be written"):
        prefetcher.read(slow, ids, rows(4))
    prefetcher.write(slow, ids[:1], pattern(1, seed=7))
    with pytest.raises(StoreError, match="record 1 could not be written"):
        prefetcher.read(slow, ids, rows(4))
    prefetcher.write(slow, ids[1:], pattern(3, seed=8))
    out = rows(4)
    prefetcher.read(slow, ids, out).wait()
    assert torch.equal(out, torch.cat([pattern(1, seed=7), pattern(3, seed=8)]))


def test_the_write_queue_is_bounded(account: MemoryAccount) -> None:
    store = SlowWrites(memory())
    ids = store.allocate(10)
    prefetcher = Prefetcher(account, 4 * RECORD_BYTES)
    prefetcher.write(store, ids[:2], pattern(2))
    prefetcher.write(store, ids[2:4], pattern(2, seed=1))
    store.gate.wait_for(1)
    assert account.by_owner["write queue"] == 4 * RECORD_BYTES
    thread, outcome = in_background(lambda: prefetcher.write(store, ids[4:5], pattern(1, seed=2)))
    thread.join(0.05)
    assert thread.is_alive() and account.current == 4 * RECORD_BYTES, "the third batch has no room"
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None]
    prefetcher.flush(store)
    assert store.order == ids[[0, 2, 4]].tolist()
    assert (account.current, account.peak) == (0, 4 * RECORD_BYTES)
    prefetcher.write(store, ids, pattern(10, seed=3))  # larger than the bound: alone it may
    prefetcher.flush()
    assert (account.current, account.peak) == (0, 10 * RECORD_BYTES)
    assert torch.equal(read(store, ids), pattern(10, seed=3))
    prefetcher.close()


def test_a_booking_waits_for_what_is_queued_before_it_fails() -> None:
    """A booking of the queue, or of another owner: the speed of a disk does not decide whether it succeeds."""
    account, store = MemoryAccount(2 * RECORD_BYTES), SlowWrites(memory())
    prefetcher, ids = Prefetcher(account, 4 * RECORD_BYTES), store.allocate(4)
    prefetcher.write(store, ids[:2], pattern(2))
    thread, outcome = in_background(lambda: prefetcher.write(store, ids[2:], pattern(2, seed=1)))
    thread.join(0.05)
    assert thread.is_alive() and account.current == 2 * RECORD_BYTES
    store.gate.open()
    thread.join(LONG)
    account.hold("another", 2 * RECORD_BYTES)
    assert outcome == [None] and account.by_owner["write queue"] == 0, "what was queued is written, not lost"
    assert torch.equal(read(store, ids), torch.cat([pattern(2), pattern(2, seed=1)]))
    with pytest.raises(BudgetError, match="write queue needs"):
        prefetcher.write(store, ids[:1], pattern(1))
    prefetcher.flush()
    assert account.current == 2 * RECORD_BYTES
    account.release("another", 2 * RECORD_BYTES)
    prefetcher.close()


def test_the_write_queue_is_made_shorter_when_what_is_in_it_is_written(account: MemoryAccount) -> None:
    store = SlowWrites(memory())
    ids = store.allocate(4)
    prefetcher = Prefetcher(account, 4 * RECORD_BYTES)
    for one in range(4):
        prefetcher.write(store, ids[one : one + 1], pattern(1, seed=one))
    thread, outcome = in_background(lambda: prefetcher.limit_writes(RECORD_BYTES))
    thread.join(0.05)
    assert thread.is_alive() and account.current == 4 * RECORD_BYTES
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None] and account.current <= RECORD_BYTES
    prefetcher.flush()
    account.peak = 0
    for one in range(4):
        prefetcher.write(store, ids[one : one + 1], pattern(1, seed=one))
    assert account.peak == RECORD_BYTES
    prefetcher.limit_writes(4 * RECORD_BYTES)  # longer: at once
    prefetcher.flush()
    assert torch.equal(read(store, ids), torch.cat([pattern(1, seed=one) for one in range(4)]))
    prefetcher.close()
    with pytest.raises(CacheClosedError):
        prefetcher.limit_writes(1)


@pytest.mark.parametrize("advises", [True, False])
def test_a_queued_write_is_read_from_the_queue(prefetcher: Prefetcher, advises: bool) -> None:
    store = SlowWrites(memory())
    store.advises = advises
    ids, old = fill(store.inner, 12)
    new = pattern(4, seed=1)
    prefetcher.write(store, ids[[5, 2, 9, 8]], new)
    newest = pattern(1, seed=2)
    prefetcher.write(store, ids[[8]], newest)
    store.gate.wait_for(1)
    out = rows(12)
    prefetcher.read(store, ids, out).wait()  # would never return if it waited for the gate
    expected = old.clone()
    expected[[5, 2, 9, 8]] = new
    expected[8] = newest
    assert torch.equal(out, expected)
    reads = store.reads
    out = rows(2)
    ticket = prefetcher.read(store, ids[[8, 9]], out)
    assert ticket.done() and store.reads == reads, "the disk has no part in this"
    assert torch.equal(out, expected[[8, 9]])
    store.gate.open()
    prefetcher.flush(store)
    out = rows(12)
    prefetcher.read(store, ids, out).wait()
    assert torch.equal(out, expected)


def test_records_that_a_device_fills_are_waited_for(account: MemoryAccount) -> None:
    """By the writer, and by a read from the queue; longer than a disk may take."""
    store, began, arrived = memory(), threading.Event(), threading.Event()
    ids, filled, out = store.allocate(3), rows(3), rows(3)
    prefetcher = Prefetcher(account, 16 * RECORD_BYTES, timeout=0.05)

    def fills() -> None:
        began.set()
        assert arrived.wait(LONG)

    prefetcher.write(store, ids, filled, fills)
    assert began.wait(LONG)
    reading, _ = in_background(lambda: prefetcher.read(store, ids, out).wait())
    flushing, outcome = in_background(lambda: prefetcher.flush(store))
    for thread in (reading, flushing):
        thread.join(0.15)
        assert thread.is_alive()
    filled.copy_(pattern(3))
    prefetcher._writes.deadline.seconds = LONG  # for the disk, whose time begins now
    arrived.set()
    for thread in (reading, flushing):
        thread.join(LONG)
    assert outcome == [None]
    assert torch.equal(out, pattern(3)) and torch.equal(read(store, ids), pattern(3))
    prefetcher.close()


def test_work_runs_behind_the_writes(account: MemoryAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their thread, or here if the system provides none. What it raises is raised where its result is asked for."""
    store, begin, done = memory(), threading.Event(), list[str]()
    writes = store.write

    def late(ids: np.ndarray, records: torch.Tensor) -> None:
        assert begin.wait(60)
        writes(ids, records)
        done.append("written")

    def work() -> str:
        done.append("worked")
        return threading.current_thread().name

    monkeypatch.setattr(store, "write", late)
    prefetcher = Prefetcher(account, 1 << 20)
    prefetcher.write(store, store.allocate(1), pattern(1))
    result = prefetcher.run_behind_writes(work)
    failing = prefetcher.run_behind_writes(lambda: 1 // 0)
    assert done == []
    begin.set()
    assert result() == prefetcher._writes.threads[0].name and done == ["written", "worked"] and result() == result()
    with pytest.raises(ZeroDivisionError):
        failing()
    prefetcher.close()
    with pytest.raises(CacheClosedError):
        prefetcher.run_behind_writes(work)

    def refused(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(write_queue, "start_worker", refused)
    alone = Prefetcher(account, 1 << 20)
    assert alone.run_behind_writes(work)() == threading.current_thread().name
    alone.close()


def test_work_that_a_close_comes_before_has_no_result(account: MemoryAccount) -> None:
    prefetcher, started, begin = Prefetcher(account, 1 << 20), threading.Event(), threading.Event()

    def waits() -> bool:
        started.set()
        return begin.wait(60)

    first = prefetcher.run_behind_writes(waits)
    assert started.wait(60)
    second = prefetcher.run_behind_writes(lambda: 1)
    prefetcher._writes.stop()
    begin.set()
    prefetcher.close()
    assert first() is True
    with pytest.raises(CacheClosedError):
        second()


def test_a_device_that_fails_fails_the_write(prefetcher: Prefetcher) -> None:
    store = memory()
    ids = store.allocate(2)

    def fails() -> None:
        raise RuntimeError("CUDA error: made to fail")

    prefetcher.write(store, ids, pattern(2), fails)
    with pytest.raises(RuntimeError, match="made to fail"):
        prefetcher.flush(store)
    with pytest.raises(StoreError, match="could not be written: CUDA error"):
        prefetcher.read(store, ids, rows(2))
    prefetcher.write(store, ids, pattern(2, seed=1))
    prefetcher.flush(store)
    assert torch.equal(read(store, ids), pattern(2, seed=1))


def test_flush_waits_for_its_own_store_only(prefetcher: Prefetcher) -> None:
    first, second = memory(), SlowWrites(memory())
    prefetcher.write(first, first.allocate(1), pattern(1))
    prefetcher.write(second, second.allocate(1), pattern(1))
    prefetcher.flush(first)
    assert second.order == []
    second.gate.open()
    prefetcher.flush()
    assert second.order == [0]


def test_cancel_drops_what_has_not_begun(prefetcher: Prefetcher, account: MemoryAccount) -> None:
    store = SlowWrites(memory())
    ids = store.allocate(6)
    for index in range(6):
        prefetcher.write(store, ids[[index]], pattern(1, seed=index))
    store.gate.wait_for(1)
    thread, outcome = in_background(lambda: prefetcher.cancel(store))
    while account.current > RECORD_BYTES:  # the five that wait are dropped at once
        pass
    assert thread.is_alive() and outcome == [], "one write is running"
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None]
    assert account.current == 0
    prefetcher.flush()
    assert store.order == [0]
    prefetcher.write(store, ids[[3]], pattern(1))
    prefetcher.flush(store)
    assert store.order == [0, 3], "a cancelled store can be used again"


@pytest.mark.parametrize("advises", [True, False])
def test_cancel_ends_reads(prefetcher: Prefetcher, advises: bool) -> None:
    gate = Gate()
    calls: list[float] = []

    def sleep(seconds: float) -> None:
        calls.append(seconds)
        gate.pass_through()

    store = LatencyStore(memory(), 1.0, sleep=sleep, advises=advises)
    ids, _ = fill(store, 40)
    out = rows(40)
    tickets = [prefetcher.read(store, ids[i : i + 20 : 2], out[i : i + 10]) for i in (0, 20)]
    if not advises:
        gate.wait_for(8)  # all readers are in a read; the rest waits
    thread, outcome = in_background(lambda: prefetcher.cancel(store))
    if not advises:
        thread.join(0.05)
        assert thread.is_alive(), "reads are running"
    gate.open()
    thread.join(LONG)
    assert outcome == [None]
    store.close()  # nothing may touch it now
    assert len(calls) == (0 if advises else 8)
    for ticket in tickets:
        with pytest.raises(CacheClosedError, match="cancelled"):
            ticket.wait()


def test_cancel_forgets_failures(prefetcher: Prefetcher) -> None:
    store = FaultyStore(memory(), "write", 1)
    ids = store.allocate(1)
    other = memory()
    prefetcher.write(store, ids, pattern(1))
    prefetcher.write(other, other.allocate(1), pattern(1))
    prefetcher.flush(other)  # first in, first out: the failing write is over
    prefetcher.cancel(store)
    prefetcher.read(store, ids, rows(1)).wait()
    prefetcher.flush(store)


def test_the_first_failure_is_the_one_that_is_told(prefetcher: Prefetcher) -> None:
    class Failing(WrapperStore):
        def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
            if ids[0] == 0:  # the piece that ends last
                gate.pass_through()
            raise OSError(int(ids[0]), "made to fail")

        def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
            queued.pass_through()
            raise OSError(int(ids[0]), "made to fail")

    gate, queued, store = Gate(), Gate(), Failing(memory())
    store.advises = False
    store.start = lambda ids, out: None
    ids = store.allocate(8)
    ticket = prefetcher.read(store, ids[[0, 5]], rows(2))
    gate.wait_for(1)
    while ticket.transfers[0]._error is None:
        pass
    gate.open()
    with pytest.raises(OSError, match="made to fail") as caught:
        ticket.wait()
    assert caught.value.errno == 5
    other = memory()
    for first in (3, 4):
        prefetcher.write(store, ids[[first]], pattern(1))
    queued.open()
    prefetcher.write(other, other.allocate(1), pattern(1))
    prefetcher.flush(other)
    with pytest.raises(OSError, match="made to fail") as caught:
        prefetcher.flush()
    assert caught.value.errno == 3


def test_a_write_that_is_interrupted_while_it_is_queued(
    prefetcher: Prefetcher, account: MemoryAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when its job is there and the books do not know it yet: nothing was queued."""
    store = SlowWrites(memory())
    store.gate.open()
    ids = store.allocate(2)
    prefetcher.write(store, ids[:1], pattern(1))
    prefetcher.flush()
    jobs = prefetcher._writes._jobs

    class Interrupted:
        def put(self, job: Any) -> None:
            jobs.put(job)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prefetcher._writes, "_jobs", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            prefetcher.write(store, ids[1:], pattern(1))
    assert account.current == 0
    prefetcher.write(store, ids[:1], pattern(1))
    prefetcher.flush()
    assert store.order == [0, 0], "the second was never written"


def test_close_drops_writes_and_reads(account: MemoryAccount) -> None:
    prefetcher = Prefetcher(account, 100 * RECORD_BYTES)
    gate = Gate()
    slow, store = LatencyStore(memory(), 1.0, sleep=gate.pass_through), SlowWrites(memory())
    ids, _ = fill(slow, 40)
    finished = prefetcher.read(store, store.allocate(1), rows(1))
    finished.wait()
    deferred = prefetcher.read(store, np.array([0]), rows(1))
    tickets = [prefetcher.read(slow, ids[i : i + 20 : 2], rows(10)) for i in (0, 20)]
    for index in range(5):
        prefetcher.write(store, store.allocate(1), pattern(1, seed=index))
    gate.wait_for(8)
    store.gate.wait_for(1)
    thread, outcome = in_background(prefetcher.close)
    while not prefetcher._writes.closed:
        pass
    assert thread.is_alive()
    gate.open()
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None]
    assert threads_of_ours() == []
    assert len(store.order) == 1
    assert account.current == 0
    for ticket in [tickets[1], deferred]:
        with pytest.raises(CacheClosedError):
            ticket.wait()
    for ticket in [tickets[0], finished]:  # all its pieces were running when close was called
        assert ticket.wait() >= 0
    prefetcher.close()
    prefetcher.cancel(store)
    for call in (
        lambda: prefetcher.read(slow, ids, rows(40)),
        lambda: prefetcher.write(slow, ids, pattern(40)),
        prefetcher.flush,
    ):
        with pytest.raises(CacheClosedError):
            call()


def test_close_releases_a_writer_that_waits_for_room(account: MemoryAccount) -> None:
    prefetcher = Prefetcher(account, RECORD_BYTES)
    store = SlowWrites(memory())
    ids = store.allocate(2)
    prefetcher.write(store, ids[:1], pattern(1))
    store.gate.wait_for(1)
    thread, outcome = in_background(lambda: prefetcher.write(store, ids[1:], pattern(1)))
    closing, _ = in_background(prefetcher.close)
    store.gate.open()
    thread.join(LONG)
    closing.join(LONG)
    assert outcome == [None] or isinstance(outcome[0], CacheClosedError)
    assert not thread.is_alive() and not closing.is_alive()


def test_a_forgotten_prefetcher_ends_its_threads(account: MemoryAccount, store: Store) -> None:
    prefetcher = Prefetcher(account, 16 * RECORD_BYTES)
    ids = store.allocate(8)
    prefetcher.write(store, ids, pattern(8))
    prefetcher.flush()
    prefetcher.read(LatencyStore(store, 0.0), ids, rows(8)).wait()
    mine = [t for t in threading.enumerate() if t.name.startswith("hf_offload_cache-")]
    assert len(mine) >= 2
    held = weakref.ref(prefetcher._readers)
    del prefetcher
    for thread in mine:
        thread.join(LONG)
        assert not thread.is_alive()
    assert held() is None, "no exit handler is left"


def test_a_forgotten_prefetcher_writes_no_more(account: MemoryAccount) -> None:
    prefetcher = Prefetcher(account, 16 * RECORD_BYTES)
    store = SlowWrites(memory())
    ids = store.allocate(2)
    for index in (0, 1):
        prefetcher.write(store, ids[[index]], pattern(1))
    store.gate.wait_for(1)
    thread = prefetcher._writes.threads[0]
    del prefetcher
    store.gate.open()
    thread.join(LONG)
    assert store.order == [0], "what had begun, and nothing else"


def test_idle_threads_hold_no_store(prefetcher: Prefetcher, tmp_path: Path) -> None:
    descriptors = open_descriptors()
    store = open_store("mapped", tmp_path, RECORD_BYTES, "layer 3")
    ids = store.allocate(2)
    prefetcher.write(store, ids, pattern(2))
    prefetcher.flush()
    prefetcher.read(LatencyStore(store, 0.0), ids, rows(2)).wait()
    del store
    end = time.monotonic() + LONG  # the threads are on their way back to their queues
    while open_descriptors() != descriptors and time.monotonic() < end:
        time.sleep(0.001)
    assert open_descriptors() == descriptors


def test_the_end_of_the_interpreter_waits_for_what_runs(
    account: MemoryAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_offload_cache.fetch.reader_pool.EXIT_SECONDS", LONG)
    gate = Gate()
    slow, store = LatencyStore(memory(), 1.0, sleep=gate.pass_through), SlowWrites(memory())
    prefetcher = Prefetcher(account, 16 * RECORD_BYTES)
    ids, _ = fill(slow.inner, 1)
    prefetcher.read(slow, ids, rows(1))
    gate.wait_for(1)
    prefetcher.write(store, store.allocate(1), pattern(1))
    store.gate.wait_for(1)
    thread, outcome = in_background(lambda: _end(prefetcher._readers, prefetcher._writes))
    for each in (gate, store.gate):
        thread.join(0.05)
        assert thread.is_alive()
        each.open()
    thread.join(LONG)
    assert outcome == [None] and threads_of_ours() == []
    prefetcher.close()


def test_idle_threads_hold_no_store_whose_read_failed(prefetcher: Prefetcher) -> None:
    store = LatencyStore(FaultyStore(memory(), "read", 1), 0.0)
    ids = store.allocate(1)
    with pytest.raises(StoreError, match="made to fail"):
        prefetcher.read(store, ids, rows(1)).wait()
    held = weakref.ref(store)
    del store
    deadline = time.monotonic() + LONG
    while held() is not None and time.monotonic() < deadline:
        gc.collect()
    assert held() is None


@pytest.mark.parametrize("closed", [False, *in_full((True,))])
def test_the_interpreter_ends(closed: bool) -> None:
    script = f"""
        import threading, weakref
        from hf_offload_cache.errors import StalledError
        from hf_offload_cache.fetch.prefetcher import Prefetcher
        from hf_offload_cache.memory.account import MemoryAccount
        from hf_offload_cache.stores.memory import MemoryStore
        from hf_offload_cache.testing import LatencyStore, WrapperStore, fill, pattern
        from hf_offload_cache.stores.base import aligned_empty

        began = threading.Event()

        class Stuck(WrapperStore):
            def write(self, ids, records):
                began.set()
                threading.Event().wait()

        prefetcher = Prefetcher(MemoryAccount(), 2**20)
        store = LatencyStore(MemoryStore(4096, "layer 3"), 3600.0 if not {closed} else 0.0)
        ids, _ = fill(store, 8)

        def close():
            try:
                prefetcher.close()
            except StalledError:
                print("stalled")

        weakref.finalize(store, close)  # as a cache does that nobody closed: nothing is waited for without a limit
        ticket = prefetcher.read(store, ids[::2], aligned_empty(4, 4096))
        if {closed}:
            ticket.wait()
            prefetcher.close()
        else:
            stuck = Stuck(store.inner)
            prefetcher.write(stuck, ids[:1], pattern(1, record_bytes=4096))
            began.wait()  # what has not begun is dropped, and stalls nobody
        print("end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n" if closed else "end\nstalled\n", "")


@pytest.mark.parametrize("wrong", [{"write_queue_bytes": -1}, {"write_queue_bytes": 0, "threads": 0}])
def test_wrong_sizes(account: MemoryAccount, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"write_queue_bytes|threads"):
        Prefetcher(account, **wrong)


def test_wrong_arguments_are_refused_where_they_are_given(prefetcher: Prefetcher, account: MemoryAccount) -> None:
    store = memory()
    ids, _ = fill(store, 2)
    for call in (prefetcher.read, prefetcher.write):
        with pytest.raises(ValueError, match="shape"):
            call(store, ids, rows(3))
        with pytest.raises(TypeError, match="int64"):
            call(store, ids.astype(np.int32), rows(2))
    assert account.current == 0
    with pytest.raises(StoreError, match="layer 3"):
        prefetcher.read(store, np.array([10**9]), rows(1)).wait()
    prefetcher.write(store, np.array([10**9]), rows(1))
    with pytest.raises(StoreError, match="layer 3"):
        prefetcher.flush()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 12)),
        st.tuples(st.just("free"), st.integers(0, 2**16)),
        st.tuples(st.just("read"), st.integers(0, 2**16)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("cancel"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("engine", ["memory", "mapped", "direct", "uring"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
def test_any_sequence_is_like_a_dict(engine: str, steps: list[tuple[str, int]]) -> None:
    directory = tempfile.gettempdir()
    skip_without(engine, directory)
    store = open_store(engine, directory, 4096, "layer 3")
    prefetcher = Prefetcher(MemoryAccount(), 16 * 4096, threads=3)
    expected: dict[int, int] = {}
    serial = 0
    try:
        for step, number in steps:
            generator = np.random.default_rng(number)
            if step == "write":
                ids = store.allocate(number)
                assert not set(ids.tolist()) & set(expected), "a record that is taken was handed out"
                records = aligned_empty(number, 4096)
                for row, index in enumerate(ids.tolist()):
                    serial += 1
                    expected[index] = serial
                    records[row] = serial % 251
                prefetcher.write(store, ids, records)
            elif step == "flush":
                prefetcher.flush(store)
            elif expected and step in ("read", "free"):
                known = np.array(sorted(expected))
                chosen = known[generator.random(len(known)) < 0.5]
                if step == "free":
                    store.free(chosen)
                    for index in chosen.tolist():
                        del expected[index]
                else:
                    out = aligned_empty(len(chosen), 4096).fill_(0xEE)
                    prefetcher.read(store, chosen, out).wait()
                    assert out.eq(out[:, :1]).all()
                    assert out[:, 0].tolist() == [expected[index] % 251 for index in chosen.tolist()]
            elif step == "cancel":
                prefetcher.cancel(store)
                store.free(np.array(sorted(expected), dtype=np.int64))
                expected.clear()
        prefetcher.flush()
        for index, value in expected.items():
            out = aligned_empty(1, 4096)
            store.read(np.array([index]), out)
            assert out.eq(value % 251).all()
    finally:
        prefetcher.close()
        store.close()


def test_staging_on_the_cpu_is_one_buffer(account: MemoryAccount) -> None:
    """Looked at as rows of any size: what is read into `host_rows` is what `upload` gives."""
    staging = Staging(5 * RECORD_BYTES, torch.device("cpu"), account, "staging")
    rows = staging.host_rows(5, RECORD_BYTES)
    assert rows.shape == (5, RECORD_BYTES) and rows.data_ptr() % 4096 == 0
    assert account.by_owner["staging"] == 5 * RECORD_BYTES
    rows.copy_(pattern(5))
    uploaded = staging.upload(4, RECORD_BYTES)
    staging.wait_uploaded()
    assert uploaded.data_ptr() == rows.data_ptr() and torch.equal(uploaded, pattern(5)[:4])
    assert torch.equal(staging.host_rows(10, RECORD_BYTES // 2).view(5, RECORD_BYTES), pattern(5))
    assert staging.fits(5 * RECORD_BYTES, torch.device("cpu")) and not staging.fits(1, torch.device("meta"))
    for _ in range(2):
        staging.release()
        assert (account.current, account.peak) == (0, 5 * RECORD_BYTES)


@pytest.mark.gpu
def test_staging_on_a_gpu(account: MemoryAccount) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    staging = Staging(64 * RECORD_BYTES, device, account, "staging")
    rows = staging.host_rows(64, RECORD_BYTES)
    assert rows.is_pinned() and rows.data_ptr() % 4096 == 0
    assert account.current == 2 * 64 * RECORD_BYTES
    for seed in range(20):
        staging.wait_uploaded()
        rows.copy_(pattern(64, seed=seed))
        total = staging.upload(64, RECORD_BYTES).long().sum()  # on the current stream, with no wait of its own
        assert total.item() == pattern(64, seed=seed).long().sum().item()
    staging.release()
    assert account.current == 0


# ----------------------------------------------------------------------------------- reads that the kernel runs


class Blocked:
    """A store on a ring of one place, which an empty pipe takes: its reads do not begin until `open`."""

    def __init__(self, directory: Path) -> None:
        skip_without("uring", directory)
        self._out, self._into = os.pipe()
        self._memory = aligned_empty(1, RECORD_BYTES)
        self.ring = Ring(1)
        self.store = UringStore(directory, RECORD_BYTES, "layer 3", self.ring)
        address = np.array([self._memory.data_ptr()])
        self.ring.read(self._out, np.zeros(1, int), address, np.array([RECORD_BYTES]), self._memory)

    def open(self) -> None:
        os.write(self._into, bytes(RECORD_BYTES))

    def close(self) -> None:
        self.store.close()
        self.ring.close()
        os.close(self._out)
        os.close(self._into)


@pytest.fixture
def blocked(tmp_path: Path) -> Iterator[Blocked]:
    blocked = Blocked(tmp_path)
    yield blocked
    blocked.close()


def test_the_ring_needs_no_thread(prefetcher: Prefetcher, blocked: Blocked) -> None:
    ids, records = fill(blocked.store, 12)
    out = rows(6)
    ticket = prefetcher.read(blocked.store, ids[::2], out)
    assert not ticket.done() and (out == 0xEE).all(), "the caller is here while the reads wait"
    blocked.open()
    assert ticket.wait() > 0
    assert ticket.done()
    assert torch.equal(out, records[::2])
    assert threads_of_ours() == []


def test_the_end_is_seen_whenever_the_prefetcher_is_called(prefetcher: Prefetcher, blocked: Blocked) -> None:
    ids, records = fill(blocked.store, 4)
    out, other = rows(2), memory()
    start = time.perf_counter()
    ticket = prefetcher.read(blocked.store, ids[::2], out)
    blocked.open()
    while prefetcher.seconds_in_flight == 0:
        prefetcher.read(other, np.empty(0, dtype=np.int64), rows(0))
    seen = prefetcher.seconds_in_flight
    assert 0 < seen <= time.perf_counter() - start
    assert ticket.done() and torch.equal(out, records[::2]), "nobody has waited yet"
    ticket.wait()
    assert prefetcher.seconds_in_flight == seen, "a read counts once"


def test_cancel_and_the_ring(prefetcher: Prefetcher, blocked: Blocked) -> None:
    ids, records = fill(blocked.store, 8)
    out = rows(4)
    ticket = prefetcher.read(blocked.store, ids[::2], out)
    thread, outcome = in_background(lambda: prefetcher.cancel(blocked.store))
    blocked.open()
    thread.join(LONG)
    assert outcome == [None]
    assert (out == 0xEE).all(), "nothing had begun"
    for _ in range(2):
        with pytest.raises(CacheClosedError, match="cancelled"):
            ticket.wait()
    prefetcher.read(blocked.store, ids[::2], out).wait()
    assert torch.equal(out, records[::2]), "a cancelled store can be used again"


def test_close_and_the_ring(account: MemoryAccount, blocked: Blocked) -> None:
    prefetcher = Prefetcher(account, RECORD_BYTES)
    ids, _ = fill(blocked.store, 8)
    out = rows(4)
    ticket = prefetcher.read(blocked.store, ids[::2], out)
    thread, outcome = in_background(prefetcher.close)
    while not prefetcher._writes.closed:
        pass
    thread.join(0.05)
    assert thread.is_alive(), "the reads are still in the ring"
    blocked.open()
    thread.join(LONG)
    assert outcome == [None]
    assert (out == 0xEE).all()
    with pytest.raises(CacheClosedError):
        ticket.wait()


def test_a_read_that_is_forgotten_is_waited_for(prefetcher: Prefetcher, blocked: Blocked) -> None:
    ids, _ = fill(blocked.store, 8)
    prefetcher.read(blocked.store, ids[::2], rows(4))
    gc.collect()
    thread, outcome = in_background(lambda: prefetcher.cancel(blocked.store))
    thread.join(0.05)
    assert thread.is_alive()
    blocked.open()
    thread.join(LONG)
    assert outcome == [None]


def test_an_interrupted_wait_can_be_taken_up_again(
    prefetcher: Prefetcher, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    ids, records = fill(blocked.store, 8)
    out = rows(4)
    ticket = prefetcher.read(blocked.store, ids[::2], out)
    with monkeypatch.context() as patch:
        patch.setattr(io_uring, "enter", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    assert not ticket.done()
    blocked.open()
    ticket.wait()
    assert torch.equal(out, records[::2])


def test_a_wrapper_of_a_ring_store_reads_through_the_wrapper(prefetcher: Prefetcher, tmp_path: Path) -> None:
    skip_without("uring", tmp_path)
    store = FaultyStore(UringStore(tmp_path, RECORD_BYTES, "layer 3"), "read", 2)
    ids, records = fill(store, 4)
    out = rows(4)
    prefetcher.read(store, ids, out).wait()
    assert torch.equal(out, records)
    with pytest.raises(StoreError, match="made to fail"):
        prefetcher.read(store, ids, out).wait()
    store.close()


class Recorder(Timeline):
    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        self.spans.append((track, name, start, stop, details))


def test_the_timeline_of_reads_and_writes(account: MemoryAccount, store: Store) -> None:
    timeline = Recorder()
    prefetcher = Prefetcher(account, 100 * RECORD_BYTES, timeline=timeline)
    begin = time.perf_counter()
    ids = store.allocate(12)
    prefetcher.write(store, ids, pattern(12))
    prefetcher.flush()
    ticket = prefetcher.read(store, ids[::2], rows(6))
    ticket.wait()
    ticket.wait()
    prefetcher.read(store, np.empty(0, dtype=np.int64), rows(0)).wait()
    end = time.perf_counter()
    (write, read_) = timeline.spans
    assert (write[:2], write[4]) == (("writes", "layer 3"), {"records": 12, "bytes": 12 * RECORD_BYTES})
    assert (read_[:2], read_[4]) == (("reads", "layer 3"), {"records": 6, "bytes": 6 * RECORD_BYTES})
    assert begin < write[2] < write[3] < read_[2] < read_[3] < end
    assert prefetcher.seconds_in_flight == read_[3] - read_[2]
    prefetcher.close()


def test_the_timeline_leaves_out_what_came_from_the_queue(account: MemoryAccount) -> None:
    timeline, store = Recorder(), SlowWrites(memory())
    prefetcher = Prefetcher(account, 100 * RECORD_BYTES, timeline=timeline)
    ids, _ = fill(store.inner, 6)
    prefetcher.write(store, ids[2:4], pattern(2, seed=1))
    store.gate.wait_for(1)
    prefetcher.read(store, ids[2:4], rows(2)).wait()
    assert timeline.spans == [] and prefetcher.seconds_in_flight == 0
    prefetcher.read(store, ids, rows(6)).wait()
    assert [(span[0], span[4]["records"]) for span in timeline.spans] == [("reads", 4)]
    store.gate.open()
    prefetcher.close()
