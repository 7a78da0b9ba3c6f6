"""What the stores on a file share: space, growth, writes. An engine adds how records are read."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import torch

from hf_offload_cache.errors import StoreError, StoreFullError
from hf_offload_cache.stores.base import DEVICE_BLOCK, Store, runs
from hf_offload_cache.stores.checks import check_batch, check_range, describe
from hf_offload_cache.stores.freelist import FreeList
from hf_offload_cache.stores.scratch import ScratchFile

SMALLEST_STEP_RECORDS = 64
LARGEST_STEP_BYTES = 64 * 2**20
"""The file grows by half of itself, within these bounds, or by what was asked for when that is more."""


class FileStore(Store):
    """Records one after another in a scratch file, record `i` at byte `i * record_bytes`.

    A subclass implements `read`, and may override `_resized` to follow the file's size.
    """

    def __init__(self, directory: str | os.PathLike[str], record_bytes: int, name: str) -> None:
        super().__init__(record_bytes, name)
        self._file = ScratchFile(directory, name)
        self._free = FreeList(name)
        self._capacity = 0
        self._counters = threading.Lock()

    def allocate(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        missing = count - self._free.available
        if missing > 0:
            self._grow(missing)
        return self._free.take(count)

    def _grow(self, missing: int) -> None:
        step = min(max(SMALLEST_STEP_RECORDS, self._capacity // 2), LARGEST_STEP_BYTES // self.record_bytes)
        step = max(step, missing)
        needed = missing * self.record_bytes
        try:
            available = self._file.free_bytes()
            if available is not None and available < needed:
                raise StoreFullError(
                    errno.ENOSPC,
                    f"{self.name}: {missing} records need {needed:,} bytes and the disk of "
                    f"{self._file.directory!r} has {max(0, available):,} free; make room or give another `path`",
                )
            if available is not None and available < step * self.record_bytes:
                step = missing
            size = (self._capacity + step) * self.record_bytes
            self._file.resize(size)
            self._resized(size)
        except StoreError:
            raise
        except OSError as error:
            raise self._failure(f"growing by {missing} records", error) from error
        self._free.grow(step)
        self._capacity += step

    def _resized(self, size: int) -> None:
        """The file is `size` bytes long now; records in the new part are handed out after this returns."""

    def free(self, ids: np.ndarray) -> None:
        self._free.give(ids)

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        check_batch(ids, records, self.record_bytes)
        check_range(self.name, ids, self._capacity)
        if len(ids) == 0:
            return
        data = records.numpy().data.cast("B")
        bounce = self._file.direct and records.data_ptr() % DEVICE_BLOCK
        write = self._file.write_unaligned if bounce else self._file.write
        for start, stop in runs(ids):
            try:
                write(data[start * self.record_bytes : stop * self.record_bytes], int(ids[start]) * self.record_bytes)
            except OSError as error:
                raise self._failure(f"writing {describe(ids[start:stop])}", error) from error
        with self._counters:
            self.bytes_written += len(data)

    def _count_read(self, requests: int, nbytes: int) -> None:
        with self._counters:
            self.reads += requests
            self.bytes_read += nbytes

    def _failure(self, doing: str, error: OSError) -> StoreError:
        """The error to raise from `error`: it names the store, the records and the place."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = StoreFullError if full else StoreError
        advice = "; make room or give another `path`" if full else ""
        reason = error.strerror or str(error)
        return kind(error.errno or errno.EIO, f"{self.name}: {doing} in {self._file.directory!r}: {reason}{advice}")

    @property
    def disk_bytes(self) -> int:
        return self._file.disk_bytes

    @property
    def memory_bytes(self) -> int:
        return self._file.unsynced

    def close(self) -> None:
        self._capacity = 0
        self._file.unsynced = 0
        self._file.close()
