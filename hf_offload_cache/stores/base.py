"""A store: a growing array of fixed-size records of bytes. It knows nothing about attention."""

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

# The process that an object belongs to

class Process:
    """The process that created this object. A forked child has its parent's objects but none of its threads.

    Takes no lock and costs one system call. Hot code compares `id` with `os.getpid()` itself before it calls `check`.
    """

    def __init__(self) -> None:
        self.id = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a child that was forked."""
        return self.id == os.getpid()

    def check(self, what: str) -> None:
        """Raise `ForkedProcessError`, which calls the object `what`, in a forked child."""
        if self.id != os.getpid():
            raise ForkedProcessError(
                f"{what} belongs to the parent process {self.id} and is unchanged there: open the saved context or "
                "create a new cache in the child"
            )


EXIT_SECONDS = 1.0
"""The longest that the end of the interpreter waits for reads and writes under way."""


class Deadline:
    """Limits waits to `seconds` (None: no limit). Once the device has stalled, waits end at once until it answers
    again.

    One stalled read therefore costs `seconds` once, not once for each read given up after it. Any thread.

    Attributes:
        stalled: the last wait ended without an answer.
        at_exit: the interpreter is ending.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.stalled = False
        self.at_exit = False

    def expires(self) -> float | None:
        """The `time.monotonic()` at which a wait that begins now ends; None: never."""
        if self.stalled:
            return time.monotonic()
        seconds = EXIT_SECONDS if self.at_exit else self.seconds
        return None if seconds is None else time.monotonic() + seconds

    def answered(self) -> None:
        """The device answered: waits have their full time again."""
        self.stalled = False

    def shorten_for_exit(self) -> None:
        """Limit waits to `EXIT_SECONDS` from now on, because the interpreter is ending."""
        self.at_exit = True

    def missed(self, work: str = "") -> StalledError:
        """The error to raise for a wait that took too long; `work` names the place and the work. The device counts as
        stalled from now on."""
        self.stalled = True
        seconds = "the end of the process" if self.seconds is None else f"{self.seconds:g} seconds (io_timeout)"
        return StalledError(
            errno.ETIMEDOUT,
            f"{work}{': ' if work else ''}no answer for {seconds}: the device has stalled; close the cache",
        )


def seconds_left(expires: float | None, most: float) -> float:
    """Seconds to wait now: until `expires` (`time.monotonic()`; None: never), at most `most`."""
    return most if expires is None else max(0.0, min(most, expires - time.monotonic()))


def has_passed(expires: float | None) -> bool:
    """Whether `expires` (`time.monotonic()`; None: never) has passed."""
    return expires is not None and time.monotonic() >= expires


# A read that was started

class Transfer(ABC):
    """A read that was started. `ids` and `out` belong to it until `finish` returned or raised, or `wait` returned.

    For the thread that started it, unless a subclass says more.

    Attributes:
        runs: the transfer proceeds while the caller does something else. False: `finish` does all the work.
        finished_at: `time.perf_counter()` when the last byte arrived; None before.
    """

    runs = True
    finished_at: float | None = None

    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is under way: `finish` would return or raise at once. Does not block."""

    @abstractmethod
    def drop(self) -> None:
        """Give up the reads that have not begun. If bytes are missing then, `finish` raises `CacheClosedError`. Does
        not block."""

    @abstractmethod
    def wait(self) -> None:
        """Block until nothing is under way. From then on neither the store nor `out` is touched.

        Raises none of the read's errors. A signal's exception leaves the read under way, and it can be waited for
        again. So does `StalledError`, for a device that does not answer in time. What is still under way keeps the
        store and `out` alive until it ends.
        """

    @abstractmethod
    def finish(self) -> None:
        """Block until the bytes are in `out`. Raises the read's error, the same when called again, and `StalledError`
        as `wait` does."""


class LateRead(Transfer):
    """A read that was advised only: `finish` runs `read`, a store's, on the calling thread, however long that takes."""

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
"""Record sizes are multiples of these bytes, and buffers and offsets are aligned to them: every device accepts that."""


