"""Slots on a CUDA device whose records a kernel reads out of pinned host memory: no step waits for the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..errors import BudgetError
from ..kernels.on_a_device import to_device
from ..kernels.slots import bring, exchange
from ..memory.account import SLOTS, lasting_empty
from .choice import Source
from .storage import Storage

_MOVED, _MOVES = 1 << 20, 8
"""A change of rows copies as many bytes of slots at a time, or more so that there are no more parts than this."""


class Addresses:
    """Where one layer's records are in pinned host memory, on its device. For the thread that runs the model."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: torch.Tensor | None = None  # with room for more
        self._version = -1
        self.elsewhere = False
        """Some records are in memory that is not pinned, as of the latest call of `of`."""
        self.again: torch.Tensor | None = None
        """(2, n) int64, rows and numbers of records that were written again before the latest call of `of`; None: there
        are none."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return 0 if self._known is None else self._known.nbytes

    @property
    def known(self) -> torch.Tensor | None:
        """What `of` returned last; None: nothing, or it was forgotten."""
        return self._known

    def of(self, history: Source) -> torch.Tensor | None:
        """The address of each numbered record, (rows, numbers or more) int64, which work of the current stream may read
        from now on; None if some are in memory that is not pinned. Numbers without a record have any address. Valid
        until records move or rows change: see `forget`."""
        if self.elsewhere or history.version == self._version:
            self.again = None
            return self._known
        rows, numbers, records, again = history.numbered(self._version)
        self._storage.catch_up(history.store, history.device)
        self._storage.prefetcher.check_written(history.store, records)
        if (addresses := history.store.addresses(records)) is None:
            self.forget()
            self.elsewhere = True
            return None
        before, wanted = self._known, history.numbers
        if before is None or before.shape[1] < wanted:  # room for an eighth more
            shape = history.rows, wanted + max(64, wanted // 8)
            self._known = lasting_empty(*shape, dtype=torch.int64, device=history.device).zero_()
            if before is not None:
                self._known[:, : before.shape[1]] = before
        row, number, address = to_device(np.stack([rows, numbers, addresses]), history.device)
        assert self._known is not None
        self._known[row, number] = address
        self.again = torch.stack([row, number]) if again and self._version >= 0 else None
        self._version = history.version
        return self._known

    def is_latest(self, addresses: torch.Tensor, history: Source) -> bool:
        """Whether `addresses`, of an earlier call of `of`, are what it would return now."""
        return addresses is self._known and history.version == self._version

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by the present row `rows[i]`, which its history did. `rows` (n,) int64 is on the device."""
        if self._known is not None:
            with torch.inference_mode(False):  # it is changed in any mode
                self._known = self._known.index_select(0, rows)

    def forget(self) -> None:
        """Drop the addresses, because records move or rows change."""
        self._known, self._version, self.elsewhere, self.again = None, -1, False, None


