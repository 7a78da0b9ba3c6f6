"""What goes wrong while a cache is used: devices that stall, threads that die, forks, Ctrl-C, limits, a full disk.

Whatever it is: an error that says so and no hang, and afterwards a cache that is right or says that it is not.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import linecache
import os
import queue
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from background import LONG, Gate, SlowWrites, in_background, join_threads, memory, rows, skip_without, threads_of_ours
from harness import COMMON, Decoded, assert_exact, build, generate, prompt
from long_models import sparse
from pairwise import combinations, in_full
from starter import RunScript, starter
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import CacheClosedError, ForkedProcessError, StalledError, StoreError, StoreFullError
from hf_offload_cache.fetch import STALLED_READS, Jobs, Prefetcher, Storage, join_all, start_worker
from hf_offload_cache.fetch.reader_pool import _SharedRead
from hf_offload_cache.memory import SPARE_DESCRIPTORS, MemoryAccount, check_descriptors, free_descriptors
from hf_offload_cache.model import attach
from hf_offload_cache.report import Timeline
from hf_offload_cache.stores import DEPTH, Ring, Store, open_store
from hf_offload_cache.testing import RECORD_BYTES, FaultyStore, WrapperStore, fill, open_descriptors, pattern, read

SHORT = 0.05
"""Seconds after which what never answers counts as stalled. Only where nothing else is waited for, and `alone`: a
busy machine is as late with what does answer."""

LENGTH = 560
"""Tokens of a prompt: enough for compact keys."""

ALL: dict[str, Any] = {"num_selected": 2048, "reuse_capacity": 60}
"""Everything is selected: the tokens are `DynamicCache`'s."""


Stalled = Callable[..., tuple[Prefetcher, SlowWrites, np.ndarray]]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Threads and descriptors are as before, once what was stuck has been let go."""
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()  # errors that were caught keep frames, and what is in them, in cycles
    join_threads()
    assert threads_of_ours() == []
    gc.collect()
    assert open_descriptors() == before


@pytest.fixture
def account() -> MemoryAccount:
    return MemoryAccount()


@pytest.fixture
def stalled(account: MemoryAccount) -> Stalled:
    """Begins the write of `ids[:1]`, which is under way and stops at the gate of `store` until that opens.

    Gives (prefetcher, store, ids); `room` records fit the queue, and whoever waits for a write has `seconds`.
    """

    def begin(room: int = 128, seconds: float = SHORT, **options: Any) -> tuple[Prefetcher, SlowWrites, np.ndarray]:
        store = SlowWrites(memory())
        ids = store.allocate(6)
        prefetcher = Prefetcher(account, room * RECORD_BYTES, timeout=seconds, **options)
        prefetcher.write(store, ids[:1], pattern(1))
        store.gate.wait_for(1)
        return prefetcher, store, ids

    return begin


@pytest.fixture(scope="module")
def model() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "num_hidden_layers": 2, "max_position_embeddings": 2048}))


class SlowReads(WrapperStore):
    """Reads stop at a gate while it is closed. Cannot start reads by itself: threads do."""

    def __init__(self, inner: Store, gate: Gate | None) -> None:
        super().__init__(inner)
        self.advises = False
        self.gate = gate

    def start(self, ids: np.ndarray, out: torch.Tensor) -> None:
        return None

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        if self.gate is not None:
            self.gate.pass_through()
        super().read(ids, out)


class InParts(SlowWrites):
    """Reads by `reading`, on threads. Its record 1 waits to be written, so that 0 and 2 are read apart."""

    advises = False

    def __init__(self, account: MemoryAccount, reading: Callable[[list[int]], None]) -> None:
        super().__init__(memory())
        self.reading = reading
        self.ids, _ = fill(self.inner, 3)
        self.prefetcher = Prefetcher(account, 2**20)
        self.prefetcher.write(self, self.ids[1:2], pattern(1))
        self.gate.wait_for(1)

    def start(self, ids: np.ndarray, out: torch.Tensor) -> None:
        return None

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        self.reading(ids.tolist())


class FullRing:
    """Reads of an empty pipe in every place of `ring`: nothing begins that comes behind them, until `let_go`."""

    def __init__(self, ring: Ring, depth: int = DEPTH) -> None:
        self.out, self.into = os.pipe()
        self.memory = np.zeros((depth, 8), dtype=np.uint8)
        addresses = self.memory.ctypes.data + np.arange(depth) * 8
        self.batch = ring.read(self.out, np.zeros(depth, int), addresses, np.full(depth, 8), self.memory)

    def let_go(self) -> None:
        if self.into >= 0:
            os.close(self.into)  # all reads end at once
            self.into = -1

    def close(self) -> None:
        self.let_go()
        os.close(self.out)


# ---------------------------------------------------------------------------------------------- a stalled device


@pytest.mark.alone
def test_a_read_that_stalls_on_a_thread(account: MemoryAccount, tmp_path: Path) -> None:
    gate, came = Gate(), dict[int, torch.Tensor]()

    class Noting(SlowReads):
        def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
            super().read(ids, out)
            came[int(ids[0])] = out.clone()

    store = Noting(open_store("mapped", tmp_path, RECORD_BYTES, "layer 3"), gate)
    ids, records = fill(store, 8)
    prefetcher = Prefetcher(account, 2**20, timeout=SHORT)
    out = rows(4)
    ticket = prefetcher.read(store, ids[1:8:2], out)
    gate.wait_for(4)
    for _ in range(2):
        with pytest.raises(StalledError, match=r"layer 3: reading records 1\.\.7 \(4\)") as caught:
            ticket.wait()
    assert caught.value.errno == errno.ETIMEDOUT
    assert repr(str(tmp_path)) in str(caught.value) and "0.05 seconds" in str(caught.value)
    assert prefetcher.interrupted_by is caught.value
    with pytest.raises(StalledError, match="still under way"):
        prefetcher.recover()
    with pytest.raises(StalledError, match="layer 3"):
        prefetcher.cancel(store)
    prefetcher.close()  # it was said before
    assert account.by_owner[STALLED_READS] >= 4 * RECORD_BYTES
    kept = weakref.ref(store.inner)
    del store, caught, ticket, prefetcher, out
    gc.collect()
    assert kept() is not None, "the threads that are stuck hold the store"
    gate.open()
    join_threads()
    assert torch.equal(torch.cat([came[one] for one in (1, 3, 5, 7)]), records[1::2]), "and the memory they write to"
    gc.collect()
    assert kept() is None


def test_a_read_that_is_interrupted_while_it_starts(account: MemoryAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two pieces of it: `out` is the caller's again when it comes out."""
    gate, ended = Gate(), []

    class Slow(SlowReads):
        def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
            super().read(ids, out)
            ended.append(len(ids))

    store = Slow(memory(), gate)
    ids, _ = fill(store, 8)
    prefetcher = Prefetcher(account, 2**20, threads=2)
    jobs, put, wait = prefetcher._readers._jobs, [], _SharedRead.wait

    class Interrupted:
        get = jobs.get

        def put(self, job: Any) -> None:
            put.append(job)
            if len(put) == 2:
                gate.wait_for(1)
                raise KeyboardInterrupt
            jobs.put(job)

    def opening(transfer: _SharedRead) -> None:
        gate.open()
        wait(transfer)

    monkeypatch.setattr(_SharedRead, "wait", opening)
    monkeypatch.setattr(prefetcher._readers, "_jobs", Interrupted())
    with pytest.raises(KeyboardInterrupt) as caught:
        prefetcher.read(store, ids[1:8:2], rows(4))
    assert ended == [2], "one piece had begun, and none begins afterwards"
    assert prefetcher.interrupted_by is caught.value
    prefetcher.recover()
    monkeypatch.undo()
    prefetcher.close()


