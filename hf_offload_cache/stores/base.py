"""What a store is: a growing array of fixed-size records of bytes. It knows nothing about attention."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from itertools import pairwise

import numpy as np
import torch

from .transfer import LateRead, Transfer

DEVICE_BLOCK = 4096
"""Bytes that records are rounded up to, and that buffers and offsets are aligned to: what every device accepts."""


class Store(ABC):
    """The records of one layer.

    `allocate`, `free` and `close` are called by one thread only (the one that runs the model). `read` and `write` may
    run in several threads at once, on different records; the prefetcher keeps a read of a record behind its write.
    A record stays what it is from its write until `free`, or until whoever has allocated it writes it anew, with no
    read of it under way and no frozen store over it; reading one that was never written raises `CorruptRecordError`
    where the store checks what it reads, and gives undefined bytes elsewhere.

    A store whose records can be shared and saved is a `FreezableStore`; all else works with any store. `StoreTests` of
    `hf_offload_cache.testing` say whether a store of your own keeps this contract.

    Attributes:
        record_bytes: size of a record, a multiple of `DEVICE_BLOCK`.
        name: how errors name this store, e.g. "layer 3".
        advises: True when `advise` makes the kernel read ahead, so that `read` has little to wait for and runs on the
            calling thread; False when `read` is where the time goes. Says what `start` does, where a store has none
            of its own.
        bytes_read, bytes_written, reads: totals since construction: bytes moved from and to the device, alignment
            and what is written between records included, and the number of requests (a run of adjacent records is
            one). A store counts what it moved by `count_read` and `count_written`.
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
        self._counters = threading.Lock()

    def count_read(self, requests: int, nbytes: int) -> None:
        """So much was read, by so many requests. Any thread."""
        with self._counters:
            self.reads += requests
            self.bytes_read += nbytes

    def count_written(self, nbytes: int) -> None:
        """So much was written. Any thread."""
        with self._counters:
            self.bytes_written += nbytes

    @property
    def directory(self) -> str | None:
        """The folder that the records lie in, for messages; None: host memory."""
        return None

    @abstractmethod
    def allocate(self, count: int) -> np.ndarray:
        """Ids (int64, ascending where possible adjacent) of `count` free records; grows the store where needed.

        Raises `StoreFullError` with the numbers, having allocated nothing, when the disk has no room.
        """

    @abstractmethod
    def free(self, ids: np.ndarray) -> None:
        """Give records back for a later `allocate`. Their content may be overwritten from now on.

        Raises `StoreError`, having changed nothing, when one is not taken or comes twice."""

    @abstractmethod
    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        """Write `records` (uint8, (n, record_bytes), host memory, contiguous) to `ids`. Blocks until they are written.

        Raises `StoreError` (`StoreFullError` for no space); records of the batch may then be partly written.
        """

    def advise(self, ids: np.ndarray) -> None:  # noqa: B027  (an optional step: a store without advice has nothing to do)
        """Say that `ids` will be read soon; returns at once."""

    def start(self, ids: np.ndarray, out: torch.Tensor) -> Transfer | None:
        """Start to fill `out` with `ids` (as in `read`) and return at once; what is returned has to be finished.

        The caller has made sure that both are what `read` takes (`check_batch`), and that there is something to read.
        None: this store can only block in `read`, so that other threads have to run it. That is what a store of which
        `advises` is False does here; one that advises does so, and reads when the transfer is finished.
        """
        if not self.advises:
            return None
        self.advise(ids)
        return LateRead(self.read, ids, out)

    @abstractmethod
    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        """Fill `out` (uint8, (n, record_bytes), host memory, aligned to `DEVICE_BLOCK`) with `ids`, in order.

        Blocks until the bytes are there; adjacent ids are one request. Raises `StoreError`; `out` is then undefined.
        `CorruptRecordError` for bytes that are not what was written: what is wrong of them is not in `out`.
        """

    @property
    def in_memory(self) -> bool:
        """Whether all records lie in host memory, so that `read_parts` has them."""
        return False

    def read_parts(self, ids: np.ndarray, first_bytes: np.ndarray, out: torch.Tensor) -> None:
        """Fill row i of `out` (uint8, (n, size), host memory) with that many bytes of record `ids[i]` from its byte
        `first_bytes[i]` on, as they lie in it. For stores that are `in_memory`."""
        raise NotImplementedError(f"{self.name}: records on a disk are read whole")

    def addresses(self, ids: np.ndarray) -> np.ndarray | None:
        """Where each of these records begins in memory that a GPU reads by itself, (n,) int64; it is there until the
        record is freed or written anew. None: some of them are not in such memory."""
        return None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Records that exist, taken or not: ids are below it."""

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes taken on the disk now, those that are shared with other stores included."""

    @property
    def own_disk_bytes(self) -> int:
        """Bytes taken on the disk that no other store may share: all of them, except in a store with frozen parts."""
        return self.disk_bytes

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of host memory that hold records now (zero for a store on disk that bypasses the page cache)."""

    @property
    @abstractmethod
    def tables_bytes(self) -> int:
        """Bytes of host memory for what the store knows about its records: which are taken, and their tags."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back (descriptors, maps, disk space). Idempotent. No call may follow but `close`."""


def runs(ids: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges [start, stop) of positions in `ids` whose values are consecutive: each one request."""
    return list(pairwise(run_edges(ids).tolist()))


def run_edges(ids: np.ndarray) -> np.ndarray:
    """`runs` as an array: run `i` is [edges[i], edges[i + 1]). One entry more than there are runs; [0] for none."""
    breaks = (ids[1:] - ids[:-1] != 1).nonzero()[0]
    edges = np.zeros(breaks.size + (2 if ids.size else 1), dtype=np.int64)
    edges[1:-1] = breaks + 1
    edges[-1] = ids.size
    return edges


def aligned_empty(count: int, record_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Uninitialised uint8 tensor (count, record_bytes) in host memory whose first byte is aligned to `DEVICE_BLOCK`.

    The caller owns it. `pinned` asks for page-locked memory (needs a CUDA device).
    """
    with torch.inference_mode(False):  # what is made under inference mode may not be written to after it
        raw = torch.empty(count * record_bytes + DEVICE_BLOCK, dtype=torch.uint8, pin_memory=pinned, device="cpu")
    skip = -raw.data_ptr() % DEVICE_BLOCK
    return raw[skip : skip + count * record_bytes].view(count, record_bytes)


def pinned_empty(count: int, record_bytes: int) -> torch.Tensor:
    """As `aligned_empty`, page-locked, wherever it begins: torch pins powers of two, and a byte more doubles some.
    Where no more can be pinned, any memory will do."""
    with contextlib.suppress(RuntimeError), torch.inference_mode(False):
        return torch.empty(count, record_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    return aligned_empty(count, record_bytes)


def byte_view(records: torch.Tensor) -> memoryview:
    """The bytes of `records` (contiguous, host memory), without a copy; it keeps their memory."""
    return records.numpy().data.cast("B")
