"""Prefetches and queued writes for one cache's stores."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch

from ..errors import CacheClosedError, StalledError
from ..memory.account import MemoryAccount
from ..report.trace import Timeline
from ..stores.base import Deadline, Process, Store, Transfer, check_batch
from .reader_pool import ReaderPool, join_before_exit
from .write_queue import WriteQueue

T = TypeVar("T")

# Reads in flight: a ticket for the caller to wait with, and the log of unfinished reads

class Ticket:
    """A read in flight. Until `wait` returns or raises, `ids` and `out` belong to the prefetcher; then to the caller.

    For the thread that started the read. The caller uses `wait` and `done`; the rest is for the prefetcher.

    Attributes:
        transfers: transfers in flight, each for a part of the records; empty when all have ended.
        records: number of records that are read.
        error: the error that `wait` raises.
        stalled: a wait for it timed out.
        out: the memory that is read into, while there are transfers.
        started: `time.perf_counter()` at the request.
    """

    def __init__(
        self, log: ReadLog, writes: WriteQueue, store: Store, out: torch.Tensor, *, guess: bool = False
    ) -> None:
        self.name = store.name
        self.records = 0
        self.record_bytes = store.record_bytes
        self.transfers: list[Transfer] = []
        self.error: BaseException | None = None
        self.stalled = False
        self.out: torch.Tensor | None = out
        self.started = time.perf_counter()
        self._traceback: TracebackType | None = None
        self._log = log
        self._writes = writes
        self._guess = guess
        self._store = weakref.ref(store)

    def wait(self) -> float:
        """Block until all records are in `out`; returns the seconds spent here (a mapped gather included).

        Raises the read's first error. If it has none and is not a guess, raises the error of an earlier failed write to
        this store that was not reported yet. Before it raises, the complete read has finished or was cancelled. Waiting
        again is cheap and raises the same. A signal's exception (Ctrl-C) leaves the read in flight: wait again.

        Raises `StalledError` if the read does not end in time. It may then still write to `out`, which the ring or the
        stuck thread keeps until the read ends. `Prefetcher.interrupted_by` says what can be done then.
        """
        if self._log.process.id != os.getpid():
            self._log.process.check("this read")
        start = time.perf_counter()
        if self.transfers and self.error is None:
            try:
                if self._writes.closed and not self.transfers[0].runs:
                    raise CacheClosedError("the read was cancelled: the cache was closed")
                for transfer in self.transfers:
                    transfer.finish()
            except Exception as error:
                self._give_up(error)
            else:
                self._log.end(self)
                self.transfers, self.out = [], None
        if self._writes.unsettled and self.error is None and not self._guess and (store := self._store()) is not None:
            self.fail(self._writes.take_failure(store))
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)
        return time.perf_counter() - start

    def done(self) -> bool:
        """Whether `wait` would return or raise without reading or blocking."""
        ended = True
        for transfer in self.transfers:  # polls every one
            ended = transfer.done() and ended
        return ended

    def fail(self, error: BaseException | None) -> None:
        """Let `wait` raise `error`, if it is the first."""
        if self.error is None and error is not None:
            self._traceback = error.__traceback__
            self.error = error

    def drop(self) -> None:
        """Cancel what has not begun. Does not block."""
        for transfer in self.transfers:
            transfer.drop()

    def cancel(self) -> None:
        """Cancel the read: nothing touches the store or `out` afterwards. Raises `StalledError` if something may."""
        self.drop()
        for transfer in self.transfers:
            transfer.wait()

    def release_all(self) -> None:
        """Drop transfers and memory when nothing is in flight any more."""
        self.transfers, self.out = [], None

    def _give_up(self, error: Exception) -> None:
        """Cancel a failed read; if that fails, the device is stalled."""
        self.fail(error)
        try:
            if isinstance(error, StalledError):
                raise error
            self.cancel()
        except StalledError as stalled:
            self.stalled, self._log.interrupted_by = True, stalled
            return  # still in flight: the log keeps it
        self._log.end(self)
        self.transfers, self.out = [], None


class ReadLog:
    """The unfinished reads, the total time of the finished ones, and the error that makes the state uncertain.

    Attributes:
        seconds: sum over the reads that were seen to end, from submission to the last byte.
        process: the process that started the reads.
        interrupted_by: see `Prefetcher.interrupted_by`.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self.seconds = 0.0
        self.process = Process()
        self.interrupted_by: BaseException | None = None
        self._timeline = timeline
        # Reads that run by themselves are kept here, so that they can be waited for after their caller dropped them.
        # Reads that are only advised are dropped with their caller's reference.
        self.under_way: dict[Ticket, weakref.ref[Store]] = {}
        self._advised: weakref.WeakKeyDictionary[Ticket, weakref.ref[Store]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def noting_stalls(self) -> Iterator[None]:
        """Inside, store a `StalledError` in `interrupted_by`."""
        try:
            yield
        except StalledError as error:
            self.interrupted_by = error
            raise

    def begin(self, store: Store, ticket: Ticket) -> None:
        """Add `ticket`, whose transfers were started."""
        if ticket.transfers:
            tickets = self.under_way if ticket.transfers[0].runs else self._advised
            tickets[ticket] = weakref.ref(store)
        else:
            ticket.release_all()

    def poll(self) -> None:
        """Note which reads have ended."""
        for ticket in list(self.under_way):
            if ticket.done():
                self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        """Remove `ticket`, no part of which is in flight any more, and count its time."""
        known = self.under_way.pop(ticket, None) or self._advised.pop(ticket, None)
        stop: float | None = None
        for transfer in ticket.transfers:
            end = transfer.finished_at
            if end is not None and (stop is None or end > stop):
                stop = end
        if known is None or stop is None:
            return
        self.seconds += stop - ticket.started
        if self._timeline is not None:
            details = {"records": ticket.records, "bytes": ticket.records * ticket.record_bytes}
            self._timeline.add("reads", ticket.name, ticket.started, stop, **details)

    def end_all(self, tickets: Iterable[Ticket]) -> None:
        """Cancel `tickets`, and wait for what has begun. Raises the first `StalledError` after all were tried."""
        stalled = None
        for ticket in tickets:
            ticket.drop()  # all before the first wait, so that those queued behind a stalled one never begin
        for ticket in tickets:
            try:
                ticket.cancel()
            except StalledError as error:
                ticket.stalled, stalled = True, stalled or error
            else:
                self.end(ticket)
                if ticket.error is not None:
                    ticket.release_all()  # nothing waits for it any more
        if stalled is not None:
            raise stalled

    def running(self) -> list[Ticket]:
        """The reads that run by themselves."""
        return list(self.under_way)

    def of(self, store: Store) -> list[Ticket]:
        """The reads begun for `store`, those only advised included."""
        return [t for tickets in (self.under_way, self._advised) for t, of in list(tickets.items()) if of() is store]

    @property
    def stuck(self) -> bool:
        """Whether a read that timed out is still in flight, as far as `poll` has seen."""
        return any(ticket.stalled for ticket in self.under_way)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that reads in flight may still write to."""
        storages = [ticket.out.untyped_storage() for ticket in self.under_way if ticket.out is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


STALLED_READS = "stalled reads"
"""The account's owner of memory that a read may still write to after `Prefetcher.close`."""


class Prefetcher:
    """Starts reads and queues writes for one cache's stores. All methods are for one thread.

    Each store decides how its reads run (see `Store.start`): by the kernel; on the waiting thread, after advice; or, if
    a store can only block, shared by up to `threads` reader threads. Writes go to one writer thread in their order of
    arrival. Threads start when first needed and end with `close`, or soon after this object is deleted. After `close`,
    `read`, `write`, `limit_writes` and `flush` raise `CacheClosedError`. In a forked child they, and `cancel`, raise
    `ForkedProcessError`, and `close` does nothing.

    An operation that does not end within `timeout` seconds (None: no limit) raises `StalledError` in the waiting
    caller: `Ticket.wait`, `write`, `limit_writes`, `flush`, `cancel`, `close`. A stuck operation keeps running: a
    daemon thread, or the store's ring, keeps the store and the memory until it ends. A read on the waiting thread
    (`LateRead`: a map) has no such limit. A thread that dies is also an error in its waiting caller. If no thread can
    be started, and in `atexit` handlers, `read` and `write` do the work themselves.

    A failed write is reported once, by the next `read`, `write`, `flush` or `Ticket.wait` of that store. Reading one of
    its records raises until the record is written again.

    `timeline` gets a span "reads" for each read, from its submission until its last completion was seen, and a span
    "writes" for each batch while it is being written.
    """

    def __init__(
        self,
        account: MemoryAccount,
        write_queue_bytes: int,
        threads: int = 8,
        timeline: Timeline | None = None,
        timeout: float | None = None,
    ) -> None:
        if write_queue_bytes < 0:
            raise ValueError(f"write_queue_bytes must not be negative, got {write_queue_bytes}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._account = account
        self._log = ReadLog(timeline)
        self._readers = ReaderPool(threads, Deadline(timeout))
        self._writes = WriteQueue(account, write_queue_bytes, timeline, Deadline(timeout))
        at_exit = functools.partial(_end, self._readers, self._writes)
        self._stop = weakref.finalize(self, _stop, self._readers, self._writes, at_exit)
        atexit.register(at_exit)

    # An attrgetter makes no Python frame, unlike a function: steps read this often.
    interrupted_by: BaseException | None = property(attrgetter("_log.interrupted_by"))  # type: ignore[assignment]
    """The error that makes the operations in flight uncertain: a stalled device, or a signal's exception in `read`.

    None: no such error. After one, only `recover` and `close` are useful.
    """

    def recover(self) -> None:
        """Set `interrupted_by` back to None, before all stores are cancelled and closed.

        Raises `StalledError` while an operation that timed out is still in flight.
        """
        self._log.process.check("this prefetcher")
        self.poll()
        error = self._log.interrupted_by
        if isinstance(error, StalledError) and (self._log.stuck or self._writes.stuck):
            raise StalledError(error.errno, f"still under way: {error.strerror}, or try again later") from error
        self._log.interrupted_by = None

    @property
    def seconds_in_flight(self) -> float:
        """Sum over all reads that were seen to end: seconds from submission until the last byte arrived.

        Reader threads note the end at once. Reads by the kernel are polled when this object or a ticket is called, so
        their end may be noted late, and the figure is an upper bound. A read that is only advised ends with its gather,
        in `wait`. Records copied from the write queue take no time.
        """
        return self._log.seconds

    def read(self, store: Store, ids: np.ndarray, out: torch.Tensor, *, guess: bool = False) -> Ticket:
        """Start reading `ids` (int64; ascending is fastest) into the rows of `out`; change neither before `wait`.

        A record whose write is still queued is copied from the queue, now. Raises `StoreError` for a failed write of
        this store (see above), and for records that do not exist if the store can tell at once. `guess`: the caller
        drops what this raises, so a failed write is reported to the next caller.
        """
        check_batch(ids, out, store.record_bytes, aligned=True)
        if self._log.process.id != os.getpid():
            self._log.process.check("this prefetcher")
        log, writes = self._log, self._writes
        if log.under_way:
            log.poll()
        missing = [(0, ids.size)] if ids.size else []
        if store in writes.unsettled or writes.closed:
            missing = writes.copy_queued(store, ids, out, guess=guess)
        ticket = Ticket(self._log, self._writes, store, out, guess=guess)
        try:
            for start, stop in missing:
                ticket.records += stop - start
                part, rows = (ids, out) if stop - start == ids.size else (ids[start:stop], out[start:stop])
                ticket.transfers.append(store.start(part, rows) or self._readers.start(store, part, rows))
        except BaseException as error:
            if not isinstance(error, Exception):  # a signal's: an unknown part may have begun
                self._log.interrupted_by = error
            self._log.begin(store, ticket)
            with self._log.noting_stalls():
                self._log.end_all([ticket])
            raise
        self._log.begin(store, ticket)
        return ticket

    def poll(self) -> None:
        """Note which reads have ended, and submit those that wait for a queue slot. Does not block; cheap."""
        self._log.poll()

    def write(
        self, store: Store, ids: np.ndarray, records: torch.Tensor, arrived: Callable[[], object] | None = None
    ) -> None:
        """Queue `records` (uint8, (n, record_bytes), host memory) to be written to `ids`; takes ownership of both.
        `arrived`, called in any thread, blocks until a device has filled the records; None: they are complete.

        Blocks while the queue would exceed `write_queue_bytes`, or the limit of `limit_writes`; a larger batch waits
        for an empty queue. Queued bytes are booked in the account as "write queue". If it raises, nothing was queued.
        """
        check_batch(ids, records, store.record_bytes)
        self._log.process.check("this prefetcher")
        self.poll()
        with self._log.noting_stalls():
            self._writes.add(store, ids, records, arrived)

    def run_behind_writes(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run `work`, which must not use this object, in the thread that writes, behind what is queued now. Returns a
        function that waits for it, and returns what it returned or raises what it raised; at once if the system
        provides no thread. Raises `CacheClosedError` after `close`, and `StalledError` if an earlier write does not end
        in time."""
        self._log.process.check("this prefetcher")
        result = self._writes.run(work)

        def waited() -> T:
            self._log.process.check("this prefetcher")
            with self._log.noting_stalls():
                found: T = result()
            return found

        return waited

    def limit_writes(self, most_bytes: int) -> None:
        """Limit the queue to `most_bytes` from now on; blocks until it is that small. A failed write is reported to the
        next caller that uses its store."""
        self._log.process.check("this prefetcher")
        with self._log.noting_stalls():
            self._writes.limit(most_bytes)

    def flush(self, store: Store | None = None) -> None:
        """Block until the writes queued for `store` (None: for all) are done; raises the error of one that failed."""
        self._log.process.check("this prefetcher")
        self.poll()
        with self._log.noting_stalls():
            self._writes.flush(store)

    def is_queued(self, store: Store, ids: np.ndarray) -> bool:
        """Whether some of `ids` may still wait to be written to `store`."""
        return self._writes.is_queued(store, ids)

    def check_written(self, store: Store, ids: np.ndarray) -> None:
        """Raise `StoreError` if one of the records `ids` could not be written, even if that was reported before."""
        self._log.process.check("this prefetcher")
        self._writes.check_written(store, ids)

    def cancel(self, store: Store) -> None:
        """Drop what is queued for `store` and wait for what is running: nothing touches it afterwards.

        For use before `Store.close` and before its records are freed: their data, and errors about it, are dropped.
        Waiting on a read that had not finished raises `CacheClosedError`. The store may be used again afterwards. Does
        nothing after `close`.

        Raises `StalledError` if an operation does not end in time. Then drop the store without closing it: the stuck
        operation keeps it, and its file is removed with it.
        """
        self._log.process.check("this prefetcher")
        with self._log.noting_stalls():
            self._writes.drop(store)
            self.poll()
            tickets = self._log.of(store)
            for ticket in tickets:
                ticket.fail(CacheClosedError("the read was cancelled: its store was reset or closed"))
            self._log.end_all(tickets)
            self._writes.cancel(store)

    def close(self) -> None:
        """Drop queued writes and reads that have not started, wait for what is running, end the threads. Idempotent.

        Raises `StalledError`, after everything else is done, for an operation that does not end in time and was not
        reported before.
        """
        if not self._log.process.is_here:
            return
        known = self._log.interrupted_by
        self._stop()
        try:
            with self._log.noting_stalls():
                self._writes.drop_all()
                try:
                    self._log.end_all(self._log.running())
                finally:
                    self._writes.join()
        except StalledError:
            if not isinstance(known, StalledError):
                raise
        finally:
            self._readers.join()
            if held := self._log.held_bytes:
                self._account.observe(STALLED_READS, held)


# In a forked child, which has none of the threads, these two find nothing to wait for.


def _stop(readers: ReaderPool, writes: WriteQueue, at_exit: functools.partial) -> None:
    """Stop the workers of a prefetcher that was closed or collected; takes no lock."""
    atexit.unregister(at_exit)
    readers.stop()
    writes.stop()


def _end(readers: ReaderPool, writes: WriteQueue) -> None:
    """End the threads before the interpreter ends. Other exit handlers may still use the cache, without threads."""
    for each in (readers, writes):
        each.deadline.shorten_for_exit()
        each.end()
    if join_before_exit([*readers.threads, *writes.threads]):
        readers.stop()
        writes.stop()
