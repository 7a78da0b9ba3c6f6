"""The reuse buffer's books: which record lies in which slot, and which goes next (KVSwap, section 3.4.3)."""

from __future__ import annotations

import numpy as np

ABSENT = -1


class SlotTable:
    """Maps record ids to fixed slots, replaced first in, first out. Holds no data.

    Records, not positions, are the keys: rows of a batch that share a record share its slot, and reordering beams
    changes nothing here. All arrays are int64. Used by one thread.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slot_of = np.full(64, ABSENT, dtype=np.int64)
        self._record_in = np.full(capacity, ABSENT, dtype=np.int64)
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self._slot_of.nbytes + self._record_in.nbytes

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The slot of each record, `ABSENT` for those that lie in none."""
        if len(records) and (last := int(records.max())) >= len(self._slot_of):
            grown = np.full(max(last + 1, 2 * len(self._slot_of)), ABSENT, dtype=np.int64)
            grown[: len(self._slot_of)] = self._slot_of
            self._slot_of = grown
        return self._slot_of[records]

    def insert(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give slots to distinct records that lie in none, oldest slots first.

        Returns the positions in `records` that got a slot (the last `capacity` of them, when there are more) and
        their slots. What lay there before is forgotten.
        """
        taken = np.arange(max(0, len(records) - self.capacity), len(records))
        slots = (self._next + np.arange(len(taken))) % max(self.capacity, 1)
        if len(taken):
            evicted = self._record_in[slots]
            self._slot_of[evicted[evicted != ABSENT]] = ABSENT
            records = records[taken]
            self.locate(records)
            self._slot_of[records] = slots
            self._record_in[slots] = records
            self._next = int((slots[-1] + 1) % self.capacity)
        return taken, slots

    def forget(self, records: np.ndarray) -> None:
        """The content of these records is no longer valid; their slots are free."""
        slots = self.locate(records)
        held = slots != ABSENT
        self._record_in[slots[held]] = ABSENT
        self._slot_of[records[held]] = ABSENT