@pytest.mark.alone
def test_a_read_of_which_a_part_cannot_start(account: MemoryAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    ended: list[Any] = []

    def reading(ids: list[int]) -> None:
        gate.pass_through()
        ended.append(ids)

    store = InParts(account, reading)
    ids, prefetcher = store.ids, store.prefetcher
    start, wait = prefetcher._readers.start, _SharedRead.wait

    def only_the_first(store: Store, part: np.ndarray, out: torch.Tensor) -> Any:
        if part[0] == 2:
            gate.wait_for(1)
            raise StoreError(errno.EIO, "cannot start")
        return start(store, part, out)

    def opening(transfer: _SharedRead) -> None:
        gate.open()
        wait(transfer)

    monkeypatch.setattr(_SharedRead, "wait", opening)
    monkeypatch.setattr(prefetcher._readers, "start", only_the_first)
    with pytest.raises(StoreError, match="cannot start"):
        prefetcher.read(store, ids, rows(3))
    assert ended == [[0]]
    gate, ended = Gate(), []
    monkeypatch.setattr(_SharedRead, "wait", wait)
    prefetcher._readers.deadline.seconds = SHORT
    with pytest.raises(StalledError) as caught:
        prefetcher.read(store, ids, rows(3))
    assert prefetcher.interrupted_by is caught.value
    with pytest.raises(StalledError, match="still under way"):
        prefetcher.recover()
    gate.open()
    store.gate.open()
    while prefetcher._log.stuck:
        prefetcher.poll()
    prefetcher.recover()
    prefetcher.close()


@pytest.mark.alone
def test_cancel_drops_writes_behind_a_read_that_stalls(stalled: Stalled) -> None:
    gate = Gate()
    store = SlowReads(memory(), gate)
    ids, records = fill(store, 2)
    prefetcher, blocked, _ = stalled()
    prefetcher.write(store, ids[1:], pattern(1, seed=7))
    prefetcher.read(store, ids[:1], rows(1))
    gate.wait_for(1)
    with pytest.raises(StalledError):
        prefetcher.cancel(store)
    with pytest.raises(StalledError, match="still under way"):
        prefetcher.recover()
    blocked.gate.open()
    prefetcher._writes.deadline.seconds = LONG
    prefetcher.flush()
    gate.open()
    assert torch.equal(read(store.inner, ids), records), "the write was dropped"
    prefetcher.close()


def test_a_read_of_which_a_part_fails(account: MemoryAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other parts have ended when the error comes out."""
    gate, ended, waits, wait = Gate(), [], [], _SharedRead.wait

    def reading(ids: list[int]) -> None:
        if ids == [0]:
            raise StoreError(errno.EIO, "made to fail")
        gate.pass_through()
        ended.append(ids)

    store = InParts(account, reading)
    ids, prefetcher = store.ids, store.prefetcher

    def opening(transfer: _SharedRead) -> None:
        waits.append(transfer)
        if len(waits) == 2:  # not for the part that failed
            gate.open()
        wait(transfer)

    monkeypatch.setattr(_SharedRead, "wait", opening)
    ticket = prefetcher.read(store, ids, rows(3))
    gate.wait_for(1)
    with pytest.raises(StoreError, match="made to fail"):
        ticket.wait()
    assert ended == [[2]]
    gate.open()
    store.gate.open()
    prefetcher.close()


@pytest.mark.alone
def test_only_what_stalled_is_left_after_close(account: MemoryAccount) -> None:
    gate, open_gate = Gate(), Gate()
    open_gate.open()
    slow, quick = SlowReads(memory(), gate), SlowReads(memory(), open_gate)
    prefetcher = Prefetcher(account, 2**20, timeout=SHORT)
    prefetcher.read(slow, fill(slow, 1)[0], rows(1))
    gate.wait_for(1)
    out = rows(64)
    done = prefetcher.read(quick, fill(quick, 64)[0], out)
    while not done.done():
        pass
    with pytest.raises(StalledError):
        prefetcher.close()
    assert 0 < account.by_owner[STALLED_READS] < out.nbytes
    gate.open()


def test_a_thread_does_not_wait_for_itself() -> None:
    """A garbage collection may close a cache on any thread."""
    outcome: list[Any] = []
    jobs: Jobs = queue.SimpleQueue()
    worker = start_worker("reader", jobs)
    jobs.put(lambda: outcome.append(join_all([worker], None)))
    jobs.put(None)
    worker.join(LONG)
    assert outcome == [[]] and worker.error is None


@pytest.mark.alone
@pytest.mark.parametrize("operation", ["flush", "flush all", "write", "cancel", "close"])
def test_a_write_that_stalls(account: MemoryAccount, stalled: Stalled, operation: str) -> None:
    prefetcher, store, ids = stalled(room=2)
    prefetcher.write(store, ids[1:2], pattern(1))
    calls: dict[str, Callable[[], Any]] = {
        "flush": lambda: prefetcher.flush(store),
        "flush all": prefetcher.flush,
        "write": lambda: prefetcher.write(store, ids[2:3], pattern(1)),
        "cancel": lambda: prefetcher.cancel(store),
        "close": prefetcher.close,
    }
    with pytest.raises(StalledError, match=r"layer 3: writing record 0: no answer for 0\.05 seconds") as caught:
        calls[operation]()
    assert caught.value.errno == errno.ETIMEDOUT
    assert prefetcher.interrupted_by is caught.value
    if operation not in ("cancel", "close"):
        assert account.by_owner["write queue"] == 2 * RECORD_BYTES, "what was not taken in is not counted"
        with pytest.raises(StalledError, match="still under way"):
            prefetcher.recover()
    prefetcher.close()
    assert account.by_owner["write queue"] == RECORD_BYTES, "the one that is stuck; the other was dropped"
    store.gate.open()
    join_threads()
    assert account.current == 0 and store.order == [0]


def test_a_slow_device_is_not_a_stalled_one(stalled: Stalled, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the write that ended last: many slow ones take as long as they take."""
    now = [0.0]
    monkeypatch.setattr("hf_offload_cache.stores.base.time.monotonic", lambda: now[0])
    prefetcher, store, ids = stalled(room=10, seconds=60.0)
    for index in range(1, 6):
        prefetcher.write(store, ids[[index]], pattern(1))
    thread, outcome = in_background(prefetcher.flush)
    inner_write = store.inner.write

    def slow(*arguments: Any) -> None:
        now[0] += 45.0
        inner_write(*arguments)

    monkeypatch.setattr(store.inner, "write", slow)
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None] and now[0] == 270.0
    prefetcher.close()


@pytest.mark.alone
def test_after_a_write_that_stalled_the_next_has_its_time_again(stalled: Stalled) -> None:
    prefetcher, store, ids = stalled()
    with pytest.raises(StalledError):
        prefetcher.flush()
    first, store.gate = store.gate, Gate()
    first.open()
    while prefetcher.interrupted_by is not None:
        with contextlib.suppress(StalledError):
            prefetcher.recover()
    prefetcher._writes.deadline.seconds = LONG
    prefetcher.write(store, ids[1:2], pattern(1))
    store.gate.wait_for(1)
    thread, outcome = in_background(prefetcher.flush)
    thread.join(SHORT)
    assert thread.is_alive(), outcome
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None]
    prefetcher.close()


