"""Abstracts beside a history's records: what went in comes out, whatever was done to the history in between."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.errors import BudgetError, ContextError, StoreError
from hf_offload_cache.fetch import Areas, DryStorage, Fetcher, Storage
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.methods.abstract_tree import AbstractPages, ChunkHistory, page_size
from hf_offload_cache.testing import FaultyStore
from hf_offload_cache.testing.histories import some_keys_and_values

FORM = RecordFormat(2, 8, 2, 4, torch.float32, 4)
"""A record has 4 x 24 elements, an abstract 32: three fit."""


class WithPages(OffloadConfig):
    keeps_pages, keeps_replicas = True, False


CONFIG = WithPages(num_recent=4, block_tokens=16, engine="memory")
CPU = torch.device("cpu")


@pytest.fixture
def storage() -> Iterator[Storage]:
    storage = Storage(CONFIG, None)
    yield storage
    storage.close()


class Filled:
    """A history of which unit u of row r, as it was when it came, has the abstract r * 1000 + u, and what it should
    have."""

    def __init__(self, storage: Storage, rows: int) -> None:
        self.storage = storage
        self.history = ChunkHistory(storage, FORM, rows, CPU, CONFIG, "layer 0")
        self.expected = torch.empty(rows, 0)
        self.seed = 0

    def append(self, tokens: int) -> None:
        self.seed += 1
        keys, values = some_keys_and_values(self.history.rows, tokens, self.seed)
        sealed = self.history.append(keys, values)
        count = sealed.fresh // FORM.group_size
        made = self.seed * 10_000 + torch.arange(self.history.rows)[:, None] * 1000 + torch.arange(float(count))
        self.history.pages.append(made[:, :, None].expand(-1, -1, 32).contiguous())
        self.expected = torch.cat([self.expected, made], 1)

    def truncate(self, length: int) -> np.ndarray | None:
        freed = self.history.truncate(length)
        self.expected = self.expected[:, : self.history.units]
        return freed

    def select_rows(self, rows: list[int]) -> None:
        self.history.select_rows(torch.tensor(rows))
        self.expected = self.expected[rows]

    def check(self) -> None:
        """The pages have all of it, and the history what it had."""
        history, pages = self.history, self.history.pages
        assert pages.units == history.units == self.expected.shape[1]
        fetcher = Fetcher(self.storage, Areas(self.storage.account), [], 64)
        found = pages.joined(fetcher.look(history, pages.extents()))
        assert found.shape == (history.rows, history.units, 32)
        assert torch.equal(found, self.expected[:, :, None].expand_as(found))
        assert history.whole()[0].isfinite().all()
        fetcher.close()


def test_pages_of_a_growing_history(storage: Storage) -> None:
    filled = Filled(storage, 2)
    assert page_size(FORM) == 3
    for tokens in (3, 5, 1, 40, 2, 7):
        filled.append(tokens)
        filled.check()
    assert filled.history.pages.table.num_groups == filled.history.units // 3 == 4


@pytest.mark.parametrize("length", [0, 4, 9, 21, 24, 25, 40, 55, 57, 58])
def test_truncate(storage: Storage, length: int) -> None:
    filled = Filled(storage, 2)
    filled.append(58)
    pages = filled.history.pages.table.num_groups
    freed = filled.truncate(length)
    filled.check()
    kept = filled.history.pages.table.num_groups
    assert kept == pages or (freed is not None and freed.size >= 2 * (pages - kept))
    filled.append(30)
    filled.check()


def test_a_truncate_whose_read_fails_changes_nothing(storage: Storage) -> None:
    filled = Filled(storage, 1)
    filled.append(58)
    history, store = filled.history, filled.history.store
    history.move(FaultyStore(store, "read", 1))
    with pytest.raises(StoreError):
        history.truncate(24)
    history.move(store)
    assert history.length == 58
    filled.check()


def test_rows(storage: Storage) -> None:
    """They share pages, and go on by themselves; what no row names is given back."""
    filled = Filled(storage, 3)
    filled.append(50)
    filled.select_rows([2, 0, 0, 1])
    filled.check()
    filled.append(20)
    filled.check()
    filled.select_rows([3])
    filled.check()
    freed = filled.history.sweep(always=True)
    assert freed is not None and freed.size
    used = filled.history.named(filled.history.store.capacity)
    assert not used[freed].any()
    assert used.sum() == filled.history.units + filled.history.pages.table.num_groups
    filled.append(20)
    filled.check()


def test_frozen_captured_and_restored(storage: Storage) -> None:
    """The twin has the same, and what either adds is its own."""
    filled = Filled(storage, 2)
    filled.append(58)
    parts = filled.history.freeze()
    assert np.concatenate(filled.history.live(parts)).sum() == 2 * (13 + 4)
    tree = filled.history.capture()
    other = Storage(CONFIG, None)
    try:
        twin = Filled(other, 1)
        twin.history.close()
        twin.history = ChunkHistory.restore(other, tree, [part.share() for part in parts], CPU, CONFIG, "layer 0")
        twin.expected, twin.seed = filled.expected, 50
        twin.check()
        for one in (twin, filled):
            one.append(21)
            one.check()
        twin.truncate(20)
        for one in (twin, filled):
            one.check()
        twin.history.close()
    finally:
        other.close()


@pytest.mark.parametrize(
    ("part", "wrong", "said"),
    [
        ("table", lambda table: table[:, 1:], r"expected \(rows=2, pages=4\) torch.int32"),
        ("table", lambda table: table + 1000, "int32 from 0 to"),
        ("table", lambda table: table.long(), "torch.int64, expected"),
        ("open", lambda latest: latest[:, 1:], "expected .* torch.float32"),
        ("open", lambda latest: latest.double(), "torch.float64, expected"),
        ("open", lambda latest: None, "None, expected"),
    ],
)
def test_what_does_not_hold_together(storage: Storage, part: str, wrong: Any, said: str) -> None:
    filled = Filled(storage, 2)
    filled.append(59 + 4)
    filled.history.freeze()
    tree = filled.history.capture()
    tree["pages"] = {**tree["pages"], part: wrong(tree["pages"][part])}
    with pytest.raises(ContextError, match=f"layer 0 of the context .*: {part} of its abstracts is .*{said}"):
        ChunkHistory.restore(storage, tree, filled.history.store.parts, CPU, CONFIG, "layer 0")


def test_what_is_held_is_planned_and_given_back(storage: Storage) -> None:
    for rows in (1, 3):
        filled = Filled(storage, rows)
        filled.append(58)
        pages = filled.history.pages
        held = storage.account.by_owner["abstracts"] + pages.table.nbytes
        dry: Any = DryStorage(CONFIG, "cpu")
        rehearsed = AbstractPages(dry, dry.open_store(FORM.record_bytes, ""), FORM, rows, CPU, "")
        rehearsed.rehearse(dry.account, filled.history.units)
        assert 0 < held <= dry.account.by_owner["abstracts"] + rehearsed.table.nbytes
        assert dry.plan.store_bytes == rows * 4 * FORM.record_bytes
        filled.history.close()
        assert storage.account.by_owner["abstracts"] == 0


def test_clear(storage: Storage) -> None:
    """All records of pages are free again, and what is added begins anew."""
    filled = Filled(storage, 2)
    filled.append(58)
    filled.history.pages.clear()
    assert filled.history.pages.units == 0
    assert filled.history.named(filled.history.store.capacity).sum() == 2 * filled.history.units
    again = torch.arange(2.0)[:, None].expand(2, 13)
    filled.history.pages.append(again[:, :, None].expand(-1, -1, 32).contiguous())
    filled.expected = again
    filled.check()


@pytest.mark.parametrize("append", [False, True])
def test_a_page_that_could_not_be_written(storage: Storage, append: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one: there are fewer abstracts than units, until those that are missing come again."""
    filled = Filled(storage, 2)
    filled.append(58)
    pages = filled.history.pages
    more = torch.arange(8.0).expand(2, 8)[:, :, None].expand(-1, -1, 32).contiguous()
    assert (pages.units, pages.each) == (13, 3)
    with monkeypatch.context() as patch:
        if append:
            patch.setattr(pages.table, "append", failing)
        else:
            patch.setattr(storage.prefetcher, "write", failing)
        with pytest.raises(StoreError):
            pages.append(more)
    assert pages.units == 14 and pages.table.num_groups == 4
    named = filled.history.named(filled.history.store.capacity).sum()
    assert named == 2 * (filled.history.units + 4)
    tree = filled.history.capture()
    assert tree["pages"] is None  # a context that is saved now is opened without
    filled.truncate(52)
    filled.check()
    pages.truncate(5)
    pages.append(more)
    assert pages.units == 13


def failing(*given: Any) -> None:
    raise StoreError(errno.EIO, "was made to fail")


def test_a_history_without_room_for_a_page_holds_nothing(storage: Storage) -> None:
    storage.account.limit = 2 * (CONFIG.num_recent + FORM.group_size) * FORM.entry_bytes
    with pytest.raises(BudgetError):
        ChunkHistory(storage, FORM, 2, CPU, CONFIG, "layer 0")
    assert storage.account.by_owner["rolling tail"] == 0
