"""Reads by io_uring: many requests in one system call, no thread, no interpreter lock while they are under way."""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import platform
import threading
import time
import warnings
import weakref
from collections.abc import Callable

import numpy as np

from ...errors import StalledError
from ...memory.account import MemoryAccount
from ..atomic_file import Descriptor
from ..base import Deadline, Process, has_passed
from ..record_file import REFUSALS
from . import queues as io_uring
from .queues import WRAP, Queues, Waiter

# Reads that are queued together

PENDING = np.iinfo(np.int32).min
"""Result of a read that has not completed; no read returns it."""


class Batch:
    """Reads that were queued together.

    Attributes:
        base, end: the numbers of the first read and behind the last one, counted over the ring's life.
        fd: the file's descriptor.
        entries: the reads in the kernel's format.
        keep, owner: kept alive until the last read has ended: the memory read into, and the reader.
        lengths: bytes requested, one entry per read.
        results: bytes read or a negative errno, one entry per read; valid once `finished_at` is set. The caller
            completes short reads.
        finished_at: `time.perf_counter()` when the last completion was seen, None before.
        unfinished: reads that have not completed.
        dropped: reads at the end were given up before they began; their results mean nothing.
    """

    __slots__ = (
        "base", "dropped", "end", "entries", "fd", "finished_at", "keep", "lengths", "owner", "results", "unfinished",
    )  # fmt: skip

    def __init__(
        self, base: int, fd: int, entries: np.ndarray, lengths: np.ndarray, keep: object, owner: object
    ) -> None:
        self.base = base
        self.end = base + entries.size
        self.lengths = lengths
        self.results = np.empty(entries.size, dtype=np.int32)
        self.results[:] = PENDING
        self.finished_at: float | None = None
        self.dropped = False
        self.unfinished = entries.size
        self.fd = fd
        self.entries = entries
        self.keep = keep
        self.owner = owner

    def count(self) -> None:
        """Update `unfinished`, and `finished_at` if no result is missing."""
        self.unfinished = (self.results == PENDING).nonzero()[0].size
        if self.unfinished == 0 and self.finished_at is None:
            self.finished_at = time.perf_counter()

    def leave_from(self, number: int) -> None:
        """End the uncompleted reads from that number on with `EAGAIN`."""
        left = self.results[max(0, number - self.base) :]
        left[left == PENDING] = -errno.EAGAIN
        self.count()


# Reads in flight when their ring is closed or collected: the kernel may still write to their memory

class OrphanedReads:
    """Keeps what reads in flight need until they end: the ring's descriptor and queues, and the batches with their
    memory."""

    def __init__(self, descriptor: Descriptor, memory: Queues, waiter: Waiter, batches: list[Batch]) -> None:
        self.descriptor = descriptor
        self.interrupt: KeyboardInterrupt | None = None
        """An interrupt that arrived during the wait, to be raised when the memory is released."""
        self._memory = memory
        self._waiter = waiter
        self._batches = batches

    def wait(self, expires: float | None) -> bool:
        """Block until nothing is in flight, or until `expires`; returns whether nothing is."""
        memory = self._memory
        sq, cq = memory.sq, memory.cq
        while True:
            try:
                tail = cq[memory.cq_tail]
                cq[memory.cq_head] = tail  # results are no longer needed
                in_flight = (sq[memory.sq_head] - tail) & WRAP  # submitted and not completed
                if in_flight == 0:
                    return True
                if has_passed(expires):
                    return False
                if self._waiter.wait(0, in_flight, expires) < 0 and ctypes.get_errno() != errno.EINTR:
                    time.sleep(0.001)
            except KeyboardInterrupt as error:  # the kernel is still writing to memory that would be given back
                self.interrupt = error
                continue

    def wait_and_close(self) -> None:
        """Block until nothing is in flight, however long that takes, and release everything."""
        self.wait(None)
        self.close()

    def close(self) -> None:
        """Release descriptor and batches. Nothing may be in flight."""
        self._batches.clear()
        self.descriptor.close()


