"""Stores around a store: slower, or failing, on purpose."""

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
from ..stores.base import FreezableStore, Store, require_freezable
from ..stores.guard import RecordGuard


def _inner(name: str) -> Any:
    """An attribute of the inner store, as one of the wrapper that may be set."""

    def get(store: WrapperStore) -> int:
        return getattr(store.inner, name)

    def put(store: WrapperStore, value: int) -> None:
        setattr(store.inner, name, value)

    return property(get, put)


class WrapperStore(FreezableStore):
    """Delegates everything to `inner`, counters too. A wrapper overrides what it changes.

    It can be frozen where `inner` can: elsewhere what that needs raises `TypeError`.

    `share` gives a share of `inner` without the wrapper, unless the wrapper says otherwise.
    """

    def __init__(self, inner: Store) -> None:  # the base would set counters of its own
        self.inner = inner
        self.advises = inner.advises
        self.record_bytes = inner.record_bytes
        self.name = inner.name

    bytes_read = _inner("bytes_read")
    bytes_written = _inner("bytes_written")
    reads = _inner("reads")

    @property
    def first_id(self) -> int:
        return getattr(self.inner, "first_id", 0)

    @first_id.setter
    def first_id(self, value: int) -> None:
        self._freezable.first_id = value

    @property
    def _freezable(self) -> FreezableStore:
        return require_freezable(self.inner)

    @property
    def directory(self) -> str | None:
        return self.inner.directory

    def allocate(self, count: int) -> np.ndarray:
        return self.inner.allocate(count)

    def free(self, ids: np.ndarray) -> None:
        self.inner.free(ids)

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        self.inner.write(ids, records)

    def advise(self, ids: np.ndarray) -> None:
        self.inner.advise(ids)

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        self.inner.read(ids, out)

    @property
    def in_memory(self) -> bool:
        return self.inner.in_memory

    def read_parts(self, ids: np.ndarray, first_bytes: np.ndarray, out: torch.Tensor) -> None:
        self.inner.read_parts(ids, first_bytes, out)

    def count_read(self, requests: int, nbytes: int) -> None:
        self.inner.count_read(requests, nbytes)

    def addresses(self, ids: np.ndarray) -> np.ndarray | None:
        return self.inner.addresses(ids)

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    def freeze(self) -> None:
        self._freezable.freeze()

    def share(self) -> FreezableStore:
        return self._freezable.share()

    @property
    def written(self) -> np.ndarray:
        return self._freezable.written

    @property
    def inode(self) -> tuple[int, int] | None:
        return self._freezable.inode

    def verify(self, ids: np.ndarray, records: torch.Tensor) -> None:
        self._freezable.verify(ids, records)

    def export(self, folder_fd: int, name: str, live: np.ndarray | None = None) -> RecordGuard:
        return self._freezable.export(folder_fd, name, live)

    @property
    def disk_bytes(self) -> int:
        return self.inner.disk_bytes

    @property
    def own_disk_bytes(self) -> int:
        return self.inner.own_disk_bytes

    @property
    def tables_bytes(self) -> int:
        return self.inner.tables_bytes

    @property
    def memory_bytes(self) -> int:
        return self.inner.memory_bytes

    def close(self) -> None:
        self.inner.close()


class LatencyStore(WrapperStore):
    """A store whose every `read` first takes `seconds`.

    `sleep` is what a read does with the seconds, on the thread that reads: a test may pass a function that waits for
    an event instead. The store does not advise unless told to, so that the seconds fall to the reader threads.
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
        return LatencyStore(self._freezable.share(), self._seconds, sleep=self._sleep, advises=self.advises)


class FaultyStore(WrapperStore):
    """A store whose `number`-th call (from 1, and the `times - 1` calls after it) of `operation` fails.

    It raises `StoreError` (`StoreFullError` for ENOSPC) with `error` as errno, having done nothing; with `short`, a
    read fills the first half of `out` and a write keeps the first half of the records before it raises. Any thread.
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
        self._operation = operation
        self._failing = range(number, number + times)
        self._errno = error
        self._short = short
        self._lock = threading.Lock()

    def _fails(self, operation: str) -> bool:
        if operation != self._operation:
            return False
        with self._lock:
            self.calls += 1
            return self.calls in self._failing

    def _fault(self, operation: str) -> StoreError:
        kind = StoreFullError if self._errno == errno.ENOSPC else StoreError
        return kind(self._errno, f"{self.name}: {operation} was made to fail: {os.strerror(self._errno)}")

    def allocate(self, count: int) -> np.ndarray:
        if self._fails("allocate"):
            raise self._fault("allocate")
        return self.inner.allocate(count)

    def free(self, ids: np.ndarray) -> None:
        if self._fails("free"):
            raise self._fault("free")
        self.inner.free(ids)

    def advise(self, ids: np.ndarray) -> None:
        if self._fails("advise"):
            raise self._fault("advise")
        self.inner.advise(ids)

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        if self._fails("write"):
            if self._short:
                self.inner.write(ids[: len(ids) // 2], records[: len(ids) // 2])
            raise self._fault("write")
        self.inner.write(ids, records)

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        if self._fails("read"):
            if self._short:
                self.inner.read(ids[: len(ids) // 2], out[: len(ids) // 2])
            raise self._fault("read")
        self.inner.read(ids, out)
