"""The ring under faults, interruptions and bad timing. A read of an empty pipe is one that stays in flight."""

from __future__ import annotations

import ctypes
import errno
import gc
import linecache
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starter import RunScript, starter
from store_cases import needs

from hf_offload_cache.errors import CacheClosedError, ForkedProcessError, StalledError, StoreError
from hf_offload_cache.stores import Batch, Ring, UringStore, aligned_empty, runs
from hf_offload_cache.stores.uring import queues as io_uring
from hf_offload_cache.stores.uring.uring_store import _cut
from hf_offload_cache.testing import RECORD_BYTES, fill, open_descriptors, read

LONG = 30.0


@pytest.fixture(autouse=True)
def needs_uring(tmp_path: Path) -> Iterator[None]:
    needs("uring", tmp_path)
    gc.collect()
    before = open_descriptors()
    yield
    if open_descriptors() != before:
        gc.collect()  # a caught error keeps frames, and a ring in one of them, in cycles
    assert open_descriptors() == before


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(4)
    yield ring
    ring.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """A descriptor and the 64 blocks of 512 bytes that it reads."""
    content = np.random.default_rng(0).integers(0, 256, (64, 512), dtype=np.uint8)
    (tmp_path / "content").write_bytes(content.tobytes())
    fd = os.open(tmp_path / "content", os.O_RDONLY)
    yield fd, content
    os.close(fd)