def close_when_done(
    orphans: OrphanedReads, deadline: Deadline, process: Process, exit_handler: Callable[[], None]
) -> KeyboardInterrupt | None:
    """Close a ring once nothing is in flight; also when it is deleted, and at the end of the interpreter.

    A daemon thread keeps reads that do not end in time; if none can be started, the ring stays until the process ends.
    `exit_handler` is the ring's own, which is no longer needed. Returns an interrupt that was raised meanwhile, for a
    caller that can raise it: a garbage collection cannot.
    """
    atexit.unregister(exit_handler)
    if not process.is_here or orphans.wait(deadline.expires()):
        orphans.close()
        return orphans.interrupt
    keeper = threading.Thread(target=orphans.wait_and_close, name="hf_offload_cache-ring", daemon=True)
    try:
        if not deadline.at_exit:  # no thread outlives the interpreter
            keeper.start()
            return orphans.interrupt
    except RuntimeError:  # the system gives no more threads
        pass
    # The kernel may write to the memory as long as the process lives: one reference more keeps it that long.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(orphans))
    return orphans.interrupt


IO_RING = "io ring"
"""Owner of a ring's queues in the memory account."""

DEPTH = 256
"""Reads in flight at most. A device's own queue takes about half as many, and submitting more blocks for a moment; this
depth keeps it busy while the next ones are submitted (on a virtual NVMe disk, 128 is slower, 512 no faster)."""