@pytest.mark.alone
def test_a_write_in_time_does_not_keep_a_read_from_being_mended(stalled: Stalled) -> None:
    gate = Gate()
    slow = SlowReads(memory(), gate)
    ids, _ = fill(slow, 1)
    prefetcher, store, _ = stalled()
    with pytest.raises(StalledError):
        prefetcher.read(slow, ids, rows(1)).wait()
    gate.open()
    while prefetcher._log.stuck:
        prefetcher.poll()
    prefetcher.recover()
    assert prefetcher.interrupted_by is None
    store.gate.open()
    prefetcher.close()


@pytest.mark.alone
def test_close_waits_for_a_write_beside_a_read_that_stalled(stalled: Stalled) -> None:
    gate = Gate()
    slow = SlowReads(memory(), gate)
    ids, _ = fill(slow, 1)
    prefetcher, store, _ = stalled()
    prefetcher._writes.deadline.seconds = LONG
    with pytest.raises(StalledError):
        prefetcher.read(slow, ids, rows(1)).wait()
    thread, outcome = in_background(prefetcher.close)
    thread.join(SHORT)
    assert thread.is_alive()
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None] and store.order == [0]
    gate.open()


def test_what_is_given_up_behind_a_stall_is_held_no_longer(stalled: Stalled) -> None:
    """Threads that are stuck hold what they work on, and nothing that waits behind it."""
    gate = Gate()
    slow, behind = SlowReads(memory(), gate), SlowReads(memory(), gate)
    ids, _ = fill(slow, 1)
    prefetcher, blocked, _ = stalled(seconds=LONG, threads=1)
    first = prefetcher.read(slow, ids, rows(1))
    gate.wait_for(1)
    out, records = rows(1), pattern(1)
    kept = prefetcher.read(behind, fill(behind, 1)[0], out)
    prefetcher.write(behind, behind.allocate(1), records)
    prefetcher.cancel(behind)
    held = [weakref.ref(one) for one in (behind, out, records)]
    del behind, out, records
    gc.collect()
    assert [one() for one in held] == [None] * 3
    with pytest.raises(CacheClosedError):
        kept.wait()
    gate.open()
    blocked.gate.open()
    first.wait()
    prefetcher.close()


