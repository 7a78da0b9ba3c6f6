"""Reads that bypass the page cache, straight into the caller's memory."""

from __future__ import annotations

import errno
import os

import numpy as np
import torch

from ..errors import StoreError
from .base import byte_view, runs
from .checks import check_batch, check_range
from .file import FileStore, FrozenFile
from .guard import RecordGuard


class DirectStore(FileStore):
    """A file store read with `O_DIRECT`: one `preadv` a run of adjacent records, nothing left in the page cache.

    A read keeps one request in flight, so several threads should share a batch; each checks what it has read. Raises
    `StoreError` with the reason when the file system of `place` does not do `O_DIRECT`.
    """

    advises = False

    def __init__(
        self,
        place: str | os.PathLike[str] | FrozenFile,
        record_bytes: int,
        name: str,
        guard: RecordGuard | None = None,
    ) -> None:
        super().__init__(place, record_bytes, name, guard)
        reason = None if self._frozen else self._file.try_direct()
        if reason is not None:
            self.close()
            raise StoreError(errno.EINVAL, f'{name}: {reason}; use engine="mapped" or another `path`')

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        check_batch(ids, out, self.record_bytes, aligned=True)
        check_range(self.name, ids, self._capacity, self.first_id)
        if len(ids) == 0:
            return
        buffer = byte_view(out)
        ranges = runs(ids)
        for start, stop in ranges:
            try:
                self._file.read(
                    buffer[start * self.record_bytes : stop * self.record_bytes], int(ids[start]) * self.record_bytes
                )
            except OSError as error:
                raise self._failure(f"reading {self._describe(ids[start:stop])}", error) from error
        self.count_read(len(ranges), len(buffer))
        self._checked(ids, out)
