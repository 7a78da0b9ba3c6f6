"""Slots on a CUDA device whose records a kernel reads out of pinned host memory: no step waits for the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..kernels.on_a_device import to_device
from ..kernels.slots import bring, exchange
from ..memory.account import SLOTS
from .choice import Source
from .storage import Storage


class Addresses:
    """Where one layer's records are in pinned host memory, on its device. For the thread that runs the model."""

    def __init__(self, storage: Storage, grows: bool = False) -> None:
        """`grows`: there is room for an eighth more units, at least 64."""
        self._storage, self._grows = storage, grows
        self.memory: torch.Tensor | None = None
        """(rows, room) int64 on the device; None: nothing is known."""
        self._units = 0
        self._elsewhere = False

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return 0 if self.memory is None else self.memory.nbytes

    @staticmethod
    def room_for(units: int) -> int:
        """So many units, and an eighth more, at least 64."""
        return units + max(64, units // 8)

    def of(self, history: Source) -> torch.Tensor | None:
        """The address of each unit's record, (rows, units) int64, which work of the current stream may read from now
        on; None if some are in memory that is not pinned. A view of `memory`, which has room for units to come. Valid
        until records move or rows change: see `forget`."""
        if self._elsewhere:
            return None
        memory, units = self.memory, history.records
        if memory is None or self._units != units or len(memory) != history.rows:
            first = self._units if memory is not None and len(memory) == history.rows else 0
            first = 0 if first > units else first
            new = np.broadcast_to(np.arange(first, units), (history.rows, units - first))
            records = history.extents(new).records
            self._storage.catch_up(history.store, history.device)
            self._storage.prefetcher.check_written(history.store, records.reshape(-1))
            if (addresses := history.store.addresses(records.reshape(-1))) is None:
                self._elsewhere, self.memory = True, None
                return None
            more = to_device(addresses.reshape(records.shape), history.device)
            if memory is None or not first or memory.shape[1] < units:
                before = None if memory is None or not first else memory[:, :first]
                room = self.room_for(units) if self._grows else units
                with torch.inference_mode(False):  # it is written to in any mode
                    self.memory = memory = more.new_zeros(history.rows, room)
                if before is not None:
                    memory[:, :first] = before
            memory[:, first:units] = more
            self._units = units
        return memory[:, :units]

    def forget(self) -> None:
        """Drop the addresses, because records move or rows change."""
        self.memory, self._elsewhere = None, False


class DeviceSlots:
    """`count` slots a row for the records of one layer, filled first in, first out, and their tables.

    The account books them as "reuse slots". Everything is in the order of the current stream. For the thread that runs
    the model. Raises `BudgetError`, with nothing booked.
    """

    def __init__(self, storage: Storage, history: Source, count: int) -> None:
        form, device, self._account = history.form, history.device, storage.account
        self.count = count
        self.made_for = 0, 0
        """Version of the budgets, and units a row, that `count` suffices for; set by the owner."""
        self._storage = storage
        self._addresses = Addresses(storage, grows=True)
        shape = history.rows, count, form.payload_width
        self.data = self._account.empty(SLOTS, *shape, dtype=form.payload_dtype, device=device)
        """(rows, count, payload width): the payloads, valid until the next `bring`."""
        tables = {"dtype": torch.int32, "device": device}
        self._unit_in = torch.full((history.rows, count), -1, **tables)  # type: ignore[call-overload]
        self._order = torch.arange(count, **tables).repeat(history.rows, 1)  # type: ignore[call-overload]
        self._slot_of = torch.full((history.rows, 0), -1, **tables)  # type: ignore[call-overload]
        self.closed = False
        storage.account.spare(self)

    @staticmethod
    def planned_tables(rows: int, units: int, count: int) -> int:
        """Upper bound of `tables_nbytes` for so many units and slots a row."""
        return 12 * rows * Addresses.room_for(units) + 8 * rows * count

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the tables, which the account does not book."""
        return self._addresses.nbytes + sum(one.nbytes for one in (self._unit_in, self._order, self._slot_of))

    def bring(self, history: Source, units: torch.Tensor) -> torch.Tensor | None:
        """Slots (rows, S) int32 of a step's `units` (rows, S) int32, distinct and ascending, at most `count` in a row,
        after their records were read into them; -1 for a unit of -1. Does not wait. None if the device cannot read some
        record. If it raises, the slots are freed, and this is closed: tables may say that records are there which were
        not read."""
        if not self.prepare(history):
            return None
        slots, counts = self.exchanged(units)
        self.count_later(history, counts)
        return slots

    def prepare(self, history: Source) -> bool:
        """Know where all records are, with room for further units; False if the device cannot read some record."""
        if (addresses := self._addresses.of(history)) is None:
            return False
        known, memory = self._slot_of.shape[1], self._addresses.memory
        if known < addresses.shape[1]:
            assert memory is not None
            more = self._slot_of.new_full((history.rows, memory.shape[1] - known), -1)
            self._slot_of = torch.cat([self._slot_of, more], 1)
        return True

    def exchanged(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `bring`, after `prepare`, which a captured step cannot call; and the units that are read and those that
        were in slots, (2, rows) int64, for `count_later`. Nothing is counted."""
        addresses = self._addresses.memory
        assert addresses is not None
        try:
            slots, absent, counts = exchange(units, self._slot_of, self._unit_in, self._order)
            bring(addresses, absent, slots, self.data)
        except BaseException:
            self.free_memory()
            raise
        return slots, counts

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that `exchanged` uses."""
        assert self._addresses.memory is not None
        return [self.data, self._unit_in, self._order, self._slot_of, self._addresses.memory]

    @property
    def room(self) -> int:
        """Units a row that they have room for."""
        return min(self._slot_of.shape[1], 0 if self._addresses.memory is None else self._addresses.memory.shape[1])

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
        """As `Spare.free_memory`: frees the slots and closes. Reads in flight end in the stream's order."""
        if not self.closed:
            self.closed = True
            self._account.free(SLOTS, self.data)
            self.data = self.data.new_empty(0)
            self._addresses.forget()

    def close(self) -> None:
        """Free the memory, after the reads in flight. Idempotent."""
        torch.cuda.current_stream(self.data.device).synchronize()
        self.free_memory()
