"""Reader threads for stores that can only block."""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from types import TracebackType
from typing import TypeAlias

import numpy as np
import torch

from ..errors import CacheClosedError, StoreError
from ..stores.base import EXIT_SECONDS, Deadline, Store, Transfer, describe, has_passed, runs, seconds_left

# Threads that run jobs from a queue until they are told to end

Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
"""A thread's jobs, in order; None ends every thread of the queue. A job that raises ends its thread."""

ALIVE_CHECK_SECONDS = 0.5
"""Interval at which a waiting caller checks that the thread is still alive."""


class Worker(threading.Thread):
    """A daemon thread that runs jobs. It keeps nothing of a finished job.

    As a daemon, a thread stuck in a call does not keep the process from ending. The thread's frame keeps its job, so
    memory that a stuck call may still write to exists until the call returns.

    Attributes:
        error: the exception of a job, which ended the thread; the interpreter's hook for threads was given it as well.
    """

    def __init__(self, role: str, jobs: Jobs) -> None:
        super().__init__(name=f"hf_offload_cache-{role}", daemon=True)
        self.error: BaseException | None = None
        self._jobs = jobs

    def run(self) -> None:
        jobs = self._jobs
        try:
            while (job := jobs.get()) is not None:
                job()
                del job  # it keeps a store and memory, and the next job may be far off
        except BaseException as error:
            self.error = error
            raise
        jobs.put(None)  # for the next thread

    @property
    def ended_by(self) -> str:
        """The reason why a thread has ended, for a message."""
        return "it ended" if self.error is None else f"it was ended by {self.error!r}"


def start_worker(role: str, jobs: Jobs) -> Worker:
    """Start a thread that runs `jobs`. Raises `RuntimeError` if the system provides no more threads."""
    worker = Worker(role, jobs)
    worker.start()
    return worker


