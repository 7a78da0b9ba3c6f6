"""The block table against plain lists: every row's records, and what is given back to the store when."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_offload_cache.errors import StoreFullError
from hf_offload_cache.history import BlockTable
from hf_offload_cache.stores import MemoryStore


class CountingStore(MemoryStore):
    """Knows which records are allocated; may be told to be full."""

    def __init__(self) -> None:
        super().__init__(4096, "layer 0")
        self.taken: set[int] = set()
        self.full = False

    def allocate(self, count: int) -> np.ndarray:
        if self.full:
            raise StoreFullError(errno.ENOSPC, "full")
        records = super().allocate(count)
        self.taken |= set(records.tolist())
        return records

    def free(self, ids: np.ndarray) -> None:
        super().free(ids)
        assert set(ids.tolist()) <= self.taken
        self.taken -= set(ids.tolist())


class TableModel(RuleBasedStateMachine):
    @initialize(batch=st.integers(1, 3))
    def make(self, batch: int) -> None:
        self.store = CountingStore()
        self.table = BlockTable(self.store, batch)
        self.rows: list[list[int]] = [[] for _ in range(batch)]

    def named(self) -> set[int]:
        return {record for row in self.rows for record in row}

    @rule(count=st.integers(0, 40))
    def append(self, count: int) -> None:
        taken = set(self.store.taken)
        records = self.table.append(count)
        assert records.shape == (len(self.rows), count)
        assert len(set(records.reshape(-1).tolist())) == records.size
        assert not set(records.reshape(-1).tolist()) & taken
        for row, new in zip(self.rows, records.tolist(), strict=True):
            row.extend(new)

    @rule()
    def append_to_a_full_store(self) -> None:
        self.store.full = True
        with pytest.raises(StoreFullError):
            self.table.append(2)
        self.store.full = False

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        count = round(share * len(self.rows[0]))
        before = set(self.store.taken)
        self.rows = [row[:count] for row in self.rows]
        freed = self.table.truncate(count)
        assert sorted(freed.tolist()) == sorted(before - self.named())
        assert self.store.taken == self.named()

    @rule(data=st.data())
    def select_rows(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(range(len(self.rows))), min_size=1, max_size=4))
        before = set(self.store.taken)
        self.table.select_rows(np.array(rows))
        self.rows = [list(self.rows[row]) for row in rows]
        assert self.store.taken == before

    @rule()
    def sweep(self) -> None:
        before = set(self.store.taken)
        freed = self.table.sweep()
        assert sorted(freed.tolist()) == sorted(before - self.named())
        assert self.store.taken == self.named()
        assert self.table.sweep().size == 0

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "table"):
            assert self.table.ids.tolist() == self.rows
            assert self.table.num_groups == len(self.rows[0])
            assert self.named() <= self.store.taken
            assert self.table.garbage == max(0, len(self.store.taken) - self.table.ids.size)
            assert self.table.moved or self.table.garbage == 0


TestBlockTable = TableModel.TestCase
TestBlockTable.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_rows_share_records_until_the_last_names_them() -> None:
    store = CountingStore()
    table = BlockTable(store, 2)
    first, second = table.append(3).tolist()
    table.select_rows(np.array([0, 0, 1]))
    assert table.ids.tolist() == [first, first, second]
    assert len(store.taken) == 6
    table.select_rows(np.array([1, 2]))
    assert table.sweep().size == 0
    table.select_rows(np.array([0]))
    assert table.garbage == 3
    assert sorted(table.sweep().tolist()) == second
    assert table.ids.tolist() == [first]
