"""Memory faster than the store, which keeps what was read before: device slots, host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from ..memory.account import HOST_SLOTS, SLOTS, MemoryAccount
from .areas import Areas, ByteRows, View
from .choice import Fetched, kept_entries
from .policy import FirstIn, Policy

# A tier's table: which record is in which slot (KVSwap, section 3.4.3)

ABSENT = -1


class SlotTable:
    """Maps record ids to slots, replaced by a policy. Contains no data; for one thread.

    Records, not positions, are the keys: rows of a batch that share a record share its slot, and reordering beams
    changes nothing here.

    Attributes:
        used: call it with slots (int32) whose records were used again.
        renewed: call it with slots whose records were rewritten.
    """

    def __init__(self, capacity: int, policy: Callable[[int], Policy] = FirstIn) -> None:
        self.capacity = capacity
        self._slot_of = np.full(64, ABSENT, dtype=np.int32)
        self._record_in = np.full(capacity, ABSENT, dtype=np.int32)
        self._policy = policy(capacity)
        self.used, self.renewed = self._policy.used, self._policy.renewed

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._slot_of.nbytes + self._record_in.nbytes + self._policy.nbytes

    def rehearse(self, records: int) -> None:
        """Make the tables as large as a store of `records` can make them: a quarter more than needed."""
        if self.capacity:
            self._slot_of = np.empty(max(64, records * 5 // 4), dtype=np.int32)
        self._policy.rehearse(records)

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The slot (int32) of each record; `ABSENT` for -1 and for records in no slot."""
        if not self.capacity:
            return np.full(records.size, ABSENT, dtype=np.int32)
        try:
            return self._slot_of[records]  # the last entry stays absent: -1 indexes it
        except IndexError:
            self._grow(int(np.maximum.reduce(records)))
            return self._slot_of[records]

    def _grow(self, last: int) -> None:
        """Grow the table for records up to `last`, and one entry behind them."""
        size = self._slot_of.size
        grown = np.full(max(last + 2, size * 5 // 4), ABSENT, dtype=np.int32)
        grown[:size] = self._slot_of
        self._slot_of = grown

    def insert(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give slots to distinct records that are in none, as the policy decides, but no slot `in_use`: the next step
        will probably need this step's records again. If all slots are in use, nothing is copied. `wanted`: a step
        selected the records; otherwise they were rewritten.

        Returns the positions in `records` that got a slot, and their slots, whose former records are evicted.
        """
        taken, slots = self._policy.place(records, in_use, wanted=wanted)
        if not taken.size:
            return taken, taken
        records = records[taken]
        evicted = self._record_in[slots]
        self._slot_of[evicted[evicted != ABSENT]] = ABSENT
        last = int(np.maximum.reduce(records))
        if last >= self._slot_of.size - 1:
            self._grow(last)
        self._slot_of[records] = slots
        self._record_in[slots] = records
        return taken, slots

    def forget(self, records: np.ndarray) -> None:
        """Empty the slots of these records, whose contents are no longer valid; they are filled next."""
        slots = self.locate(records)
        slots = slots[slots != ABSENT]
        if len(slots):
            self._slot_of[self._record_in[slots]] = ABSENT
            self._record_in[slots] = ABSENT
            self._policy.emptied(slots)


class Tier(Protocol):
    """Keeps payloads of a history's records. The store has all of them too, so evicting writes nothing.

    For the thread that runs the model.
    """

    keeps_reads: bool
    """It is in host memory next to a device, and keeps records from the memory that they are read into; otherwise from
    where they are attended to."""

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The slot of each record (int64 ids); -1 if it is not resident."""

    def take(self, slots: np.ndarray, out: ByteRows, target: np.ndarray) -> None:
        """Copy the payloads in `slots` to rows `target` of `out`."""

    def keep(self, records: np.ndarray, in_use: np.ndarray, source: ByteRows, rows: np.ndarray) -> None:
        """Make `records`, distinct and not resident, resident while there are slots. The payload of `records[i]` is
        `source[rows[i]]`. `in_use`: slots that this step reads."""

    def renew(self, records: np.ndarray, source: ByteRows) -> None:
        """Update distinct, rewritten `records` to the rows of `source`, if they are resident; others may become
        resident."""

    def forget(self, records: np.ndarray) -> None:
        """Drop the payloads of these records, which were freed."""

    @property
    def tables_nbytes(self) -> int:
        """Bytes of host memory for the tables."""

    def rehearse(self, records: int) -> None:
        """Make the tables as large as a store of `records` can make them; in a dry run."""

    def close(self) -> None:
        """Free the memory. Idempotent."""


class SlotTier:
    """`capacity` payloads of `width` elements in one tensor on `device`, booked in the account as `owner`.

    Raises `BudgetError`, with nothing booked.
    """

    keeps_reads = False

    def __init__(
        self,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        account: MemoryAccount,
        owner: str = SLOTS,
        policy: Callable[[int], Policy] = FirstIn,
    ) -> None:
        self.capacity = capacity
        self._table = SlotTable(capacity, policy)
        self._account, self._owner = account, owner
        self._data = self._allocated(capacity, width, dtype, device)
        self._rows = ByteRows(self._data)
        self.locate = self._table.locate
        self.forget = self._table.forget

    def _allocated(self, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._account.empty(self._owner, capacity, width, dtype=dtype, device=device)

    def rehearse(self, records: int) -> None:
        self._table.rehearse(records)

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
        resident = (slots >= 0).nonzero()[0]
        if resident.size:
            self._rows.put(slots[resident], source, resident)
            self._table.renewed(slots[resident])

    @property
    def tables_nbytes(self) -> int:
        return self._table.nbytes

    def close(self) -> None:
        self._account.free(self._owner, self._data)
        self._data = self._data.new_empty(0, *self._data.shape[1:])
        self._rows = ByteRows(self._data)
        self._table = SlotTable(0)
        self.locate, self.forget = self._table.locate, self._table.forget


class HostTier(SlotTier):
    """A `SlotTier` in pinned host memory next to slots on a device: a cache of the disk.

    It keeps records as they are read, from the host memory that they were read into."""

    keeps_reads = True

    def _allocated(self, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._account.empty(self._owner, capacity, width, dtype=dtype, device=device, pinned=True)

    def renew(self, records: np.ndarray, source: ByteRows) -> None:
        """The rewritten records are on the device, and on the disk: they are read again when they are needed."""
        self.forget(records)


def slot_tiers(
    form: Any, device: torch.device, account: MemoryAccount, near: int, capacity: int,
    policy: Callable[[int], Policy] = FirstIn,
) -> list[Tier]:  # fmt: skip
    """Tiers for `capacity` payloads of `form`: `near` of them on a `device`, and the others in host memory. On a CPU
    these are one tier."""
    near = capacity if device.type == "cpu" else near
    tiers: list[Tier] = [SlotTier(near, form.payload_width, form.payload_dtype, device, account, policy=policy)]
    if near < capacity:
        try:
            far = capacity - near, form.payload_width, form.payload_dtype, torch.device("cpu")
            tiers.append(HostTier(*far, account, HOST_SLOTS, policy))
        except BaseException:
            tiers[0].close()
            raise
    return tiers


# Payloads copied between tiers and attention's view

Found = list[tuple[Tier, np.ndarray]]
"""The tiers, fastest first, each with the records' slots (-1: not resident)."""


def take_resident(found: Found, view: View) -> None:
    """Copy resident payloads to the view, each from the fastest tier that has it."""
    taken: np.ndarray | None = None
    for tier, lies_in in found:
        hits = lies_in >= 0 if taken is None else (lies_in >= 0) & ~taken
        held = hits.nonzero()[0]
        if held.size == hits.size:
            tier.take(lies_in, view.payloads, view.target)
        elif held.size:
            tier.take(lies_in[held], view.payloads, view.target[held])
        taken = hits if taken is None else taken | hits


def keep(found: Found, records: np.ndarray, view: View) -> None:
    """Let each tier keep the records it did not have, unless it keeps them when they are read. Cannot fail."""
    for tier, lies_in in found:
        if tier.keeps_reads:
            continue
        places = ((lies_in < 0) & (records >= 0)).nonzero()[0]
        if places.size:
            keep_in(tier, lies_in, places, *distinct(records[places]), view)


def keep_in(
    tier: Tier, lies_in: np.ndarray, places: np.ndarray, fresh: np.ndarray, which: np.ndarray | None, view: View
) -> None:
    """Let one tier keep the records `fresh`, which it does not have: those at `places`, mapped by `which` (see
    `distinct`)."""
    first = places if which is None else places[np.unique(which, return_index=True)[1]]
    tier.keep(fresh, lies_in[lies_in >= 0], view.payloads, view.target[first])


def distinct(records: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The distinct records, ascending, and the index among them of each given one; None if nothing changed."""
    if np.logical_and.reduce(records[1:] > records[:-1]):
        return records, None
    return np.unique(records, return_inverse=True)


def among(records: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each of `records` is one of `others`, and its index there. Both are distinct and ascending, and `others`
    is not empty."""
    which = others.searchsorted(records)
    which[which == others.size] = 0  # above all of them, so not equal to the first
    return others[which] == records, which


def kept_of(form: Any, recent: torch.Tensor, view: View, valid: np.ndarray, areas: Areas, last: int = 0) -> Fetched:
    """Only the `valid` entries of a view, followed by the `recent` ones, and by room for `last` more."""
    places, present = kept_entries(valid)
    (rows, chosen), whole = places.shape, view.entries.shape[1]
    entries = areas.kept(rows, chosen, recent.shape[1] + last, form, recent.device)
    entries[:, chosen : chosen + recent.shape[1]] = recent
    from_rows = (np.arange(rows)[:, None] * whole + places).reshape(-1)
    into_rows = (np.arange(rows)[:, None] * entries.shape[1] + np.arange(chosen)).reshape(-1)
    if (source := view.entry_rows) is None:
        source = view.entry_rows = ByteRows(view.entries.view(-1, form.entry_width))
    ByteRows(entries.view(-1, form.entry_width)).put(into_rows, source, from_rows)
    if present is not None:
        entries[:, :chosen][torch.from_numpy(~present).to(entries.device)] = 0
    return Fetched(entries, chosen, present, places)


def importance_of(
    importance: np.ndarray | None, places: np.ndarray, count: int, which: np.ndarray | None
) -> np.ndarray | None:
    """Importance of each of `count` distinct records, (count,) float32, or None without `importance`.

    It is the maximum of `importance` over the `places` (bool) that need the record; `which` is `distinct`'s index."""
    if importance is None:
        return None
    wanted = importance.reshape(-1)[places]
    if which is None:
        return wanted
    largest = np.full(count, -np.inf, dtype=np.float32)
    np.maximum.at(largest, which, wanted)
    return largest