def join_all(threads: Iterable[threading.Thread], expires: float | None) -> list[threading.Thread]:
    """Wait until `expires` (`time.monotonic()`; None: for ever) for threads told to end; returns those still alive."""
    threads = [thread for thread in threads if thread is not threading.current_thread()]  # a garbage collection closes
    for thread in threads:
        thread.join(None if expires is None else max(0.0, expires - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def join_before_exit(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    """Wait for threads that were told to end, for `EXIT_SECONDS` in total at most: a thread killed in a read could
    crash the process. Returns the threads that are still alive."""
    return join_all(threads, time.monotonic() + EXIT_SECONDS)


def work_text(verb: str, store: Store, ids: np.ndarray) -> str:
    """Description of work, for a message: "layer 3: reading records 4..8 (5) in '/tmp'"."""
    place = "" if store.directory is None else f" in {store.directory!r}"
    return f"{store.name}: {verb} {describe(ids)}{place}"


SMALLEST_PIECE_BYTES = 256 * 1024
"""A run of adjacent records is split over threads only into pieces of at least this size."""


class ReaderPool:
    """Up to `most` threads that share reads. They start when first needed and end after `end` or `stop`.

    `start` is for one thread; `stop` takes no lock, so a garbage collection may call it. The next `start` replaces a
    thread that has died. If the system provides no thread, and once the interpreter ends, `start` reads by itself.

    Attributes:
        threads: threads that were started and have not been seen to end.
        stopped: `stop` was called.
        deadline: maximum time of a read.
    """

    def __init__(self, most: int, deadline: Deadline) -> None:
        self.threads: list[Worker] = []
        self.stopped = False
        self.deadline = deadline
        self._most = most
        self._jobs: Jobs = queue.SimpleQueue()

    def start(self, store: Store, ids: np.ndarray, out: torch.Tensor) -> Transfer:
        """Share the read of `ids` (at least one) into `out` among the threads."""
        pieces = split(ids, store.record_bytes, self._most)
        transfer = _SharedRead(self, store, ids, out, pieces)
        if not self._hire(min(len(pieces), self._most)):
            transfer.run()
            return transfer
        try:
            for _ in pieces:
                self._jobs.put(transfer.run)
        except BaseException:  # a signal's: `out` is the caller's again
            transfer.drop()
            transfer.wait()
            raise
        return transfer

    def _hire(self, wanted: int) -> bool:
        """Start threads up to `wanted`, as far as the system provides them; returns whether there is any."""
        if self.deadline.at_exit:
            return False
        if len(self.threads) >= wanted and all(thread.is_alive() for thread in self.threads):
            return True
        self.threads[:] = [thread for thread in self.threads if thread.is_alive()]
        with contextlib.suppress(RuntimeError):  # the system provides no more: fewer threads do the work
            while len(self.threads) < wanted:
                self.threads.append(start_worker(f"reader-{len(self.threads)}", self._jobs))
        return bool(self.threads)

    def end(self) -> None:
        """Let the threads end after the requested reads."""
        self._jobs.put(None)

    def stop(self) -> None:
        """Let the threads skip what has not begun, and end."""
        self.stopped = True
        self._jobs.put(None)

    def join(self) -> None:
        """After `stop`: wait for the threads. Those that do not end in time are abandoned."""
        join_all(self.threads, self.deadline.expires())


class _SharedRead(Transfer):
    """The pieces of one read. `run` is for the reader threads, the rest for the thread that started it.

    Its end always follows from what has begun and what runs, so a signal's exception in the middle of a call never
    leaves a caller waiting for ever.
    """

    def __init__(
        self, pool: ReaderPool, store: Store, ids: np.ndarray, out: torch.Tensor, pieces: list[tuple[int, int]]
    ) -> None:
        self._pool = pool
        self._work: tuple[Store, np.ndarray, torch.Tensor] | None = store, ids, out
        self._pieces = pieces
        self._begun = 0
        self._running = 0
        self._changed = threading.Condition()  # guards the two counters and the attributes below
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._dropped = False

    def run(self) -> None:
        """Read one piece after the other, until all have begun, one has failed, or `drop`."""
        while True:
            with self._changed:
                if self._ending:
                    return
                start, stop = self._pieces[self._begun]
                assert self._work is not None
                store, ids, out = self._work
                self._running += 1
                self._begun += 1
            error: BaseException | None = None
            try:
                store.read(ids[start:stop], out[start:stop])
            except BaseException as failure:  # any error belongs to the waiting caller
                error = failure
            finally:
                del store, ids, out
                with self._changed:
                    self._running -= 1
                    if error is not None and self._error is None:
                        self._error, self._traceback = error, error.__traceback__
                    self._pool.deadline.answered()
                    if self._running == 0 and self._ending:
                        self.finished_at = time.perf_counter()
                        self._changed.notify_all()

    @property
    def _ending(self) -> bool:
        """Whether no further piece will begin."""
        return self._dropped or self._pool.stopped or self._error is not None or self._begun == len(self._pieces)

    @property
    def _over(self) -> bool:
        return self._ending and self._running == 0

    def done(self) -> bool:
        with self._changed:
            return self._over

    def drop(self) -> None:
        with self._changed:
            self._dropped = True

    def wait(self) -> None:
        """As in `Transfer`. A stuck thread keeps its work: the store and `out` exist until the call has returned.

        Raises `StalledError` when it takes longer than the pool's deadline.
        """
        with self._changed:
            expires = None if self._over else self._pool.deadline.expires()
            while not self._over:
                if has_passed(expires):
                    raise self._pool.deadline.missed(self._work_text())
                self._changed.wait(seconds_left(expires, ALIVE_CHECK_SECONDS))
                if not self._over and not any(thread.is_alive() for thread in self._pool.threads):
                    self._error = self._died()
            self._work = None

    def finish(self) -> None:
        self.wait()
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        if self._begun < len(self._pieces):
            raise CacheClosedError("the read was cancelled: its store was reset or closed")

    def _work_text(self) -> str:
        assert self._work is not None
        store, ids, _ = self._work
        return work_text("reading", store, ids)

    def _died(self) -> StoreError:
        why = "; ".join(thread.ended_by for thread in self._pool.threads if thread.error is not None) or "they ended"
        return StoreError(errno.EIO, f"{self._work_text()}: no thread is left that could do it: {why}")


def split(ids: np.ndarray, record_bytes: int, most: int) -> list[tuple[int, int]]:
    """Half-open ranges of `ids` for up to `most` threads to read: complete runs, or large pieces of long ones."""
    edges = runs(ids)
    if len(edges) >= most:
        stops = np.array([stop for _, stop in edges])
        wanted = np.arange(1, most + 1) * len(ids) // most
        cuts = np.unique(stops[np.searchsorted(stops, wanted)]).tolist()
        return list(pairwise([0, *cuts]))
    smallest = max(1, -(-SMALLEST_PIECE_BYTES // record_bytes))
    pieces = []
    for start, stop in edges:
        count = max(1, min(most // len(edges), (stop - start) // smallest))
        step = -(-(stop - start) // count)
        pieces += [(low, min(low + step, stop)) for low in range(start, stop, step)]
    return pieces
