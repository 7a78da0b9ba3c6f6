"""Records in host memory: the store that cannot fail, and the twin that the others are tested against."""

from __future__ import annotations

import threading

import numpy as np
import torch

from hf_offload_cache.stores.base import Store, aligned_empty, runs
from hf_offload_cache.stores.checks import check_batch, check_range
from hf_offload_cache.stores.freelist import FreeList

CHUNK_BYTES = 4 * 2**20
"""Memory is taken in pieces of about this size, so that growing copies nothing."""


class MemoryStore(Store):
    """Records in a list of tensors of equal size. `read` copies on the calling thread: there is nothing to await."""

    advises = True

    def __init__(self, record_bytes: int, name: str) -> None:
        super().__init__(record_bytes, name)
        self._chunk_records = max(1, CHUNK_BYTES // record_bytes)
        self._chunks: list[torch.Tensor] = []
        self._free = FreeList(name)
        self._counters = threading.Lock()

    def allocate(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        while self._free.available < count:
            self._chunks.append(aligned_empty(self._chunk_records, self.record_bytes))
            self._free.grow(self._chunk_records)
        return self._free.take(count)

    def free(self, ids: np.ndarray) -> None:
        self._free.give(ids)

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        check_batch(ids, records, self.record_bytes)
        check_range(self.name, ids, self._capacity)
        source = records.numpy()
        for chunk, rows, positions in self._by_chunk(ids):
            chunk[rows] = source[positions]
        with self._counters:
            self.bytes_written += records.numel()

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        check_batch(ids, out, self.record_bytes, aligned=True)
        check_range(self.name, ids, self._capacity)
        target = out.numpy()
        for chunk, rows, positions in self._by_chunk(ids):
            target[positions] = chunk[rows]
        with self._counters:
            self.reads += len(runs(ids))
            self.bytes_read += out.numel()

    def _by_chunk(self, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each chunk that holds some of `ids`: the chunk, the rows in it, and their positions in `ids`."""
        indices, rows = np.divmod(ids, self._chunk_records)
        parts = []
        for index in np.unique(indices).tolist():
            positions = np.flatnonzero(indices == index)
            parts.append((self._chunks[index].numpy(), rows[positions], positions))
        return parts

    @property
    def _capacity(self) -> int:
        return len(self._chunks) * self._chunk_records

    @property
    def disk_bytes(self) -> int:
        return 0

    @property
    def memory_bytes(self) -> int:
        return self._capacity * self.record_bytes

    def close(self) -> None:
        self._chunks.clear()
