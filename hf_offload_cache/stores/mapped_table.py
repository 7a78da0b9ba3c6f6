"""A table on the disk, whose pages are in memory while they are used."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from ..errors import StoreError, StoreFullError
from .record_file import REFUSALS, advise_map, drop_pages
from .scratch import open_scratch


class MappedTable:
    """A copy of `array` in a file without a name in `directory`, mapped: `array` is the copy from then on.

    The file goes with the last view of the array. What is in memory of it is in the system's page cache; `rest` lets go
    of that too, the first time all of it, later on all but what has changed and is still to be written. A page that the
    device cannot give back ends the process (SIGBUS), as with the `mapped` engine. Raises `StoreFullError`,
    `StoreError`, with nothing left behind.

    Attributes:
        descriptor: of the file, as long as this object is there.
    """

    def __init__(self, directory: Path, name: str, array: np.ndarray) -> None:
        size = max(1, array.nbytes)
        self._file = open_scratch(directory, name)
        descriptor = self._file.fd
        try:
            _take_space(descriptor, size)  # a page that found no space later would end the process
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            self._file.close()
            kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
            raise kind(
                error.errno, f"{name}: no table of {size:,} bytes in {str(directory)!r} ({error.strerror}): free some "
                f"space, raise `ulimit -n` where files are too many, or keep it in memory"
            ) from error  # fmt: skip
        self.descriptor, self.nbytes = descriptor, size
        self._name, self._fresh = name, True
        self._failed: tuple[int, str] | None = None
        self.array = np.frombuffer(self._map, dtype=array.dtype, count=array.size).reshape(array.shape)
        self.array[...] = array

    def will_need(self) -> None:
        """It is about to be read: the system may begin."""
        advise_map(self._map, "MADV_WILLNEED")

    def rest(self) -> None:
        """It is not read for a while: none of it is in memory until it is. The first time this waits until it is
        written, as long as the system does. Raises `StoreError` where it cannot be, then and from then on: what the
        system still has of it may be lost at any time."""
        if self._fresh:
            self._fresh = False
            try:
                self._map.flush()
            except OSError as error:
                self._failed = error.errno or 0, str(error.strerror)
        if self._failed is not None:
            raise StoreError(
                self._failed[0], f"{self._name}: its table could not be written ({self._failed[1]}); what is cached is "
                "still on the disk: `reset` the cache, or keep the table in memory"
            )  # fmt: skip
        advise_map(self._map, "MADV_DONTNEED")
        drop_pages(self.descriptor)


def _take_space(descriptor: int, size: int) -> None:
    """Make an empty file `size` bytes long, none of them a hole."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
    zeros = bytes(min(size, 2**20))
    for start in range(0, size, len(zeros)):
        piece = zeros[: size - start]
        if os.pwrite(descriptor, piece, start) != len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
