"""What a store is: a growing array of fixed-size records of bytes. It knows nothing about attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import numpy as np
import torch

DEVICE_BLOCK = 4096
"""Bytes that records are rounded up to, and that buffers and offsets are aligned to: what every device accepts."""


class Store(ABC):
    """The records of one layer.

    `allocate`, `free` and `close` are called by one thread only (the one that runs the model). `read` and `write` may
    run in several threads at once, on different records; the prefetcher keeps a read of a record behind its write.
    A record is immutable from its write until `free`; reading one that was never written gives undefined bytes.

    Attributes:
        record_bytes: size of a record, a multiple of `DEVICE_BLOCK`.
        name: how errors name this store, e.g. "layer 3".
        advises: True when `advise` starts the transfer and `read` should then run on the calling thread;
            False when `read` does the transfer, so that several threads should share it.
        bytes_read, bytes_written, reads: totals since construction: bytes moved from and to the device, alignment
            included, and the number of requests (a run of adjacent records is one).
    """

    advises = False

    def __init__(self, record_bytes: int, name: str) -> None:
        if record_bytes <= 0 or record_bytes % DEVICE_BLOCK:
            raise ValueError(f"record_bytes must be a positive multiple of {DEVICE_BLOCK}, got {record_bytes}")
        self.record_bytes = record_bytes
        self.name = name
        self.bytes_read = 0
        self.bytes_written = 0
        self.reads = 0

    @abstractmethod
    def allocate(self, count: int) -> np.ndarray:
        """Ids (int64, ascending where possible adjacent) of `count` free records; grows the store where needed.

        Raises `StoreFullError` with the numbers, having allocated nothing, when the disk has no room.
        """

    @abstractmethod
    def free(self, ids: np.ndarray) -> None:
        """Give records back for a later `allocate`. Their content may be overwritten from now on."""

    @abstractmethod
    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        """Write `records` (uint8, (n, record_bytes), host memory, contiguous) to `ids`. Blocks until they are written.

        Raises `StoreError` (`StoreFullError` for no space); records of the batch may then be partly written.
        """

    def advise(self, ids: np.ndarray) -> None:  # noqa: B027  (an optional step: a store without advice has nothing to do)
        """Say that `ids` will be read soon; returns at once."""

    @abstractmethod
    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        """Fill `out` (uint8, (n, record_bytes), host memory, aligned to `DEVICE_BLOCK`) with `ids`, in order.

        Blocks until the bytes are there; adjacent ids are one request. Raises `StoreError`; `out` is then undefined.
        """

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes taken on the disk now."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of host memory that hold records now (zero for a store on disk that bypasses the page cache)."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back (descriptors, maps, disk space). Idempotent. No call may follow but `close`."""


def runs(ids: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges [start, stop) of positions in `ids` whose values are consecutive: each one request."""
    if len(ids) == 0:
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    edges = [0, *breaks.tolist(), len(ids)]
    return list(pairwise(edges))


def aligned_empty(count: int, record_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Uninitialised uint8 tensor (count, record_bytes) in host memory whose first byte is aligned to `DEVICE_BLOCK`.

    The caller owns it. `pinned` asks for page-locked memory (needs a CUDA device).
    """
    with torch.inference_mode(False):  # what is made under inference mode may not be written to after it
        raw = torch.empty(count * record_bytes + DEVICE_BLOCK, dtype=torch.uint8, pin_memory=pinned)
    skip = -raw.data_ptr() % DEVICE_BLOCK
    return raw[skip : skip + count * record_bytes].view(count, record_bytes)
