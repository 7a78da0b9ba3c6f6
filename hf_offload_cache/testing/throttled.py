"""A slower device than the one at hand: reads that take as long as its bandwidth, latency and queue would have it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..stores.base import FreezableStore, Store, Transfer, runs
from .wrappers import WrapperStore


class DeviceClock:
    """When the requests of one device would be done, whichever threads and stores they come from.

    Up to `queue_depth` requests are under way at once. Each first takes `seconds_per_request` in its place of the
    queue, beside the others, and then moves its bytes, one request after the other, at `bytes_per_second`: a device is
    bound by its bandwidth, or by its latency over its depth. Any thread.

    Args:
        bytes_per_second: of all requests together.
        seconds_per_request: from a place in the queue to the first byte.
        queue_depth: requests under way at once.
        now: the time in seconds; a test may pass a clock of its own.
        sleep: what is done with the seconds that are left, on the thread that reads.

    Raises `ValueError` for a bandwidth or depth that is not positive, or a negative time.
    """

    def __init__(
        self,
        bytes_per_second: float,
        seconds_per_request: float,
        queue_depth: int,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second must be positive, got {bytes_per_second}")
        if seconds_per_request < 0:
            raise ValueError(f"seconds_per_request must not be negative, got {seconds_per_request}")
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, got {queue_depth}")
        self.bytes_per_second = bytes_per_second
        self.seconds_per_request = seconds_per_request
        self.queue_depth = queue_depth
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._places = [float("-inf")] * queue_depth  # when each place in the queue is free again
        self._wire = float("-inf")  # when the bytes of the latest request have moved

    def book(self, sizes: list[int]) -> float:
        """Take requests of `sizes` bytes in, now and in order; the time at which the last of them is done."""
        with self._lock:
            now = finished = self._now()
            for size in sizes:
                place = min(range(self.queue_depth), key=self._places.__getitem__)
                ready = max(now, self._places[place]) + self.seconds_per_request
                self._wire = max(ready, self._wire) + size / self.bytes_per_second
                self._places[place] = finished = self._wire
            return finished

    def passed(self, moment: float) -> bool:
        """Whether it is `moment`, or later."""
        return self._now() >= moment

    def wait_until(self, moment: float) -> None:
        """Sleep until `moment`; returns at once when it has passed."""
        remaining = moment - self._now()
        if remaining > 0:
            self._sleep(remaining)


class ThrottledStore(WrapperStore):
    """A store whose reads take as long as `clock` says, or as long as `inner` takes when that is longer.

    A run of adjacent records is one request, as in `Store.read`. Stores that share a clock share the device. Reads are
    started the way `inner` starts them: a store that can only block is read by other threads, which then sleep. Writes
    and advice are not slowed.
    """

    def __init__(self, inner: Store, clock: DeviceClock) -> None:
        super().__init__(inner)
        self.clock = clock

    def start(self, ids: np.ndarray, out: torch.Tensor) -> Transfer | None:
        transfer = self.inner.start(ids, out)
        return None if transfer is None else _ThrottledTransfer(transfer, self.clock, self._book(ids))

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        done = self._book(ids)
        self.inner.read(ids, out)
        self.clock.wait_until(done)

    def share(self) -> FreezableStore:
        return ThrottledStore(self._freezable.share(), self.clock)

    def _book(self, ids: np.ndarray) -> float:
        return self.clock.book([(stop - start) * self.record_bytes for start, stop in runs(ids)])


class _ThrottledTransfer(Transfer):
    """A transfer that is not done before `due`."""

    def __init__(self, inner: Transfer, clock: DeviceClock, due: float) -> None:
        self._inner, self._clock, self._due = inner, clock, due
        self.runs = inner.runs

    def done(self) -> bool:
        return self._inner.done() and self._clock.passed(self._due)

    def drop(self) -> None:
        self._inner.drop()

    def wait(self) -> None:
        self._inner.wait()

    def finish(self) -> None:
        self._inner.finish()
        self._clock.wait_until(self._due)
        if self.finished_at is None:
            self.finished_at = max(self._due, self._inner.finished_at or self._due)
