"""Reads under way: what their caller waits with, and the log of those that have not ended."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType

import torch

from ..errors import CacheClosedError, StalledError
from ..report.timeline import Timeline
from ..stores.base import Store
from ..stores.process import Process
from ..stores.transfer import Transfer
from .write_queue import WriteQueue


class Ticket:
    """A read under way. Until `wait` returns or raises, `ids` and `out` belong to the prefetcher; then to the caller.

    For the thread that started the read. Its caller needs `wait` and `done`; the rest is the prefetcher's.

    Attributes:
        transfers: what is under way, each for a part of the records; none once all has ended.
        records: how many of them are read.
        error: what `wait` raises.
        stalled: a wait for it took too long.
        out: the memory that is read into, as long as there are transfers.
        started: `time.perf_counter()` when the read was asked for.
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
        """Block until all records are in `out`; the seconds spent here (a mapped gather included).

        Raises the first error of the read, or else (but not of a guess) of an earlier write to this store that failed
        and was not reported yet. Before it raises, all of it has finished or was given up. Waiting again is cheap, and
        raises the same. A signal's exception (Ctrl-C) leaves the read under way: wait again.

        `StalledError`: it did not end in time, and may still write to `out`, which the ring or the thread that is stuck
        holds until it has. See `Prefetcher.interrupted_by` for what can be done then.
        """
        if self._log.process.id != os.getpid():
            self._log.process.check("this read")
        start = time.perf_counter()
        if self.transfers and self.error is None:
            self._finish()
        if self._writes.unsettled and self.error is None and not self._guess and (store := self._store()) is not None:
            self.fail(self._writes.take_failure(store))
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)
        return time.perf_counter() - start

    def done(self) -> bool:
        """Whether `wait` would return or raise without reading or blocking."""
        return all([transfer.done() for transfer in self.transfers])  # a list: each is looked at

    def fail(self, error: BaseException | None) -> None:
        """`wait` raises `error`, if it is the first."""
        if self.error is None and error is not None:
            self._traceback = error.__traceback__
            self.error = error

    def drop(self) -> None:
        """Give up what has not begun. Does not block."""
        for transfer in self.transfers:
            transfer.drop()

    def cancel(self) -> None:
        """Nothing touches the store or `out` from then on. Raises `StalledError` where something still may."""
        self.drop()
        for transfer in self.transfers:
            transfer.wait()

    def release_all(self) -> None:
        """Nothing is under way any more: hold neither transfers nor memory."""
        self.transfers, self.out = [], None

    def _finish(self) -> None:
        try:
            if self._writes.closed and not self.transfers[0].runs:
                raise CacheClosedError("the read was cancelled: the cache was closed")
            for transfer in self.transfers:
                transfer.finish()
        except Exception as error:
            self.fail(error)
            try:
                if isinstance(error, StalledError):
                    raise
                self.cancel()
            except StalledError as stalled:
                self.stalled, self._log.interrupted_by = True, stalled
                return  # still under way: the log looks after it
        self._log.end(self)
        self.transfers, self.out = [], None


class ReadLog:
    """The reads that have not ended, and how long those that have took; and what went wrong with the waiting.

    Attributes:
        seconds: sum over the reads that were seen to end, from submission to the last byte.
        process: whose reads they are.
        interrupted_by: see `Prefetcher.interrupted_by`.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self.seconds = 0.0
        self.process = Process()
        self.interrupted_by: BaseException | None = None
        self._timeline = timeline
        # Held here: what goes on by itself, so that it can be waited for when its caller has forgotten it. What is only
        # advised goes when its caller lets go of it.
        self._running: dict[Ticket, weakref.ref[Store]] = {}
        self._advised: weakref.WeakKeyDictionary[Ticket, weakref.ref[Store]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def noting_stalls(self) -> Iterator[None]:
        """A `StalledError` in here is noted in `interrupted_by`."""
        try:
            yield
        except StalledError as error:
            self.interrupted_by = error
            raise

    def begin(self, store: Store, ticket: Ticket) -> None:
        """What there was to start for `ticket` was started."""
        if ticket.transfers:
            tickets = self._running if ticket.transfers[0].runs else self._advised
            tickets[ticket] = weakref.ref(store)
        else:
            ticket.release_all()

    def poll(self) -> None:
        """Note what has come to an end."""
        for ticket in list(self._running):
            if ticket.done():
                self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        """No part of `ticket` is under way any more."""
        known = self._running.pop(ticket, None) or self._advised.pop(ticket, None)
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
        """Give up `tickets`, and wait for what has begun. Raises the first `StalledError`, when all were tried."""
        stalled = None
        for ticket in tickets:
            ticket.drop()  # all before the first wait: what is dropped behind a stalled one never begins
        for ticket in tickets:
            try:
                ticket.cancel()
            except StalledError as error:
                ticket.stalled, stalled = True, stalled or error
            else:
                self.end(ticket)
                if ticket.error is not None:
                    ticket.release_all()  # nobody asks it any more
        if stalled is not None:
            raise stalled

    def running(self) -> list[Ticket]:
        """What goes on by itself."""
        return list(self._running)

    def of(self, store: Store) -> list[Ticket]:
        """What was begun for `store`, what was only advised included."""
        return [t for tickets in (self._running, self._advised) for t, of in list(tickets.items()) if of() is store]

    @property
    def stuck(self) -> bool:
        """A read that did not end in time is still under way, unless `look` has seen it end."""
        return any(ticket.stalled for ticket in self._running)

    @property
    def held_bytes(self) -> int:
        """Memory that reads under way may still write to."""
        storages = [ticket.out.untyped_storage() for ticket in self._running if ticket.out is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
