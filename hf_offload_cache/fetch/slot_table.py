"""The reuse buffer's books: which record lies in which slot, and which goes next (KVSwap, section 3.4.3)."""

from __future__ import annotations

import numpy as np

ABSENT = -1


class SlotTable:
    """Maps record ids to fixed slots, replaced first in, first out, but for what is in use. Holds no data.

    Records, not positions, are the keys: rows of a batch that share a record share its slot, and reordering beams
    changes nothing here. Used by one thread.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slot_of = np.full(64, ABSENT, dtype=np.int32)
        self._record_in = np.full(capacity, ABSENT, dtype=np.int32)
        self._order = np.arange(capacity, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return self._slot_of.nbytes + self._record_in.nbytes + self._order.nbytes

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The slot of each record, `ABSENT` for those that lie in none."""
        if not self.capacity:
            return np.full(len(records), ABSENT, dtype=np.int32)
        if len(records) and (last := int(records.max())) >= len(self._slot_of):
            grown = np.full(max(last + 1, len(self._slot_of) * 5 // 4), ABSENT, dtype=np.int32)
            grown[: len(self._slot_of)] = self._slot_of
            self._slot_of = grown
        return self._slot_of[records]

    def insert(self, records: np.ndarray, in_use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give slots to distinct records that lie in none: those filled longest ago, `in_use` slots only after all
        others (the next step will probably want again what this one uses).

        Returns the positions in `records` that got a slot (the last `capacity` of them, when there are more) and
        their slots. What lay there before is forgotten.
        """
        taken = np.arange(max(0, len(records) - self.capacity), len(records))
        if not len(taken):
            return taken, taken
        records = records[taken]
        used = np.zeros(self.capacity, dtype=bool)
        used[in_use] = True
        used = used[self._order]
        slots = np.concatenate([self._order[~used], self._order[used]])[: len(taken)]
        evicted = self._record_in[slots]
        self._slot_of[evicted[evicted != ABSENT]] = ABSENT
        self.locate(records)
        self._slot_of[records] = slots
        self._record_in[slots] = records
        filled = np.zeros(self.capacity, dtype=bool)
        filled[slots] = True
        self._order = np.concatenate([self._order[~filled[self._order]], slots])
        return taken, slots

    def forget(self, records: np.ndarray) -> None:
        """The content of these records is no longer valid; their slots are empty, and next to be filled."""
        slots = self.locate(records)
        slots = slots[slots != ABSENT]
        if len(slots):
            self._slot_of[self._record_in[slots]] = ABSENT
            self._record_in[slots] = ABSENT
            empty = np.zeros(self.capacity, dtype=bool)
            empty[slots] = True
            self._order = np.concatenate([slots, self._order[~empty[self._order]]])