class DeviceSlots:
    """`count` slots a row for the records of one layer, filled first in, first out, or, `by_use`, those of the least
    used records first (see `exchange`), and their tables.

    The account books them as "reuse slots". Everything is in the order of the current stream. For the thread that runs
    the model. Raises `BudgetError`, with nothing booked.
    """

    def __init__(self, storage: Storage, history: Source, count: int, by_use: bool = False) -> None:
        form, device, self._account = history.form, history.device, storage.account
        self.count = count
        self.made_for = 0, 0
        """Version of the budgets, and units a row, that `count` suffices for; set by the owner."""
        self._storage = storage
        self._addresses = Addresses(storage)
        shape = history.rows, count, form.payload_width
        self.data = self._account.empty(SLOTS, *shape, dtype=form.payload_dtype, device=device)
        """(rows, count, payload width): the payloads, valid until the next `bring`."""
        self._unit_in, self._slot_of = self._table(history, count), self._table(history, 0)
        self._order: torch.Tensor | None = None
        self._uses: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        if by_use:
            self._uses = lasting_empty(history.rows, 0, dtype=torch.float32, device=device)
            self._weight = lasting_empty(history.rows, dtype=torch.float64, device=device).fill_(1)
        else:
            self._order = self._table(history, count)
            self._order.copy_(torch.arange(count, dtype=torch.int32, device=device))
        self.addresses: torch.Tensor | None = None
        """(rows, units or more) int64: the records' addresses in the latest `bring`; None before the first."""
        self.closed = self.at_work = False
        storage.account.spare(self)

    @staticmethod
    def moving_bytes(nbytes: int) -> int:
        """Bytes that `select_rows` uses while it runs, for `nbytes` of slots."""
        return min(nbytes, max(_MOVED, -(-nbytes // _MOVES)))

    @staticmethod
    def planned_tables(rows: int, count: int, units: int, by_use: bool = False) -> int:
        """Upper bound of `tables_nbytes` for `count` slots and up to so many `units` a row."""
        of_slots, of_units = (4, 4 + 8 + 4) if by_use else (4 + 4, 4 + 8)
        return rows * (of_slots * count + of_units * (units + max(64, units // 8)) + (8 if by_use else 0))

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the tables, which the account does not book."""
        return self._addresses.nbytes + sum(one.nbytes for one in self._tables if one is not None)

    @property
    def _tables(self) -> tuple[torch.Tensor | None, ...]:
        """The tables, of which some do not exist."""
        return self._slot_of, self._unit_in, self._order, self._uses, self._weight

    @property
    def slot_of(self) -> torch.Tensor:
        """(rows, units or more) int32: the slot of each unit, or -1; valid until the next `bring`."""
        return self._slot_of

    def bring(self, history: Source, units: torch.Tensor) -> torch.Tensor | None:
        """Slots (rows, S) int32 of a step's `units` (rows, S) int32, distinct and ascending, at most `count` in a row,
        after their records were read into them; -1 for a unit of -1. Does not wait. None if the device cannot read some
        record. If it raises, the slots are freed, and this is closed: tables may say that records are there which were
        not read."""
        if (addresses := self._addresses.of(history)) is None:
            return None
        self.addresses = addresses
        try:
            if self._slot_of.shape[1] < addresses.shape[1]:
                before, self._slot_of = self._slot_of, self._table(history, addresses.shape[1])
                self._slot_of[:, : before.shape[1]] = before
                if (uses := self._uses) is not None:
                    shape = history.rows, addresses.shape[1]
                    self._uses = lasting_empty(*shape, dtype=torch.float32, device=history.device).zero_()
                    self._uses[:, : uses.shape[1]] = uses
            if self._addresses.again is not None:
                self._empty(*self._addresses.again)
        except BaseException:
            self._free()
            raise
        slots, counts = self.exchanged(units)
        self.count_later(history, counts)
        return slots

    def exchanged(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `bring` with what it knew last, in a captured step; and the units that are read and those that were in
        slots, (2, rows) int64, for `count_later`. If it raises, the slots are freed, as by `bring`."""
        assert self.addresses is not None
        try:
            tables = self._slot_of, self._unit_in, self._order, self._uses, self._weight
            slots, absent, counts = exchange(units, *tables)
            bring(self.addresses, absent, slots, self.data)
        except BaseException:
            self._free()
            raise
        return slots, counts

    def is_ready(self, history: Source) -> bool:
        """Whether `exchanged` knows all records as they are now: none moved or was written again since `bring`."""
        known = self._addresses
        return self.addresses is not None and known.is_latest(self.addresses, history)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that `exchanged` uses, after `bring`."""
        assert self.addresses is not None
        return [self.data, *(one for one in self._tables if one is not None), self.addresses]

    @property
    def room(self) -> int:
        """Units a row that they have room for."""
        return 0 if self.addresses is None else min(self._slot_of.shape[1], self.addresses.shape[1])

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by the present row `rows[i]`, which the history did. Does not wait, unless `rows` (n,) int64
        is on the host and not pinned. Closes if the number of rows changes, or without memory for it."""
        if self.closed or len(rows) != len(self.data):
            return self._free()
        most = self.moving_bytes(self.data.nbytes)
        try:
            lasting = torch.inference_mode(False)  # tables are changed in any mode
            with self._account.not_sparing(), self._account.holding("moving rows", most), lasting:
                chosen = rows if rows.device == self.data.device else to_device(rows.numpy(), self.data.device)
                for part in self.data.split(max(1, self.count * most // self.data.nbytes), 1):
                    part.copy_(part.index_select(0, chosen))
                tables = (None if one is None else one.index_select(0, chosen) for one in self._tables)
                self._slot_of, self._unit_in, self._order, self._uses, self._weight = tables  # type: ignore[assignment]
                self._addresses.select_rows(chosen)
        except BudgetError:
            self._free()
        except BaseException:  # tables may differ from the slots
            self._free()
            raise

    @staticmethod
    def _table(history: Source, width: int) -> torch.Tensor:
        """(rows, width) int32 of -1, which can be changed in any mode."""
        return lasting_empty(history.rows, width, dtype=torch.int32, device=history.device).fill_(-1)

    def _empty(self, rows: torch.Tensor, units: torch.Tensor) -> None:
        """Empty the slots of units (n,) of `rows` (n,), whose records have other contents now. Their uses count on."""
        self._slot_of[rows, units] = -1
        place = torch.arange(self.count, dtype=torch.int32, device=rows.device)
        there = self._slot_of.gather(1, self._unit_in.clamp(min=0).long()) == place
        self._unit_in.masked_fill_(~there, -1)

    def count_later(self, history: Source, counts: torch.Tensor, told: Callable[[], object] | None = None) -> None:
        """Count units later, when numbers leave the device: `counts` (2, rows) int64, those that were read and those
        that were in slots. `told` is called then."""
        counters, store, nbytes = self._storage.counters, history.store, self.data[0, 0].nbytes

        def were_read(units: int) -> None:
            counters.units_selected += units
            store.count_read(units, units * nbytes)
            if told is not None:
                told()

        def were_there(units: int) -> None:
            counters.units_selected += units
            counters.units_resident += units
            counters.units_ready += units

        counters.tell_later(were_read, counts[0])
        counters.tell_later(were_there, counts[1])

    def free_memory(self) -> None:
        """As `Spare.free_memory`: frees the slots and closes, unless a step is `at_work`, as its owner says. Reads in
        flight end in the stream's order."""
        if not self.at_work:
            self._free()

    def _free(self) -> None:
        if not self.closed:
            self.closed = True
            self._account.free(SLOTS, self.data)
            self.data = self.data.new_empty(0)
            self._addresses.forget()
            self.addresses = None

    def close(self) -> None:
        """Free the memory, after the reads in flight. Idempotent."""
        torch.cuda.current_stream(self.data.device).synchronize()
        self._free()
