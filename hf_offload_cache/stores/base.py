"""What a store is: a growing array of fixed-size records of bytes. It knows nothing about attention."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from ..errors import CacheClosedError, ForkedProcessError, StalledError, StoreError
from .guard import RecordGuard

# How long a wait for a device may take before the device counts as stalled

# Which process an object belongs to: a child that was forked has its parent's objects, but none of the threads

class Process:
    """The process that made this object. Takes no lock, and costs one system call: any thread, any time.

    What runs often looks itself whether `id` is `os.getpid()` before it calls `check`.
    """

    def __init__(self) -> None:
        self.id = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a child that was forked."""
        return self.id == os.getpid()

    def check(self, what: str) -> None:
        """Raises `ForkedProcessError`, which calls the object `what`, in a child that was forked."""
        if self.id != os.getpid():
            raise ForkedProcessError(
                f"{what} belongs to the parent process {self.id} and stays as it is there: open the saved context or "
                "make a new cache in the child"
            )


EXIT_SECONDS = 1.0
"""The longest that the end of the interpreter waits for what is under way."""


class Deadline:
    """A wait may take `seconds` (None: any time); once the device has stalled, no time at all until it answers again.

    So one stalled read costs `seconds` once, and not again for each of the reads that are then given up. Any thread.

    Attributes:
        stalled: the last wait ended without an answer.
        at_exit: the interpreter ends.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.stalled = False
        self.at_exit = False

    def expires(self) -> float | None:
        """The `time.monotonic()` at which a wait that begins now is to be given up; None: never."""
        if self.stalled:
            return time.monotonic()
        seconds = EXIT_SECONDS if self.at_exit else self.seconds
        return None if seconds is None else time.monotonic() + seconds

    def answered(self) -> None:
        """The device did something: waits have their usual time again."""
        self.stalled = False

    def shorten_for_exit(self) -> None:
        """The interpreter ends: waits are `EXIT_SECONDS` from now on."""
        self.at_exit = True

    def missed(self, work: str = "") -> StalledError:
        """The error to raise for a wait that took too long; `work` says where and at what.

        The device counts as stalled from now on."""
        self.stalled = True
        seconds = "the end of the process" if self.seconds is None else f"{self.seconds:g} seconds (io_timeout)"
        return StalledError(
            errno.ETIMEDOUT,
            f"{work}{': ' if work else ''}no answer for {seconds}: the device has stalled; close the cache",
        )


def seconds_left(expires: float | None, most: float) -> float:
    """Seconds to wait now: until `expires` (`time.monotonic()`; None: never), but at most `most`."""
    return most if expires is None else max(0.0, min(most, expires - time.monotonic()))


def has_passed(expires: float | None) -> bool:
    """Whether `expires` (`time.monotonic()`; None: never) is over."""
    return expires is not None and time.monotonic() >= expires


# What a store hands out when it has started a read: something to finish

class Transfer(ABC):
    """A read that was started. `ids` and `out` belong to it until `finish` returned or raised, or `wait` returned.

    For the thread that started it, except where a subclass says more.

    Attributes:
        runs: True when the transfer goes on while the caller does something else; False when all that is left happens
            in `finish`.
        finished_at: `time.perf_counter()` when the last byte was seen to be there; None before.
    """

    runs = True
    finished_at: float | None = None

    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is under way any more: `finish` would return or raise at once. Does not block."""

    @abstractmethod
    def drop(self) -> None:
        """Give up what has not begun; `finish` raises `CacheClosedError` when that left bytes out. Does not block."""

    @abstractmethod
    def wait(self) -> None:
        """Block until nothing is under way: neither the store nor `out` is touched from then on.

        Raises nothing of the read's. A signal's exception leaves it under way, and it can be waited for again; so does
        `StalledError`, for a device that does not answer in the time that whoever made the transfer gives it. What is
        still under way then holds the store and `out` by itself until it ends, whatever its caller lets go of.
        """

    @abstractmethod
    def finish(self) -> None:
        """Block until the bytes are in `out`. Raises what the read failed with, and the same when called again.

        Raises `StalledError` as `wait` does.
        """


class LateRead(Transfer):
    """A read that was advised: `finish` runs `read`, a store's, on the calling thread, however long that takes."""

    runs = False

    def __init__(
        self, read: Callable[[np.ndarray, torch.Tensor], None], ids: np.ndarray, out: torch.Tensor
    ) -> None:
        self._read = read
        self._ids = ids
        self._out = out
        self._dropped = False

    def done(self) -> bool:
        return self.finished_at is not None

    def drop(self) -> None:
        self._dropped = True

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        if self.finished_at is not None:
            return
        if self._dropped:
            raise CacheClosedError("the read was cancelled: its store was reset or closed")
        self._read(self._ids, self._out)
        self.finished_at = time.perf_counter()


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


# What every store asks of its arguments, said once

