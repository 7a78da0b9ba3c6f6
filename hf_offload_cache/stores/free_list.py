"""Which records of a store are taken."""

from __future__ import annotations

import errno

import numpy as np

from ..errors import StoreError
from .checks import check_range, describe


class FreeList:
    """Hands out record ids, adjacent ones where it can, and takes them back. One thread only.

    Takes `RECORD_BYTES` of host memory a record.
    """

    RECORD_BYTES = 1

    def __init__(self, name: str) -> None:
        self._name = name
        self._taken = np.zeros(0, dtype=bool)
        self._lowest = 0  # every record below is taken
        self.available = 0

    @property
    def capacity(self) -> int:
        """Records that exist, taken or not."""
        return self._taken.size

    @property
    def taken(self) -> np.ndarray:
        """Whether each record is taken (bool), up to the last one that is: a copy."""
        return self._taken[: int(self._taken.nonzero()[0].max(initial=-1)) + 1].copy()

    def grow(self, count: int) -> None:
        """Add `count` free records at the end."""
        self._taken = np.concatenate([self._taken, np.zeros(count, dtype=bool)])
        self.available += count

    def take(self, count: int) -> np.ndarray:
        """`count` (at most `available`) ascending ids: the first gap that holds them all, else the lowest free ones."""
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
        """Take `ids` back. Raises `StoreError`, having changed nothing, when one is not taken or comes twice."""
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
