"""Reads ahead and writes behind, for the stores of one cache."""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from types import TracebackType

import numpy as np
import torch

from hf_offload_cache.errors import CacheClosedError
from hf_offload_cache.readers import ReaderPool
from hf_offload_cache.report import MemoryAccount
from hf_offload_cache.stores.base import Store
from hf_offload_cache.stores.checks import check_batch
from hf_offload_cache.stores.transfer import Transfer
from hf_offload_cache.timeline import Timeline
from hf_offload_cache.workers import join_before_exit
from hf_offload_cache.write_queue import WriteQueue


class Ticket:
    """A read under way. Until `wait` returns or raises, `ids` and `out` belong to the prefetcher; then to the caller.

    For the thread that started the read.
    """

    def __init__(self, log: _Log, writes: WriteQueue, store: Store, records: int) -> None:
        self._log = log
        self._writes = writes
        self._store = weakref.ref(store)
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
        """
        start = time.perf_counter()
        if self._transfers:
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
            self._give_up()
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
        """Nothing touches the store or `out` from then on."""
        self._drop()
        for transfer in self._transfers:
            transfer.wait()


class Prefetcher:
    """Starts reads and takes over writes, for the stores of one cache. All methods are for one thread.

    Reads run as their store starts them (see `Store.start`): by the kernel; on the thread that waits, after advice; or,
    where a store can only block, shared by up to `threads` reader threads. Writes go to one writer thread in the order
    they came. Threads start when first needed and end with `close`, or soon after this object is gone. After `close`,
    `read`, `write` and `flush` raise `CacheClosedError`. A forked child cannot use its parent's prefetcher.

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
    ) -> None:
        if write_queue_bytes < 0:
            raise ValueError(f"write_queue_bytes must not be negative, got {write_queue_bytes}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._threads: list[threading.Thread] = []
        self._log = _Log(timeline)
        self._readers = ReaderPool(threads, self._threads)
        self._writes = WriteQueue(account, write_queue_bytes, self._threads, timeline)
        at_exit = functools.partial(_end, self._readers, self._writes, self._threads)
        self._stop = weakref.finalize(self, _stop, self._readers, self._writes, at_exit)
        atexit.register(at_exit)

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
        self.look()
        missing = self._writes.copy_queued(store, ids, out)
        ticket = Ticket(self._log, self._writes, store, sum(stop - start for start, stop in missing))
        try:
            for start, stop in missing:
                part, rows = (ids, out) if stop - start == len(ids) else (ids[start:stop], out[start:stop])
                ticket._transfers.append(store.start(part, rows) or self._readers.start(store, part, rows))
        except BaseException:
            ticket._give_up()
            raise
        self._log.begin(store, ticket)
        return ticket

    def look(self) -> None:
        """See what has come to an end, and let reads that wait for a place in a queue go. Does not block; cheap."""
        self._log.look()

    def write(self, store: Store, ids: np.ndarray, records: torch.Tensor) -> None:
        """Queue `records` (uint8, (n, record_bytes), host memory) to be written to `ids`; takes both over.

        Blocks while the queue would hold more than `write_queue_bytes`; a batch larger than that waits for an empty
        queue. Queued bytes are in the memory account as "write queue". When it raises, nothing was queued.
        """
        check_batch(ids, records, store.record_bytes)
        self.look()
        self._writes.add(store, ids, records)

    def flush(self, store: Store | None = None) -> None:
        """Block until the writes queued for `store` (None: for all) are done; raises the error of one that failed."""
        self.look()
        self._writes.flush(store)

    def cancel(self, store: Store) -> None:
        """Drop what is queued for `store` and wait for what is running: nothing touches it from then on.

        For before `Store.close` and before its records are given up: their data, and errors about it, are forgotten.
        Waiting on a read that had not finished raises `CacheClosedError`. The store may be used again afterwards. After
        `close` there is nothing to do.
        """
        self._writes.drop(store)
        self.look()
        tickets = self._log.of(store)
        for ticket in tickets:
            ticket._drop()
            ticket._fail(CacheClosedError("the read was cancelled: its store was reset or closed"))
        for ticket in tickets:
            ticket._give_up()
            self._log.end(ticket)
            ticket._transfers = []
        self._writes.cancel(store)

    def close(self) -> None:
        """Drop queued writes and reads that have not started, wait for what is running, end the threads. Idempotent."""
        self._stop()
        tickets = self._log.running()
        for ticket in tickets:
            ticket._drop()
        for ticket in tickets:
            ticket._give_up()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection may close on any thread
                thread.join()
        self._threads.clear()


class _Log:
    """The reads that have not ended, and how long those that have took."""

    def __init__(self, timeline: Timeline | None) -> None:
        self.seconds = 0.0
        self._timeline = timeline
        # Held here: what goes on by itself, so that it can be waited for when its caller has forgotten it. What is only
        # advised goes when its caller lets go of it.
        self._running: dict[Ticket, weakref.ref[Store]] = {}
        self._advised: weakref.WeakKeyDictionary[Ticket, weakref.ref[Store]] = weakref.WeakKeyDictionary()

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


def _stop(readers: ReaderPool, writes: WriteQueue, at_exit: functools.partial) -> None:
    """What a prefetcher that is closed or gone leaves to do; takes no lock."""
    atexit.unregister(at_exit)
    readers.stop()
    writes.stop()


def _end(readers: ReaderPool, writes: WriteQueue, threads: list[threading.Thread]) -> None:
    """Before the interpreter ends."""
    readers.stop()
    writes.stop()
    join_before_exit(threads)
