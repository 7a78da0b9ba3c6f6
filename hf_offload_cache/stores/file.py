"""Stores in files: space, growth, writes and tags. An engine adds how records are read."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import CorruptRecordError, StoreError, StoreFullError, is_full
from .base import DEVICE_BLOCK, FreezableStore, byte_view, check_batch, check_range, describe, runs
from .guard import Checksums, RecordGuard
from .memory import FreeList
from .record_file import (
    BOUNCE_BYTES,
    MOST_PARTS,
    RecordFile,
    ScratchFile,
    ShortReadError,
    copy_file,
    link_file,
    pieces,
    undo_name,
)

# Nearby records in one request, with zeros for the gaps

THROUGH_BYTES = 32 * 2**10
"""Gaps of up to this many bytes between records written together are written as zeros, so that one request does. 8K
tokens in clusters then take 300 requests instead of 27,000, and 0.4 s instead of 2.7 s, with 1.6 times the bytes."""

_ZEROS = memoryview(mmap.mmap(-1, THROUGH_BYTES))


def spans(ids: np.ndarray, most: int, holding: Callable[[slice], np.ndarray]) -> Iterator[list[slice]]:
    """Group the runs of consecutive `ids`, as slices of positions, into spans to write with one request.

    Runs join a span if the gap between them is at most `most` records, none of which is `holding` data (a range of
    records -> bool); a span has at most half of `MOST_PARTS` runs.
    """
    span: list[slice] = []
    for start, stop in runs(ids):
        if span:
            between = slice(int(ids[start - 1]) + 1, int(ids[start]))
            near = 0 < between.stop - between.start <= most and len(span) < MOST_PARTS // 2
            if not near or holding(between).any():
                yield span
                span = []
        span.append(slice(start, stop))
    if span:
        yield span


class Blanks:
    """Marks of the records of a file that were overwritten with zeros and not written since: `table` (count,), bool.

    `writing` is held from checking which records are empty until zeros are written there, so a record that another
    thread seals meanwhile is written after them. The store's owner may `resize` while another thread writes.
    """

    def __init__(self) -> None:
        self.table = np.zeros(0, dtype=bool)
        self.writing, self._lock = threading.Lock(), threading.Lock()

    def resize(self, count: int) -> None:
        """Have entries for `count` records; existing ones stay."""
        with self._lock:
            before, self.table = self.table, np.zeros(count, dtype=bool)
            self.table[: len(before)] = before[:count]

    def set(self, some: np.ndarray | slice, blank: bool) -> None:
        """Mark these records as blank, or as about to be written."""
        with self._lock:
            self.table[some] = blank

    def write_through(
        self, file: RecordFile, data: memoryview, ids: np.ndarray, span: list[slice], record_bytes: int
    ) -> int:  # fmt: skip
        """Write a span of records from `data`, which has all of `ids`, with zeros between them; returns the bytes of
        zeros. Raises `OSError`; part of the span may be written then."""
        parts, between = list[memoryview](), list[slice]()
        for run in span:
            if parts:
                between.append(slice(int(ids[run.start - 1]) + 1, int(ids[run.start])))
                parts.append(_ZEROS[: (between[-1].stop - between[-1].start) * record_bytes])
            parts.append(data[run.start * record_bytes : run.stop * record_bytes])
        file.write_parts(parts, int(ids[span[0].start]) * record_bytes)
        for gap in between:
            self.set(gap, True)
        return sum(len(part) for part in parts[1::2])


SMALLEST_STEP_RECORDS = 64
LARGEST_STEP_BYTES = 64 * 2**20
"""The file grows by an eighth of its size within these bounds, or by the requested size if that is larger."""

WRONG = 0xFF
"""Overwrites the bytes of a wrong record: not a number in any floating-point type."""


@dataclass(frozen=True)
class FrozenFile:
    """Immutable records for a new store, which takes `file` over. `holes` are the records below `count` without
    data."""

    file: RecordFile
    count: int
    guard: RecordGuard
    holes: np.ndarray


class FileStore(FreezableStore):
    """Records one after another in a file, record `i` at byte `i * record_bytes`.

    The file is a new scratch file in the folder `place`, or the frozen one that `place` is. `guard` (None: checksums,
    checked at every read) seals what is written; its tags belong to this store. One thread at a time writes. Small
    empty gaps between records become zeros (see `Blanks`). A subclass implements `read`, which ends with `_checked`,
    and may override `_begin`, and `_resized` to follow the file's size.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | FrozenFile,
        record_bytes: int,
        name: str,
        guard: RecordGuard | None = None,
    ) -> None:
        super().__init__(record_bytes, name)
        self._free = FreeList(name)
        self._frozen = isinstance(place, FrozenFile)
        self._file: RecordFile
        if isinstance(place, FrozenFile):
            self._file, self._guard = place.file, place.guard
            self._capacity, self._holes = place.count, place.holes
        else:
            self._file = ScratchFile(place, name)
            self._guard = Checksums() if guard is None else guard
            self._capacity, self._holes = 0, np.empty(0, dtype=np.int64)
        self._blanks = Blanks()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Prepare for reading. If this raises, the store closes itself."""

    def allocate(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        self._check_not_frozen(self._frozen)
        missing = count - self._free.available
        if missing > 0:
            self._grow(missing)
        ids = self._free.take(count)
        self._guard.forget(ids)  # if a write fails, the old content must not pass the check
        return ids

    @staticmethod
    def planned_capacity(records: int, record_bytes: int) -> int:
        """The most records that the file has room for if at most `records` are allocated at once."""
        return records + max(SMALLEST_STEP_RECORDS, min(records // 8, LARGEST_STEP_BYTES // record_bytes))

    @classmethod
    def planned_tables(cls, records: int, record_bytes: int, tag_bytes: int) -> int:
        """`tables_bytes` of a store in which at most `records` are allocated at once, with tags of `tag_bytes`."""
        return cls.planned_capacity(records, record_bytes) * (tag_bytes + FreeList.RECORD_BYTES + 1)

    def _grow(self, missing: int) -> None:
        step = min(max(SMALLEST_STEP_RECORDS, self._capacity // 8), LARGEST_STEP_BYTES // self.record_bytes)
        step = max(step, missing)
        needed = missing * self.record_bytes
        try:
            available = self._file.free_bytes()
            if available is not None and available < needed:
                raise StoreFullError(
                    errno.ENOSPC,
                    f"{self.name}: {missing} records need {needed:,} bytes and the disk of "
                    f"{self._file.place!r} has {max(0, available):,} free; make room or give another `path`",
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
        self._guard.resize(self._capacity + step)
        self._blanks.resize(self._capacity + step)
        self._free.grow(step)
        self._capacity += step

    def _resized(self, size: int) -> None:
        """Called when the file has become `size` bytes long, before records in the new part are handed out."""

    def free(self, ids: np.ndarray) -> None:
        if not self._frozen:
            self._free.give(ids)

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        check_batch(ids, records, self.record_bytes)
        check_range(self.name, ids, self._capacity, self.first_id)
        self._check_not_frozen(self._frozen)
        if len(ids) == 0:
            return
        step = max(1, BOUNCE_BYTES // self.record_bytes) if self._guard.copies else len(ids)
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            self._write(part, self._guard.seal(part, records[start : start + step]))
        self.count_written(records.numel())

    def _write(self, ids: np.ndarray, sealed: torch.Tensor) -> None:
        data, size = byte_view(sealed), self.record_bytes
        bounce = self._file.direct and sealed.data_ptr() % DEVICE_BLOCK
        with self._blanks.writing:
            for span in spans(ids, 0 if bounce else THROUGH_BYTES // size, self._guard.holding):
                start, stop, offset = span[0].start, span[-1].stop, int(ids[span[0].start]) * size
                self._blanks.set(ids[start:stop], False)
                try:
                    if len(span) > 1:
                        self.count_written(self._blanks.write_through(self._file, data, ids, span, size))
                    elif bounce:
                        self._file.write_unaligned(data[start * size : stop * size], offset)
                    else:
                        self._file.write(data[start * size : stop * size], offset)
                except OSError as error:
                    raise self._failure(f"writing {self._describe(ids[start:stop])}", error) from error

    @property
    def capacity(self) -> int:
        return self._capacity

    def freeze(self) -> None:
        if self._frozen:
            return
        taken = self._free.taken
        count = len(taken)
        try:
            if self._file.unsynced:
                self._file.sync()  # other stores will read it without counting its pages in the page cache
            self._file.resize(count * self.record_bytes)
        except OSError as error:
            raise self._failure("freezing", error) from error
        self._file.vouch()
        self._frozen = True
        self._capacity = count
        self._guard.resize(count)
        self._guard.forget(np.flatnonzero(~taken))
        self._holes = np.flatnonzero(~self._guard.written & ~self._blanks.table[:count])
        self._blanks.resize(0)
        self._free = FreeList(self.name)

    def share(self) -> FreezableStore:
        return type(self)(self._shared_file(), self.record_bytes, self.name)

    def _shared_file(self) -> FrozenFile:
        """The records once more, for another store to take over. Raises `StoreError` unless they are frozen."""
        self._check_frozen(self._frozen, "shared")
        return FrozenFile(self._file.share(), self._capacity, self._guard, self._holes)

    @property
    def written(self) -> np.ndarray:
        return self._guard.written

    def verify(self, ids: np.ndarray, records: torch.Tensor) -> None:
        wrong = self._guard.recheck(ids, records)
        if wrong.size:
            self._refuse(wrong, ids, records)

    def on_damage(self, told: Callable[[str], object]) -> None:
        self._file.on_damage(told)

    @property
    def inode(self) -> tuple[int, int] | None:
        status = os.fstat(self._file.fd)
        return status.st_dev, status.st_ino

    def export(self, folder_fd: int, name: str, live: np.ndarray | None = None) -> RecordGuard:
        self._check_frozen(self._frozen, "exported")
        guard, size = self._guard, self._capacity * self.record_bytes
        try:
            if live is not None and (guard.written & ~live).any():
                guard = guard.only(live)
            else:
                self._wipe_holes()
                self._file.sync()
                if self._file.size == size and self._link(folder_fd, name):  # otherwise something has written to it
                    return guard
            ranges = self._ranges(np.flatnonzero(guard.written))
            copy_file(self._file, size, ranges, folder_fd, name, self.record_bytes, self._check_piece)
        except CorruptRecordError:
            raise
        except OSError as error:
            raise self._failure(f"saving as {name!r}", error) from error
        return guard

    def _link(self, folder_fd: int, name: str) -> bool:
        """Call `link_file`. A link reads nothing. If something has written to the file since it was opened or frozen,
        or a read has found damage, the complete file is read and checked."""
        if not link_file(self._file, folder_fd, name):
            return False
        try:
            if not self._file.unchanged:
                for piece in pieces(self._file, self._ranges(np.flatnonzero(self.written)), self.record_bytes):
                    self._check_piece(*piece)
        except BaseException as error:
            undo_name(folder_fd, name, error)
            raise
        return True

    def _check_piece(self, start: int, piece: memoryview) -> None:
        """Raise `CorruptRecordError` unless `piece`, records as they are in the file from byte `start` on, is as it was
        written."""
        first, count = start // self.record_bytes, len(piece) // self.record_bytes
        ids, records = np.arange(first, first + count), torch.frombuffer(piece, dtype=torch.uint8).view(count, -1)
        wrong = self._guard.audit(ids, records)
        if wrong.size:
            self._refuse(wrong, ids, records)

    def _wipe_holes(self) -> None:
        """Zero records that were freed before the freeze, e.g. cropped tokens: they must not be saved."""
        if not len(self._holes):
            return
        unchanged = self._file.unchanged
        for first, end in self._ranges(self._holes):
            self._file.wipe(first, end)
        self._holes = self._holes[:0].copy()
        if unchanged:
            self._file.vouch()

    def _ranges(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """Byte ranges in the file of each run of records."""
        edges = [(int(ids[start]), int(ids[stop - 1]) + 1) for start, stop in runs(ids)]
        return [(first * self.record_bytes, end * self.record_bytes) for first, end in edges]

    def _checked(self, ids: np.ndarray, out: torch.Tensor) -> None:
        """Raise `CorruptRecordError` unless the rows of `out`, as they were read, are as they were written to `ids`.
        Decrypts encrypted rows."""
        wrong = self._guard.check(ids, out)
        if wrong.size:
            self._refuse(wrong, ids, out)

    def _refuse(self, wrong: np.ndarray, ids: np.ndarray, out: torch.Tensor) -> None:
        """Raise for the positions `wrong`, at least one, and overwrite their rows."""
        out[torch.from_numpy(wrong)] = WRONG
        verb = "is" if len(wrong) == 1 else "are"
        problem = f"{self.name}: {self._describe(ids[wrong])} {verb} not what was written ({self._guard.reason})"
        self._file.doubt(problem)
        raise CorruptRecordError(
            errno.EIO,
            f"{problem} in {self._file.place!r}: the disk failed, or the file was changed by something else; other "
            f"records are readable, and the lost ones must be computed again",
        )

    def _describe(self, ids: np.ndarray) -> str:
        return describe(ids + self.first_id)

    def _failure(self, work: str, error: OSError) -> StoreError:
        """The error to raise from `error`: it names the store, the records and the place."""
        full = is_full(error)
        kind: type[StoreError] = StoreFullError if full else StoreError
        if isinstance(error, ShortReadError):
            kind = CorruptRecordError
        elif isinstance(error, StoreError):  # its text says more than its number
            kind = type(error)
        advice = "; make room or give another `path`" if full and not isinstance(error, StoreFullError) else ""
        reason = error.strerror or str(error)
        if kind is CorruptRecordError or error.errno == errno.EIO:
            self._file.doubt(f"{self.name}: {work}: {reason}")
        return kind(error.errno or errno.EIO, f"{self.name}: {work} in {self._file.place!r}: {reason}{advice}")

    @property
    def directory(self) -> str | None:
        return self._file.place

    @property
    def disk_bytes(self) -> int:
        return self._file.disk_bytes

    @property
    def memory_bytes(self) -> int:
        return self._file.unsynced

    @property
    def tables_bytes(self) -> int:
        return self._guard.nbytes + self._free.capacity + self._blanks.table.nbytes

    def close(self) -> None:
        self._capacity = 0
        self._file.unsynced = 0
        self._file.close()


# Reads that bypass the page cache

class DirectStore(FileStore):
    """A file store read with `O_DIRECT`: one `preadv` per run of adjacent records; nothing stays in the page cache.

    A read keeps one request in flight, so several threads should share a batch; each checks what it has read. Raises
    `StoreError` with the reason if the file system of `place` has no `O_DIRECT`.
    """

    def _begin(self) -> None:
        reason = None if self._frozen else self._file.try_direct()
        if reason is not None:
            raise StoreError(errno.EINVAL, f'{self.name}: {reason}; use engine="mapped" or another `path`')

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