class Store(ABC):
    """The records of one layer.

    One thread, the one that runs the model, calls `allocate`, `free` and `close`. Several threads may `read` and
    `write` different records at once; the prefetcher keeps a read of a record behind its write. A record keeps its
    content from its write until `free`, or until its owner writes it again, with no read under way and no frozen store
    over it. Reading a record that was never written raises `CorruptRecordError` if the store checks its reads, and
    gives undefined bytes otherwise.

    A store whose records can be shared and saved is a `FreezableStore`; everything else works with any store.
    `StoreTests` of `hf_offload_cache.testing` check whether your own store keeps this contract.

    Attributes:
        record_bytes: size of a record, a multiple of `DEVICE_BLOCK`.
        name: the store's name in errors, e.g. "layer 3".
        advises: `advise` makes the kernel read ahead, so `read` waits little and runs on the calling thread. False:
            `read` is where the time goes. Decides what `start` does unless a store overrides it.
        bytes_read, bytes_written, reads: totals since construction: bytes moved from and to the device, including
            alignment and zeros between records, and requests (a run of adjacent records is one). A store counts by
            `count_read` and `count_written`.
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
        """Count `nbytes` read by `requests` requests. Any thread."""
        with self._counters:
            self.reads += requests
            self.bytes_read += nbytes

    def count_written(self, nbytes: int) -> None:
        """Count `nbytes` written. Any thread."""
        with self._counters:
            self.bytes_written += nbytes

    @property
    def directory(self) -> str | None:
        """The folder with the records, for messages; None: host memory."""
        return None

    @abstractmethod
    def allocate(self, count: int) -> np.ndarray:
        """Ids (int64, ascending, adjacent if possible) of `count` free records; grows the store if needed.

        If the disk has no room, raises `StoreFullError` with the numbers and allocates nothing.
        """

    @abstractmethod
    def free(self, ids: np.ndarray) -> None:
        """Return records for a later `allocate`, which may overwrite their content.

        Raises `StoreError`, with nothing changed, for an id that is not allocated or occurs twice.
        """

    @abstractmethod
    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        """Write `records` (uint8, (n, record_bytes), host memory, contiguous) to `ids`. Blocks until they are written.

        Raises `StoreError` (`StoreFullError` for no space); some records may be written then.
        """

    def advise(self, ids: np.ndarray) -> None:  # noqa: B027  (an optional step: a store without advice has nothing to do)
        """Announce a read of `ids`; returns at once."""

    def start(self, ids: np.ndarray, out: torch.Tensor) -> Transfer | None:
        """Start to fill `out` with `ids` (as in `read`) and return at once; the caller has to finish the transfer.

        The caller has checked both (`check_batch`), and `ids` is not empty. None: this store can only block in `read`,
        so other threads have to run it. This default returns None if the store does not advise; else it advises, and
        reads when the transfer is finished.
        """
        if not self.advises:
            return None
        self.advise(ids)
        return LateRead(self.read, ids, out)

    @abstractmethod
    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        """Fill `out` (uint8, (n, record_bytes), host memory, aligned to `DEVICE_BLOCK`) with `ids`, in order.

        Blocks until the bytes are there; adjacent ids are one request. Raises `StoreError`, and `out` is undefined
        then. Raises `CorruptRecordError` for bytes that differ from those written; wrong records are not in `out`.
        """

    @property
    def in_memory(self) -> bool:
        """Whether all records are in host memory, so that `read_parts` works."""
        return False

    def read_parts(self, ids: np.ndarray, first_bytes: np.ndarray, out: torch.Tensor) -> None:
        """Fill row i of `out` (uint8, (n, size), host memory) with bytes of record `ids[i]`, from its byte
        `first_bytes[i]` on. For stores that are `in_memory`."""
        raise NotImplementedError(f"{self.name}: records on a disk can only be read completely")

    def addresses(self, ids: np.ndarray) -> np.ndarray | None:
        """Addresses (n,) int64 of these records in memory that a GPU reads by itself, valid until a record is freed or
        written again. None: some records are not in such memory."""
        return None

    def pinned_runs(self, ids: np.ndarray) -> list[torch.Tensor] | None:
        """The memory of these allocated records, in order, that a GPU copies from: adjacent ones are one tensor (n,
        record_bytes) uint8. Not to be changed; valid as `addresses`. None: some are not in pinned memory."""
        return None

    def in_place(self, ids: np.ndarray) -> torch.Tensor | None:
        """The memory (n, record_bytes) uint8 of these allocated records, which a GPU may fill before it is passed to
        `write` with them. None: they are not adjacent, or not in memory that a GPU reaches by itself."""
        return None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of records that exist, allocated or not: all ids are below it."""

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes on the disk now, including those shared with other stores."""

    @property
    def own_disk_bytes(self) -> int:
        """Bytes on the disk that no other store shares: all of them, except in a store with frozen parts."""
        return self.disk_bytes

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of host memory that hold records now; zero for a store on disk that bypasses the page cache."""

    @property
    def pageable_bytes(self) -> int:
        """The part of `memory_bytes` that was to be pinned, and that the system did not pin."""
        return 0

    @property
    @abstractmethod
    def tables_bytes(self) -> int:
        """Bytes of host memory for the store's tables: which records are allocated, and their tags."""

    @abstractmethod
    def close(self) -> None:
        """Release descriptors, maps and disk space. Idempotent. Only `close` may be called afterwards."""


