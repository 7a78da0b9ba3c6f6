"""Memory nearer than the store, which keeps what was read before: device slots, host memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ..memory.account import SLOTS, MemoryAccount
from ..memory.buffers import lasting_empty
from .byte_rows import ByteRows
from .policy import FirstIn, Policies
from .slot_table import SlotTable


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
