"""Writes behind: a bounded queue, and the thread that empties it."""

from __future__ import annotations

import errno
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import torch

from ..errors import CacheClosedError, StoreError
from ..memory.account import MemoryAccount
from ..report.timeline import Timeline
from ..stores.base import Store, runs
from ..stores.checks import describe
from ..stores.deadline import Patience, left, passed
from .workers import LOOK_SECONDS, Jobs, Worker, doing, join_all, start_worker

WRITE_QUEUE = "write queue"
"""The owner under which queued writes are in the memory account."""


class WriteQueue:
    """Batches that wait to be written, oldest first, by one thread, which starts when first needed.

    All methods are for one thread; `stop` takes no lock, so that a garbage collection may call it. After it the
    methods raise `CacheClosedError`, except `cancel` and `take_failure`. For what becomes of a write that failed see
    `Prefetcher`; the writes that were queued when the thread died have failed too.

    A wait during which no write ends for as long as `patience` says raises `StalledError`. The write that is stuck is
    held by its thread, records and store, and its bytes stay in the account until it ends.

    Attributes:
        threads: the thread, once it was started.
    """

    def __init__(
        self, account: MemoryAccount, most_bytes: int, timeline: Timeline | None, patience: Patience
    ) -> None:
        self.closed = False
        self.threads: list[Worker] = []
        self.patience = patience
        self._account = account
        self._most_bytes = most_bytes
        self._timeline = timeline
        self._changed = threading.Condition()  # guards the lines
        self._lines: weakref.WeakKeyDictionary[Store, _Line] = weakref.WeakKeyDictionary()
        self._jobs: Jobs = queue.SimpleQueue()
        self._ended = 0  # batches that came to an end

    def add(self, store: Store, ids: np.ndarray, records: torch.Tensor) -> None:
        """See `Prefetcher.write`."""
        batch = _Batch(store, ids, records)
        with self._changed:
            self._check_open()
            if not self._alive:
                self._fail_all()  # before there is another thread, which would not know of what this one had begun
            line = self._line(store)
            self._raise_failure(line)
            if batch.nbytes == 0:
                return
            while (queued := self._bytes) and queued + batch.nbytes > self._most_bytes:
                self._wait(lambda: self._bytes < queued)
                self._check_open()
                self._raise_failure(line)
            self._need_writer(store)
            self._account.hold(WRITE_QUEUE, batch.nbytes)  # may raise
            try:
                self._jobs.put(functools.partial(self._run, batch))  # finds nothing to do where the next line fails
                line.batches.append(batch)
            except BaseException:
                if batch not in line.batches:
                    self._account.release(WRITE_QUEUE, batch.nbytes)
                raise
            line.lost = [(rest, error) for lost, error in line.lost if len(rest := np.setdiff1d(lost, ids))]

    @property
    def _bytes(self) -> int:
        """Queued and being written. Counted anew each time: an exception of a signal cannot leave it wrong."""
        return sum(batch.nbytes for line in list(self._lines.values()) for batch in line.batches)

    @property
    def _alive(self) -> bool:
        return bool(self.threads) and self.threads[0].is_alive()

    def _need_writer(self, store: Store) -> None:
        if self._alive:
            return
        try:
            self.threads[:] = [start_worker("writer", self._jobs)]
        except RuntimeError as error:
            raise StoreError(
                errno.EAGAIN,
                f"{store.name}: no thread can be started to write with ({error}): end other threads or processes, or "
                "raise the limit with `ulimit -u`",
            ) from error

    def copy_queued(self, store: Store, ids: np.ndarray, out: torch.Tensor) -> list[tuple[int, int]]:
        """Fill the rows of `out` whose records wait to be written to `store`; the ranges of rows that remain.

        Raises what a write of this store failed with, when that was not reported yet or hit one of `ids`.
        """
        with self._changed:
            self._check_open()
            line = self._lines.get(store)
            if line is None:
                return [(0, len(ids))] if len(ids) else []
            self._raise_failure(line, ids)
            queued = [(batch, batch.records) for batch in line.batches]  # one that is done lets go of its records
        return _copy(queued, ids, out) if queued else [(0, len(ids))] if len(ids) else []

    def flush(self, store: Store | None) -> None:
        """See `Prefetcher.flush`."""
        with self._changed:
            self._check_open()
            lines = list(self._lines.values()) if store is None else [self._line(store)]
            self._wait(lambda: self.closed or not any(line.batches for line in lines))
            self._check_open()
            for line in lines:
                self._raise_failure(line)

    def check_written(self, store: Store, ids: np.ndarray) -> None:
        """Raises what a write of `store` failed with that was not reported yet, or that hit one of `ids`."""
        with self._changed:
            self._check_open()
            line = self._lines.get(store)
            if line is not None:
                self._raise_failure(line, ids)

    def drop(self, store: Store) -> None:
        """Forget what is queued for `store` and has not begun. Does not block on a write."""
        with self._changed:
            line = self._line(store)
            for batch in [batch for batch in line.batches if not batch.started]:
                self._finish(batch, line)

    def drop_all(self) -> None:
        """`drop` for every store."""
        for store in list(self._lines):
            self.drop(store)

    def cancel(self, store: Store) -> None:
        """`drop`, wait for the write that has begun, and forget failures."""
        self.drop(store)
        with self._changed:
            line = self._line(store)
            self._wait(lambda: not line.batches)
            line.lost.clear()
            line.failure = None

    def take_failure(self, store: Store) -> BaseException | None:
        """What a write of `store` failed with, when that was not reported yet."""
        line = self._lines.get(store)
        if line is None or line.failure is None:
            return None
        with self._changed:
            failure, line.failure = line.failure, None
            return failure

    @property
    def stuck(self) -> bool:
        """A write that did not end in time is still under way."""
        return self._alive and self.patience.stalled

    def stop(self) -> None:
        """Let the thread drop what has not begun, and end."""
        self.closed = True
        self._jobs.put(None)

    def join(self) -> None:
        """After `stop`: wait for the thread. Raises `StalledError` when its last write does not end in time."""
        alive = join_all(self.threads, self.patience.deadline())
        with self._changed:
            if alive:
                raise self.patience.give_up(self._doing())
            self._fail_all()  # what a thread that died has left

    def _line(self, store: Store) -> _Line:
        line = self._lines.get(store)
        if line is None:
            line = self._lines[store] = _Line()
        return line

    def _wait(self, over: Callable[[], bool]) -> None:
        """Block until `over()`, which a write that ends may bring about. With `_changed` held, which is let go."""
        deadline, ended = None, -1
        while not over():
            if ended != self._ended:
                ended, deadline = self._ended, self.patience.deadline()
            elif passed(deadline):
                raise self.patience.give_up(self._doing())
            self._changed.wait(left(deadline, LOOK_SECONDS))
            if not self._alive:
                self._fail_all()

    def _doing(self) -> str:
        batches = sorted((batch for line in self._lines.values() for batch in line.batches), key=lambda b: b.started)
        if not batches or batches[-1].store is None:
            return "writing"
        return doing("writing", batches[-1].store, batches[-1].ids)

    def _fail_all(self) -> None:
        """No thread is left: what was queued is lost, and whoever asks for it is told. With `_changed` held."""
        self.patience.answered()  # nothing is waited for any more
        why = self.threads[0].ended_by if self.threads else "it was not started"
        for line in list(self._lines.values()):
            for batch in list(line.batches):
                assert batch.store is not None
                where = doing("writing", batch.store, batch.ids)
                error = StoreError(errno.EIO, f"{where}: no thread is left that could do it: {why}")
                line.failure = line.failure or error
                line.lost.append((batch.ids, error))
                self._finish(batch, line)

    def _check_open(self) -> None:
        if self.closed:
            raise CacheClosedError("the cache was closed; make a new one")

    def _raise_failure(self, line: _Line, ids: np.ndarray | None = None) -> None:
        """Raise for a failed write that was not reported yet, or that one of `ids` was part of."""
        failure, line.failure = line.failure, None
        if failure is not None:
            raise failure
        if ids is None:
            return
        for lost, error in line.lost:
            if len(touched := np.intersect1d(lost, ids)):
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                raise StoreError(number, f"{describe(touched)} could not be written: {error}") from error

    def _run(self, batch: _Batch) -> None:
        with self._changed:
            store = batch.store
            line = None if store is None else self._line(store)
            if store is None or line is None or batch not in line.batches:
                return
            batch.started = True
        error: BaseException | None = None
        if not self.closed:
            started = time.perf_counter()
            try:
                store.write(batch.ids, batch.records)
            except BaseException as failure:  # kept for whoever uses this store next
                error = failure
            if self._timeline is not None:
                details = {"records": len(batch.ids), "bytes": batch.nbytes}
                self._timeline.add("writes", store.name, started, time.perf_counter(), **details)
        self.patience.answered()
        with self._changed:
            if error is not None:
                line.failure = line.failure or error
                line.lost.append((batch.ids, error))
            self._finish(batch, line)

    def _finish(self, batch: _Batch, line: _Line) -> None:
        """`batch` is done with, however it went. With `_changed` held."""
        line.batches.remove(batch)
        self._ended += 1
        self._account.release(WRITE_QUEUE, batch.nbytes)
        batch.store, batch.records = None, torch.empty(0, dtype=torch.uint8)
        self._changed.notify_all()