def runs(ids: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges [start, stop) of positions in `ids` with consecutive values: one request each."""
    return list(pairwise(run_edges(ids).tolist()))


def run_edges(ids: np.ndarray) -> np.ndarray:
    """`runs` as an array: run `i` is [edges[i], edges[i + 1]). One entry more than runs; [0] for none."""
    breaks = (ids[1:] - ids[:-1] != 1).nonzero()[0]
    edges = np.zeros(breaks.size + (2 if ids.size else 1), dtype=np.int64)
    edges[1:-1] = breaks + 1
    edges[-1] = ids.size
    return edges


def aligned_empty(count: int, record_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Uninitialised uint8 tensor (count, record_bytes) in host memory, aligned to `DEVICE_BLOCK`. The caller owns it.
    `pinned`: page-locked memory, which needs a CUDA device; plain memory if no more can be pinned."""
    nbytes = count * record_bytes + DEVICE_BLOCK
    with torch.inference_mode(False):  # an inference tensor cannot be written to later
        try:
            raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        except RuntimeError:
            if not pinned:
                raise
            raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    skip = -raw.data_ptr() % DEVICE_BLOCK
    return raw[skip : skip + count * record_bytes].view(count, record_bytes)


def pinned_empty(count: int, record_bytes: int) -> torch.Tensor:
    """Like `aligned_empty`, page-locked, without alignment: torch pins powers of two, and a byte more doubles some. If
    no more memory can be pinned, it is plain memory."""
    with contextlib.suppress(RuntimeError), torch.inference_mode(False):
        return torch.empty(count, record_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    return aligned_empty(count, record_bytes)


def byte_view(records: torch.Tensor) -> memoryview:
    """The bytes of `records` (contiguous, host memory) without a copy; the view keeps their memory."""
    return records.numpy().data.cast("B")


# Checks of the arguments of every store

def check_batch(ids: np.ndarray, records: torch.Tensor, record_bytes: int, *, aligned: bool = False) -> None:
    """Raise unless `ids` and `records` are valid for `Store.read` (`aligned`) and `Store.write`: `TypeError` for the
    wrong dtype or device, `ValueError` for a wrong shape, stride or alignment."""
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
    """Raise `StoreError` if one of `ids` is not among the `capacity` records of the store `name`. The message counts
    records from `first_id`."""
    if ids.size and np.maximum.reduce(ids.view(np.uint64)) >= capacity:  # negative ids become the largest
        outside = ids[(ids < 0) | (ids >= capacity)] + first_id
        exist = f"{capacity} records that exist" + (f" from {first_id} on" if first_id else "")
        raise StoreError(errno.EINVAL, f"{name}: {describe(outside)} outside the {exist}")


def describe(ids: np.ndarray) -> str:
    """Records in the words of a message: "record 7", "records 7..9 (3)"."""
    if len(ids) == 1:
        return f"record {int(ids[0])}"
    return f"records {int(ids.min())}..{int(ids.max())} ({len(ids)})"


# Immutable records, for saved contexts and forks

class FreezableStore(Store):
    """A store that can be frozen: its records are immutable from then on, can be shared, and get a name on the disk.

    Once frozen, `allocate` and `write` raise `StoreError`, unless the store says where new records go. `free` does
    nothing, because others may use the records.

    Attributes:
        first_id: the number of the first record in errors; not 0 if this store is a part of another.
    """

    def __init__(self, record_bytes: int, name: str) -> None:
        super().__init__(record_bytes, name)
        self.first_id = 0

    @abstractmethod
    def freeze(self) -> None:
        """Make all records immutable for good, and release the unused end. Idempotent.

        No write may be under way or follow. Raises `StoreError`; the store is not frozen then.
        """

    @property
    @abstractmethod
    def written(self) -> np.ndarray:
        """Whether each record of a frozen store holds data: (capacity,), bool; the caller's."""

    @property
    def inode(self) -> tuple[int, int] | None:
        """Device and number of the file with the records, which tell whether two stores share it; None: no file."""
        return None

    @abstractmethod
    def share(self) -> FreezableStore:
        """Another frozen store over the same records, with its own counters; each owner closes its own.

        Takes no disk space. Another thread may use it. Raises `StoreError` unless this store is frozen.
        """

    @abstractmethod
    def export(self, folder_fd: int, name: str, live: np.ndarray | None = None) -> RecordGuard:
        """Give the records of a frozen store the new name `name` in the open directory `folder_fd`, mode 0600.

        Makes a hard link if the file system allows it, else a copy. `live` ((capacity,), bool; None: all) says which
        records may be in the file: if the others hold data, the file is a copy without them, with holes instead.

        Each record is checked as it is copied, whatever reads trust. A link reads nothing, unless something has written
        to the file since it was opened or frozen, or a read has found damage in it: then the complete file is checked.

        The file's content is on the device when this returns; its name is when the directory is synced. Returns the
        guard whose tags describe it. Raises `StoreError` (`StoreFullError` with the numbers, before anything is copied;
        `CorruptRecordError` for a record that is not as it was written): then no file of that name exists.
        """

    def verify(self, ids: np.ndarray, records: torch.Tensor) -> None:
        """Raise `CorruptRecordError` unless `records`, as `read` gave them for `ids`, are as they were written.

        For a caller that is about to vouch for them: checks even if reads trust the disk. Wrong rows are overwritten.
        """

    def on_damage(self, told: Callable[[str], object]) -> None:
        """Register `told`: it is called once, in any thread, with the reason when a read of a frozen store finds a
        record that is unreadable or changed. Reads of stores that share the record count too. It must not raise."""

    def _check_frozen(self, frozen: bool, purpose: str) -> None:
        """Raise `StoreError` unless `frozen`; `purpose` is e.g. "shared"."""
        if not frozen:
            raise StoreError(errno.EBUSY, f"{self.name}: records that may change cannot be {purpose}; freeze it first")

    def _check_not_frozen(self, frozen: bool) -> None:
        """Raise `StoreError` if `frozen`."""
        if frozen:
            raise StoreError(errno.EROFS, f"{self.name}: its records are frozen; new ones go to another store")


def require_freezable(store: Store) -> FreezableStore:
    """`store`, which is about to be frozen. Raises `TypeError` if it cannot be."""
    if isinstance(store, FreezableStore):
        return store
    raise TypeError(
        f"saving and forking need a store that can be frozen; {store.name} is in a {type(store).__name__}, which is "
        "not a FreezableStore: implement freeze, written, share and export, or use one of the engines of this package"
    )