class Ring:
    """Submits file reads to the kernel and collects the completed ones.

    The memory read into must not move: `keep` objects live until the batch's last read has ended. `close` and a garbage
    collection of the ring wait for the reads in flight as `wait` does. A daemon thread ("hf_offload_cache-ring") waits
    for reads that do not end in time, with everything they need; if none can be started, all of it is kept until the
    process ends.

    If the process forbids itself io_uring later (a sandbox), it gets one warning. Reads that the kernel has not taken
    by then, and all later reads, end with `EAGAIN` at once, so that the caller reads in another way.

    Any thread may call, one at a time. A signal's exception (Ctrl-C) may be raised from any method; the ring is then
    unchanged and usable. In a forked child the methods raise `ForkedProcessError`, except `close` and `release`, which
    leave the parent's ring unchanged.

    `timeout` (seconds; None: no limit) limits a wait; after it, `StalledError` is raised. The queues' host memory is in
    `account` as `IO_RING` from construction to `close`. Raises `OSError` with the reason if the kernel gives no ring
    (old, forbidden by a container, out of memory), and `BudgetError`.
    """

    # The completion queue is at least as long as what may be in flight, so it cannot overflow. All counts come from
    # the counters in the shared memory, each of which moves by one store: what a signal's exception cuts off in the
    # middle is either done or done again. Entries are numbered from 0 over the ring's life (`serial`), in the order in
    # which batches were queued, and put into the submission queue in that order.

    def __init__(
        self, depth: int = DEPTH, timeout: float | None = None, account: MemoryAccount | None = None
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._account, self._held = account, io_uring.ring_bytes(depth)
        if account is not None:
            account.hold(IO_RING, self._held)
        try:
            self._open_queues(depth, timeout)
        except BaseException:
            self._release()
            raise

    def _open_queues(self, depth: int, timeout: float | None) -> None:
        descriptor, parameters = io_uring.open_ring(depth)
        fd = descriptor.fd
        try:
            self._memory: io_uring.Queues | None = io_uring.Queues(fd, parameters)
        except OSError:
            descriptor.close()
            raise
        self._fd = fd
        self._waiter = io_uring.Waiter(fd, parameters)
        self._deadline = Deadline(timeout)
        self._process = Process()
        self._depth = min(depth, parameters.sq_entries)
        self._refused = False  # the kernel is not called any more
        self._put = 0  # entries ever put into the submission queue
        self._open: list[Batch] = []
        self._lock, self._fence_lock = threading.Lock(), threading.Lock()
        self._ordered = platform.machine() in ("x86_64", "AMD64")  # loads and stores keep their order among themselves
        exit_handler = self._deadline.shorten_for_exit
        orphans = OrphanedReads(descriptor, self._memory, self._waiter, self._open)
        self._close = weakref.finalize(self, close_when_done, orphans, self._deadline, self._process, exit_handler)
        atexit.register(exit_handler)  # after `finalize` has registered itself: it is called before

    def read(
        self,
        fd: int,
        offsets: np.ndarray,
        addresses: np.ndarray,
        lengths: np.ndarray,
        keep: object,
        owner: object = None,
    ) -> Batch:
        """Queue one read per position and submit as many as fit; later calls submit the rest.

        Offsets, lengths (below 2 GiB) and addresses are in bytes; `keep` holds the memory at the addresses, and `owner`
        keeps the descriptor open. Does not wait for data. If it raises, reads may be in flight until `release` or
        `close`.
        """
        if self._process.id != os.getpid():
            self._process.check("this io_uring")
        entries = np.zeros(offsets.size, io_uring.ENTRY)
        entries["opcode"] = io_uring.OP_READ
        entries["fd"] = fd
        entries["offset"] = offsets
        entries["address"] = addresses
        entries["length"] = lengths
        with self._lock:
            memory = self._queues()
            if memory.cq[memory.cq_head] != memory.cq[memory.cq_tail]:
                self._reap(memory)
            base = self._put
            if self._open and self._open[-1].end > base:
                base = self._open[-1].end
            batch = Batch(base, fd, entries, lengths, keep, owner)
            entries["serial"] = np.arange(base, batch.end)
            if entries.size == 0 or self._refused:
                batch.leave_from(batch.base)
                return batch
            self._open.append(batch)
            try:
                if self._fill(memory):
                    self._enter(memory, 0)
            except BaseException:
                self._drop(batch, self._queues())
                raise
        return batch

    def poll(self) -> None:
        """Collect completed reads and submit waiting ones. Makes no system call if nothing waits."""
        # If the lock is taken, another thread is polling. `acquire` without `with` would lose the lock to a signal.
        if self._open and self._memory is not None and not self._lock.locked():
            self._process.check("this io_uring")
            with self._lock:
                memory = self._queues()
                if self._reap(memory) and self._fill(memory):
                    self._enter(memory, 0)

    def wait(self, batch: Batch) -> None:
        """Block until `batch` has finished.

        Raises `StalledError` if it has not after `timeout`, or at once if nothing has completed since an earlier wait
        timed out. The batch is still under way then, and can be waited for again.
        """
        expires, begun = None, False
        while batch.finished_at is None:
            if self._process.id != os.getpid():
                self._process.check("this io_uring")
            with self._lock:
                memory = self._queues()
                self._reap(memory)
                if batch.finished_at is not None:
                    return
                if not begun:
                    expires, begun = self._deadline.expires(), True
                elif has_passed(expires):
                    raise self._deadline.missed()
                if self._open[-1].end > self._put:
                    self._fill(memory)
                # If entries still wait, wait for few completions: the device stays busy while they are submitted.
                all_in = batch.end <= self._put
                self._enter(memory, batch.unfinished if all_in else max(1, self._depth // 2), expires)
                self._reap(memory)

    def drop(self, batch: Batch) -> None:
        """Give up the reads of `batch` that were not submitted. Submitted ones must still be waited for."""
        self._process.check("this io_uring")
        with self._lock:
            if self._memory is not None:  # else `close` has given them up
                self._drop(batch, self._queues())

    def release(self, fd: int, owner: object = None) -> None:
        """Give up queued reads of `fd`, and wait, as `wait` does, for submitted ones; call it before `fd` is closed.
        With `owner`, which shares `fd` with others: only for its reads."""
        if self._memory is None or not self._process.is_here:
            return
        with self._lock:
            batches = [one for one in self._open if one.fd == fd and (owner is None or one.owner is owner)]
            for batch in batches:
                self._drop(batch, self._queues())
        for batch in batches:
            self.wait(batch)

    def close(self) -> None:
        """Give up reads that were not submitted, wait for the others (see above), and release the ring. Idempotent.

        Raises nothing for reads that do not end in time: whoever waits for their batch gets the error.
        """
        if self._memory is not None and self._process.is_here:
            with self._lock:
                batches = list(self._open)
                for batch in batches:
                    self._drop(batch, self._queues())
            try:
                for batch in batches:
                    self.wait(batch)
            except StalledError:
                pass  # `close_when_done` finds what is left in flight, and does not wait any more
        self._memory = None
        interrupt = self._close()
        if self._process.is_here:
            self._release()
        if interrupt is not None:
            raise interrupt

    def _release(self) -> None:
        """Release the queues from the account, once."""
        account, self._account = self._account, None
        if account is not None:
            account.release(IO_RING, self._held)

    def _queues(self) -> io_uring.Queues:
        """The queues, for whoever has taken the lock. Corrects `_put` after a signal's exception."""
        memory = self._memory
        if memory is None:
            raise OSError(errno.EBADF, "the ring was closed")
        self._put += (memory.sq[memory.sq_tail] - self._put) & WRAP
        return memory

    def _drop(self, batch: Batch, memory: io_uring.Queues) -> None:
        begun = max(0, self._put - batch.base)
        if begun < len(batch.entries):
            batch.dropped = True
            batch.entries["opcode"][begun:] = io_uring.OP_NOP  # they stay queued, so that serials remain in order

    def _fill(self, memory: io_uring.Queues) -> bool:
        """Put waiting entries into the submission queue, up to the depth; returns whether some are to be submitted."""
        put = self._put
        room = self._depth - ((put - memory.cq[memory.cq_head]) & WRAP)
        if not self._open or self._open[-1].end <= put or room <= 0:
            return bool(memory.sq[memory.sq_tail] != memory.sq[memory.sq_head])
        for batch in self._open:
            if batch.end <= put or room == 0:
                continue
            first, at = put - batch.base, put & memory.sq_mask
            entries = batch.entries[first : first + room]
            places = memory.entries[at : at + entries.size]
            places[:] = entries[: places.size]
            if places.size < entries.size:  # the rest goes to the queue's beginning
                memory.entries[: entries.size - places.size] = entries[places.size :]
            put += entries.size
            room -= entries.size
        if not self._ordered:
            self._fence()
        memory.sq[memory.sq_tail] = put & WRAP
        self._put = put
        return True

    def _enter(self, memory: io_uring.Queues, wanted: int, expires: float | None = None) -> None:
        """Submit the submission queue and wait for `wanted` completions, or until a signal or `expires`."""
        if self._refused:
            self._give_up(memory)
            if wanted:
                time.sleep(0.001)  # for reads that the kernel has taken
            return
        waiting = (memory.sq[memory.sq_tail] - memory.sq[memory.sq_head]) & WRAP
        done = self._waiter.wait(waiting, wanted, expires) if wanted else io_uring.enter(self._fd, waiting, 0, 0)
        if done >= 0:
            return
        number = ctypes.get_errno()
        if number in (errno.EAGAIN, errno.EBUSY):  # no memory for a request now: it stays in the queue
            if wanted:
                in_flight = (memory.sq[memory.sq_head] - memory.cq[memory.cq_tail]) & WRAP
                if in_flight == 0 or self._waiter.wait(0, 1, expires) < 0:
                    time.sleep(0.001)
        elif number in REFUSALS:
            self._refused = True
            self._give_up(memory)
            warnings.warn(
                f"io_uring_enter is refused from now on ({os.strerror(number)}): records are read one by one, which is "
                'slower; make the cache with engine="direct" in a process that forbids itself io_uring',
                stacklevel=2,
            )
        elif number != errno.EINTR:
            raise OSError(number, f"io_uring_enter: {os.strerror(number)}")

    def _give_up(self, memory: io_uring.Queues) -> None:
        """Return to their callers the entries that the kernel has not taken; it takes no more."""
        taken = self._put - ((memory.sq[memory.sq_tail] - memory.sq[memory.sq_head]) & WRAP)
        for batch in self._open:
            batch.leave_from(taken)
        self._open[:] = [batch for batch in self._open if batch.finished_at is None]
        memory.sq[memory.sq_tail] = memory.sq[memory.sq_head]
        self._put = taken

    def _reap(self, memory: io_uring.Queues) -> bool:
        """Pass completions to their batches; returns whether there were any."""
        head, tail = memory.cq[memory.cq_head], memory.cq[memory.cq_tail]
        if head == tail:
            return False
        if self._deadline.stalled:
            self._deadline.answered()
        if not self._ordered:
            self._fence()
        first, count = head & memory.cq_mask, (tail - head) & WRAP
        if first + count <= memory.cq_mask + 1:
            found = memory.completions[first : first + count]
        else:
            found = memory.completions[(head + np.arange(count)) & memory.cq_mask]
        serials, results = found["serial"], found["result"]
        for batch in self._open:
            positions = serials - np.uint64(batch.base)  # of an earlier batch: wraps to a large number
            mine = positions < batch.results.size
            batch.results[positions[mine]] = results[mine]
            batch.count()
        if not self._ordered:
            self._fence()
        memory.cq[memory.cq_head] = tail
        while self._open and self._open[0].finished_at is not None:  # they seldom end in another order
            del self._open[0]
        if len(self._open) > 1:
            self._open[:] = [batch for batch in self._open if batch.finished_at is None]
        return True

    def _fence(self) -> None:
        # Python has no memory barrier. Giving back a lock that is held orders what came before, taking it orders what
        # comes after; on processors that reorder loads nothing passes the two. `_lock` cannot be used: it must stay.
        with self._fence_lock:
            pass
        with self._fence_lock:
            pass
