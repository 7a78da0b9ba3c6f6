"""A table on the disk, whose pages are in memory while they are used."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from ..errors import StoreError, StoreFullError
from .scratch import open_scratch


class MappedTable:
    """A copy of `array` in a file without a name in `directory`, mapped: `array` is the copy from then on.

    The file goes with the last view of the array. What is in memory of it belongs to the system's page cache, which may
    give it up at any time; `rest` lets go of what this process has. A page that the device cannot give back ends the
    process (SIGBUS), as with the `mapped` engine. Raises `StoreFullError`, `StoreError`, with nothing left behind.
    """

    def __init__(self, directory: Path, name: str, array: np.ndarray) -> None:
        size = max(1, array.nbytes)
        descriptor = open_scratch(directory, name)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)  # a page that found no space later would end the process
            else:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
            raise kind(
                error.errno, f"{name}: no table of {size:,} bytes in {str(directory)!r} ({error.strerror}): free some "
                f"space, raise `ulimit -n` where files are too many, or keep it in memory"
            ) from error  # fmt: skip
        finally:
            os.close(descriptor)
        self.array = np.frombuffer(self._map, dtype=array.dtype, count=array.size).reshape(array.shape)
        self.array[...] = array

    def will_need(self) -> None:
        """It is about to be read: the system may begin."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED)

    def rest(self) -> None:
        """It is not read for a while: none of it is this process's memory until it is."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