def check_batch(ids: np.ndarray, records: torch.Tensor, record_bytes: int, *, aligned: bool = False) -> None:
    """Raise unless `ids` and `records` are what `Store.read` (`aligned`) and `Store.write` take.

    `TypeError` for the wrong dtype or device, `ValueError` for a wrong shape, stride or alignment.
    """
    if ids.dtype != np.int64:
        raise TypeError(f"ids must be int64, got {ids.dtype}")
    if records.dtype != torch.uint8 or records.device.type != "cpu":
        raise TypeError(f"records must be uint8 in host memory, got {records.dtype} on {records.device}")
    if ids.ndim != 1 or records.shape != (ids.size, record_bytes):
        raise ValueError(
            f"records must have shape (len(ids), record_bytes) = ({ids.size}, {record_bytes}) and ids one dimension, "
            f"got {tuple(records.shape)} and ids of shape {ids.shape}"
        )
    if not records.is_contiguous():
        raise ValueError("records must be contiguous; call .contiguous()")
    if aligned and ids.size and records.data_ptr() % DEVICE_BLOCK:
        raise ValueError(f"out must be aligned to {DEVICE_BLOCK} bytes; make it with aligned_empty")


def check_range(name: str, ids: np.ndarray, capacity: int, first_id: int = 0) -> None:
    """Raise `StoreError` when one of `ids` is not a record of the store called `name`, which has `capacity`.

    The message counts records from `first_id`.
    """
    if ids.size and np.maximum.reduce(ids.view(np.uint64)) >= capacity:  # a negative one is above all others
        outside = ids[(ids < 0) | (ids >= capacity)] + first_id
        exist = f"{capacity} records that exist" + (f" from {first_id} on" if first_id else "")
        raise StoreError(errno.EINVAL, f"{name}: {describe(outside)} outside the {exist}")


def describe(ids: np.ndarray) -> str:
    """Records as a message names them: "record 7", "records 7..9 (3)"."""
    if len(ids) == 1:
        return f"record {int(ids[0])}"
    return f"records {int(ids.min())}..{int(ids.max())} ({len(ids)})"


# A store whose records can be made immutable: what saving a context and forking a cache need beyond `Store`

class FreezableStore(Store):
    """A store that can be frozen: its records are immutable from then on, can be shared, and given a name on the disk.

    Once frozen, `allocate` and `write` raise `StoreError`, unless the store says where new records go, and `free` does
    nothing: others may hold the records.

    Attributes:
        first_id: the number that errors give to the first record: not 0 where this store is a part of another.
    """

    def __init__(self, record_bytes: int, name: str) -> None:
        super().__init__(record_bytes, name)
        self.first_id = 0

    @abstractmethod
    def freeze(self) -> None:
        """Make all records immutable for good, and give the unused end back. Idempotent.

        No write may be under way or follow. Raises `StoreError`, and is not frozen then.
        """

    @property
    @abstractmethod
    def written(self) -> np.ndarray:
        """Which records of a frozen store hold something: (capacity,), bool; the caller's."""

    @property
    def inode(self) -> tuple[int, int] | None:
        """Device and number of the file that the records lie in, by which two stores tell that they share it; None:
        they are in no file of one's own."""
        return None

    @abstractmethod
    def share(self) -> FreezableStore:
        """Another frozen store over the same records, with counters of its own; each is closed by its owner.

        Takes no disk space. May be used by another thread than this store. Raises `StoreError` unless this store is
        frozen.
        """

    @abstractmethod
    def export(self, folder_fd: int, name: str, live: np.ndarray | None = None) -> RecordGuard:
        """Give the records of a frozen store the new name `name` in the open directory `folder_fd`, mode 0600.

        A hard link if the file system allows it, else a copy. `live` ((capacity,), bool; None: all) says which records
        may be in the file: if the others hold data, the file is a copy without them, with holes instead.

        Each record is checked as it is copied, whatever reads trust. A link reads nothing, unless something has written
        to the file since it was opened or frozen, or a read has found damage in it: then the complete file is checked.

        The file's content is on the device when this returns; its name is when the directory is synced. Returns the
        guard whose tags describe it. Raises `StoreError` (`StoreFullError` with the numbers, before anything is copied;
        `CorruptRecordError` for a record that is not as it was written): then no file of that name exists.
        """

    def verify(self, ids: np.ndarray, records: torch.Tensor) -> None:
        """Raise `CorruptRecordError` unless `records`, which `read` gave for `ids`, are what was written.

        For a caller that is about to vouch for them: it checks what `read` was told to trust. Wrong rows are
        overwritten.
        """

    def on_damage(self, told: Callable[[str], object]) -> None:
        """Register `told` to be called, once and in any thread, with the reason when a read of a frozen store finds a
        record that is unreadable or not as it was written. Reads of stores that share the record count too. It must not
        raise."""

    def _check_frozen(self, frozen: bool, purpose: str) -> None:
        """For `share` and `export`: raise `StoreError` unless `frozen`; `purpose` is e.g. "shared"."""
        if not frozen:
            raise StoreError(errno.EBUSY, f"{self.name}: records that may change cannot be {purpose}; freeze it first")

    def _check_not_frozen(self, frozen: bool) -> None:
        """For `allocate` and `write`: raise `StoreError` when `frozen`."""
        if frozen:
            raise StoreError(errno.EROFS, f"{self.name}: its records are frozen; new ones go to another store")


def require_freezable(store: Store) -> FreezableStore:
    """`store`, which is to be frozen. Raises `TypeError` where it cannot be."""
    if isinstance(store, FreezableStore):
        return store
    raise TypeError(
        f"saving and forking need a store that can be frozen; {store.name} is in a {type(store).__name__}, which is no "
        "FreezableStore: implement freeze, written, share and export, or use one of the engines of this package"
    )
