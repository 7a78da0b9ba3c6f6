"""Threads that run jobs from a queue until it is told to end.

They run stores' `read` and `write` and copy bytes with numpy, never torch: OpenMP workers and I/O threads get in each
other's way, and a daemon thread inside torch can take the interpreter down at exit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
"""What a thread runs, in order; None ends every thread of the queue. A job must not raise."""

EXIT_SECONDS = 1.0
"""That the end of the interpreter waits for threads in a read: killed there, one could take the process down."""


def start_worker(role: str, jobs: Jobs) -> threading.Thread:
    """A daemon thread that runs `jobs`. It holds nothing of a job that is done."""
    thread = threading.Thread(target=_serve, args=(jobs,), name=f"hf_offload_cache-{role}", daemon=True)
    thread.start()
    return thread


def join_before_exit(threads: list[threading.Thread]) -> None:
    """Wait for threads that were told to end, all together `EXIT_SECONDS` at most."""
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds a store and memory, and the next may be long in coming
    jobs.put(None)  # for the next thread
