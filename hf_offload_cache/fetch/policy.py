"""Replacement policies: the slots that a tier evicts to make room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..kernels.slots import EVERY_STEP, LATER, MOST_WEIGHT


class Policy(Protocol):
    """Decides which of a tier's slots are filled again, and with what. Made for a number of slots; for one thread."""

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose slots for `records` (int64 ids), which are distinct and in no slot.

        Returns the positions in `records` of those that get a slot, and as many distinct slots (int32), none of them
        `in_use`. `wanted`: a step selected the records, and reads the slots in use; otherwise they were rewritten after
        it."""

    def used(self, slots: np.ndarray) -> None:
        """Note that the records in these slots were used again; several times in a step if several rows use one."""

    def renewed(self, slots: np.ndarray) -> None:
        """Note that the records in these slots were rewritten, here and in the store."""

    def emptied(self, slots: np.ndarray) -> None:
        """Note that these slots are empty; they are the next to be filled."""

    @property
    def nbytes(self) -> int:
        """Bytes of the policy's own tables."""

    def rehearse(self, records: int) -> None:
        """Make the tables as large as a store of `records` can make them: a quarter more than needed."""


class FirstIn:
    """First in, first out (KVSwap, section 3.4.3): evicts the slot that was filled longest ago. If there are more
    records than slots, the last ones get a slot."""

    def __init__(self, capacity: int) -> None:
        self._order = np.arange(capacity, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return self._order.nbytes

    def rehearse(self, records: int) -> None:
        """Do nothing: the tables depend on the number of slots."""

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        order = self._order
        used = np.zeros(order.size, dtype=bool)
        used[in_use] = True
        slots = order[~used[order]][: records.size]
        if slots.size:
            self.put_last(slots)
        return np.arange(records.size - slots.size, records.size), slots

    def used(self, slots: np.ndarray) -> None:
        """Do nothing: only the time of filling counts."""

    def renewed(self, slots: np.ndarray) -> None:
        """Do nothing."""

    def emptied(self, slots: np.ndarray) -> None:
        chosen = np.zeros(len(self._order), dtype=bool)
        chosen[slots] = True
        self._order = np.concatenate([slots, self._order[~chosen[self._order]]])

    def put_last(self, slots: np.ndarray) -> None:
        """Make these slots the last to be evicted."""
        chosen = np.zeros(self._order.size, dtype=bool)
        chosen[slots] = True
        self._order = np.concatenate([self._order[~chosen[self._order]], slots])


class MostUsed:
    """The access-frequency table (LeoAM, section 4.3): the records used most often of late stay.

    Counts each record's uses, in a slot or not; older uses count less after each step that reads something. A new
    record replaces one that was used less often, or gets no slot, so a single use does not evict a record that is used
    every other step. A slower tier does not count uses that a faster tier serves, because it need not keep such
    records. (Counting them changes the hit rates of two tiers little: at 8K tokens of text .594 instead of .593, with
    slots for a third and two thirds of a selection; .929 instead of .926, for a third and four thirds.)
    """

    def __init__(self, capacity: int) -> None:
        self._record_in = np.full(capacity, -1, dtype=np.int64)
        self._uses = np.zeros(64, dtype=np.float32)
        self._one = 1.0  # weight of a use now: later uses weigh more, which equals earlier ones weighing less

    @property
    def nbytes(self) -> int:
        return self._record_in.nbytes + self._uses.nbytes

    def rehearse(self, records: int) -> None:
        if self._record_in.size:
            self._uses = np.empty(max(64, records * 5 // 4), dtype=np.float32)

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        none = np.empty(0, dtype=np.int32)
        if not self._record_in.size or not records.size:
            return none, none
        last = int(np.maximum.reduce(records))
        if last >= self._uses.size:
            self._grow(last)
        self._uses[records] += self._one
        if wanted:
            self._one *= LATER
            if self._one > MOST_WEIGHT:
                self._uses /= self._one
                self._one = 1.0
        worth, size = self._worth(np.concatenate([self._record_in, records])), self._record_in.size
        lie, arriving = np.where(self._record_in < 0, -1, worth[:size]), worth[size:]
        lie[in_use] = np.inf
        if self._reserved is not None:
            lie[self._reserved()] = np.inf
        count = min(records.size, lie.size)
        best = np.argsort(-arriving, kind="stable")[:count]
        least = np.argsort(lie, kind="stable")[:count]
        better = arriving[best] > lie[least]  # a prefix, because one side falls and the other rises
        taken, slots = best[better], least[better].astype(np.int32)
        self._record_in[slots] = records[taken]
        return taken, slots

    def _worth(self, records: np.ndarray) -> np.ndarray:
        """The values by which records stay or are evicted; undefined for -1."""
        return self._uses[records]

    _reserved: Callable[[], np.ndarray] | None = None
    """Returns the slots that are not evicted in this step; None: there are no such slots."""

    def renewed(self, slots: np.ndarray) -> None:
        """Do nothing."""

    def used(self, slots: np.ndarray) -> None:
        """Count a use, up to the limit of a record used in every step: without steps that read, counts do not decay.
        """
        records, most = self._record_in[slots], self._one * EVERY_STEP
        self._uses[records] = np.minimum(self._uses[records] + self._one, most)

    def emptied(self, slots: np.ndarray) -> None:
        self._uses[self._record_in[slots]] = 0
        self._record_in[slots] = -1

    def _grow(self, record: int) -> None:
        size = self._uses.size
        grown = np.zeros(max(record + 1, size * 5 // 4), dtype=np.float32)
        grown[:size] = self._uses
        self._uses = grown
