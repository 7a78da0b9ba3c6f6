"""Records in host memory: the store that cannot fail, and the plain twin that the others are tested against."""

from __future__ import annotations

import errno
import threading

import numpy as np
import torch

from ..errors import StoreError
from ..memory.account import RECORDS, MemoryAccount
from .base import FreezableStore, aligned_empty, byte_view, check_batch, check_range, describe, pinned_empty, runs
from .guard import Checksums, RecordGuard
from .record_file import new_file

# Allocation of record ids

class FreeList:
    """Hands out record ids, adjacent if possible, and takes them back. One thread only.

    Takes `RECORD_BYTES` of host memory per record.
    """

    RECORD_BYTES = 1

    def __init__(self, name: str) -> None:
        self._name = name
        self._taken = np.zeros(0, dtype=bool)
        self._lowest = 0  # every record below is allocated
        self.available = 0

    @property
    def capacity(self) -> int:
        """Records that exist, allocated or not."""
        return self._taken.size

    @property
    def taken(self) -> np.ndarray:
        """Whether each record is allocated (bool), up to the last one that is: a copy."""
        return self._taken[: int(self._taken.nonzero()[0].max(initial=-1)) + 1].copy()

    def grow(self, count: int) -> None:
        """Add `count` free records at the end."""
        self._taken = np.concatenate([self._taken, np.zeros(count, dtype=bool)])
        self.available += count

    def take(self, count: int) -> np.ndarray:
        """`count` (at most `available`) ascending ids: the first gap that fits them all, else the lowest free ones."""
        assert 0 <= count <= self.available
        if count == 0:
            return np.empty(0, dtype=np.int64)
        free = np.flatnonzero(~self._taken[self._lowest :]).astype(np.int64) + self._lowest
        gaps = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        first = int(gaps[0]) if len(gaps) else 0
        ids = free[first : first + count].copy()
        self._taken[ids] = True
        self.available -= count
        if first == 0:
            self._lowest = int(ids[-1]) + 1
        return ids

    def give(self, ids: np.ndarray) -> None:
        """Take `ids` back. Raises `StoreError`, with nothing changed, for an id that is not allocated or occurs
        twice."""
        if len(ids) == 0:
            return
        check_range(self._name, ids, self.capacity)
        if not self._taken[ids].all():
            raise StoreError(errno.EINVAL, f"{self._name}: {describe(ids[~self._taken[ids]])} not allocated")
        if len(np.unique(ids)) != len(ids):
            raise StoreError(errno.EINVAL, f"{self._name}: {describe(ids)} freed, one of them twice")
        self._taken[ids] = False
        self.available += len(ids)
        self._lowest = min(self._lowest, int(ids.min()))


CHUNK_BYTES = 4 * 2**20
"""Memory is allocated in chunks of at most this size, so that growing copies nothing; or of a record, if that is
larger."""


