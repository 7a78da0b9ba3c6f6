"""The books of a tier: which record lies in which slot (KVSwap, section 3.4.3)."""

from __future__ import annotations

import numpy as np

from .policy import FirstIn, Policies

ABSENT = -1


class SlotTable:
    """Maps record ids to slots, replaced by a policy. Holds no data; used by one thread.

    Records, not positions, are the keys: rows of a batch that share a record share its slot, and reordering beams
    changes nothing here.

    Attributes:
        used: to be called with slots (int32) whose content was wanted again.
        renewed: with those whose content was written anew.
    """

    def __init__(self, capacity: int, policy: Policies = FirstIn) -> None:
        self.capacity = capacity
        self._slot_of = np.full(64, ABSENT, dtype=np.int32)
        self._record_in = np.full(capacity, ABSENT, dtype=np.int32)
        self._policy = policy(capacity)
        self.used, self.renewed = self._policy.used, self._policy.renewed

    @property
    def nbytes(self) -> int:
        """Bytes of the books."""
        return self._slot_of.nbytes + self._record_in.nbytes + self._policy.nbytes

    @staticmethod
    def planned(records: int, capacity: int, policy: Policies = FirstIn) -> int:
        """The most that the books of `capacity` slots take for a store of `records`: by record, a quarter beyond what
        there is, and by slot."""
        by_record = max(64, records * 5 // 4 if capacity else 0)
        return 4 * (by_record + capacity) + policy.planned(records, capacity)

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The slot (int32) of each record, `ABSENT` for those that lie in none and for -1."""
        if not self.capacity:
            return np.full(records.size, ABSENT, dtype=np.int32)
        try:
            return self._slot_of[records]  # the last entry stays absent: it is that of -1
        except IndexError:
            self._grow(records)
            return self._slot_of[records]

    def _grow(self, records: np.ndarray) -> None:
        """Make room in the books for these records, and one behind them."""
        size = self._slot_of.size
        if (last := int(np.maximum.reduce(records))) >= size - 1:
            grown = np.full(max(last + 2, size * 5 // 4), ABSENT, dtype=np.int32)
            grown[:size] = self._slot_of
            self._slot_of = grown

    def insert(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give slots to distinct records that lie in none, as the policy says, none of those `in_use`: the next step
        will probably want again what this one does, and where all are in use nothing is copied. They are `wanted` by a
        step, or were written anew.

        Returns the positions in `records` that got a slot, and their slots. What lay there before is evicted.
        """
        taken, slots = self._policy.place(records, in_use, wanted=wanted)
        if not taken.size:
            return taken, taken
        records = records[taken]
        evicted = self._record_in[slots]
        self._slot_of[evicted[evicted != ABSENT]] = ABSENT
        self._grow(records)
        self._slot_of[records] = slots
        self._record_in[slots] = records
        return taken, slots

    def forget(self, records: np.ndarray) -> None:
        """The content of these records is no longer valid; their slots are empty, and next to be filled."""
        slots = self.locate(records)
        slots = slots[slots != ABSENT]
        if len(slots):
            self._slot_of[self._record_in[slots]] = ABSENT
            self._record_in[slots] = ABSENT
            self._policy.emptied(slots)
