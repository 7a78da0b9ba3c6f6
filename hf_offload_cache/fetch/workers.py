"""Threads that run jobs from a queue until it is told to end.

They run stores' `read` and `write` and copy bytes with numpy, never torch: OpenMP workers and I/O threads get in each
other's way, and a daemon thread inside torch can take the interpreter down at exit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from ..stores.base import Store
from ..stores.checks import describe
from ..stores.deadline import EXIT_SECONDS

Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
"""What a thread runs, in order; None ends every thread of the queue. A job that raises ends its thread."""

ALIVE_CHECK_SECONDS = 0.5
"""Who waits for a thread looks this often whether it is still alive."""


class Worker(threading.Thread):
    """A daemon thread that runs jobs. It holds nothing of a job that is done.

    Daemon: one that is stuck in a call does not keep the process from ending. What it works on is held by its frame, so
    memory that a stuck call may still write to stays where it is until the call returns.

    Attributes:
        error: what a job let out, which ended the thread; the interpreter's hook for threads was given it as well.
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
                del job  # it holds a store and memory, and the next may be long in coming
        except BaseException as error:
            self.error = error
            raise
        jobs.put(None)  # for the next thread

    @property
    def ended_by(self) -> str:
        """For a message about a thread that is not alive."""
        return "it ended" if self.error is None else f"it was ended by {self.error!r}"


def start_worker(role: str, jobs: Jobs) -> Worker:
    """A thread that runs `jobs`. Raises `RuntimeError` where the system gives no more threads."""
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
    """For a message: "layer 3: reading records 4..8 (5) in '/tmp'"."""
    place = "" if store.directory is None else f" in {store.directory!r}"
    return f"{store.name}: {verb} {describe(ids)}{place}"