class MemoryStore(FreezableStore):
    """Records in a list of tensors of equal size. `read` copies on the calling thread: nothing is awaited.

    Nothing is checked here. An exported file is sealed by a fresh guard of `guard`'s kind (None: checksums).

    Args:
        account: books memory for records before it is allocated, until somebody observes it anew; None: only they do.
        pinned: in pages that a GPU reads by itself, while there are any. torch keeps them for later use, also after
            `close`: `torch.accelerator.empty_host_cache` releases them.
    """

    advises = True

    def __init__(
        self, record_bytes: int, name: str, guard: RecordGuard | None = None, *, pinned: bool = False,
        account: MemoryAccount | None = None,
    ) -> None:  # fmt: skip
        super().__init__(record_bytes, name)
        self._chunk_records = max(1, CHUNK_BYTES // record_bytes)
        self._pinned, self._account = pinned, account
        self._chunks: list[torch.Tensor] = []
        self._free = FreeList(name)
        self._tables = threading.Lock()
        self._guard = Checksums() if guard is None else guard
        self._written = np.zeros(0, dtype=bool)
        self._frozen = False

    @staticmethod
    def planned(records: int, record_bytes: int, *, pinned: bool = False) -> tuple[int, int]:
        """`memory_bytes` and `tables_bytes` of a store in which at most `records` are allocated at once."""
        chunk = max(1, CHUNK_BYTES // record_bytes)
        chunks = -(-records // chunk)
        return chunks * _taken(chunk * record_bytes, pinned), chunks * chunk * (FreeList.RECORD_BYTES + 1)

    @classmethod
    def copy_of(cls, store: FreezableStore, guard: RecordGuard, *, pinned: bool = False) -> MemoryStore:
        """A frozen copy of a frozen store, with the same ids. `guard`, `pinned`: as for a new one. Raises the errors of
        `store.read`, with nothing left behind."""
        copy = cls(store.record_bytes, store.name, guard, pinned=pinned)
        copy.allocate(store.capacity)
        written = np.flatnonzero(store.written)
        for start in range(0, len(written), copy._chunk_records):
            ids = written[start : start + copy._chunk_records]
            buffer = aligned_empty(len(ids), store.record_bytes)
            store.read(ids, buffer)
            store.verify(ids, buffer)  # they get new tags when they are saved
            copy.write(ids, buffer)
        copy.freeze()
        return copy

    def allocate(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        self._check_not_frozen(self._frozen)
        while self._free.available < count:
            empty = pinned_empty if self._pinned else aligned_empty
            if self._account is not None:
                self._account.hold(RECORDS, _taken(self._chunk_records * self.record_bytes, self._pinned))
            self._chunks.append(empty(self._chunk_records, self.record_bytes))
            self._free.grow(self._chunk_records)
            with self._tables:  # changes of another thread must not be lost
                self._written = np.concatenate([self._written, np.zeros(self._chunk_records, dtype=bool)])
        return self._free.take(count)

    def free(self, ids: np.ndarray) -> None:
        if not self._frozen:
            self._free.give(ids)
            with self._tables:
                self._written[ids] = False

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        check_batch(ids, records, self.record_bytes)
        check_range(self.name, ids, self.capacity, self.first_id)
        self._check_not_frozen(self._frozen)
        source, there = records.numpy(), self.in_place(ids)
        if there is None or there.data_ptr() != records.data_ptr():
            for chunk, rows, positions in self._by_chunk(ids):
                chunk[rows] = source[positions]
        with self._tables:
            self._written[ids] = True
        self.count_written(records.numel())

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        check_batch(ids, out, self.record_bytes, aligned=True)
        check_range(self.name, ids, self.capacity, self.first_id)
        target = out.numpy()
        for chunk, rows, positions in self._by_chunk(ids):
            target[positions] = chunk[rows]
        self.count_read(len(runs(ids)), out.numel())

    @property
    def in_memory(self) -> bool:
        return True

    def read_parts(self, ids: np.ndarray, first_bytes: np.ndarray, out: torch.Tensor) -> None:
        check_range(self.name, ids, self.capacity, self.first_id)
        target, size = out.numpy(), out.shape[1]
        for chunk, rows, positions in self._by_chunk(ids):
            windows = np.lib.stride_tricks.sliding_window_view(chunk.reshape(-1), size)
            target[positions] = windows[rows * self.record_bytes + first_bytes[positions]]
        self.count_read(len(ids), out.numel())

    def addresses(self, ids: np.ndarray) -> np.ndarray | None:
        chunks, rows = np.divmod(ids, self._chunk_records)
        some = np.unique(chunks)
        if not all(self._chunks[chunk].is_pinned() for chunk in some.tolist()):
            return None
        begin = np.zeros(len(self._chunks), dtype=np.int64)
        begin[some] = [self._chunks[chunk].data_ptr() for chunk in some.tolist()]
        return begin[chunks] + rows * self.record_bytes

    def pinned_runs(self, ids: np.ndarray) -> list[torch.Tensor] | None:
        if not self._pinned:
            return None
        chunks, rows = np.divmod(ids, self._chunk_records)
        if not all(self._chunks[chunk].is_pinned() for chunk in np.unique(chunks).tolist()):
            return None
        together = runs(ids + chunks)  # a chunk's end counts as a gap
        return [self._chunks[chunks[first]][rows[first] : rows[first] + stop - first] for first, stop in together]

    def in_place(self, ids: np.ndarray) -> torch.Tensor | None:
        if self._frozen or not self._pinned or not ids.size or (np.diff(ids) != 1).any():
            return None
        pinned = self.pinned_runs(ids)
        return pinned[0] if pinned is not None and len(pinned) == 1 else None

    def _by_chunk(self, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each chunk with some of `ids`: the chunk, the rows in it, and their positions in `ids`."""
        indices, rows = np.divmod(ids, self._chunk_records)
        parts = []
        for index in np.unique(indices).tolist():
            positions = np.flatnonzero(indices == index)
            parts.append((self._chunks[index].numpy(), rows[positions], positions))
        return parts

    @property
    def capacity(self) -> int:
        return len(self._written)

    @property
    def written(self) -> np.ndarray:
        return self._written.copy()

    def freeze(self) -> None:
        if self._frozen:
            return
        count = len(self._free.taken)
        self._written = self._written[:count].copy()
        del self._chunks[-(-count // self._chunk_records) :]
        self._free = FreeList(self.name)
        self._frozen = True

    def share(self) -> FreezableStore:
        self._check_frozen(self._frozen, "shared")
        other = type(self)(self.record_bytes, self.name, self._guard, pinned=self._pinned)
        other._chunks, other._written, other._frozen = list(self._chunks), self._written, True
        return other

    def export(self, folder_fd: int, name: str, live: np.ndarray | None = None) -> RecordGuard:
        self._check_frozen(self._frozen, "exported")
        guard = self._guard.fresh()
        guard.resize(self.capacity)
        ids = np.flatnonzero(self._written if live is None else self._written & live)
        size, taken = self.capacity * self.record_bytes, len(ids) * self.record_bytes
        buffer = aligned_empty(max(1, CHUNK_BYTES // self.record_bytes), self.record_bytes)
        try:
            with new_file(folder_fd, name, size, taken) as file:
                for first, stop in runs(ids):
                    for start in range(first, stop, len(buffer)):
                        some = ids[start : min(stop, start + len(buffer))]
                        for chunk, rows, positions in self._by_chunk(some):
                            buffer.numpy()[positions] = chunk[rows]
                        sealed = guard.seal(some, buffer[: len(some)])
                        file.write(byte_view(sealed), int(some[0]) * self.record_bytes)
        except OSError as error:
            kind = type(error) if isinstance(error, StoreError) else StoreError
            raise kind(error.errno, f"{self.name}: saving as {name!r}: {error.strerror}") from error
        return guard

    @property
    def disk_bytes(self) -> int:
        return 0

    @property
    def memory_bytes(self) -> int:
        pinned, nbytes = self._pinned_chunks, self._chunk_records * self.record_bytes
        return pinned * _taken(nbytes, True) + (len(self._chunks) - pinned) * nbytes

    @property
    def pageable_bytes(self) -> int:
        pageable = len(self._chunks) - self._pinned_chunks if self._pinned else 0
        return pageable * self._chunk_records * self.record_bytes

    @property
    def _pinned_chunks(self) -> int:
        return sum(chunk.is_pinned() for chunk in self._chunks) if self._pinned else 0

    @property
    def tables_bytes(self) -> int:
        return self._free.capacity + self._written.nbytes

    def close(self) -> None:
        self._chunks.clear()
        self._written = np.zeros(0, dtype=bool)


def _taken(nbytes: int, pinned: bool) -> int:
    """Memory of a chunk: torch pins powers of two."""
    return 1 << (nbytes - 1).bit_length() if pinned else nbytes
