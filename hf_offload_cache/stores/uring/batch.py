"""Reads that a ring takes in and completes together."""

from __future__ import annotations

import errno
import time

import numpy as np

PENDING = np.iinfo(np.int32).min
"""Stands for the result of a read that has not completed; no read has it."""


class Batch:
    """Reads that were queued together.

    Attributes:
        base, end: the numbers of the first read and behind the last one, over the life of the ring.
        fd: the file's descriptor.
        entries: the reads as the kernel takes them.
        keep, owner: what has to live until the last read has ended: the memory that is read into, and who reads.
        lengths: bytes asked for, one entry a read.
        results: bytes read or a negative errno, one entry a read; valid once `finished_at` is set. Fewer bytes than
            asked for are the caller's to complete.
        finished_at: `time.perf_counter()` when the last completion was seen, None before.
        unfinished: reads that have not completed.
        dropped: reads at the end were given up before they began; their results mean nothing.
    """

    __slots__ = (
        "base", "dropped", "end", "entries", "fd", "finished_at", "keep", "lengths", "owner", "results", "unfinished",
    )  # fmt: skip

    def __init__(
        self, base: int, fd: int, entries: np.ndarray, lengths: np.ndarray, keep: object, owner: object
    ) -> None:
        self.base = base
        self.end = base + entries.size
        self.lengths = lengths
        self.results = np.empty(entries.size, dtype=np.int32)
        self.results[:] = PENDING
        self.finished_at: float | None = None
        self.dropped = False
        self.unfinished = entries.size
        self.fd = fd
        self.entries = entries
        self.keep = keep
        self.owner = owner

    def count(self) -> None:
        """Count results as they arrive: the number still missing, and whether that is the end."""
        self.unfinished = (self.results == PENDING).nonzero()[0].size
        if self.unfinished == 0 and self.finished_at is None:
            self.finished_at = time.perf_counter()

    def leave_from(self, number: int) -> None:
        """End the uncompleted reads from that number on with `EAGAIN`."""
        left = self.results[max(0, number - self.base) :]
        left[left == PENDING] = -errno.EAGAIN
        self.count()
