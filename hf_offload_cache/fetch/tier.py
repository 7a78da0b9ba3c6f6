"""Memory nearer than the store, which keeps what was read before: device slots, host memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ..memory.account import SLOTS, MemoryAccount, lasting_empty
from .areas import ByteRows
from .policy import FirstIn, Policies

# The books of a tier: which record lies in which slot (KVSwap, section 3.4.3)

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


class Tier(Protocol):
    """Keeps payloads of a history's records. Everything has its replica in the store: evicting writes nothing.

    For the thread that runs the model.
    """

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The slot of each record (int64 ids), -1 for those that are not resident."""

    def take(self, slots: np.ndarray, out: ByteRows, target: np.ndarray) -> None:
        """Copy the payloads in `slots` to rows `target` of `out`."""

    def keep(self, records: np.ndarray, in_use: np.ndarray, source: ByteRows, rows: np.ndarray) -> None:
        """Make `records`, distinct and not resident, resident as far as there are slots: the payload of `records[i]` is
        `source[rows[i]]`. `in_use`: slots that this step takes from."""

    def renew(self, records: np.ndarray, source: ByteRows) -> None:
        """Distinct `records` hold the rows of `source` from now on: those that are resident here too, and others may
        become so."""

    def forget(self, records: np.ndarray) -> None:
        """These records are free: nothing kept of them is valid."""

    @property
    def tables_nbytes(self) -> int:
        """Bytes of host memory for the books."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""


class SlotTier:
    """`capacity` payloads of `width` elements in one tensor on `device`, held in the account as `owner`.

    Raises `BudgetError`, with nothing held.
    """

    def __init__(
        self,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        account: MemoryAccount,
        owner: str = SLOTS,
        policy: Policies = FirstIn,
    ) -> None:
        self.capacity = capacity
        self._table = SlotTable(capacity, policy)
        self._account, self._owner = account, owner
        nbytes = capacity * width * dtype.itemsize
        account.hold(owner, nbytes)
        try:
            self._data = lasting_empty(capacity, width, dtype=dtype, device=device)
        except BaseException:  # a device has less than a budget gives
            account.release(owner, nbytes)
            raise
        self._rows = ByteRows(self._data)
        self.locate = self._table.locate
        self.forget = self._table.forget

    @staticmethod
    def planned(
        capacity: int, payload_bytes: int, records: int, owner: str = SLOTS, policy: Policies = FirstIn
    ) -> dict[str, int]:
        """The most that a tier of `capacity` takes, for a store of `records`."""
        return {owner: capacity * payload_bytes, "tables": SlotTable.planned(records, capacity, policy)}

    def take(self, slots: np.ndarray, out: ByteRows, target: np.ndarray) -> None:
        out.put(target, self._rows, slots)
        self._table.used(slots)

    def keep(self, records: np.ndarray, in_use: np.ndarray, source: ByteRows, rows: np.ndarray) -> None:
        taken, slots = self._table.insert(records, in_use)
        if taken.size:
            self._rows.put(slots, source, rows[taken])

    def renew(self, records: np.ndarray, source: ByteRows) -> None:
        slots = self.locate(records)
        absent = (slots < 0).nonzero()[0]
        if absent.size:
            self._table.insert(records[absent], slots[slots >= 0], wanted=False)
            slots = self.locate(records)
        here = (slots >= 0).nonzero()[0]
        if here.size:
            self._rows.put(slots[here], source, here)
            self._table.renewed(slots[here])

    @property
    def tables_nbytes(self) -> int:
        return self._table.nbytes

    def close(self) -> None:
        self._account.release(self._owner, self._data.nbytes)
        self._data = self._data.new_empty(0, *self._data.shape[1:])
        self._rows = ByteRows(self._data)
        self._table = SlotTable(0)
        self.locate, self.forget = self._table.locate, self._table.forget