class _Batch:
    """What was given to one `add`."""

    def __init__(self, store: Store, ids: np.ndarray, records: torch.Tensor) -> None:
        self.store: Store | None = store
        self.ids = ids
        self.records = records
        self.nbytes = records.numel()
        self.started = False
        self.lowest, self.highest = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)


class _Line:
    """The writes of one store."""

    def __init__(self) -> None:
        self.batches: list[_Batch] = []  # oldest first; the one being written is in it
        self.lost: list[tuple[np.ndarray, BaseException]] = []
        self.failure: BaseException | None = None  # not yet reported


def _copy(queued: list[tuple[_Batch, torch.Tensor]], ids: np.ndarray, out: torch.Tensor) -> list[tuple[int, int]]:
    """Fill the rows of `out` whose records are in `queued` (oldest first); the ranges of rows that remain."""
    absent = np.ones(len(ids), dtype=bool)
    if len(ids):
        lowest, highest = int(ids.min()), int(ids.max())
        rows = out.numpy()
        for batch, records in queued:
            if batch.lowest > highest or batch.highest < lowest:
                continue
            found = np.isin(ids, batch.ids)
            if found.any():
                order = np.argsort(batch.ids)
                rows[found] = records.numpy()[order[np.searchsorted(batch.ids, ids[found], sorter=order)]]
                absent[found] = False
    positions = np.flatnonzero(absent)
    return [(int(positions[first]), int(positions[stop - 1]) + 1) for first, stop in runs(positions)]
