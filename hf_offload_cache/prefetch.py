"""Reads ahead and writes behind, for the stores of one cache."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections.abc import Iterator
from types import TracebackType

import numpy as np
import torch

from hf_offload_cache.errors import CacheClosedError, StalledError
from hf_offload_cache.process import Process
from hf_offload_cache.readers import ReaderPool
from hf_offload_cache.report import MemoryAccount
from hf_offload_cache.stores.base import Store
from hf_offload_cache.stores.checks import check_batch
from hf_offload_cache.stores.patience import Patience
from hf_offload_cache.stores.transfer import Transfer
from hf_offload_cache.timeline import Timeline
from hf_offload_cache.workers import join_before_exit
from hf_offload_cache.write_queue import WriteQueue

STALLED_READS = "stalled reads"
"""The owner under which the account keeps memory that a read may still write to after `Prefetcher.close`."""


class Ticket:
    """A read under way. Until `wait` returns or raises, `ids` and `out` belong to the prefetcher; then to the caller.

    For the thread that started the read.
    """

    def __init__(self, log: _Log, writes: WriteQueue, store: Store, out: torch.Tensor, records: int) -> None:
        self._log = log
        self._writes = writes
        self._store = weakref.ref(store)
        self._memory = out.untyped_storage().data_ptr(), out.untyped_storage().nbytes()
        self._name = store.name
        self._records = records
        self._bytes = records * store.record_bytes
        self._transfers: list[Transfer] = []
        self._started = time.perf_counter()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def wait(self) -> float:
        """Block until all records are in `out`; the seconds spent here (a mapped gather included).

        Raises the first error of the read, or else of an earlier write to this store that failed and was not reported
        yet. Before it raises, all of it has finished or was given up. Waiting again is cheap, and raises the same. A
        signal's exception (Ctrl-C) leaves the read under way: wait again.

        `StalledError`: it did not end in time, and may still write to `out`, which the ring or the thread that is stuck
        holds until it has. The prefetcher has no use for anything but `close` from then on (see `Prefetcher.trouble`).
        """
        self._log.process.check("this read")
        start = time.perf_counter()
        if self._transfers and self._error is None:
            self._finish()
        if self._error is None and (store := self._store()) is not None:
            self._fail(self._writes.take_failure(store))
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return time.perf_counter() - start

    def done(self) -> bool:
        """Whether `wait` would return or raise without reading or blocking."""
        return all([transfer.done() for transfer in self._transfers])  # a list: each is looked at

    def _finish(self) -> None:
        try:
            if self._writes.closed and not self._transfers[0].runs:
                raise CacheClosedError("the read was cancelled: the cache was closed")
            for transfer in self._transfers:
                transfer.finish()
        except Exception as error:
            self._fail(error)
            try:
                if isinstance(error, StalledError):
                    raise
                self._give_up()
            except StalledError as stalled:
                self._drop()
                self._log.trouble = stalled
                return  # still under way: the log looks after it
        self._log.end(self)
        self._transfers = []

    def _fail(self, error: BaseException | None) -> None:
        if self._error is None and error is not None:
            self._traceback = error.__traceback__
            self._error = error

    def _drop(self) -> None:
        for transfer in self._transfers:
            transfer.drop()

    def _give_up(self) -> None:
        """Nothing touches the store or `out` from then on. Raises `StalledError` where something still may."""
        self._drop()
        for transfer in self._transfers:
            transfer.wait()


class Prefetcher:
    """Starts reads and takes over writes, for the stores of one cache. All methods are for one thread.

    Reads run as their store starts them (see `Store.start`): by the kernel; on the thread that waits, after advice; or,
    where a store can only block, shared by up to `threads` reader threads. Writes go to one writer thread in the order
    they came. Threads start when first needed and end with `close`, or soon after this object is gone. After `close`,
    `read`, `write` and `flush` raise `CacheClosedError`. In a forked child they, and `cancel`, raise
    `ForkedProcessError`, and `close` does nothing.

    What does not end within `timeout` seconds (None: no limit) raises `StalledError` in whoever waits: `Ticket.wait`,
    `write`, `flush`, `cancel`, `close`. What is stuck goes on by itself: a daemon thread, or the ring of the store,
    holds the store and the memory until it ends. A read that a store does on the thread that waits (`LateRead`: a map)
    has no such limit. A thread that dies, or cannot be started, is an error in whoever waits for it, too.

    A write that failed is reported once, by the next `read`, `write`, `flush` or `Ticket.wait` of that store; reading
    one of its records raises until it is written again.

    `timeline` is given a span "reads" for each read, from its submission until its last completion was seen, and a span
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
        self._log = _Log(timeline)
        self._readers = ReaderPool(threads, Patience(timeout))
        self._writes = WriteQueue(account, write_queue_bytes, timeline, Patience(timeout))
        at_exit = functools.partial(_end, self._readers, self._writes, self._log.process)
        self._stop = weakref.finalize(self, _stop, self._readers, self._writes, self._log.process, at_exit)
        atexit.register(at_exit)

    @property
    def trouble(self) -> BaseException | None:
        """Why it is not certain what is under way: a device that stalled, or a signal's exception within `read`."""
        return self._log.trouble

    def mend(self) -> None:
        """Forget the trouble; for when all stores are about to be cancelled and closed.

        Raises `StalledError` while something that did not end in time is still under way.
        """
        self._log.process.check("this prefetcher")
        self.look()
        stuck = [ticket for ticket in self._log.running() if isinstance(ticket._error, StalledError)]
        if isinstance(self._log.trouble, StalledError) and (stuck or self._writes.stuck):
            raise StalledError(
                self._log.trouble.errno, f"still under way: {self._log.trouble.strerror}, or try again later"
            ) from self._log.trouble
        self._log.trouble = None

    @property
    def seconds_in_flight(self) -> float:
        """Sum over all reads that were seen to end: seconds from submission until the last byte was there.

        A reader thread notes the end when it comes. What the kernel does by itself is looked at whenever this object
        or a ticket is called, so the end is noted late when nobody calls: the figure is an upper bound there. A read
        that is only advised ends with its gather, in `wait`. Records copied from the write queue take no time.
        """
        return self._log.seconds

    def read(self, store: Store, ids: np.ndarray, out: torch.Tensor) -> Ticket:
        """Start reading `ids` (int64; ascending is fastest) into the rows of `out`; both stay as they are until `wait`.

        A record whose write is still queued is copied from the queue, now. Raises `StoreError` for a failed write of
        this store (see above), and for records that do not exist where the store can tell at once.
        """
        check_batch(ids, out, store.record_bytes, aligned=True)
        self._log.process.check("this prefetcher")
        self.look()
        missing = self._writes.copy_queued(store, ids, out)
        ticket = Ticket(self._log, self._writes, store, out, sum(stop - start for start, stop in missing))
        try:
            for start, stop in missing:
                part, rows = (ids, out) if stop - start == len(ids) else (ids[start:stop], out[start:stop])
                ticket._transfers.append(store.start(part, rows) or self._readers.start(store, part, rows))
        except BaseException as error:
            if not isinstance(error, Exception):  # a signal's: a part may have begun that nobody knows of
                self._log.trouble = error
            self._give_up(ticket)
            raise
        self._log.begin(store, ticket)
        return ticket

    def _give_up(self, ticket: Ticket) -> None:
        try:
            ticket._give_up()
        except StalledError as stalled:
            self._log.trouble = stalled
            raise

    def look(self) -> None:
        """See what has come to an end, and let reads that wait for a place in a queue go. Does not block; cheap."""
        self._log.look()

    def write(self, store: Store, ids: np.ndarray, records: torch.Tensor) -> None:
        """Queue `records` (uint8, (n, record_bytes), host memory) to be written to `ids`; takes both over.

        Blocks while the queue would hold more than `write_queue_bytes`; a batch larger than that waits for an empty
        queue. Queued bytes are in the memory account as "write queue". When it raises, nothing was queued.
        """
        check_batch(ids, records, store.record_bytes)
        self._log.process.check("this prefetcher")
        self.look()
        with self._log.noticing():
            self._writes.add(store, ids, records)

    def flush(self, store: Store | None = None) -> None:
        """Block until the writes queued for `store` (None: for all) are done; raises the error of one that failed."""
        self._log.process.check("this prefetcher")
        self.look()
        with self._log.noticing():
            self._writes.flush(store)

    def cancel(self, store: Store) -> None:
        """Drop what is queued for `store` and wait for what is running: nothing touches it from then on.

        For before `Store.close` and before its records are given up: their data, and errors about it, are forgotten.
        Waiting on a read that had not finished raises `CacheClosedError`. The store may be used again afterwards. After
        `close` there is nothing to do.

        Raises `StalledError` where something of it does not end in time: the store is not to be closed then, but let go
        of; whatever is stuck holds it, and its file goes with it.
        """
        self._log.process.check("this prefetcher")
        with self._log.noticing():
            self._writes.drop(store)
            self.look()
            tickets = self._log.of(store)
            for ticket in tickets:
                ticket._drop()
                ticket._fail(CacheClosedError("the read was cancelled: its store was reset or closed"))
            self._end_all(tickets)
            self._writes.cancel(store)

    def _end_all(self, tickets: list[Ticket]) -> None:
        """Wait for tickets that were dropped. Raises the first `StalledError`, when all were tried."""
        stalled = None
        for ticket in tickets:
            try:
                ticket._give_up()
            except StalledError as error:
                stalled = stalled or error
            else:
                self._log.end(ticket)
                if ticket._error is not None:
                    ticket._transfers = []  # they hold memory, and nobody asks them any more
        if stalled is not None:
            raise stalled

    def close(self) -> None:
        """Drop queued writes and reads that have not started, wait for what is running, end the threads. Idempotent.

        Raises `StalledError`, once all is done that can be, for what does not end in time and was not reported before.
        """
        if not self._log.process.is_here:
            return
        known = self._log.trouble
        self._stop()
        tickets = self._log.running()
        for ticket in tickets:
            ticket._drop()
        try:
            with self._log.noticing():
                self._writes.drop_all()
                try:
                    self._end_all(tickets)
                finally:
                    self._writes.join()
        except StalledError:
            if not isinstance(known, StalledError):
                raise
        finally:
            self._readers.join()
            held = dict(ticket._memory for ticket in self._log.running())
            if held:
                self._account.observe(STALLED_READS, sum(held.values()))


