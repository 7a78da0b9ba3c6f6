"""The bounded queue of writes, and the thread that empties it."""

from __future__ import annotations

import contextlib
import errno
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import CacheClosedError, StalledError, StoreError
from ..memory.account import MemoryAccount
from ..report.trace import Timeline
from ..stores.base import Deadline, Store, describe, has_passed, runs, seconds_left
from .reader_pool import ALIVE_CHECK_SECONDS, Jobs, Worker, join_all, start_worker, work_text

# Queued writes: a batch, and the batches of one store

class WriteBatch:
    """The arguments of one `WriteQueue.add`.

    Attributes:
        arrived: blocks until a device has filled `records`; None: they are complete.
        nbytes: bytes that wait; 0 if a device fills the records in their store.
        started: the thread has begun to write it.
        lowest, highest: smallest and largest id; 0 and -1 without ids.
    """

    def __init__(
        self, store: Store, ids: np.ndarray, records: torch.Tensor, arrived: Callable[[], object] | None = None
    ) -> None:
        self.store: Store | None = store
        self.ids = ids
        self.records, self.arrived = records, arrived
        in_place = None if arrived is None else store.in_place(ids)
        self.nbytes = records.numel()
        if in_place is not None and in_place.data_ptr() == records.data_ptr():
            self.nbytes = 0  # it waits in no memory of its own, and nobody for it
        self.started = False
        self.lowest, self.highest = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)


class StoreWrites:
    """The writes of one store.

    Attributes:
        batches: queued batches, oldest first, including the one that is being written.
        lost: records whose write failed, each with its error, until they are written again.
        failure: the error of a failed write, until it was reported.
    """

    def __init__(self) -> None:
        self.batches: list[WriteBatch] = []
        self.lost: list[tuple[np.ndarray, BaseException]] = []
        self.failure: BaseException | None = None


def copy_rows(
    queued: list[tuple[WriteBatch, torch.Tensor]], ids: np.ndarray, out: torch.Tensor
) -> list[tuple[int, int]]:
    """Fill the rows of `out` whose records are in `queued` (oldest first); returns the ranges of the other rows."""
    absent = np.ones(len(ids), dtype=bool)
    if len(ids):
        lowest, highest = int(ids.min()), int(ids.max())
        rows = out.numpy()
        for batch, records in queued:
            if batch.lowest > highest or batch.highest < lowest:
                continue
            hits = np.isin(ids, batch.ids)
            if hits.any():
                if (arrived := batch.arrived) is not None:
                    arrived()
                order = np.argsort(batch.ids)
                rows[hits] = records.numpy()[order[np.searchsorted(batch.ids, ids[hits], sorter=order)]]
                absent[hits] = False
    positions = np.flatnonzero(absent)
    return [(int(positions[first]), int(positions[stop - 1]) + 1) for first, stop in runs(positions)]


WRITE_QUEUE = "write queue"
"""The account's owner of queued writes."""


