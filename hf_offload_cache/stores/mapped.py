"""Reads through a memory map: the kernel fetches what was advised, one gather copies it, and the pages go again."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading

import numpy as np
import torch

from .base import runs
from .checks import check_batch, check_range
from .file import FileStore, FrozenFile
from .guard import RecordGuard
from .record_file import ShortReadError, advise_map


class MappedStore(FileStore):
    """A file store read from a map of the file; works on every file system that can map files.

    `advise` makes the kernel read ahead without a thread of ours; `read` copies and then drops the pages from the map
    and from the page cache. Pages that were advised and not read yet count as `memory_bytes`. Writes bypass the page
    cache where the file system allows that. A device error while a page is being read kills the process (SIGBUS):
    the kernel has no other way to say so through a map.
    """

    advises = True

    def __init__(
        self,
        place: str | os.PathLike[str] | FrozenFile,
        record_bytes: int,
        name: str,
        guard: RecordGuard | None = None,
    ) -> None:
        super().__init__(place, record_bytes, name, guard)
        self._tables = threading.Lock()
        # Replaced as a pair when the file grows: a read in another thread keeps the pair that it began with, and the
        # old map goes when the last such read has ended. Never `mmap.close`: the tensor does not hold it open.
        self._map: tuple[mmap.mmap, torch.Tensor] | None = None
        self._advised = np.zeros(0, dtype=bool)
        if not self._frozen:
            self._file.try_direct()  # for the writes; without it they go through the page cache and are dropped there
        elif self._capacity:
            try:
                self._resized(self._capacity * record_bytes)
            except OSError as error:
                failure = self._failure("mapping", error)
                self.close()
                raise failure from error

    @classmethod
    def planned_tables(cls, records: int, record_bytes: int, tag_bytes: int) -> int:
        """See `FileStore.planned_tables`; whether a record was advised takes a byte."""
        advised = cls.planned_capacity(records, record_bytes)
        return super().planned_tables(records, record_bytes, tag_bytes) + advised

    def _resized(self, size: int) -> None:
        mapped = mmap.mmap(self._file.fd, size, prot=mmap.PROT_READ)
        advise_map(mapped, "MADV_RANDOM")
        # By its address: torch takes no buffer that it may not write to. `view` keeps the map, and the tensor the view.
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
            if self._file.size < end:  # touching a page behind the end would kill the process
                raise ShortReadError(
                    errno.EIO, f"short read: the file ends at byte {self._file.size}, before byte {end}"
                )
            torch.index_select(records, 0, torch.from_numpy(np.require(ids, requirements=["C", "W"])), out=out)
            requests = self._drop(mapped, ids)
        except OSError as error:
            raise self._failure(f"reading {self._describe(ids)}", error) from error
        finally:
            del mapped, records  # whoever keeps an error keeps this frame: not the map, nor its descriptor, with it
        self.count_read(requests, out.numel())
        self._checked(ids, out)

    def free(self, ids: np.ndarray) -> None:
        super().free(ids)
        if self._map is not None and not self._frozen and len(stale := ids[self._advised[ids]]):
            self._drop(self._map[0], stale)

    def _drop(self, mapped: mmap.mmap, ids: np.ndarray) -> int:
        """Let go of the pages of `ids`; the number of runs."""
        ranges = self._page_ranges(ids)
        for start, length in ranges:
            advise_map(mapped, "MADV_DONTNEED", start, length)  # a page that is mapped cannot leave the page cache
            self._file.drop(start, length)
        with self._tables:
            self._advised[ids] = False
        return len(ranges)

    def _page_ranges(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """Start and length in bytes of each run, widened to whole pages (a page can be larger than a record)."""
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
