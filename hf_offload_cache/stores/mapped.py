"""Reads through a memory map: the kernel fetches advised pages, one gather copies them, and they are dropped again."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import torch

from ..errors import StoreError, StoreFullError, is_full
from .base import check_batch, check_range, runs
from .file import FileStore
from .record_file import REFUSALS, ShortReadError, advise_map, drop_pages, open_scratch

# A table on the disk, in memory while it is used

class MappedTable:
    """A copy of `array` in an unnamed file in `directory`, mapped: use `array` of this object from then on.

    The file goes with the last view of the array. Its resident part is in the system's page cache. The first `rest`
    drops all of that, later ones all pages but those still to be written. A page that the device cannot return ends the
    process (SIGBUS), as with the `mapped` engine. Raises `StoreFullError`, `StoreError`, with nothing left behind.

    Attributes:
        descriptor: the file's descriptor while this object lives.
    """

    def __init__(self, directory: Path, name: str, array: np.ndarray) -> None:
        size = max(1, array.nbytes)
        self._file = open_scratch(directory, name)
        descriptor = self._file.fd
        try:
            _take_space(descriptor, size)  # a page without space would end the process later
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            self._file.close()
            kind = StoreFullError if is_full(error) else StoreError
            raise kind(
                error.errno, f"{name}: no table of {size:,} bytes in {str(directory)!r} ({error.strerror}): free some "
                f"space, raise `ulimit -n` if there are too many files, or keep it in memory"
            ) from error  # fmt: skip
        self.descriptor, self.nbytes = descriptor, size
        self._name, self._fresh = name, True
        self._failed: tuple[int, str] | None = None
        self.array = np.frombuffer(self._map, dtype=array.dtype, count=array.size).reshape(array.shape)
        self.array[...] = array

    def will_need(self) -> None:
        """Let the system begin to read the table."""
        advise_map(self._map, "MADV_WILLNEED")

    def rest(self) -> None:
        """Drop the table from memory until it is read again. The first call waits until the table is on the disk. If it
        cannot be written, this call and all later ones raise `StoreError`, because the system may lose its pages at any
        time."""
        if self._fresh:
            self._fresh = False
            try:
                self._map.flush()
            except OSError as error:
                self._failed = error.errno or 0, str(error.strerror)
        if self._failed is not None:
            raise StoreError(
                self._failed[0], f"{self._name}: its table could not be written ({self._failed[1]}); the records are "
                "still on the disk: `reset` the cache, or keep the table in memory"
            )  # fmt: skip
        advise_map(self._map, "MADV_DONTNEED")
        drop_pages(self.descriptor)


def _take_space(descriptor: int, size: int) -> None:
    """Make an empty file `size` bytes long, without holes."""
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


class MappedStore(FileStore):
    """A file store read from a map of the file; works on every file system that can map files.

    `advise` makes the kernel read ahead without a thread of ours; `read` copies pages and then drops them from the map
    and from the page cache. Pages advised and not read yet count as `memory_bytes`. Writes bypass the page cache if the
    file system allows that. A device error while a page is read kills the process (SIGBUS): the kernel reports it in no
    other way through a map.
    """

    advises = True

    def _begin(self) -> None:
        self._tables = threading.Lock()
        # Replaced as a pair when the file grows: a read in another thread keeps the pair that it began with, and the
        # old map goes when the last such read has ended. Never `mmap.close`: the tensor does not hold it open.
        self._map: tuple[mmap.mmap, torch.Tensor] | None = None
        self._advised = np.zeros(0, dtype=bool)
        if not self._frozen:
            self._file.try_direct()  # for writes; without it they pass through the page cache
        elif self._capacity:
            try:
                self._resized(self._capacity * self.record_bytes)
            except OSError as error:
                raise self._failure("mapping", error) from error

    @classmethod
    def planned_tables(cls, records: int, record_bytes: int, tag_bytes: int) -> int:
        """See `FileStore.planned_tables`; one more byte per record says whether it was advised."""
        advised = cls.planned_capacity(records, record_bytes)
        return super().planned_tables(records, record_bytes, tag_bytes) + advised

    def _resized(self, size: int) -> None:
        mapped = mmap.mmap(self._file.fd, size, prot=mmap.PROT_READ)
        advise_map(mapped, "MADV_RANDOM")
        # By address, because torch takes no read-only buffer. `view` keeps the map, and the tensor keeps the view.
        view = (ctypes.c_ubyte * size).from_address(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
        setattr(view, "map", mapped)  # noqa: B010  (ctypes says nothing of attributes)
        records = torch.frombuffer(view, dtype=torch.uint8).view(-1, self.record_bytes)
        with self._tables:
            self._advised = np.concatenate([self._advised, np.zeros(len(records) - len(self._advised), dtype=bool)])
        self._map = (mapped, records)

    def advise(self, ids: np.ndarray) -> None:
        """Advise the system of coming reads; does nothing if it takes no advice. Raises `StoreError` for records that
        do not exist, or if the disk fails."""
        check_range(self.name, ids, self._capacity, self.first_id)
        if self._map is None or len(ids) == 0:
            return
        mapped = self._map[0]
        with self._tables:
            self._advised[ids] = True
        try:
            for start, length in self._page_ranges(ids):
                advise_map(mapped, "MADV_WILLNEED", start, length)
        except OSError as error:
            raise self._failure(f"advising {self._describe(ids)}", error) from error

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        check_batch(ids, out, self.record_bytes, aligned=True)
        check_range(self.name, ids, self._capacity, self.first_id)
        if self._map is None or len(ids) == 0:
            return
        mapped, records = self._map
        try:
            self._file.check()
            end = (int(ids.max()) + 1) * self.record_bytes
            if self._file.size < end:  # a page behind the end would kill the process
                raise ShortReadError(
                    errno.EIO, f"short read: the file ends at byte {self._file.size}, before byte {end}"
                )
            torch.index_select(records, 0, torch.from_numpy(np.require(ids, requirements=["C", "W"])), out=out)
            requests = self._drop(mapped, ids)
        except OSError as error:
            raise self._failure(f"reading {self._describe(ids)}", error) from error
        finally:
            del mapped, records  # a kept error keeps this frame, but must not keep the map and its descriptor
        self.count_read(requests, out.numel())
        self._checked(ids, out)

    def free(self, ids: np.ndarray) -> None:
        super().free(ids)
        if self._map is not None and not self._frozen and len(stale := ids[self._advised[ids]]):
            self._drop(self._map[0], stale)

    def _drop(self, mapped: mmap.mmap, ids: np.ndarray) -> int:
        """Drop the pages of `ids`; returns the number of runs."""
        ranges = self._page_ranges(ids)
        for start, length in ranges:
            advise_map(mapped, "MADV_DONTNEED", start, length)  # a mapped page cannot leave the page cache
            self._file.drop(start, length)
        with self._tables:
            self._advised[ids] = False
        return len(ranges)

    def _page_ranges(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """Start and length in bytes of each run, extended to complete pages (a page can be larger than a record)."""
        ranges = []
        for first, stop in runs(ids):
            start = int(ids[first]) * self.record_bytes
            end = (int(ids[stop - 1]) + 1) * self.record_bytes
            start -= start % mmap.PAGESIZE
            ranges.append((start, end - start))
        return ranges

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + int(np.count_nonzero(self._advised)) * self.record_bytes

    @property
    def tables_bytes(self) -> int:
        return super().tables_bytes + self._advised.nbytes

    def close(self) -> None:
        self._map = None
        self._advised = np.zeros(0, dtype=bool)
        super().close()
