"""Reads by io_uring: a batch is submitted with one system call and goes on without a thread."""

from __future__ import annotations

import errno
import os
from operator import attrgetter

import numpy as np
import torch

from ...errors import CacheClosedError
from ..base import Transfer, byte_view, check_batch, check_range, run_edges
from ..file import FileStore, FrozenFile
from ..guard import RecordGuard
from .ring import Batch, Ring

LARGEST_REQUEST_BYTES = 2**20
"""Longer runs of adjacent records are submitted in pieces of at most this size, because an entry's length has 32
bits."""

_AGAIN = (errno.EINTR, errno.EAGAIN)


class UringStore(FileStore):
    """A file store read through a ring, by `O_DIRECT` if the file system has it.

    Elsewhere reads go through the page cache, which is dropped when they are finished. `ring` is the caller's, who
    closes it after the stores; None makes one for this store. Raises `OSError` if there can be no ring. Whoever
    finishes a transfer checks its records.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | FrozenFile,
        record_bytes: int,
        name: str,
        ring: Ring | None = None,
        guard: RecordGuard | None = None,
    ) -> None:
        self._given_ring = ring
        self._own_ring: Ring | None = None
        super().__init__(place, record_bytes, name, guard)

    def _begin(self) -> None:
        ring = self._given_ring
        if ring is None:
            ring = self._own_ring = Ring()
        self._ring = ring
        self._most = max(1, LARGEST_REQUEST_BYTES // self.record_bytes)  # records of a request
        if not self._frozen:
            self._file.try_direct()

    def start(self, ids: np.ndarray, out: torch.Tensor) -> Transfer:
        check_range(self.name, ids, self._capacity, self.first_id)
        edges = run_edges(ids)
        requests = edges.size - 1
        if ids.size > self._most:
            edges = _cut(edges, self._most)
        rows = edges * self.record_bytes  # in `out`, in bytes
        addresses, lengths = rows[:-1] + out.data_ptr(), rows[1:] - rows[:-1]
        offsets = ids[edges[:-1]] * self.record_bytes
        try:
            if self._file.doubtful:
                self._file.check()
            batch = self._ring.read(self._file.fd, offsets, addresses, lengths, out, self._file)
        except OSError as error:
            raise self._failure(f"reading {self._describe(ids)}", error) from error
        return _RingRead(self, self._ring, batch, ids, out, edges, requests)

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        check_batch(ids, out, self.record_bytes, aligned=True)
        if len(ids) == 0:
            return
        transfer = self.start(ids, out)
        try:
            transfer.finish()
        except BaseException:  # an interrupted wait: `out` is the caller's again
            transfer.drop()
            transfer.wait()
            raise

    def _complete(self, batch: Batch, ids: np.ndarray, out: torch.Tensor, edges: np.ndarray, requests: int) -> None:
        """All of `batch` has ended: complete short reads, check the records, or raise the error of a failed one."""
        for index in (batch.results != batch.lengths).nonzero()[0]:
            start, stop, result = int(edges[index]), int(edges[index + 1]), int(batch.results[index])
            try:
                if result < 0 and -result not in _AGAIN:
                    raise OSError(-result, os.strerror(-result))
                buffer = byte_view(out[start:stop])
                done = max(0, result)
                self._file.read(buffer[done:], int(ids[start]) * self.record_bytes + done)
            except OSError as error:
                raise self._failure(f"reading {self._describe(ids[start:stop])}", error) from error
        if not self._file.direct:
            self._file.drop(0, 0)
        self.count_read(requests, out.nbytes)
        self._checked(ids, out)

    def share(self, ring: Ring | None = None) -> UringStore:
        """See `FreezableStore.share`; reads go through `ring`, the caller's (None: a new one)."""
        return type(self)(self._shared_file(), self.record_bytes, self.name, ring)

    def close(self) -> None:
        """Wait for reads in flight. See `Store.close`."""
        ring = getattr(self, "_ring", None)  # absent if the constructor failed
        if ring is not None and self._file.fd >= 0:
            # A shared descriptor stays open, with the reads of others.
            ring.release(self._file.fd, self._file if self._file.shared else None)
        if self._own_ring is not None:
            self._own_ring.close()
        super().close()


class _RingRead(Transfer):
    """One `UringStore.start`. Any one thread at a time."""

    def __init__(
        self,
        store: UringStore,
        ring: Ring,
        batch: Batch,
        ids: np.ndarray,
        out: torch.Tensor,
        edges: np.ndarray,
        requests: int,
    ) -> None:
        self._store: UringStore | None = store
        self._ring = ring
        self._batch = batch
        self._request = ids, out, edges, requests
        self._error: OSError | None = None

    # An attrgetter makes no Python frame, unlike a function: steps read this often.
    finished_at: float | None = property(attrgetter("_batch.finished_at"))  # type: ignore[assignment]

    def done(self) -> bool:
        if self._batch.finished_at is None:
            self._ring.poll()
        return self._batch.finished_at is not None

    def drop(self) -> None:
        if self._batch.finished_at is None:
            self._ring.drop(self._batch)

    def wait(self) -> None:
        self._ring.wait(self._batch)

    def finish(self) -> None:
        try:
            if self._batch.finished_at is None:
                self._ring.wait(self._batch)
        except OSError as error:
            assert self._store is not None
            raise self._store._failure(f"reading {self._store._describe(self._request[0])}", error) from error
        if self._batch.dropped:
            raise CacheClosedError("the read was cancelled: its store was reset or closed")
        if self._error is not None:
            raise self._error
        if self._store is not None:
            try:
                self._store._complete(self._batch, *self._request)
            except OSError as error:
                self._error = error
                raise
            self._store = None  # complete


def _cut(edges: np.ndarray, most: int) -> np.ndarray:
    """`edges` of runs, with more between them so that no two are further apart than `most`."""
    pieces = -((edges[:-1] - edges[1:]) // most)
    first = np.repeat(edges[:-1], pieces)
    before = np.cumsum(pieces) - pieces
    return np.append(first + (np.arange(len(first)) - np.repeat(before, pieces)) * most, edges[-1])
