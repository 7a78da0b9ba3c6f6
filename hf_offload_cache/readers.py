"""Reads of stores that can only block, by threads."""

from __future__ import annotations

import functools
import queue
import threading
import time
from itertools import pairwise
from types import TracebackType

import numpy as np
import torch

from hf_offload_cache.errors import CacheClosedError
from hf_offload_cache.stores.base import Store, runs
from hf_offload_cache.stores.transfer import Transfer
from hf_offload_cache.workers import Jobs, start_worker

SMALLEST_PIECE_BYTES = 256 * 1024
"""A run of adjacent records is split over threads only into pieces of at least this size."""


class ReaderPool:
    """Up to `most` threads that share reads. They start when first needed and end after `stop`.

    `start` and `join` are for one thread; `stop` takes no lock, so that a garbage collection may call it. The threads
    do not hold this object.
    """

    def __init__(self, most: int, threads: list[threading.Thread]) -> None:
        self._most = most
        self._jobs: Jobs = queue.SimpleQueue()
        self._readers = 0
        self._threads = threads
        self._stopped = threading.Event()

    def start(self, store: Store, ids: np.ndarray, out: torch.Tensor) -> Transfer:
        """Share the read of `ids` (at least one) into `out` among the threads."""
        pieces = split(ids, store.record_bytes, self._most)
        while self._readers < min(len(pieces), self._most):
            self._threads.append(start_worker(f"reader-{self._readers}", self._jobs))
            self._readers += 1
        transfer = _SharedRead(len(pieces), self._stopped)
        for start, stop in pieces:
            self._jobs.put(functools.partial(transfer.run, store, ids[start:stop], out[start:stop]))
        return transfer

    def stop(self) -> None:
        """Let the threads skip what has not begun, and end."""
        self._stopped.set()
        self._jobs.put(None)


class _SharedRead(Transfer):
    """The pieces of one read. `run` is for the reader threads, the rest for the thread that started it."""

    def __init__(self, pieces: int, stopped: threading.Event) -> None:
        self._left = pieces
        self._stopped = stopped
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._dropped = False

    def run(self, store: Store, ids: np.ndarray, out: torch.Tensor) -> None:
        """Read one piece, or skip it after a failure or `drop`. Never raises."""
        try:
            if self._error is None:
                if self._dropped or self._stopped.is_set():
                    raise CacheClosedError("the read was cancelled: its store was reset or closed")
                store.read(ids, out)
        except BaseException as error:  # whatever it is belongs to whoever waits
            with self._lock:
                if self._error is None:
                    self._error, self._traceback = error, error.__traceback__
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.finished_at = time.perf_counter()
                self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def drop(self) -> None:
        self._dropped = True

    def wait(self) -> None:
        self._finished.wait()

    def finish(self) -> None:
        self.wait()
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)


def split(ids: np.ndarray, record_bytes: int, most: int) -> list[tuple[int, int]]:
    """Half-open ranges of `ids` for up to `most` threads to read: whole runs, or large pieces of long ones."""
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