class WriteQueue:
    """Batches that wait to be written, oldest first, by one thread, which starts when first needed. If the system
    provides no thread, and once the interpreter ends, `add` writes by itself.

    All methods are for one thread; `stop` takes no lock, so a garbage collection may call it. After it the methods
    raise `CacheClosedError`, except `cancel` and `take_failure`. For failed writes see `Prefetcher`; if the thread
    dies, the queued writes have failed too.

    A wait raises `StalledError` if no write ends for as long as `deadline` allows. The thread keeps a stuck write's
    records and store, and its bytes stay in the account until it ends.

    Attributes:
        threads: the thread, once it was started.
        unsettled: stores with queued writes, or with a failed write that is not yet fully reported and repaired. All
            other stores have everything that was written.
    """

    def __init__(
        self, account: MemoryAccount, most_bytes: int, timeline: Timeline | None, deadline: Deadline
    ) -> None:
        self.closed = False
        self.threads: list[Worker] = []
        self.deadline = deadline
        self._account = account
        self._most_bytes = most_bytes
        self._timeline = timeline
        self._changed = threading.Condition()  # guards the attributes below, and the batches
        self.unsettled: dict[Store, StoreWrites] = {}
        self._jobs: Jobs = queue.SimpleQueue()
        self._progress = 0  # changes when a batch was filled by a device, and when one, or other work, ended
        self._arriving = False  # a device fills the next batch, or other work runs
        account.spare(self)

    @staticmethod
    def planned(most_bytes: int, largest_batch: int) -> int:
        """Maximum queued bytes: `most_bytes`, or one batch that is larger."""
        return max(most_bytes, largest_batch)

    def limit(self, most_bytes: int) -> None:
        """As `Prefetcher.limit_writes`."""
        with self._changed:
            self._check_open()
            self._wait(lambda: self._bytes <= most_bytes)
            self._most_bytes = most_bytes

    def free_memory(self) -> None:
        """As `Spare.free_memory`: waits until what is queued is written, so that a booking does not fail because of how
        fast a disk is. A write that stalls is left; its next user is told."""
        with self._changed, contextlib.suppress(StalledError):
            if threading.current_thread() not in self.threads:
                self._wait(lambda: self.closed or not self._bytes)

    def add(
        self, store: Store, ids: np.ndarray, records: torch.Tensor, arrived: Callable[[], object] | None = None
    ) -> None:
        """As `Prefetcher.write`."""
        batch = WriteBatch(store, ids, records, arrived)
        with self._changed:
            self._check_open()
            if not self._alive:
                self._fail_all()  # before there is another thread, which would not know what this one had begun
            self._raise_failure(store)
            if records.numel() == 0:
                return
            while batch.nbytes and (queued := self._bytes) and queued + batch.nbytes > self._most_bytes:
                self._wait(lambda: self._bytes < queued)
                self._check_open()
                self._raise_failure(store)
            self._account.hold(WRITE_QUEUE, batch.nbytes)  # may raise, or wait
            try:
                self._check_open()
                self._raise_failure(store)
                hired = self._hire()
                if hired:
                    self._jobs.put(functools.partial(self._run, batch))  # does nothing if the next lines fail
                writes = self.unsettled.setdefault(store, StoreWrites())
                writes.batches.append(batch)
            except BaseException:
                if batch not in getattr(self.unsettled.get(store), "batches", []):
                    self._account.release(WRITE_QUEUE, batch.nbytes)
                raise
            writes.lost = [(left, error) for lost, error in writes.lost if len(left := np.setdiff1d(lost, ids))]
        if not hired:
            self._run(batch)

    def run(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """As `Prefetcher.run_behind_writes`."""
        outcome: list[tuple[Any, BaseException | None]] = []
        with self._changed:
            self._check_open()
            if not self._alive:
                self._fail_all()
            hired = self._hire()
        job = functools.partial(self._work, work, outcome)
        if hired:
            self._jobs.put(job)
        else:
            job()

        def result() -> Any:
            with self._changed:
                self._wait(lambda: bool(outcome) or self.closed or not self._alive)
                if not outcome:
                    self._check_open()
                    why = self.threads[0].ended_by if self.threads else "it was not started"
                    raise StoreError(errno.EIO, f"no thread is left that could do it: {why}")
            returned, error = outcome[0]
            if error is not None:
                raise error
            return returned

        return result

    def _work(self, work: Callable[[], Any], outcome: list[tuple[Any, BaseException | None]]) -> None:
        with self._changed:
            if self.closed:
                return
            self._arriving = True
        returned: Any = None
        error: BaseException | None = None
        try:
            returned = work()
        except BaseException as failure:  # kept for who waits
            error = failure
        self.deadline.answered()
        with self._changed:
            outcome.append((returned, error))
            self._arriving = False
            self._progress += 1
            self._changed.notify_all()

    @property
    def _bytes(self) -> int:
        """Bytes queued and being written. Summed each time, so that a signal's exception cannot leave it wrong."""
        return sum(batch.nbytes for writes in list(self.unsettled.values()) for batch in writes.batches)

    @property
    def _alive(self) -> bool:
        return bool(self.threads) and self.threads[0].is_alive()

    def _hire(self) -> bool:
        """Start the thread if necessary; returns whether there is one."""
        if self.deadline.at_exit:
            self._wait(lambda: not self._bytes)  # the thread's batches are written before the next one
            return False
        if not self._alive:
            try:
                self.threads[:] = [start_worker("writer", self._jobs)]
            except RuntimeError:  # the system provides no thread
                return False
        return True

    def copy_queued(
        self, store: Store, ids: np.ndarray, out: torch.Tensor, *, guess: bool = False
    ) -> list[tuple[int, int]]:
        """Fill the rows of `out` whose records wait to be written to `store`; returns the ranges of the other rows.

        Raises the error of a failed write of this store that was not reported yet or that wrote one of `ids`. `guess`:
        the caller drops errors, so the failure counts as not reported.
        """
        whole = [(0, ids.size)] if ids.size else []
        if store not in self.unsettled and not self.closed:
            return whole
        with self._changed:
            self._check_open()
            writes = self.unsettled.get(store)
            if writes is None:
                return whole
            failure = writes.failure
            try:
                self._raise_failure(store, ids)
            finally:
                writes.failure = failure if guess else None
            queued = [(batch, batch.records) for batch in writes.batches]  # a finished batch drops its records
        return copy_rows(queued, ids, out) if queued else whole

    def is_queued(self, store: Store, ids: np.ndarray) -> bool:
        """Whether a queued batch of `store` has one of `ids`."""
        with self._changed:
            writes = self.unsettled.get(store)
            batches = [] if writes is None or not len(ids) else [*writes.batches]
        near = [batch.ids for batch in batches if batch.lowest <= ids.max() and batch.highest >= ids.min()]
        return any(np.isin(own, ids).any() for own in near)

    def flush(self, store: Store | None) -> None:
        """As `Prefetcher.flush`."""
        with self._changed:
            self._check_open()
            stores = list(self.unsettled) if store is None else [store]
            waited = [self.unsettled[each] for each in stores if each in self.unsettled]
            self._wait(lambda: self.closed or not any(each.batches for each in waited))
            self._check_open()
            for each in stores:
                self._raise_failure(each)

    def check_written(self, store: Store, ids: np.ndarray) -> None:
        """Raise the error of a failed write of `store` that was not reported yet, or that wrote one of `ids`."""
        with self._changed:
            self._check_open()
            self._raise_failure(store, ids)

    def drop(self, store: Store) -> None:
        """Drop queued batches of `store` that have not begun. Does not block on a write."""
        with self._changed:
            writes = self.unsettled.get(store)
            if writes is not None:
                for batch in [batch for batch in writes.batches if not batch.started]:
                    self._finish(store, batch, writes)

    def drop_all(self) -> None:
        """Apply `drop` to every store."""
        for store in list(self.unsettled):
            self.drop(store)

    def cancel(self, store: Store) -> None:
        """Apply `drop`, wait for the write that has begun, and drop failures."""
        self.drop(store)
        with self._changed:
            writes = self.unsettled.get(store)
            if writes is not None:
                self._wait(lambda: not writes.batches)
                self.unsettled.pop(store, None)

    def take_failure(self, store: Store) -> BaseException | None:
        """The error of a failed write of `store`, if it was not reported yet; it then counts as reported."""
        writes = self.unsettled.get(store)
        if writes is None or writes.failure is None:
            return None
        with self._changed:
            failure, writes.failure = writes.failure, None
            return failure

    @property
    def stuck(self) -> bool:
        """Whether a write that timed out is still running."""
        return self._alive and self.deadline.stalled

    def end(self) -> None:
        """Let the thread end once everything is written."""
        self._jobs.put(None)

    def stop(self) -> None:
        """Let the thread drop what has not begun, and end."""
        self.closed = True
        self._jobs.put(None)

    def join(self) -> None:
        """After `stop`: wait for the thread. Raises `StalledError` when its last write does not end in time."""
        alive = join_all(self.threads, self.deadline.expires())
        with self._changed:
            if alive:
                raise self.deadline.missed(self._work_text())
            self._fail_all()  # batches left by a thread that died

    def _wait(self, over: Callable[[], bool]) -> None:
        """Block until `over()`, which is checked after each write. Call with `_changed` held; releases it meanwhile."""
        expires, seen = None, -1
        while not over():
            if seen != self._progress or self._arriving:  # a device may take its time
                seen, expires = self._progress, self.deadline.expires()
            elif has_passed(expires):
                raise self.deadline.missed(self._work_text())
            self._changed.wait(seconds_left(expires, ALIVE_CHECK_SECONDS))
            if not self._alive:
                self._fail_all()

    def _work_text(self) -> str:
        batches = [batch for writes in self.unsettled.values() for batch in writes.batches]
        batches.sort(key=lambda batch: batch.started)
        if not batches or batches[-1].store is None:
            return "writing"
        return work_text("writing", batches[-1].store, batches[-1].ids)

    def _fail_all(self) -> None:
        """Fail all queued writes after the thread died; the next users of their stores get the error. With `_changed`
        held."""
        self.deadline.answered()  # nothing is waited for any more
        why = self.threads[0].ended_by if self.threads else "it was not started"
        for store, writes in list(self.unsettled.items()):
            for batch in list(writes.batches):
                where = work_text("writing", store, batch.ids)
                error = StoreError(errno.EIO, f"{where}: no thread is left that could do it: {why}")
                writes.failure = writes.failure or error
                writes.lost.append((batch.ids, error))
                self._finish(store, batch, writes)

    def _check_open(self) -> None:
        if self.closed:
            raise CacheClosedError("the cache was closed; make a new one")

    def _raise_failure(self, store: Store, ids: np.ndarray | None = None) -> None:
        """Raise the error of a failed write that was not reported yet, or that wrote one of `ids`."""
        writes = self.unsettled.get(store)
        if writes is None:
            return
        failure, writes.failure = writes.failure, None
        if failure is not None:
            raise failure
        if ids is None:
            return
        for lost, error in writes.lost:
            if len(touched := np.intersect1d(lost, ids)):
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                advice = "their contents are lost: reset() the cache, or open what was saved"
                raise StoreError(number, f"{describe(touched)} could not be written: {error}; {advice}") from error

    def _run(self, batch: WriteBatch) -> None:
        with self._changed:
            store = batch.store
            writes = None if store is None else self.unsettled.get(store)
            if store is None or writes is None or batch not in writes.batches:
                return
            batch.started, arrived = True, batch.arrived
            self._arriving = arrived is not None
        error: BaseException | None = None
        if arrived is not None:
            try:
                arrived()
            except BaseException as failure:
                error = failure
            self.deadline.answered()
            with self._changed:
                self._arriving = False
                self._progress += 1
                self._changed.notify_all()
        if not self.closed and error is None:
            started = time.perf_counter()
            try:
                store.write(batch.ids, batch.records)
            except BaseException as failure:  # kept for the next user of this store
                error = failure
            if self._timeline is not None:
                details = {"records": len(batch.ids), "bytes": batch.records.numel()}
                self._timeline.add("writes", store.name, started, time.perf_counter(), **details)
        self.deadline.answered()
        with self._changed:
            if error is not None:
                writes.failure = writes.failure or error
                writes.lost.append((batch.ids, error))
            self._finish(store, batch, writes)

    def _finish(self, store: Store, batch: WriteBatch, writes: StoreWrites) -> None:
        """Remove a finished `batch`, whether it succeeded or not. With `_changed` held."""
        writes.batches.remove(batch)
        if not writes.batches and not writes.lost and writes.failure is None:
            self.unsettled.pop(store, None)
        self._progress += 1
        self._account.release(WRITE_QUEUE, batch.nbytes)
        batch.store, batch.arrived, batch.records = None, None, torch.empty(0, dtype=torch.uint8, device="cpu")
        self._changed.notify_all()
