"""Stores around a store that are slow, or fail, on purpose."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import StoreError, StoreFullError
from ..stores.base import FreezableStore, Store, Transfer, require_freezable, runs


def _attribute(name: str, freezable: bool = False) -> Any:
    """An attribute of the inner store; `freezable`: one that only freezable stores have."""

    def get(store: WrapperStore) -> Any:
        return getattr(store.freezable if freezable else store.inner, name)

    def put(store: WrapperStore, value: Any) -> None:
        setattr(store.freezable if freezable else store.inner, name, value)

    return property(get, put)


def _method(name: str, freezable: bool = False) -> Any:
    def call(store: WrapperStore, *arguments: Any) -> Any:
        return getattr(store.freezable if freezable else store.inner, name)(*arguments)

    return call


class WrapperStore(FreezableStore):
    """Delegates everything to `inner`, counters too. A wrapper overrides what it changes.

    It can be frozen if `inner` can; otherwise freezing and its like raise `TypeError`. `share` gives a share of `inner`
    without the wrapper, unless the wrapper overrides it.
    """

    def __init__(self, inner: Store) -> None:  # the base would set counters of its own
        self.inner = inner
        self.advises = inner.advises
        self.record_bytes = inner.record_bytes
        self.name = inner.name

    @property
    def freezable(self) -> FreezableStore:
        """`inner`. Raises `TypeError` if it cannot be frozen."""
        return require_freezable(self.inner)

    @property
    def first_id(self) -> int:
        return getattr(self.inner, "first_id", 0)

    @first_id.setter
    def first_id(self, value: int) -> None:
        self.freezable.first_id = value

    bytes_read, bytes_written, reads = map(_attribute, ("bytes_read", "bytes_written", "reads"))
    directory, in_memory, capacity = map(_attribute, ("directory", "in_memory", "capacity"))
    disk_bytes, own_disk_bytes = map(_attribute, ("disk_bytes", "own_disk_bytes"))
    memory_bytes, pageable_bytes, tables_bytes = map(_attribute, ("memory_bytes", "pageable_bytes", "tables_bytes"))
    written, inode = _attribute("written", True), _attribute("inode", True)
    allocate, free, write, advise, read = map(_method, ("allocate", "free", "write", "advise", "read"))
    read_parts, count_read, close = map(_method, ("read_parts", "count_read", "close"))
    addresses, in_place, pinned_runs = map(_method, ("addresses", "in_place", "pinned_runs"))
    freeze, share, verify = _method("freeze", True), _method("share", True), _method("verify", True)
    export = _method("export", True)


class LatencyStore(WrapperStore):
    """A store whose reads are delayed by `seconds`.

    `sleep` is called with the seconds in the reading thread: a test may pass a function that waits for an event. By
    default the store does not advise, so that reader threads wait.
    """

    def __init__(
        self, inner: Store, seconds: float, *, sleep: Callable[[float], Any] = time.sleep, advises: bool = False
    ) -> None:
        super().__init__(inner)
        self.advises = advises
        self._seconds = seconds
        self._sleep = sleep

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        self._sleep(self._seconds)
        self.inner.read(ids, out)

    def share(self) -> FreezableStore:
        return LatencyStore(self.freezable.share(), self._seconds, sleep=self._sleep, advises=self.advises)


def _failing(operation: str) -> Any:
    def call(store: FaultyStore, ids: Any, *records: torch.Tensor) -> Any:
        if not store.fails(operation):
            return getattr(store.inner, operation)(ids, *records)
        if store.short:
            half = len(ids) // 2
            getattr(store.inner, operation)(ids[:half], *(part[:half] for part in records))
        kind = StoreFullError if store.error == errno.ENOSPC else StoreError
        raise kind(store.error, f"{store.name}: {operation} was made to fail: {os.strerror(store.error)}")

    return call


class FaultyStore(WrapperStore):
    """A store whose `number`-th call of `operation`, from 1, and the `times - 1` calls after it fail.

    They raise `StoreError` (`StoreFullError` for ENOSPC) with `error` as errno and do nothing; with `short`, a read
    first fills half of `out`, and a write stores half of the records. Any thread.
    """

    def __init__(
        self,
        inner: Store,
        operation: str,
        number: int,
        error: int = errno.EIO,
        *,
        times: int = 1,
        short: bool = False,
        advises: bool = False,
    ) -> None:
        if operation not in ("allocate", "free", "write", "advise", "read"):
            raise ValueError(f"operation must be allocate, free, write, advise or read, got {operation!r}")
        if number < 1 or times < 1:
            raise ValueError(f"number and times count from 1, got {number} and {times}")
        if short and operation not in ("read", "write"):
            raise ValueError(f"short must be False for {operation!r}: only a read or a write moves bytes")
        super().__init__(inner)
        self.advises = advises
        self.calls = 0
        self.error = error
        self.short = short
        self._operation = operation
        self._failing = range(number, number + times)
        self._lock = threading.Lock()

    def fails(self, operation: str) -> bool:
        """Count a call of `operation`; whether it has to fail."""
        if operation != self._operation:
            return False
        with self._lock:
            self.calls += 1
            return self.calls in self._failing

    allocate, free, write, advise, read = map(_failing, ("allocate", "free", "write", "advise", "read"))


class DeviceClock:
    """The times at which one device's requests are done, from all threads and stores together.

    Up to `queue_depth` requests run at once. Each first takes `seconds_per_request` in its place of the queue, and then
    moves its bytes at `bytes_per_second`, one request after the other. So a device is limited by its bandwidth, or by
    its latency over its depth. Any thread.

    Args:
        bytes_per_second: of all requests together.
        seconds_per_request: from a place in the queue to the first byte.
        queue_depth: requests at once.
        now: the time in seconds; a test may pass its own clock.
        sleep: called with the remaining seconds, in the reading thread.

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
        """Queue requests of `sizes` bytes, now and in order. Returns the time at which the last one is done."""
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
        """Sleep until `moment`, unless it has passed."""
        remaining = moment - self._now()
        if remaining > 0:
            self._sleep(remaining)


class ThrottledStore(WrapperStore):
    """A store whose reads take as long as `clock` says, or as long as `inner` takes if that is longer.

    A run of adjacent records is one request, as in `Store.read`. Stores with the same clock share the device. Reads are
    started as `inner` starts them; if it can only block, reader threads sleep. Writes and advice are not delayed.
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
        return ThrottledStore(self.freezable.share(), self.clock)

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