class Pipe:
    """`stall` puts reads into a ring that end when `feed` is called."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        self.memory = np.zeros((8, 512), dtype=np.uint8)

    def stall(self, ring: Ring, count: int = 1) -> Batch:
        addresses = self.memory.ctypes.data + np.arange(count) * 512
        return ring.read(self.out, np.zeros(count, np.int64), addresses, np.full(count, 512), self.memory)

    def feed(self, count: int = 1) -> None:
        for index in range(count):
            os.write(self.into, bytes([index + 1]) * 512)

    def close(self) -> None:
        os.close(self.out)
        os.close(self.into)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def queue(ring: Ring, fd: int, blocks: np.ndarray, out: np.ndarray) -> Batch:
    addresses = out.ctypes.data + np.arange(len(blocks)) * 512
    return ring.read(fd, blocks * 512, addresses, np.full(len(blocks), 512), out)


def in_background(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 63])
def test_more_reads_than_the_ring_holds(ring: Ring, file: tuple[int, np.ndarray], count: int) -> None:
    fd, content = file
    for turn in range(5):  # past the end of the queues
        blocks = np.random.default_rng(turn).permutation(64)[:count]
        out = np.zeros((count, 512), np.uint8)
        batch = queue(ring, fd, blocks, out)
        ring.wait(batch)
        assert batch.results.tolist() == [512] * count
        assert np.array_equal(out, content[blocks])


def test_batches_end_in_any_order(ring: Ring, file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    fd, content = file
    first = pipe.stall(ring, 2)
    outs = [np.zeros((20, 512), np.uint8) for _ in range(3)]
    batches = [queue(ring, fd, np.arange(index, index + 20), out) for index, out in enumerate(outs)]
    for index in (2, 0, 1):
        ring.wait(batches[index])
        assert np.array_equal(outs[index], content[index : index + 20])
    assert first.finished_at is None and not pipe.memory.any()
    pipe.feed(2)
    ring.wait(first)
    assert sorted(pipe.memory[:2, 0].tolist()) == [1, 2]


def test_results_go_to_the_batch_that_asked(file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    ring = Ring(32)
    stalled, out = pipe.stall(ring, 2), np.zeros(10 * 512, np.uint8)
    lengths = np.arange(100, 110)
    short = ring.read(file[0], np.zeros(10, int), out.ctypes.data + np.arange(10) * 512, lengths, out)
    pipe.feed(2)
    for batch in (stalled, short):  # both have completed, and are taken in together
        ring.wait(batch)
    assert stalled.results.tolist() == [512, 512]
    assert np.array_equal(short.results, lengths)
    ring.close()


def test_looking_sees_the_end_and_lets_others_go(ring: Ring, file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    fd, content = file
    stalled, out = pipe.stall(ring, 4), np.zeros((6, 512), np.uint8)
    waiting = queue(ring, fd, np.arange(6), out)
    for _ in range(3):
        ring.poll()
    assert stalled.finished_at is None and waiting.finished_at is None and not out.any()
    pipe.feed(4)
    while waiting.finished_at is None:
        ring.poll()
    assert stalled.finished_at is not None and stalled.finished_at <= waiting.finished_at
    assert np.array_equal(out, content[:6])


def test_a_batch_that_is_dropped(ring: Ring, file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    fd, content = file
    stalled = pipe.stall(ring, 6)  # four in flight, two that wait
    out, late = np.zeros((3, 512), np.uint8), np.zeros((3, 512), np.uint8)
    dropped, behind = queue(ring, fd, np.arange(3), out), queue(ring, fd, np.arange(3), late)
    ring.drop(stalled)
    ring.drop(dropped)
    assert stalled.dropped and dropped.dropped and not behind.dropped
    pipe.feed(4)
    for batch in (stalled, dropped, behind):
        ring.wait(batch)
    assert sorted(pipe.memory[:, 0].tolist()) == [0, 0, 0, 0, 1, 2, 3, 4], "two never began"
    assert not out.any()
    assert np.array_equal(late, content[:3])
    ring.drop(behind)
    assert not behind.dropped, "there was nothing left to give up"


@pytest.mark.parametrize("how", ["close", "forget", "release"])
def test_nothing_writes_to_memory_after_the_end(pipe: Pipe, how: str) -> None:
    rings = [Ring(4)]
    pipe.stall(rings[0], 3)
    calls = {
        "close": lambda: rings[0].close(),
        "forget": lambda: (rings.clear(), None)[1],
        "release": lambda: rings[0].release(pipe.out),
    }
    gc.disable()  # reference counts alone must do it
    try:
        thread = in_background(calls[how])
        thread.join(0.05)
        assert thread.is_alive(), "the kernel still writes to the memory"
        pipe.feed(3)
        thread.join(LONG)
        assert not thread.is_alive()
        assert sorted(pipe.memory[:3, 0].tolist()) == [1, 2, 3]
    finally:
        gc.enable()
        for ring in rings:
            ring.close()


def test_memory_is_held_as_long_as_it_is_read_into(ring: Ring, pipe: Pipe) -> None:
    class Kept:
        pass

    kept = Kept()
    gone = threading.Event()
    weakref.finalize(kept, gone.set)
    batch = ring.read(pipe.out, np.zeros(1, int), np.array([pipe.memory.ctypes.data]), np.array([512]), kept)
    del kept, batch
    assert not gone.is_set()
    pipe.feed()
    while not gone.is_set():
        ring.poll()


def test_after_close(file: tuple[int, np.ndarray]) -> None:
    ring = Ring(4)
    ring.close()
    ring.close()
    ring.poll()
    ring.release(file[0])
    with pytest.raises(OSError, match="closed"):
        queue(ring, file[0], np.arange(3), np.zeros((3, 512), np.uint8))
    with pytest.raises(ValueError, match="depth"):
        Ring(0)


def test_a_forked_child_keeps_off(ring: Ring, file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    stalled, parent = pipe.stall(ring), os.getpid()
    child = os.fork()
    if child == 0:
        signal.alarm(int(LONG))  # it does not wait for ever
        code = 1
        try:
            for call in (
                lambda: queue(ring, file[0], np.arange(3), np.zeros((3, 512), np.uint8)),
                lambda: ring.wait(stalled),
                lambda: ring.drop(stalled),
                ring.poll,
            ):
                try:
                    call()
                except ForkedProcessError as error:
                    assert f"parent process {parent}" in str(error)
                else:
                    raise AssertionError("the child used the ring")
            ring.release(pipe.out)
            ring.close()  # does not wait for what its parent reads
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    pipe.feed()
    ring.wait(stalled)
    assert (pipe.memory[0] == 1).all(), "the parent's read was not touched"


def refusing(monkeypatch: pytest.MonkeyPatch, number: int, when: Callable[[int], bool]) -> list[int]:
    """The kernel's call fails with this errno when `when(call)`; the calls are counted in the list."""
    real, calls = io_uring.enter, list[int]()

    def enter(*arguments: int) -> int:
        calls.append(len(calls) + 1)
        if when(calls[-1]):
            ctypes.set_errno(number)
            return -1
        return real(*arguments)

    monkeypatch.setattr(io_uring, "enter", enter)
    return calls


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_the_kernel_asks_to_try_again(
    ring: Ring, file: tuple[int, np.ndarray], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls = refusing(monkeypatch, number, lambda call: call % 3 != 0)
    out = np.zeros((20, 512), np.uint8)
    ring.wait(queue(ring, file[0], np.arange(20), out))
    assert np.array_equal(out, file[1][:20]) and len(calls) > 3


def test_another_error_of_the_kernel(
    ring: Ring, file: tuple[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, content = file
    out, again = np.zeros((6, 512), np.uint8), np.zeros((6, 512), np.uint8)
    with monkeypatch.context() as patch:
        refusing(patch, errno.ENXIO, lambda call: True)
        with pytest.raises(OSError, match="io_uring_enter"):
            queue(ring, fd, np.arange(6), out)
    ring.wait(queue(ring, fd, np.arange(6), again))
    assert np.array_equal(again, content[:6])
    assert not out[4:].any(), "what was not submitted then is not read later"


def test_closing_gives_up_what_has_not_begun(file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    ring, out = Ring(1), np.zeros((3, 512), np.uint8)
    pipe.stall(ring)
    behind = queue(ring, file[0], np.arange(3), out)
    thread = in_background(ring.close)
    while not behind.dropped and thread.is_alive():
        pass
    pipe.feed()
    thread.join(LONG)
    assert not thread.is_alive() and behind.dropped and not out.any()


def test_an_interruption_anywhere_leaves_the_ring_whole(file: tuple[int, np.ndarray]) -> None:
    """A signal's exception is raised at each line of the ring in turn; it goes on, or starts again, as before."""
    fd, content = file
    moment, reached = 0, True
    while reached:
        moment, reached = moment + 1, False
        ring, out, batch = Ring(4), np.zeros((10, 512), np.uint8), None
        left = [moment]

        def trace(frame: Any, event: str, _: Any, left: list[int] = left) -> Any:
            of_the_ring = frame.f_code.co_filename.endswith(("uring/ring.py", "uring/batch.py"))
            if not of_the_ring or frame.f_code.co_name == "_close":
                return None
            statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if event == "line" and not statement.startswith(("with ", "try:", "pass")):  # no signal is served there
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            batch = queue(ring, fd, np.arange(10), out)
            ring.wait(batch)
        except KeyboardInterrupt:
            reached = True
        finally:
            sys.settrace(before)
        if batch is None:
            ring.release(fd)
            batch = queue(ring, fd, np.arange(10), out)
        ring.wait(batch)
        assert np.array_equal(out, content[:10]), f"interrupted at line event {moment}"
        again = np.zeros((10, 512), np.uint8)
        ring.wait(queue(ring, fd, np.arange(10, 20), again))
        assert np.array_equal(again, content[10:20]), f"interrupted at line event {moment}"
        ring.close()
    assert moment > 100, "the trace saw the ring at work"


# --------------------------------------------------------------------------------------------------- a stalled device


@pytest.fixture(params=[True, False], ids=["timed call", "polled"])
def with_deadline(request: pytest.FixtureRequest) -> Iterator[Ring]:
    """A ring whose waits are short, with and without the kernel's help."""
    ring = Ring(4, timeout=0.05)
    if request.param and not ring._waiter.timed:
        pytest.skip("this kernel waits without a limit")
    ring._waiter.timed = request.param
    yield ring
    ring.close()


@pytest.mark.alone
def test_a_wait_that_takes_too_long(with_deadline: Ring, file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    batch = pipe.stall(with_deadline, 2)
    for _ in range(3):
        with pytest.raises(StalledError, match=r"0\.05 seconds.*stalled") as caught:
            with_deadline.wait(batch)
        assert caught.value.errno == errno.ETIMEDOUT
    assert batch.finished_at is None and not pipe.memory.any()
    pipe.feed(2)
    while batch.finished_at is None:
        with_deadline.poll()
    with_deadline.wait(batch)
    assert sorted(pipe.memory[:2, 0].tolist()) == [1, 2], "it was still under way"
    out = np.zeros((20, 512), np.uint8)
    with_deadline.wait(queue(with_deadline, file[0], np.arange(20), out))
    assert np.array_equal(out, file[1][:20]), "and the ring can be used on"


@pytest.mark.alone
def test_what_waits_behind_a_stalled_read(with_deadline: Ring, file: tuple[int, np.ndarray], pipe: Pipe) -> None:
    """Reads that never began, and what was dropped of them, are waited for no longer than the one that is stuck."""
    pipe.stall(with_deadline, 4)
    out = np.zeros((6, 512), np.uint8)
    behind = queue(with_deadline, file[0], np.arange(6), out)
    with pytest.raises(StalledError):
        with_deadline.wait(behind)
    with pytest.raises(StalledError):
        with_deadline.release(file[0])
    pipe.feed(4)
    with_deadline.wait(behind)
    assert behind.dropped and not out.any()


@pytest.mark.alone
@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_stalled_read_outlives_its_ring(pipe: Pipe, how: str) -> None:
    """A thread holds the memory and the descriptor until the read has ended."""

    class Kept:
        pass

    kept, gone, rings = Kept(), threading.Event(), [Ring(4, timeout=0.05)]
    weakref.finalize(kept, gone.set)
    address = np.array([pipe.memory.ctypes.data])
    rings[0].read(pipe.out, np.zeros(1, int), address, np.array([512]), (kept, pipe.memory))
    descriptors = open_descriptors()
    for _ in range(2 * (how == "closed")):
        rings[0].close()
    rings.clear()
    del kept
    (keeper,) = [thread for thread in threading.enumerate() if thread.name == "hf_offload_cache-ring"]
    assert keeper.daemon and not gone.is_set() and open_descriptors() == descriptors
    pipe.feed()
    keeper.join(LONG)
    assert not keeper.is_alive() and gone.is_set() and open_descriptors() < descriptors
    assert (pipe.memory[0] == 1).all()


def test_ctrl_c_while_a_forgotten_ring_is_waited_for(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    rings, real, calls = [Ring(4)], io_uring.Waiter.wait, []
    pipe.stall(rings[0])

    def interrupted_once(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        pipe.feed()
        return real(*arguments)

    monkeypatch.setattr(io_uring.Waiter, "wait", interrupted_once)
    rings.clear()
    assert (pipe.memory[0] == 1).all(), "the kernel was not left to write to memory that is given back"


@pytest.fixture(scope="module")
def run_script() -> Iterator[RunScript]:
    with starter("hf_offload_cache.stores") as run:
        yield run


STALLED = """
import gc, os, sys, threading, weakref
import numpy as np
from hf_offload_cache.stores import Ring

class Kept:
    pass

def refuse(thread):
    raise RuntimeError("can't start new thread")

why = sys.argv[1]
out, into = os.pipe()
memory, kept = np.zeros(512, dtype=np.uint8), Kept()
held = weakref.ref(kept)
ring = Ring(4, timeout=float(why) if why[0].isdigit() else None if why == "None" else 0.05)
ring.read(out, np.zeros(1, int), np.array([memory.ctypes.data]), np.array([512]), (kept, memory))
if why.startswith("the interpreter"):
    ring._deadline.shorten_for_exit()
elif why.startswith("no thread"):
    threading.Thread.start = refuse
else:
    sys.exit(0)
ring.close()
del ring, kept
gc.collect()
assert threading.active_count() == 1 and held() is not None
os.write(into, bytes([7]) * 512)
while not memory[-1]:
    pass
"""


@pytest.mark.parametrize(
    "why",
    [
        "no thread can be started", "the interpreter ends", "0.05",
        *(pytest.param(timeout, marks=pytest.mark.slow) for timeout in ("None", "3600.0")),
    ],
)  # fmt: skip
def test_memory_that_nobody_can_wait_for_is_kept(why: str, run_script: RunScript, tmp_path: Path) -> None:
    """A timeout: the interpreter ends with a read that is stalled."""
    done = run_script(STALLED, tmp_path, why)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_of_a_ring_is_left(closed: bool) -> None:
    """Its exit handler neither."""
    rings = [Ring(4, timeout=60.0)]
    deadline = weakref.ref(rings[0]._deadline)
    if closed:
        rings[0].close()
    rings.clear()
    assert deadline() is None


def test_a_timeout_costs_no_system_call(file: tuple[int, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has completed is taken in without one, and what has not takes one for the wait."""
    ring, out = Ring(4, timeout=60.0), np.zeros((2, 512), np.uint8)
    calls = refusing(monkeypatch, 0, lambda call: False)
    batch = queue(ring, file[0], np.arange(2), out)
    assert len(calls) == 1
    memory = ring._memory
    while (memory.cq[memory.cq_tail] - memory.cq[memory.cq_head]) < 2:
        pass
    ring.wait(batch)
    assert len(calls) == 1 and np.array_equal(out, file[1][:2])
    ring.close()


# --------------------------------------------------------------------------------------------------- the store on it


def with_results(monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], None]) -> None:
    """What the kernel says of the first completions that are taken in is changed by `change`, in place, once."""
    real, left = Ring._reap, [1]

    def reap(ring: Ring, memory: Any) -> bool:
        head, tail = memory.cq[memory.cq_head], memory.cq[memory.cq_tail]
        if left[0] and head != tail:
            left[0] = 0
            found = [index & memory.cq_mask for index in range(head, tail)]
            results = memory.completions["result"][found]
            change(results)
            memory.completions["result"][found] = results
        return real(ring, memory)

    monkeypatch.setattr(Ring, "_reap", reap)


@pytest.mark.parametrize("result", [-errno.EINTR, -errno.EAGAIN, 4096])
def test_a_read_that_is_not_whole_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    store = UringStore(tmp_path, RECORD_BYTES, "layer 3")
    ids, records = fill(store, 20)
    expected = store.reads + 10, store.bytes_read + 10 * RECORD_BYTES
    out = aligned_empty(10, RECORD_BYTES).fill_(0xEE)
    transfer = store.start(ids[::2], out)
    transfer.wait()
    transfer._batch.results[3] = result
    out[3, max(0, result) :] = 0xEE
    transfer.finish()
    assert torch.equal(out, records[::2])
    assert (store.reads, store.bytes_read) == expected
    store.close()


def test_a_device_error_names_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = UringStore(tmp_path, RECORD_BYTES, "layer 3")
    ids, records = fill(store, 20)
    counted = store.reads
    with monkeypatch.context() as patch:
        with_results(patch, lambda results: results.fill(-errno.EIO))
        transfer = store.start(ids[4:9], aligned_empty(5, RECORD_BYTES))
        for _ in range(2):
            with pytest.raises(StoreError, match=r"layer 3: reading records 4\.\.8 \(5\).*Input/output") as caught:
                transfer.finish()
    assert (caught.value.errno, store.reads) == (errno.EIO, counted)
    assert torch.equal(read(store, ids), records), "it was that read only"
    store.close()


def test_closing_a_store_gives_up_what_has_not_begun(tmp_path: Path, pipe: Pipe) -> None:
    ring = Ring(1)
    store, other = (UringStore(tmp_path, RECORD_BYTES, f"layer {index}", ring) for index in (3, 4))
    ids, _ = fill(store, 8)
    more, records = fill(other, 8)
    pipe.stall(ring)
    out, kept = aligned_empty(4, RECORD_BYTES).fill_(0xEE), aligned_empty(4, RECORD_BYTES)
    transfer, behind = store.start(ids[::2], out), other.start(more[::2], kept)
    assert not transfer.done() and not behind.done()
    thread = in_background(store.close)
    pipe.feed()
    thread.join(LONG)
    assert not thread.is_alive()
    assert (out == 0xEE).all()
    with pytest.raises(CacheClosedError):
        transfer.finish()
    behind.finish()
    assert torch.equal(kept, records[::2])
    other.close()
    ring.close()


def test_an_interrupted_read_leaves_the_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Pipe
) -> None:
    ring = Ring(1)
    store = UringStore(tmp_path, RECORD_BYTES, "layer 3", ring)
    ids, _ = fill(store, 8)
    pipe.stall(ring)
    real, calls = Ring.wait, []

    def interrupted_once(self: Ring, batch: Batch) -> None:
        calls.append(batch)
        if len(calls) == 1:
            raise KeyboardInterrupt
        pipe.feed()
        real(self, batch)

    monkeypatch.setattr(Ring, "wait", interrupted_once)
    out = aligned_empty(8, RECORD_BYTES).fill_(0xEE)
    with pytest.raises(KeyboardInterrupt):
        store.read(ids, out)
    assert calls[0].finished_at is not None and calls[0].dropped
    assert (out == 0xEE).all()
    monkeypatch.undo()
    store.close()
    ring.close()


def test_long_runs_are_cut(tmp_path: Path) -> None:
    assert _cut(np.array([0, 3, 10, 11, 20]), 4).tolist() == [0, 3, 7, 10, 11, 15, 19, 20]
    assert _cut(np.array([0, 8]), 4).tolist() == [0, 4, 8]
    store = UringStore(tmp_path, RECORD_BYTES, "layer 3")
    ids, records = fill(store, 700)
    chosen = np.r_[ids[:300], ids[301:303], ids[310:700]]
    before = store.reads
    assert torch.equal(read(store, chosen), records[chosen])
    assert store.reads - before == len(runs(chosen)) == 3
    store.close()