@pytest.mark.alone
@pytest.mark.parametrize(("engine", "answers"), combinations(("uring", "direct"), (True, False)))
def test_a_cache_on_a_device_that_stalls(
    model: Any, engine: str, answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` raises; the cache says so from then on and can be closed, or reset once the device answers."""
    skip_without(engine, tmp_path)
    gate, slow = Gate(), []
    new_store = Storage._new_store

    def gated(storage: Storage, *arguments: Any) -> Store:
        store = new_store(storage, *arguments)
        if engine == "uring":
            return store
        slow.append(SlowReads(store, gate))
        slow[-1].gate = None
        return slow[-1]

    monkeypatch.setattr(Storage, "_new_store", gated)
    ids = prompt(model, 1, LENGTH)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=4)
    cache = sparse(model, engine=engine, path=tmp_path, io_timeout=LONG, **ALL)
    generate(model, cache, ids, max_new_tokens=2)
    cache.storage.prefetcher.flush()
    prefetcher = cache.storage.prefetcher
    used = [deadline_of(cache), prefetcher._readers.deadline, prefetcher._writes.deadline]
    assert [deadline.seconds for deadline in used] == [LONG] * 3
    if engine == "uring":
        full = FullRing(cache.storage.ring)
        cache.storage.ring._deadline.seconds = SHORT
    else:
        for store in slow:
            store.gate = gate
        cache.storage.prefetcher._readers.deadline.seconds = SHORT
    for layer in cache.selective:
        layer.drop_fetcher()  # so that the step has something to read
    with pytest.raises(StalledError, match=r"layer \d: reading record.*0\.05 seconds") as caught:
        generate(model, cache, expected.tokens[:, : LENGTH + 2], max_new_tokens=2)
    assert repr(str(tmp_path)) in str(caught.value)
    assert cache.shared.broken
    for use in (
        lambda: generate(model, cache, expected.tokens[:, : LENGTH + 2], max_new_tokens=2),
        lambda: cache.crop(-1),
    ):
        with pytest.raises(RuntimeError, match="stalled"):
            use()
    with pytest.raises(StalledError, match="still under way"):
        cache.reset()

    def let_go() -> None:
        full.let_go() if engine == "uring" else gate.open()

    if answers:
        let_go()
        while cache.shared.broken:
            with contextlib.suppress(StalledError):
                cache.reset()
        for deadline in (cache.storage.prefetcher._readers.deadline, *([deadline_of(cache)])):
            deadline.seconds = LONG
        assert_exact(expected, generate(model, cache, ids, max_new_tokens=4))
        cache.close()
        assert not cache.storage.account.by_owner[STALLED_READS]
    else:
        cache.close()
        cache.close()
        assert cache.storage.account.by_owner[STALLED_READS] > 0, "memory that may still be written to counts"
        with pytest.raises(CacheClosedError):
            generate(model, cache, ids, max_new_tokens=2)
        let_go()
    if engine == "uring":
        full.close()


def deadline_of(cache: DiskSwapCache) -> Any:
    ring = cache.storage.ring
    return cache.storage.prefetcher._writes.deadline if ring is None else ring._deadline


# ---------------------------------------------------------------------------------------------- threads that die


class Lethal(Timeline):
    """Lets an exception out of the job that tells it about a write, as often as told to."""

    def __init__(self, error: BaseException, times: int = 1) -> None:
        self.error, self.times = error, times

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        if track == "writes" and self.times:
            self.times -= 1
            raise self.error


@pytest.mark.alone
@pytest.mark.parametrize(
    ("operation", "timeout", "error"),
    combinations(("flush", "write", "cancel", "close"), (None, LONG), (SystemExit("enough"), MemoryError("no more"))),
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies(
    account: MemoryAccount,
    operation: str,
    timeout: float | None,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits is told; what was queued counts as lost; and the next write has a new thread."""
    monkeypatch.setattr("hf_offload_cache.fetch.write_queue.ALIVE_CHECK_SECONDS", SHORT)
    store = SlowWrites(memory())
    ids = store.allocate(8)
    prefetcher = Prefetcher(account, 3 * RECORD_BYTES, timeline=Lethal(error), timeout=timeout)
    for index in range(3):
        prefetcher.write(store, ids[[index]], pattern(1, seed=index))
    store.gate.wait_for(1)
    store.gate.open()
    if operation == "cancel":
        prefetcher.cancel(store)
    elif operation == "close":
        prefetcher.close()
    else:
        call = prefetcher.flush if operation == "flush" else lambda: prefetcher.write(store, ids[5:], pattern(3))
        with pytest.raises(StoreError, match=r"layer 3: writing record \d: no thread .*(enough|no more)"):
            call()
        with pytest.raises(StoreError, match="could not be written"):
            prefetcher.read(store, ids[:3], rows(3))
        prefetcher.write(store, ids[:3], pattern(3, seed=9))
        prefetcher.flush()
        out = rows(3)
        prefetcher.read(store, ids[:3], out).wait()
        assert torch.equal(out, pattern(3, seed=9))
    prefetcher.close()
    assert account.current == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_died_while_nobody_waited(account: MemoryAccount) -> None:
    """The next write says so: the new thread would not know of what the old one had begun."""
    store = memory()
    ids = store.allocate(3)
    prefetcher = Prefetcher(account, 8 * RECORD_BYTES, timeline=Lethal(SystemExit("enough")))
    prefetcher.write(store, ids[:1], pattern(1))
    prefetcher._writes.threads[0].join(LONG)
    with pytest.raises(StoreError, match=r"layer 3: writing record 0: no thread .*enough"):
        prefetcher.write(store, ids[1:2], pattern(1))
    assert account.current == 0
    prefetcher.write(store, ids, pattern(3))
    prefetcher.flush()
    assert torch.equal(read(store, ids), pattern(3))
    prefetcher.close()


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_stalled_and_then_died(stalled: Stalled) -> None:
    """Nothing is under way any more, and the next write has its time."""
    prefetcher, store, ids = stalled(timeline=Lethal(SystemExit("enough")))
    with pytest.raises(StalledError):
        prefetcher.flush()
    first, store.gate = store.gate, Gate()
    first.open()
    prefetcher._writes.threads[0].join(LONG)
    prefetcher.recover()
    prefetcher._writes.deadline.seconds = LONG
    with pytest.raises(StoreError, match="enough"):
        prefetcher.write(store, ids[:1], pattern(1))
    prefetcher.write(store, ids[:1], pattern(1))
    store.gate.wait_for(1)
    thread, outcome = in_background(prefetcher.flush)
    thread.join(SHORT)
    assert thread.is_alive(), outcome
    store.gate.open()
    thread.join(LONG)
    assert outcome == [None] and prefetcher.interrupted_by is None
    prefetcher.close()


@pytest.mark.alone
@pytest.mark.parametrize("timeout", [None, LONG])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_dies(
    account: MemoryAccount, timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_offload_cache.fetch.reader_pool.ALIVE_CHECK_SECONDS", SHORT)
    gate = Gate()
    store = SlowReads(memory(), gate)
    ids, records = fill(store, 4)
    prefetcher = Prefetcher(account, 2**20, threads=1, timeout=timeout)

    def die() -> None:
        raise SystemExit("enough")

    first = prefetcher.read(store, ids[:1], rows(1))
    gate.wait_for(1)
    prefetcher._readers._jobs.put(die)
    second = prefetcher.read(store, ids[1:2], rows(1))
    gate.open()
    first.wait()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"layer 3: reading record 1: no thread is left.*enough"):
            second.wait()
    assert second.done()
    out = rows(4)
    prefetcher.read(store, ids, out).wait()
    assert torch.equal(out, records), "the next read has a new thread"
    prefetcher.close()


def test_threads_that_cannot_be_started(account: MemoryAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.open()
    store = SlowReads(memory(), gate)
    ids, records = fill(store, 8)
    prefetcher = Prefetcher(account, 2**20, threads=4)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    out = rows(4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        prefetcher.read(store, ids[:2], out[:2]).wait()
        assert torch.equal(out[:2], records[:2]), "whoever asks reads"
        prefetcher.write(store, ids[:1], records[7:])
        assert account.current == 0
        prefetcher.flush()
        prefetcher.read(store, ids[:1], out[:1]).wait()
        assert torch.equal(out[0], records[7]) and threads_of_ours() == []
    store.write(ids[:1], records[:1])
    prefetcher.read(store, ids[:1], out[:1]).wait()
    assert len(threads_of_ours()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        prefetcher.read(store, ids[::2], out).wait()
    assert torch.equal(out, records[::2]), "one thread does it too"
    prefetcher.close()


@pytest.fixture(scope="module")
def run_script() -> Iterator[RunScript]:
    with starter("harness", "long_models", "transformers.models.llama.modeling_llama") as run:
        yield run


AT_EXIT = """
    import atexit, sys, threading
    import torch
    from harness import COMMON, build
    from transformers import LlamaConfig, LlamaForCausalLM
    from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache

    model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
    ids = torch.arange(5, 125)[None]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    caches = []

    def last():
        def refuse(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading.Thread.start = refuse  # as from Python 3.12 on
        for cache in [*caches, DiskSwapCache(model, engine=sys.argv[1], exact=True, path=sys.argv[2])]:
            start = expected[:, : max(120, cache.tokens + 1)]
            found = model.generate(start, past_key_values=cache, max_length=126, do_sample=False)
            print(type(cache).__name__, torch.equal(found, expected))
            cache.close()

    atexit.register(last)
    for cls in (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache):
        caches.append(cls(model, engine=sys.argv[1], exact=True, block_tokens=64, path=sys.argv[2]))
        model.generate(ids, past_key_values=caches[-1], max_new_tokens=2, do_sample=False)
"""


@pytest.mark.parametrize("engine", ["auto", *in_full(("direct", "mapped"))])
def test_caches_are_used_in_exit_handlers(engine: str, run_script: RunScript, tmp_path: Path) -> None:
    if engine != "auto":
        skip_without(engine, tmp_path)
    (tmp_path / "stores").mkdir()
    done = run_script(AT_EXIT, tmp_path, engine, str(tmp_path / "stores"))
    names = ("DiskSwapCache", "ClusterCache", "SpecCache", "AbstractTreeCache", "DiskSwapCache")
    assert (done.stdout.splitlines(), done.stderr) == ([f"{name} True" for name in names], "")


# ---------------------------------------------------------------------------------------------- fork


def in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child, which has to end in time and without an error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    thread, status = in_background(lambda: os.waitpid(child, 0)[1])
    thread.join(LONG)
    if thread.is_alive():
        os.kill(child, signal.SIGKILL)
        thread.join()
        pytest.fail("the child hung")
    assert status == [0]


@contextlib.contextmanager
def held_elsewhere(*locks: Any) -> Iterator[None]:
    """Another thread has these locks."""
    gate = Gate()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            gate.pass_through()

    thread, _ = in_background(hold)
    gate.wait_for(1)
    try:
        yield
    finally:
        gate.open()
        thread.join(LONG)


@pytest.mark.parametrize("engine", ["uring", "mapped", *in_full(("direct", "memory"))])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_cache_in_a_forked_child(model: Any, engine: str, tmp_path: Path) -> None:
    """Refused there whatever lock another thread of the parent held; the child makes its own; the parent goes on."""
    skip_without(engine, tmp_path)
    ids = prompt(model, 1, LENGTH)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=6)
    fields = {"engine": engine, "path": tmp_path, **ALL}
    cache = sparse(model, **fields)
    generate(model, cache, ids, max_new_tokens=2)
    parent, store, prefetcher = os.getpid(), cache.offloaded[0].history.store, cache.storage.prefetcher
    chosen = cache.offloaded[0].history.table.ids[0, :8:2].astype(np.int64)
    prefetcher.flush()
    record_bytes = store.record_bytes
    out = rows(4).view(-1)[: 4 * record_bytes].view(4, record_bytes)
    ticket = prefetcher.read(store, chosen, out)

    def check() -> None:
        refused: list[Callable[[], Any]] = [
            lambda: generate(model, cache, expected.tokens[:, : LENGTH + 2], max_new_tokens=2),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([0])),
            cache.reset,
            ticket.wait,
            lambda: prefetcher.read(store, chosen, out),
            lambda: prefetcher.write(store, chosen, out),
            prefetcher.flush,
            lambda: prefetcher.cancel(store),
            prefetcher.recover,
        ]
        for number, use in enumerate(refused):
            try:
                use()
            except ForkedProcessError as error:
                assert f"belongs to the parent process {parent}" in str(error), error
                assert str(error).startswith("this cache") == (number < 4), error
            else:
                raise AssertionError("the child used the parent's cache")
        with sparse(model, **fields) as own:
            assert_exact(expected, generate(model, own, ids, max_new_tokens=6))
        cache.close()
        cache.close()
        prefetcher.close()

    locks = [
        prefetcher._writes._changed,
        cache.storage.account._lock,
        attach._lock(),
        *([cache.storage.ring._lock] if engine == "uring" else []),
    ]
    with held_elsewhere(*locks):
        in_child(check)
    ticket.wait()
    assert_exact(
        Decoded(expected.tokens, expected.logits[2:]),
        generate(model, cache, expected.tokens[:, : LENGTH + 2], max_new_tokens=4),
    )
    cache.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_inherited_cache_is_collected_quietly(model: Any, tmp_path: Path) -> None:
    caches = [sparse(model, engine="direct", path=tmp_path, **ALL)]
    ids = prompt(model, 1, LENGTH)
    generate(model, caches[0], ids, max_new_tokens=2)
    gate = Gate()
    store = SlowReads(caches[0].offloaded[0].history.store, gate)
    chosen = caches[0].offloaded[0].history.table.ids[0, :1].astype(np.int64)
    caches[0].shared.storage.prefetcher.flush()
    out = rows(1).view(-1)[: store.record_bytes].view(1, store.record_bytes)
    ticket = caches[0].shared.storage.prefetcher.read(store, chosen, out)
    gate.wait_for(1)  # a thread that the child does not have is in the middle of it
    files = open_descriptors()

    def check() -> None:
        nonlocal store, ticket
        store = ticket = None
        shared = weakref.ref(caches[0].shared)
        caches.clear()
        gc.collect()
        assert shared() is None
        assert open_descriptors() < files, "its copies of the descriptors are given back"

    in_child(check)
    gate.open()
    ticket.wait()
    caches[0].close()


ENDING = """
    import os, sys
    import harness, long_models
    from hf_offload_cache.stores.base import aligned_empty
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(**{**harness.COMMON, "num_hidden_layers": 2, "max_position_embeddings": 2048})
    model = harness.build(LlamaForCausalLM, config)
    ids = harness.prompt(model, 1, 560)

    def read_everything(cache):
        for layer in cache.offloaded:
            history, prefetcher = layer.history, cache.storage.prefetcher
            table = history.table.ids[0].astype("int64")
            outs = [aligned_empty(len(table), history.form.record_bytes) for _ in range(4)]
            prefetcher.flush()
            kept.extend((prefetcher.read(history.store, table, out), out) for out in outs)
            prefetcher.write(history.store, history.store.allocate(len(table)), outs[0].clone())

    def ends_well(child):
        assert os.waitpid(child, 0)[1] == 0

    for engine in sys.argv[1:]:
        kept = []
        child = os.fork()
        if child:
            ends_well(child)
            continue
        cache = long_models.sparse(model, engine=engine, num_selected=2048)
        first = harness.generate(model, cache, ids, max_new_tokens=3).tokens
        for reading in (False, True):
            if reading:
                read_everything(cache)
            child = os.fork()
            if child == 0:
                sys.exit(0)
            ends_well(child)
        for ticket, _ in kept:
            ticket.wait()
        print(engine, harness.generate(model, cache, first, max_new_tokens=3).tokens.shape[1])
        read_everything(cache)
        sys.exit(0)
"""
"""For each engine a process that ends by itself, as every process does: finalizers, exit handlers. It ends with reads
and writes in flight of a cache that nobody closed. Before, it forks children, which end by themselves as well: while
nothing of the cache is under way, and while something is. The process does not notice."""


def test_processes_end_by_themselves(run_script: RunScript, tmp_path: Path) -> None:
    engines = [engine for engine in ("uring", "direct", "mapped", "memory") if works(engine, tmp_path)]
    done = run_script(ENDING, tmp_path, *engines)
    expected = "".join(f"{engine} 566\n" for engine in engines)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


# ---------------------------------------------------------------------------------------------- Ctrl-C


class Interrupt:
    """Raises `KeyboardInterrupt` at the `number`-th line that the package runs, where Python would serve a signal."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.place = ""

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "hf_offload_cache/" not in name or "/tests/" in name:
            return None
        return self._line

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        served = not statement.startswith(("with ", "try:", "pass"))  # no signal comes between a block and its exit
        if event == "line" and self.left > 0 and served:
            self.left -= 1
            if self.left == 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._line


def test_an_interrupted_submission_is_told(model: Any) -> None:
    """A part of a read may be under way that nobody knows of."""
    with sparse(model, **ALL) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=2)
        cache.storage.prefetcher._log.interrupted_by = KeyboardInterrupt()
        assert cache.shared.broken
        with pytest.raises(RuntimeError, match=r"interrupted.*reset"):
            cache.crop(-1)
        cache.reset()
        cache.shared.check_open()


@pytest.mark.parametrize(("engine", "points"), [("uring", 25), *in_full(("uring", "direct"), (75,))])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_anywhere(model: Any, engine: str, points: int, tmp_path: Path) -> None:
    skip_without(engine, tmp_path)
    ids = prompt(model, 1, LENGTH)
    fields = {"engine": engine, "path": tmp_path, "io_timeout": LONG, **ALL}
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=14)
    with sparse(model, **fields) as cache, Interrupt(10**9) as all_of_it:
        first = Decoded(expected.tokens[:, : LENGTH + 7], expected.logits[:7])
        assert_exact(first, generate(model, cache, ids, max_new_tokens=7))
    lines = 10**9 - all_of_it.left
    assert lines > 2000
    outcomes: dict[str, int] = {"right": 0, "removed": 0, "refused": 0}

    def go_on(cache: Any) -> tuple[Decoded, int]:
        held = cache.get_seq_length()
        given = expected.tokens[:, : max(held + 1, LENGTH)]
        begin = given.shape[1] - LENGTH
        return generate(model, cache, given, max_new_tokens=14 - begin), begin

    for number in np.linspace(1, lines - 200, points).astype(int).tolist():  # at the end nothing is left to interrupt
        cache = sparse(model, **fields)
        with Interrupt(number) as interrupt, contextlib.suppress(KeyboardInterrupt):
            generate(model, cache, ids, max_new_tokens=7)
        held = cache.get_seq_length()
        try:
            result, begin = go_on(cache)
        except (RuntimeError, ValueError) as error:
            if "were removed" in str(error):
                outcomes["removed"] += 1
                result, begin = go_on(cache)
            else:
                assert "reset" in str(error), (interrupt.place, error)
                outcomes["refused"] += 1
                cache.reset()
                result, begin = generate(model, cache, ids, max_new_tokens=3), 0
        else:
            outcomes["right"] += 1
        wanted = expected.logits[begin : begin + len(result.logits)]
        tokens = expected.tokens[:, : result.tokens.shape[1]]
        try:
            assert_exact(Decoded(tokens, wanted), result)
        except AssertionError as error:
            raise AssertionError(f"after an interruption at {interrupt.place}, with {held} tokens held") from error
        cache.close()
        assert threads_of_ours() == [], interrupt.place
    assert min(outcomes.values()) > points // 10, outcomes


# ---------------------------------------------------------------------------------------------- limits


LIMITED = """
    import errno, os, resource, sys
    import harness, long_models
    from transformers import LlamaConfig, LlamaForCausalLM

    def used():
        return len(os.listdir("/proc/self/fd"))

    def limit(count):
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def build(layers):
        fields = {**harness.COMMON, "num_hidden_layers": layers, "hidden_size": 32, "intermediate_size": 32}
        return harness.build(LlamaForCausalLM, LlamaConfig(**fields))

    def answer(model, cache):
        return harness.generate(model, cache, harness.prompt(model, 1, 100), max_new_tokens=3).tokens.shape[1]

    def refused(call, *words):
        try:
            call()
        except OSError as error:
            assert error.errno == errno.EMFILE and all(word in str(error) for word in words), error
        else:
            raise AssertionError("not refused")

    limit(64)
    small, large = build(4), build(60)
    for engine in sys.argv[1:]:
        before = used()
        refused(lambda: long_models.sparse(large, engine=engine), "needs 60 descriptors", "ulimit -n")
        assert used() == before
        with long_models.sparse(small, engine=engine) as cache:
            assert answer(small, cache) == 103
            cache.reset()
            limit(used() + 1)
            refused(lambda: answer(small, cache), "ulimit -n")
            limit(64)
            cache.reset()
            assert answer(small, cache) == 103
        print(engine)
    assert answer(large, long_models.sparse(large, engine="memory")) == 103
"""
"""With 64 descriptors a small model works, and what comes later loses nothing. One with too many layers is refused
before any prefill and leaves nothing open, except where the records are in memory."""


def test_a_limit_of_64_descriptors(run_script: RunScript, tmp_path: Path) -> None:
    engines = [engine for engine in ("uring", "direct", "mapped") if works(engine, tmp_path)]
    done = run_script(LIMITED, tmp_path, *engines)
    assert (done.returncode, done.stdout, done.stderr) == (0, "".join(f"{engine}\n" for engine in engines), "")


def test_descriptors_are_counted() -> None:
    free = free_descriptors()
    assert free is not None and free > 40
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        assert free_descriptors() == free - 20
        check_descriptors(free - 20 - SPARE_DESCRIPTORS)
        with pytest.raises(StoreError, match=rf"needs {free} descriptors.*{free - 20} more.*ulimit -n") as caught:
            check_descriptors(free)
        assert caught.value.errno == errno.EMFILE
        with pytest.raises(StoreError):
            check_descriptors(free - 19 - SPARE_DESCRIPTORS)
    finally:
        for fd in held:
            os.close(fd)


# ---------------------------------------------------------------------------------------------- no space


@pytest.mark.parametrize(("operation", "number"), combinations(("allocate", "write"), (1, 2, 3, 5)))
def test_no_space_in_the_middle(
    model: Any, operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear error; what was there is readable; going on is right, or refused until `reset`."""
    faulty: list[FaultyStore] = []
    new_store = Storage._new_store

    def wrapped(storage: Storage, *arguments: Any) -> Store:
        store = new_store(storage, *arguments)
        if not faulty:
            faulty.append(FaultyStore(store, operation, 10**6, errno.ENOSPC))
            return faulty[0]
        return store

    monkeypatch.setattr(Storage, "_new_store", wrapped)
    ids = prompt(model, 1, LENGTH)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=40)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(expected.tokens[:, :-1], past_key_values=plain)
    with sparse(model, engine="direct", path=tmp_path, **ALL) as cache:
        generate(model, cache, ids, max_new_tokens=2)
        cache.storage.prefetcher.flush()
        faulty[0]._failing = range(faulty[0].calls + number, faulty[0].calls + number + 1)
        with pytest.raises(StoreFullError, match=r"layer 0: .*No space left") as caught:
            generate(model, cache, expected.tokens[:, : LENGTH + 2], max_new_tokens=38)
            cache.storage.prefetcher.flush()
        assert caught.value.errno == errno.ENOSPC
        held = min(layer.length for layer in cache.offloaded)
        assert held > LENGTH
        for layer in cache.offloaded:
            if operation == "allocate" or layer.layer_idx:
                keys = plain.layers[layer.layer_idx].keys
                torch.testing.assert_close(layer.keys[:, :, :held], keys[:, :, :held], rtol=0, atol=1e-4)
        try:
            result = generate(model, cache, expected.tokens[:, : held + 1], max_new_tokens=4)
        except (RuntimeError, StoreError) as error:
            assert "reset" in str(error) or "could not be written" in str(error)
        else:
            begin = held + 1 - LENGTH
            wanted = expected.logits[begin : begin + 4]
            assert_exact(Decoded(result.tokens, wanted), result)
        cache.reset()
        first = Decoded(expected.tokens[:, : LENGTH + 3], expected.logits[:3])
        assert_exact(first, generate(model, cache, ids, max_new_tokens=3))


# ---------------------------------------------------------------------------------------------- again and again


@pytest.mark.slow
def test_a_thousand_caches(tmp_path: Path) -> None:
    """Made, filled, closed: descriptors, threads, maps and accounts do not grow."""
    engines = [engine for engine in ("uring", "direct", "mapped") if works(engine, tmp_path)]
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1,
                            "num_key_value_heads": 1, "intermediate_size": 16})  # fmt: skip
    model = build(LlamaForCausalLM, config)
    ids = prompt(model, 1, 24)

    def once(engine: str, reads: bool = True) -> None:
        with DiskSwapCache(model, path=tmp_path, engine=engine, exact=True, group_size=4, num_recent=4) as cache:
            with torch.no_grad():
                model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
                if reads:
                    model(ids[:, -1:], past_key_values=cache, logits_to_keep=1)
            assert cache.get_seq_length() == 23 + reads
        assert cache.storage.account.current == 0

    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps")
        files = [line for line in maps.read_text().splitlines() if "io_uring" in line or str(tmp_path) in line]
        return open_descriptors(), threading.active_count(), len(files)

    for engine in engines:
        once(engine)
    gc.collect()
    before = held()
    for number in range(1000):
        once(engines[number % len(engines)], reads=number % 4 == 0)
        if number % 250 == 249:
            gc.collect()
            assert held() == before, f"after {number + 1} caches"
    assert list(tmp_path.iterdir()) == []


def works(engine: str, directory: Path) -> bool:
    try:
        skip_without(engine, directory)
    except pytest.skip.Exception:
        return False
    return True
