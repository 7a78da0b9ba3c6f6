"""Detects records that are not as they were written: one tag per record, kept in memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
import xxhash

NONE_WRONG = np.empty(0, dtype=np.int64)
NONE_WRONG.flags.writeable = False


class RecordGuard(ABC):
    """The tags of one store's records. A tag of zeros means that nothing was written to the record.

    `resize` and `forget` are for the thread that owns the store, `seal` for the one that writes, `check` and `holding`
    for any.

    Attributes:
        tag_bytes: size of a tag.
        copies: `seal` returns its own memory, so a caller should pass a bounded number of records at once.
        reason: how an error describes a wrong record, e.g. "its checksum differs".
    """

    tag_bytes: int
    copies: bool
    reason: str

    def __init__(self) -> None:
        self._tags = np.zeros((0, self.tag_bytes), dtype=np.uint8)
        self._lock = threading.Lock()  # a resize must not lose tags that another thread writes meanwhile

    def resize(self, count: int) -> None:
        """Have tags for `count` records; existing tags stay."""
        with self._lock:
            tags = np.zeros((count, self.tag_bytes), dtype=np.uint8)
            kept = min(count, len(self._tags))
            tags[:kept] = self._tags[:kept]
            self._set(tags)

    def forget(self, ids: np.ndarray) -> None:
        """Mark the records `ids` as empty."""
        with self._lock:
            self._tags[ids] = 0

    @abstractmethod
    def seal(self, ids: np.ndarray, records: torch.Tensor) -> torch.Tensor:
        """The records (n, record_bytes) as they are to be written; notes their tags.

        Does not change `records`: returns `records` itself or, if `copies`, aligned memory that the caller owns. Raises
        `ValueError` if this guard may only check.
        """

    @abstractmethod
    def check(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        """Compare `records` (n, record_bytes), as they were read, with the tags of `ids`; decrypts them in place.

        Returns the positions (int64) of wrong records, whose rows are undefined then.
        """

    def recheck(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        """Like `check`, for records that went through it: finds wrong ones that `check` was told to trust."""
        return NONE_WRONG

    @abstractmethod
    def audit(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        """Like `check`, for copies of records as they are in the file: trusts nothing, and leaves them unchanged."""

    @property
    def tags(self) -> np.ndarray:
        """A view (count, tag_bytes), uint8, valid until the next `resize`: saved next to the records."""
        return self._tags

    @property
    def written(self) -> np.ndarray:
        """Whether each record holds data: (count,), bool."""
        return self.holding(slice(None))

    def holding(self, some: slice) -> np.ndarray:
        """Whether each of `some` records holds data, bool."""
        return np.any(self._tags[some], axis=1)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the tags take."""
        return self._tags.nbytes

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Input of `open_guard` besides tags and key; fit for JSON."""

    @abstractmethod
    def fresh(self) -> RecordGuard:
        """A guard of the same kind and key without records, for another file."""

    @abstractmethod
    def only(self, live: np.ndarray) -> RecordGuard:
        """A new guard that only checks, for a file with the records `live` (count,), bool, and no others."""

    def _tags_of(self, live: np.ndarray) -> np.ndarray:
        return np.where(live[:, None], self._tags, np.uint8(0))

    def _set(self, tags: np.ndarray) -> None:
        self._tags = tags


class Checksums(RecordGuard):
    """A tag is the record's xxh3 digest, 64 bits, little-endian. Without `verify`, `check` trusts reads.

    `tags` ((count, 8), uint8; taken over) are those to continue with. A digest of 0 is stored as 1, because 0 means
    that nothing was written.
    """

    tag_bytes = 8
    copies = False
    reason = "its checksum differs"

    def __init__(self, verify: bool = True, tags: np.ndarray | None = None) -> None:
        super().__init__()
        self._verify = verify
        self._set(self._tags if tags is None else tags)

    def seal(self, ids: np.ndarray, records: torch.Tensor) -> torch.Tensor:
        digests = [digest or 1 for digest in _digests(records)]
        with self._lock:
            self._digests[ids] = np.array(digests, dtype=np.uint64)
        return records

    def check(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        if not self._verify:
            return NONE_WRONG
        expected, found = self._digests[ids].tolist(), list(map(xxhash.xxh3_64_intdigest, records.numpy()))
        return NONE_WRONG if found == expected else _differing(found, expected)

    def recheck(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        return NONE_WRONG if self._verify else self.audit(ids, records)

    def audit(self, ids: np.ndarray, records: torch.Tensor) -> np.ndarray:
        return _differing(_digests(records), self._digests[ids].tolist())

    def describe(self) -> dict[str, Any]:
        return {"kind": "xxh3_64"}

    def fresh(self) -> Checksums:
        return Checksums(self._verify)

    def only(self, live: np.ndarray) -> Checksums:
        return Checksums(self._verify, self._tags_of(live))

    def _set(self, tags: np.ndarray) -> None:
        self._tags = tags
        self._digests = tags.view("<u8").reshape(-1)


def _digests(records: torch.Tensor) -> list[int]:
    """xxh3 of each row. On the decode path: 25 records of 12 KiB take 5 to 15 us, depending on whether they are in the
    processor's cache."""
    return list(map(xxhash.xxh3_64_intdigest, records.numpy()))


def _differing(found: list[int], expected: list[int]) -> np.ndarray:
    """Positions (int64) of digests that differ from the stored ones, which are 1 for a digest of 0."""
    wrong = [(one or 1) != other for one, other in zip(found, expected, strict=True)]
    return np.flatnonzero(wrong).astype(np.int64)