class _Log:
    """The reads that have not ended, and how long those that have took; and what went wrong with the waiting."""

    def __init__(self, timeline: Timeline | None) -> None:
        self.seconds = 0.0
        self.process = Process()
        self.trouble: BaseException | None = None
        self._timeline = timeline
        # Held here: what goes on by itself, so that it can be waited for when its caller has forgotten it. What is only
        # advised goes when its caller lets go of it.
        self._running: dict[Ticket, weakref.ref[Store]] = {}
        self._advised: weakref.WeakKeyDictionary[Ticket, weakref.ref[Store]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """A `StalledError` in here is kept as the trouble."""
        try:
            yield
        except StalledError as error:
            self.trouble = error
            raise

    def begin(self, store: Store, ticket: Ticket) -> None:
        if ticket._transfers:
            tickets = self._running if ticket._transfers[0].runs else self._advised
            tickets[ticket] = weakref.ref(store)

    def look(self) -> None:
        for ticket in list(self._running):
            if ticket.done():
                self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        """No part of `ticket` is under way any more."""
        known = self._running.pop(ticket, None) or self._advised.pop(ticket, None)
        ends = [transfer.finished_at for transfer in ticket._transfers if transfer.finished_at is not None]
        if known is None or not ends:
            return
        stop = max(ends)
        self.seconds += stop - ticket._started
        if self._timeline is not None:
            details = {"records": ticket._records, "bytes": ticket._bytes}
            self._timeline.add("reads", ticket._name, ticket._started, stop, **details)

    def running(self) -> list[Ticket]:
        return list(self._running)

    def of(self, store: Store) -> list[Ticket]:
        return [t for tickets in (self._running, self._advised) for t, of in list(tickets.items()) if of() is store]


def _stop(readers: ReaderPool, writes: WriteQueue, process: Process, at_exit: functools.partial) -> None:
    """What a prefetcher that is closed or gone leaves to do; takes no lock."""
    atexit.unregister(at_exit)
    if process.is_here:
        readers.stop()
        writes.stop()


def _end(readers: ReaderPool, writes: WriteQueue, process: Process) -> None:
    """Before the interpreter ends."""
    if process.is_here:
        readers.patience.hurry()
        writes.patience.hurry()
        readers.stop()
        writes.stop()
        join_before_exit([*readers.threads, *writes.threads])
