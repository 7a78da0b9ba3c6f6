"""The slot table against a model in plain Python: what lies where, what goes first, what is passed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_offload_cache.fetch import ABSENT, SlotTable
from hf_offload_cache.fetch.device_slots import Addresses, DeviceSlots
from hf_offload_cache.memory import MemoryAccount

EMPTY = -1
"""When an empty slot was filled: before every other."""


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class SlotModel(RuleBasedStateMachine):
    """Keeps which record lies in which slot and when each slot was filled; a batch is one point in time."""

    @initialize(capacity=st.integers(0, 6))
    def make(self, capacity: int) -> None:
        self.table = SlotTable(capacity)
        self.slot_of: dict[int, int] = {}
        self.filled = dict.fromkeys(range(capacity), EMPTY)
        self.time = 0

    @rule(data=st.data(), records=st.lists(st.integers(0, 300), max_size=10, unique=True))
    def insert(self, data: st.DataObject, records: list[int]) -> None:
        records = [record for record in records if record not in self.slot_of]
        capacity = self.table.capacity
        in_use = data.draw(st.lists(st.sampled_from(range(capacity)), max_size=8)) if capacity else []
        self.time += 1
        before = {slot: when for slot, when in self.filled.items() if slot not in in_use}
        taken, slots = self.table.insert(ids(*records), ids(*in_use))

        count = min(len(before), len(records))
        assert taken.tolist() == list(range(len(records) - count, len(records)))
        assert len(set(slots.tolist())) == len(slots) == count
        assert sorted(before[slot] for slot in slots.tolist()) == sorted(before.values())[:count]
        self.slot_of = {record: slot for record, slot in self.slot_of.items() if slot not in slots}
        self.slot_of.update(zip([records[i] for i in taken], slots.tolist(), strict=True))
        self.filled.update(dict.fromkeys(slots.tolist(), self.time))

    @rule(data=st.data(), strangers=st.lists(st.integers(0, 400), max_size=3, unique=True))
    def forget(self, data: st.DataObject, strangers: list[int]) -> None:
        held = data.draw(st.lists(st.sampled_from(sorted(self.slot_of)), unique=True)) if self.slot_of else []
        records = list(dict.fromkeys([*held, *strangers]))
        self.table.forget(ids(*records))
        for record in records:
            if record in self.slot_of:
                self.filled[self.slot_of.pop(record)] = EMPTY

    @rule(records=st.lists(st.integers(0, 1000), max_size=5))
    def locate(self, records: list[int]) -> None:
        expected = [self.slot_of.get(record, ABSENT) for record in records]
        assert self.table.locate(ids(*records)).tolist() == expected

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "table"):
            expected = [self.slot_of.get(record, ABSENT) for record in range(301)]
            assert self.table.locate(np.arange(301)).tolist() == expected
            assert len(set(self.slot_of.values())) == len(self.slot_of) <= self.table.capacity


TestSlotTable = SlotModel.TestCase
TestSlotTable.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("capacity", [0, 1])
def test_more_records_than_capacity(capacity: int) -> None:
    """The last ones get a slot; with no slots, none does."""
    table = SlotTable(capacity)
    taken, slots = table.insert(ids(5, 6, 7), ids())
    assert taken.tolist() == [2][:capacity]
    assert slots.tolist() == [0][:capacity]
    assert table.locate(ids(5, 6, 7)).tolist() == [ABSENT, ABSENT, 0 if capacity else ABSENT]
    table.forget(ids(5, 6, 7))
    assert (table.locate(ids(5, 6, 7)) == ABSENT).all()


@pytest.mark.parametrize("by_use", [False, True])
def test_slots_whose_rows_were_selected_in_inference_mode_can_be_changed_in_any_mode(by_use: bool) -> None:
    """So can the addresses: steps outside that mode write to both."""
    form = SimpleNamespace(payload_width=4, payload_dtype=torch.float32)
    storage: Any = SimpleNamespace(account=MemoryAccount())
    history: Any = SimpleNamespace(form=form, device=torch.device("cpu"), rows=2)
    slots, addresses = DeviceSlots(storage, history, 3, by_use), Addresses(storage)
    slots.data.copy_(torch.arange(24.0).view(2, 3, 4))
    slots._unit_in.copy_(torch.tensor([[0, 1, -1], [2, -1, -1]]))
    slots._slot_of = torch.tensor([[0, 1, -1], [-1, -1, 0]], dtype=torch.int32)
    addresses._known = torch.tensor([[10, 11, 12], [20, 21, 22]])
    if by_use:
        assert slots._weight is not None and slots._order is None
        slots._uses, slots._weight[1] = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), 7
    with torch.inference_mode():
        rows = torch.tensor([1, 1])
        slots.select_rows(rows)
        addresses.select_rows(rows)
    slots._empty(torch.tensor([0]), torch.tensor([2]))
    if by_use:
        assert slots._uses is not None and slots._weight is not None
        slots._uses[0, 0] = 9
        assert slots._uses.tolist() == [[9, 5, 6], [4, 5, 6]] and slots._weight.tolist() == [7, 7]
    addresses._known[0, 0] = 30
    assert slots._unit_in.tolist() == [[-1, -1, -1], [2, -1, -1]]
    assert addresses._known.tolist() == [[30, 21, 22], [20, 21, 22]]
    slots._addresses._known = torch.empty(2, 9000, dtype=torch.int64)  # with room for an eighth more
    slots._slot_of = torch.empty(2, 9000, dtype=torch.int32)
    slots._uses = torch.empty(2, 9000) if by_use else None
    assert slots.tables_nbytes == DeviceSlots.planned_tables(2, 3, 8000, by_use)
    assert slots.data.tolist() == torch.arange(12.0, 24.0).view(3, 4).expand(2, 3, 4).tolist()
