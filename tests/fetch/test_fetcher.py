"""A choice in, entries out: every mix of tiers, reads ahead and the store, held against what the records hold."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.errors import BudgetError, CacheClosedError, StalledError, StoreError
from hf_offload_cache.fetch import (
    Areas,
    Choice,
    Estimates,
    Extents,
    Fetched,
    Fetcher,
    FirstIn,
    MostUsed,
    Policy,
    SlotTier,
    Storage,
)
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import DryRun
from hf_offload_cache.stores import aligned_empty
from hf_offload_cache.testing import FaultyStore, LatencyStore
from hf_offload_cache.testing.wrappers import WrapperStore

FORM = RecordFormat(1, 2, 1, 2, torch.float32, 4)
RECORDS, GROUP, WIDTH = 40, FORM.group_size, FORM.entry_width
CPU = torch.device("cpu")


def content(record: int) -> torch.Tensor:
    """The entries (G, width) of a record: no two elements of all records are the same."""
    return record * 100.0 + torch.arange(GROUP * WIDTH, dtype=torch.float32).view(GROUP, WIDTH)


def looked(seen: Fetcher, source: Any, extents: Extents) -> torch.Tensor:
    """The entries (rows, E, G, width) in the payloads that a look shows."""
    return seen.look(source, extents).unflatten(2, (GROUP, WIDTH))


class ReadsSeen(WrapperStore):
    """Keeps the ids of every read."""

    advises = False

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.calls: list[list[int]] = []

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        self.calls.append(ids.tolist())
        self.inner.read(ids, out)

    def taken(self) -> list[int]:
        """The ids read since the last call, in order."""
        ids = [record for read in self.calls for record in read]
        self.calls = []
        return ids


class Source:
    """Units of a history without one: unit u of row b lies in record `table[b, u]`, or in `spread`'s extents of it."""

    form, device, extra_entries = FORM, CPU, None

    def __init__(self, store: Any, table: np.ndarray, tail: int = 3) -> None:
        self.store, self.table = store, table
        self.rows, self.records = table.shape
        self.tail = -1.0 - torch.arange(self.rows * tail * WIDTH).float().view(self.rows, tail, WIDTH)
        self.spread: Callable[[np.ndarray], Extents] | None = None

    @property
    def recent(self) -> torch.Tensor:
        return self.tail

    def extents(self, units: np.ndarray) -> Extents:
        if self.spread is not None:
            return self.spread(units)
        return Extents(np.where(units < 0, -1, np.take_along_axis(self.table, units.clip(min=0), 1)))


@pytest.fixture
def storage() -> Iterator[Storage]:
    storage = Storage(OffloadConfig(engine="memory"), None)
    yield storage
    storage.close()


def filled(storage: Storage, name: str = "layer 0") -> Any:
    """A store whose record r holds `content(r)`."""
    store = storage.open_store(FORM.record_bytes, name)
    ids = store.allocate(RECORDS)
    records = aligned_empty(RECORDS, FORM.record_bytes).fill_(0)
    payload = FORM.payload(records)
    for record in ids.tolist():
        payload[record] = content(record).reshape(-1)
    store.write(ids, records)
    return store


def tier(storage: Storage, capacity: int, policy: Callable[[int], Policy] = FirstIn, owner: str = "slots") -> SlotTier:
    return SlotTier(capacity, FORM.payload_width, FORM.dtype, CPU, storage.account, owner, policy)


def fetcher(storage: Storage, *capacities: int, areas: Areas | None = None, most: int = 8) -> Fetcher:
    tiers = [tier(storage, capacity, owner=f"slots {index}") for index, capacity in enumerate(capacities)]
    return Fetcher(storage, Areas(storage.account) if areas is None else areas, tiers, most)


def assert_holds(source: Source, choice: Choice, fetched: Fetched) -> None:
    """Row by row and unit by unit the entries of the records, and behind them the latest; zeros where none is."""
    extents = source.extents(choice.units)
    rows, count = extents.records.shape
    assert fetched.chosen == count * GROUP
    assert fetched.entries.shape == (rows, count * GROUP + source.recent.shape[1], WIDTH)
    for row in range(rows):
        for place, record in enumerate(extents.records[row].tolist()):
            got = fetched.entries[row, place * GROUP : (place + 1) * GROUP]
            assert torch.equal(got, torch.zeros(GROUP, WIDTH) if record < 0 else content(record)), (row, place)
    assert torch.equal(fetched.entries[:, fetched.chosen :], source.recent)


def assert_areas_are_back(areas: Areas) -> None:
    assert (areas._borrowed, areas._lent) == ([], 0)


def units(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


# ---------------------------------------------------------------------------------------------- what is gathered


def test_a_choice_that_is_gathered_again_is_counted_once(storage: Storage) -> None:
    """Its entries are there again; hit rates are of steps that chose. The same units chosen anew count."""
    store = filled(storage)
    source, seen, counters = Source(store, units([4, 7, 2])), fetcher(storage, 2), storage.counters
    choice = Choice(units([0, 2]))
    for count, again in ((2, choice), (2, choice), (4, Choice(units([0, 2])))):
        assert_holds(source, again, seen.gather(source, again))
        assert counters.units_selected == count
    assert counters.units_resident == 2
    seen.close()


@pytest.mark.parametrize("read", [[0, 3], []], ids=["reads", "all resident"])
def test_estimates_are_computed_once_while_records_are_read(storage: Storage, read: list[int]) -> None:
    """They come behind the latest entries, fewer than there is room for. One that fails changes nothing."""
    store, areas = filled(storage), Areas(storage.account)
    source, seen = Source(store, units([4, 7, 2, 9])), fetcher(storage, 8, areas=areas)
    seen.gather(source, Choice(units([1, 2])))
    choice, borrowed = Choice(units(sorted([1, 2, *read]))), list[int]()
    entries = torch.full((1, 2, WIDTH), 5.0)

    def estimate(error: Exception | None = None) -> Estimates:
        borrowed.append(len(areas._borrowed))
        if error is not None:
            raise error
        return Estimates(entries, torch.zeros(1, 1, 1, 2))

    with pytest.raises(BudgetError, match="no room"):
        seen.gather(source, choice, functools.partial(estimate, BudgetError("no room")), 6)
    assert_areas_are_back(areas)
    fetched = seen.gather(source, choice, estimate, 6)
    assert borrowed == 2 * [1 if read else 0]
    assert torch.equal(fetched.entries[:, -2:], entries) and fetched.estimates is not None
    assert_holds(source, choice, dataclasses.replace(fetched, entries=fetched.entries[:, :-2]))
    assert_areas_are_back(areas)
    again = seen.gather(source, choice, lambda: None, 6)
    assert again.estimates is None
    assert_holds(source, choice, again)
    seen.close()


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("capacities", [(), (0,), (3,), (64,), (2, 9), (0, 5), (5, 0)])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_mix_of_tiers_guesses_and_reads(
    storage: Storage, rows: int, capacities: tuple[int, ...], guesses: bool
) -> None:
    """Rows share some of their records; some rows are ragged."""
    generator = np.random.default_rng(rows + len(capacities))
    store = ReadsSeen(filled(storage))
    table = np.stack([generator.permutation(RECORDS)[:20] for _ in range(rows)])
    table[:, :6] = table[0, :6]
    source, seen = Source(store, table), fetcher(storage, *capacities)
    counters = storage.counters
    for step in range(25):
        count = int(generator.integers(0, 8))
        wanted = np.sort(np.stack([generator.permutation(20)[:count] for _ in range(rows)]), 1)
        ragged = step % 3 == 0 and count > 1
        if ragged:
            wanted[-1, -1] = -1
        choice = Choice(wanted)
        ahead: set[int] = set()
        if guesses and step % 4:
            guess = np.sort(np.stack([generator.permutation(20)[: count + 1] for _ in range(rows)]), 1)
            seen.ahead(source, Choice(guess), seen.latest)
            assert seen.guess is not None and seen.guess.units is guess
            assert seen._missing.ahead is not None
            seen._missing.ahead.read.tickets[0].wait()
            read = store.taken()
            assert len(set(read)) == len(read)
            ahead = set(read)
            assert all((part.locate(np.array(read, dtype=np.int64)) == -1).all() for part in seen.tiers)
        asked = source.extents(wanted).records.reshape(-1)
        asked = asked[asked >= 0]
        resident = {r for part in seen.tiers for r in range(RECORDS) if part.locate(np.array([r]))[0] >= 0}
        before = (counters.units_selected, counters.units_resident, counters.units_ready)
        fetched = seen.gather(source, choice)
        assert_holds(source, choice, fetched)
        read = store.taken()
        assert sorted(read) == sorted(set(asked.tolist()) - resident - ahead)
        assert (fetched.valid is None) == (not ragged)
        if ragged:
            assert fetched.valid is not None
            assert fetched.valid.reshape(rows, count, GROUP).all(-1).tolist() == (wanted >= 0).tolist()
        after = (counters.units_selected, counters.units_resident, counters.units_ready)
        held = sum(record in resident for record in asked.tolist())
        ready = sum(record in resident | ahead for record in asked.tolist())
        assert tuple(b - a for a, b in zip(before, after, strict=True)) == (len(asked), held, ready)
        assert seen.latest is choice
        assert_areas_are_back(seen._areas)
    seen.close()
    seen._areas.reset()
    assert storage.account.current == 0


def test_keep_says_which_entries_are_attended(storage: Storage) -> None:
    """They come alone, in order, and the latest behind them; a row that keeps fewer has zeros at its end."""
    source, seen = Source(filled(storage), np.arange(20).reshape(2, 10)), fetcher(storage, 4)
    keep = np.zeros((2, 2, GROUP), dtype=bool)
    keep[0, 0, [0, 3]] = keep[1, 1, 2] = True
    fetched = seen.gather(source, Choice(units([1, 4], [0, 7]), keep=keep))
    assert fetched.entries.shape == (2, 2 + source.recent.shape[1], WIDTH)
    assert torch.equal(fetched.entries[0, :2], content(1)[[0, 3]])
    assert torch.equal(fetched.entries[1, :2], torch.stack([content(17)[2], torch.zeros(WIDTH)]))
    assert torch.equal(fetched.entries[:, fetched.chosen :], source.recent)
    assert fetched.valid is not None and fetched.kept is not None
    assert fetched.valid.tolist() == [[True, True], [True, False]]
    assert fetched.kept[fetched.valid].tolist() == [0, 3, GROUP + 2]
    places = np.arange(2 * 2 * GROUP).reshape(2, -1)
    assert fetched.of_chosen(places)[fetched.valid].tolist() == [0, 3, 2 * GROUP + GROUP + 2]


def test_rows_that_keep_equally_many_need_no_mask(storage: Storage) -> None:
    source, seen = Source(filled(storage), np.arange(20).reshape(2, 10)), fetcher(storage, 4)
    keep = np.zeros((2, 2, GROUP), dtype=bool)
    keep[0, 0, [0, 3]] = keep[1, :, 2] = True
    fetched = seen.gather(source, Choice(units([1, 4], [0, 7]), keep=keep))
    assert fetched.valid is None and fetched.chosen == 2
    assert torch.equal(fetched.entries[1, :2], torch.stack([content(10)[2], content(17)[2]]))


def test_fetched_units_are_gathered_from_there(storage: Storage) -> None:
    store = ReadsSeen(filled(storage))
    source, seen, counters = Source(store, np.arange(20).reshape(2, 10)), fetcher(storage, 8), storage.counters
    seen.gather(source, Choice(units([3], [9])))
    seen.ahead(source, Choice(units([5], [8])))
    assert seen._missing.ahead is not None
    seen._missing.ahead.read.tickets[0].wait()
    store.taken()
    wanted = Choice(units([3, 5, 6], [8, 9, -1]))
    entries = seen.bring(source, wanted)
    assert entries.shape == (2, 3, GROUP, WIDTH)
    assert torch.equal(entries[0], torch.stack([content(3), content(5), content(6)]))
    assert torch.equal(entries[1], torch.stack([content(18), content(19), torch.zeros(GROUP, WIDTH)]))
    before = dataclasses.replace(counters)
    keep = np.zeros((2, 3, GROUP), dtype=bool)
    keep[:, :2, 1] = True
    fetched = seen.gather(source, Choice(units([3, 5, 6], [8, 9, -1]), keep))
    assert torch.equal(fetched.entries[0, :2], torch.stack([content(3)[1], content(5)[1]]))
    assert torch.equal(fetched.entries[1, :2], torch.stack([content(18)[1], content(19)[1]]))
    assert store.taken() == [6]
    counted = [getattr(counters, f"units_{name}") - getattr(before, f"units_{name}") for name in (
        "selected", "resident", "ready",
    )]  # fmt: skip
    assert counted == [5, 2, 4]  # records 3 and 19 were resident, 5 and 18 were read ahead
    assert (seen.tiers[0].locate(np.array([3, 5, 6, 18, 19])) >= 0).all()
    assert_areas_are_back(seen._areas)


@pytest.mark.parametrize("between", ["another choice", "another gather", "changed rows", "another layer"])
def test_fetched_units_stand_for_no_others(storage: Storage, between: str) -> None:
    """It is read again for whoever wants other units, or the same after the memory was used or rows have changed."""
    store, areas = ReadsSeen(filled(storage)), Areas(storage.account)
    source, seen = Source(store, np.arange(20).reshape(2, 10)), fetcher(storage, 0, areas=areas)
    other = fetcher(storage, 0, areas=areas)
    wanted, another = Choice(units([3, 5], [8, 9])), Choice(units([3, 6], [8, 9]))
    seen.bring(source, wanted)
    if between == "another gather":
        other.gather(source, another)
    elif between == "changed rows":
        seen.rows_changed()
    store.taken()
    choice = another if between == "another choice" else wanted
    assert_holds(source, choice, (other if between == "another layer" else seen).gather(source, choice))
    assert sorted(store.taken()) == sorted(source.extents(choice.units).records.reshape(-1).tolist())
    seen.bring(source, wanted)
    seen.gather(source, wanted)
    assert_holds(source, wanted, seen.gather(source, wanted))
    assert sorted(store.taken()) == sorted([3, 5, 18, 19] * 2)


def test_extents_of_parts_of_records(storage: Storage) -> None:
    """A unit in two runs, two runs of one record in a row, a unit that ends in the middle of a record, and none."""
    store = ReadsSeen(filled(storage))
    source, seen = Source(store, np.arange(4)[None]), fetcher(storage, 0)
    records = units([7, 9, 7, 3, -1])
    first, count = units([2, 0, 0, 1, 0]), units([2, 3, 2, 1, 4])
    source.spread = lambda asked: Extents(records, first, count, unit=units([0, 0, 1, 2, 3]))
    choice = Choice(units([0, 1, 2, 3]))
    fetched = seen.gather(source, choice)
    assert sorted(store.taken()) == [3, 7, 9]  # each once
    assert_holds(source, choice, fetched)
    assert fetched.valid is not None
    expected = [[False, False, True, True], [True, True, True, False], [True, True, False, False],
                [False, True, False, False], [False] * 4]  # fmt: skip
    assert fetched.valid.reshape(5, GROUP).tolist() == expected


def test_rows_with_fewer_runs_have_zeros_that_are_not_valid(storage: Storage) -> None:
    """No row lacks a unit, but one has fewer extents: what lay in the view before is not attended to, nor NaN."""
    source, seen = Source(filled(storage), np.arange(8).reshape(2, 4), tail=0), fetcher(storage, 0)
    seen.gather(source, Choice(units([0, 1], [2, 3]))).entries.fill_(torch.nan)
    source.spread = lambda asked: Extents(units([1, 2], [5, -1]))
    choice = Choice(units([0], [1]))
    fetched = seen.gather(source, choice)
    assert_holds(source, choice, fetched)
    assert fetched.valid is not None
    assert fetched.valid.reshape(2, 2, GROUP).all(-1).tolist() == [[True, True], [True, False]]


def test_what_the_near_tier_evicts_comes_from_the_far_one(storage: Storage) -> None:
    store = ReadsSeen(filled(storage))
    source, seen = Source(store, np.arange(10)[None]), fetcher(storage, 2, 8)
    near, far = seen.tiers
    for unit in range(6):
        choice = Choice(units([unit]))
        assert_holds(source, choice, seen.gather(source, choice))
    assert store.taken() == list(range(6))
    assert [record for record in range(10) if near.locate(np.array([record]))[0] >= 0] == [4, 5]
    choice = Choice(units([0, 1, 5]))
    assert_holds(source, choice, seen.gather(source, choice))
    assert store.taken() == []
    assert (near.locate(np.array([0, 1])) >= 0).any()  # and it is near again
    assert (far.locate(np.arange(6)) >= 0).all()
    seen.forget(np.array([0]))
    assert near.locate(np.array([0]))[0] == far.locate(np.array([0]))[0] == -1
    assert_holds(source, choice, seen.gather(source, choice))
    assert store.taken() == [0]


def test_what_is_looked_at_is_not_kept(storage: Storage) -> None:
    store = ReadsSeen(filled(storage))
    source, seen = Source(store, np.arange(20).reshape(2, 10)), fetcher(storage, 8)
    guess = Choice(units([8], [9]))
    seen.ahead(source, guess)
    got = looked(seen, source, Extents(units([5, -1, 6], [6, 5, 5])))
    assert got.shape == (2, 3, GROUP, WIDTH)
    assert torch.equal(got[0], torch.stack([content(5), torch.zeros(GROUP, WIDTH), content(6)]))
    assert torch.equal(got[1], torch.stack([content(6), content(5), content(5)]))
    assert seen.guess is guess
    assert (seen.tiers[0].locate(np.array([5, 6])) == -1).all()
    assert_holds(source, guess, seen.gather(source, guess))
    assert sorted(store.taken()) == [5, 6, 8, 19]
    assert torch.equal(looked(seen, source, Extents(units([-1], [-1]))), torch.zeros(2, 1, GROUP, WIDTH))
    assert_areas_are_back(seen._areas)


# ---------------------------------------------------------------------------------------------- early looks


def test_a_look_that_was_begun_reads_nothing_more(storage: Storage) -> None:
    store, looks = ReadsSeen(filled(storage)), Areas(storage.account)
    source, seen = Source(store, np.arange(20).reshape(2, 10)), Fetcher(
        storage, Areas(storage.account), [], 8, looks=looks
    )
    extents = Extents(units([5, -1, 6], [6, 5, 3]))
    seen.begin_look(source, extents)
    got = looked(seen, source, extents)
    assert sorted(store.taken()) == [3, 5, 6]
    assert torch.equal(got[0], torch.stack([content(5), torch.zeros(GROUP, WIDTH), content(6)]))
    assert torch.equal(got[1], torch.stack([content(6), content(5), content(3)]))
    assert_areas_are_back(looks)
    assert torch.equal(looked(seen, source, extents), got) and sorted(store.taken()) == [3, 5, 6]


def test_a_look_at_something_else_drops_what_was_begun(storage: Storage) -> None:
    store, looks = ReadsSeen(filled(storage)), Areas(storage.account)
    source, seen = Source(store, np.arange(10)[None]), Fetcher(storage, Areas(storage.account), [], 8, looks=looks)
    again = functools.partial(seen.begin_look, source, Extents(units([9])))
    for drop in (lambda: None, seen.drop_reads, seen.rows_changed, again):
        seen.begin_look(source, Extents(units([1, 2])))
        drop()
        assert torch.equal(looked(seen, source, Extents(units([2, 4])))[0], torch.stack([content(2), content(4)]))
        assert_areas_are_back(looks)
        assert store.taken()[-2:] == [2, 4]
    seen.close()
    looks.release()
    seen._areas.release()
    assert storage.account.by_owner["staging"] == 0


def test_an_early_look_that_failed_is_made_anew(storage: Storage) -> None:
    looks = Areas(storage.account)
    store = FaultyStore(filled(storage), "read", 1)
    source, seen = Source(store, np.arange(10)[None]), Fetcher(storage, Areas(storage.account), [], 8, looks=looks)
    seen.begin_look(source, Extents(units([1, 2])))
    assert torch.equal(looked(seen, source, Extents(units([1, 2])))[0], torch.stack([content(1), content(2)]))
    assert store.calls == 2
    assert_areas_are_back(looks)


def test_without_room_no_look_is_begun(storage: Storage) -> None:
    store, looks = ReadsSeen(filled(storage)), Areas(storage.account)
    source, seen = Source(store, np.arange(10)[None]), Fetcher(storage, Areas(storage.account), [], 8, looks=looks)
    looked(seen, source, Extents(units([0])))
    storage.account.limit = storage.account.current
    seen.begin_look(source, Extents(units([1, 2])))
    assert_areas_are_back(looks)
    assert torch.equal(looked(seen, source, Extents(units([1])))[0, 0], content(1))
    assert fetcher(storage, 0, areas=seen._areas).begin_look(source, Extents(units([1]))) is None


def test_others_fill_what_room_a_guess_leaves(storage: Storage) -> None:
    store = ReadsSeen(filled(storage))
    source, seen = Source(store, np.arange(30)[None]), fetcher(storage, 0, most=3)
    seen.ahead(source, Choice(units([4])), Choice(units([1, 4, 6, 9])))
    assert seen._missing.ahead is not None
    seen._missing.ahead.read.tickets[0].wait()
    assert store.taken() == [1, 4, 6]  # three at most, each once
    choice = Choice(units([4, 6, 9]))
    assert_holds(source, choice, seen.gather(source, choice))
    assert store.taken() == [9]


# ---------------------------------------------------------------------------------------------- what fails


def test_a_guess_that_failed_is_dropped(storage: Storage) -> None:
    store = FaultyStore(filled(storage), "read", 1)
    source, seen = Source(store, np.arange(10)[None]), fetcher(storage, 4)
    choice = Choice(units([2, 3]))
    seen.ahead(source, choice)
    assert_holds(source, choice, seen.gather(source, choice))
    assert store.calls == 2
    assert_areas_are_back(seen._areas)
    seen.ahead(source, Choice(units([4])))
    assert_areas_are_back(seen._areas) if seen._missing.ahead is None else seen.drop_ahead()
    assert_areas_are_back(seen._areas)


def test_a_gather_that_fails_changes_nothing(storage: Storage) -> None:
    """Neither the tiers nor what was gathered last; what was read ahead is spent, and its area is back."""
    store = FaultyStore(filled(storage), "read", 3)
    source, seen = Source(store, np.arange(10)[None]), fetcher(storage, 4)
    first, second = Choice(units([0, 1])), Choice(units([1, 2, 3]))
    seen.gather(source, first)
    seen.ahead(source, Choice(units([2])))
    with pytest.raises(StoreError):
        seen.gather(source, second)
    assert seen.latest is first
    assert (seen.tiers[0].locate(np.arange(10)) >= 0).tolist() == [True, True] + 8 * [False]
    assert_areas_are_back(seen._areas)
    assert_holds(source, second, seen.gather(source, second))
    with pytest.raises(StoreError):
        looked(seen, Source(FaultyStore(store, "read", 1), source.table), Extents(units([4])))
    assert_areas_are_back(seen._areas)


def test_an_area_that_the_budget_does_not_allow(storage: Storage) -> None:
    """Told with everything as it was: the read ahead has its area given back, and the next gather goes on."""
    source, seen = Source(filled(storage), np.arange(30)[None]), fetcher(storage, 0, most=2)
    seen.gather(source, Choice(units([7])))
    seen.ahead(source, Choice(units([1])))
    storage.account.limit = storage.account.current
    many = Choice(np.arange(20)[None])
    with pytest.raises(BudgetError):
        seen.gather(source, many)
    storage.account.limit = None
    small = Choice(units([1, 2]))
    assert_holds(source, small, seen.gather(source, small))
    assert_areas_are_back(seen._areas)
    seen._areas.release()
    seen.ahead(source, Choice(units([1])))
    view = (20 + -(-source.recent.shape[1] // GROUP)) * FORM.payload_width * FORM.dtype.itemsize
    storage.account.limit = storage.account.current + view  # and nothing for an area
    with pytest.raises(BudgetError, match="staging"):
        seen.gather(source, many)
    assert_areas_are_back(seen._areas)
    storage.account.limit = None
    assert_holds(source, many, seen.gather(source, many))


def test_more_than_an_area_holds_comes_in_parts(storage: Storage) -> None:
    """A union of choices, with something of it read ahead, in an area for one choice; and as much to look at."""
    source, seen = Source(filled(storage), np.arange(30)[None]), fetcher(storage, 3, most=4)
    most = storage.account.by_owner["staging"]
    for first, count in ((0, 4), (2, 13), (5, 20), (0, 30), (3, 4)):
        seen.ahead(source, Choice(units([first + 1, first + 2])))
        choice = Choice(first + np.arange(count)[None])
        assert_holds(source, choice, seen.gather(source, choice))
        most = max(most, storage.account.by_owner["staging"])
    found = looked(seen, source, Extents(np.array([[5, -1, 9, 5, *range(10, 29)]])))
    assert found.shape[1] == 23 and torch.equal(found[0, 0], found[0, 3]) and not found[0, 1].any()
    small = Choice(units([5, 9, 10]))
    assert torch.equal(
        seen.gather(source, small).entries[0, : 3 * FORM.group_size].reshape(3, -1),
        found[0][[0, 2, 4]].reshape(3, -1),
    )
    assert most == 2 * 4 * FORM.record_bytes, "an area for a gather and one ahead, of one choice each"
    assert_areas_are_back(seen._areas)


def test_a_read_that_does_not_begin(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its area is back, whoever asked: a guess, a gather, a look."""
    source, seen = Source(filled(storage), np.arange(10)[None]), fetcher(storage, 4)
    choice = Choice(units([2, 3]))
    with monkeypatch.context() as patch:

        def fails(*arguments: Any, **fields: Any) -> Any:
            raise StoreError(errno.EIO, "no")

        patch.setattr(storage.prefetcher, "read", fails)
        for ask in (seen.ahead, seen.gather):
            with pytest.raises(StoreError):
                ask(source, choice)
            assert_areas_are_back(seen._areas)
        with pytest.raises(StoreError):
            looked(seen, source, Extents(units([1])))
        assert_areas_are_back(seen._areas)
    assert_holds(source, choice, seen.gather(source, choice))


class NeverEnds:
    """A ticket of a device that does not answer."""

    stalled = True

    def wait(self) -> float:
        raise StalledError(errno.ETIMEDOUT, "it did not answer")


def test_an_area_that_a_stalled_read_may_still_write_to_is_not_used_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the read that would mend the guess, nor for any other, until the cache is reset."""
    source, areas = Source(filled(storage), np.arange(10)[None]), Areas(storage.account)
    seen = fetcher(storage, 0, areas=areas)
    choice, read, into = Choice(units([2])), storage.prefetcher.read, []

    def watched(store: Any, ids: np.ndarray, out: torch.Tensor, **fields: Any) -> Any:
        into.append(out.data_ptr())
        return NeverEnds() if len(into) in (1, 3) else read(store, ids, out, **fields)

    monkeypatch.setattr(storage.prefetcher, "read", watched)
    seen.ahead(source, choice)
    with pytest.raises(StalledError):
        seen.gather(source, choice)
    assert_holds(source, choice, seen.gather(source, choice))
    with pytest.raises(StalledError):
        seen.gather(source, choice)
    assert_holds(source, choice, seen.gather(source, choice))
    assert len(into) == 4 and into[0] not in into[1:] and into[2] != into[3]
    assert len(areas._borrowed) == 2
    areas.reset()
    assert_areas_are_back(areas)
    assert storage.account.by_owner["staging"] == 0


def test_a_read_that_was_cancelled_with_its_store_is_dropped(storage: Storage) -> None:
    going = threading.Event()
    store = LatencyStore(filled(storage), 0, sleep=lambda seconds: going.wait(10))
    source, seen = Source(store, np.arange(10)[None]), fetcher(storage, 0)
    seen.ahead(source, Choice(units([2])))
    threading.Timer(0.05, going.set).start()
    storage.prefetcher.cancel(store)
    assert seen._missing.ahead is not None
    with pytest.raises(CacheClosedError):
        seen._missing.ahead.read.tickets[0].wait()
    seen.close()
    assert_areas_are_back(seen._areas)


# ---------------------------------------------------------------------------------------------- areas


def test_an_area_in_flight_is_used_by_nobody_else(storage: Storage) -> None:
    going = threading.Event()
    inner, areas = filled(storage), Areas(storage.account)
    slow = Source(LatencyStore(inner, 0, sleep=lambda seconds: going.wait(10)), np.arange(10)[None])
    quick = Source(inner, np.arange(10, 20)[None])
    one, other = fetcher(storage, 0, areas=areas), fetcher(storage, 0, areas=areas)
    choice = Choice(units([3, 4]))
    one.ahead(slow, choice)
    assert one._missing.ahead is not None
    in_flight = one._missing.ahead.read.area
    for _ in range(3):
        assert_holds(quick, choice, other.gather(quick, choice))
        assert in_flight in areas._borrowed and in_flight not in areas._free
    other.ahead(quick, choice)
    assert other.guess is None  # none is free: reading ahead is never needed
    going.set()
    assert_holds(slow, choice, one.gather(slow, choice))
    other.ahead(quick, choice)
    assert other.guess is choice
    other.close()
    assert_areas_are_back(areas)


def test_areas_are_lent_once_and_given_back(storage: Storage) -> None:
    areas, account = Areas(storage.account, ahead=2), storage.account
    one, two = areas.borrow(8192, CPU), areas.borrow_ahead(8192, CPU)
    assert two is not None and one is not two
    assert account.by_owner["staging"] == 2 * 8192
    three = areas.borrow_ahead(4096, CPU)
    assert three is not None and areas.borrow_ahead(1, CPU) is None
    areas.give_back(two, ahead=True)
    assert areas.borrow(4096, CPU) is two
    areas.give_back(one)
    larger = areas.borrow(16384, CPU)  # the one that is too small goes before
    assert account.by_owner["staging"] == 8192 + 4096 + 16384
    with pytest.raises(ValueError, match="not in list"):
        areas.give_back(one)
    areas.give_back(larger)
    areas.release()
    assert account.by_owner["staging"] == 8192 + 4096
    areas.reset()
    assert account.by_owner["staging"] == 0
    assert areas.borrow_ahead(4096, CPU) is not None


def test_the_view_grows_in_steps(storage: Storage) -> None:
    areas, account = Areas(storage.account), storage.account
    first = areas.view(2, 3, 1, FORM, CPU, room=25)
    assert first.payloads.tensor.shape == (2 * (3 + 1), 16) and first.entries.shape == (2, (3 + 1) * GROUP, WIDTH)
    assert first.target.tolist() == [0, 1, 2, 4, 5, 6]
    assert account.by_owner["selection"] == 25 * 64
    assert areas.view(2, 3, 1, FORM, CPU, room=1) is first
    same = areas.view(5, 3, 2, FORM, CPU, room=1)
    assert same.entries.data_ptr() == first.entries.data_ptr() and same.entries.shape == (5, 5 * GROUP, WIDTH)
    assert areas.view(2, 13, 0, FORM, CPU, room=1).entries.shape == (2, 13 * GROUP, WIDTH)
    assert account.by_owner["selection"] == 26 * 64
    narrow = dataclasses.replace(FORM, dtype=torch.bfloat16)
    assert areas.view(2, 13, 0, narrow, CPU, room=1).entries.dtype == torch.bfloat16
    assert account.by_owner["selection"] == 26 * 32
    areas.release()
    assert account.by_owner["selection"] == 0
    assert areas.view(2, 3, 1, FORM, CPU, room=1) is not first


def test_a_view_that_needs_more_takes_the_place_of_areas(storage: Storage) -> None:
    areas, account = Areas(storage.account), storage.account
    def rehearsed(widest: int) -> dict[str, int]:
        run = DryRun()
        Areas(run).rehearse(run, 8 * 64, (9 * 64, widest), (0, 0))
        return {owner: nbytes for owner, nbytes in run.plan(0).shared.decode.items() if nbytes}

    payload, planned = 64, rehearsed(18 * 64)
    assert planned == {"staging": 8 * 64, "selection": 18 * 64}
    assert rehearsed(10 * 64) == {"staging": 16 * 64, "selection": 9 * 64}
    lent, ahead = areas.borrow(8 * payload, CPU), areas.borrow_ahead(8 * payload, CPU)
    areas.view(1, 8, 1, FORM, CPU, room=9)
    areas.give_back(lent)
    areas.give_back(ahead, ahead=True)
    held = dict(account.by_owner)
    assert (held["staging"], held["selection"]) == (16 * payload, 9 * payload)
    areas.view(1, 17, 1, FORM, CPU, room=9)
    assert (account.by_owner["staging"], account.by_owner["selection"]) == (0, 18 * payload)
    areas.give_back(areas.borrow(8 * payload, CPU))
    assert account.peak == sum(planned.values())
    areas.view(1, 5, 1, FORM, CPU, room=9)
    assert account.by_owner["selection"] == 18 * payload
    for _ in range(2):
        areas.narrow()
        areas.view(1, 5, 1, FORM, CPU, room=9)
        assert (account.by_owner["staging"], account.by_owner["selection"]) == (8 * payload, 9 * payload)


def test_a_view_is_made_anew_only_where_it_is_too_small(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    areas, account, alive = Areas(storage.account), storage.account, []
    hold = account.hold

    def watched(owner: str, nbytes: int) -> None:
        if owner == "selection" and nbytes > 0:
            alive.append([one() is not None for one in views])
        hold(owner, nbytes)

    views: list[Any] = []
    monkeypatch.setattr(account, "hold", watched)
    for behind, room in ((1, 9), (2, 10), (1, 9), (2, 10), (1, 9)):
        view = areas.view(1, 8, behind, FORM, CPU, room=room)
        views.append(weakref.ref(view.payloads.tensor.untyped_storage()))
        del view
    assert len(alive) == 2 and not any(alive[1])


def test_a_queue_that_was_not_waited_for_stays_as_it_was(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it is made shorter: the next call waits anew."""
    asked: list[int] = []

    def interrupted(most: int) -> None:
        asked.append(most)
        raise KeyboardInterrupt

    before = storage.write_queue
    with monkeypatch.context() as once:
        once.setattr(storage.prefetcher, "limit_writes", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                storage.limit_writes(2**17)
            assert storage.write_queue == before
    storage.limit_writes(2**17)
    storage.limit_writes(None)
    assert asked == [2**17] * 2 and storage.write_queue == before


def test_a_fetcher_gives_back_what_it_does_not_gather_with(storage: Storage) -> None:
    """Slots and unused areas are given up for a gather that needs the memory, and nothing is read ahead for it."""
    store, account = filled(storage), storage.account
    source = Source(store, np.arange(10)[None])
    here, there = fetcher(storage, 4), fetcher(storage, 4)
    for one in (here, there):
        one.gather(source, Choice(units([1, 2])))
    held = account.by_owner["slots 0"]
    account.limit = account.current
    assert there._areas.borrow_ahead(2**20, CPU) is None and account.pressed == 0
    choice = Choice(units(range(9)))  # one more than the view and the area are made for
    assert_holds(source, choice, here.gather(source, choice))
    assert account.pressed >= 1 and account.by_owner["slots 0"] == held // 2
    assert there.closed and not here.closed and account.current <= account.limit


@pytest.mark.parametrize(
    ("first", "then"), itertools.permutations([torch.inference_mode, torch.no_grad, torch.enable_grad], 2)
)
def test_the_view_is_written_to_in_any_mode(storage: Storage, first: Any, then: Any) -> None:
    source, seen = Source(filled(storage), np.arange(10)[None]), fetcher(storage, 4)
    for mode, wanted in ((first, [1, 2]), (then, [2, 5])):
        with mode():
            choice = Choice(units(wanted))
            fetched = seen.gather(source, choice)
            assert_holds(source, choice, fetched)
            if mode is torch.enable_grad:
                weight = torch.ones(WIDTH, requires_grad=True)
                (fetched.entries * weight).sum().backward()
                assert weight.grad is not None and torch.equal(weight.grad, fetched.entries.sum((0, 1)))


def test_a_tier_replaces_as_its_policy_says(storage: Storage) -> None:
    """Two are wanted again and again: the most used one keeps them, first in, first out does not."""
    for policy, kept in ((MostUsed, True), (FirstIn, False)):
        store = ReadsSeen(filled(storage))
        source = Source(store, np.arange(30)[None])
        seen = Fetcher(storage, Areas(storage.account), [tier(storage, 4, policy)], 4)
        seen.gather(source, Choice(units([0, 1])))
        for unit in range(2, 12):
            seen.gather(source, Choice(units([unit])))
            seen.gather(source, Choice(units([0, 1])))
        assert (store.taken().count(0) == 1) == kept
        seen.close()


# --------------------------------------------------------------------------------------- records that are written anew


def test_what_is_written_anew_is_so_in_the_tiers(storage: Storage) -> None:
    store = ReadsSeen(filled(storage))
    source, seen = Source(store, np.arange(10)[None]), fetcher(storage, 4)
    choice = Choice(units([0, 1, 2]))
    seen.gather(source, choice)
    seen.ahead(source, Choice(units([5])))
    seen.stale(np.array([1, 2]))
    assert seen._missing.ahead is None
    assert_holds(source, choice, seen.gather(source, choice))
    other = torch.stack([content(21), content(27)]).flatten(1)
    store.taken()
    seen.renew(np.array([1, 7]), other, np.array([2]))
    fetched = seen.gather(source, Choice(units([0, 1, 7])))
    assert store.taken() == []
    parts = fetched.entries[0, : 3 * GROUP].unflatten(0, (3, GROUP))
    for part, record in zip(parts, (0, 21, 27), strict=True):
        assert torch.equal(part, content(record))
    assert (seen.tiers[0].locate(np.array([0, 1, 2, 7])) >= 0).tolist() == [True, True, False, True]
    seen.close()


def test_what_is_written_anew_pushes_out_nothing_of_its_own(storage: Storage) -> None:
    """A full tier: of a page that is new and one that is resident the latter stays, as it is now."""
    store = ReadsSeen(filled(storage))
    source, seen = Source(store, np.arange(10)[None]), fetcher(storage, 2)
    seen.gather(source, Choice(units([0, 1])))
    for other in (1, 0):
        seen.renew(np.array([other, 7]), torch.stack([content(20 + other), content(27)]).flatten(1), np.array([], int))
        assert seen.tiers[0].locate(np.array([other]))[0] >= 0
        store.taken()
        fetched = seen.gather(source, Choice(units([other])))
        assert torch.equal(fetched.entries[0, :GROUP], content(20 + other)) and store.taken() == []
        seen.gather(source, Choice(units([0, 1])))
    seen.close()


def test_a_tier_that_cannot_be_renewed_forgets(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ReadsSeen(filled(storage))
    source, seen = Source(store, np.arange(10)[None]), fetcher(storage, 4)
    seen.gather(source, Choice(units([0, 1])))

    def fail(slots: np.ndarray) -> None:
        raise MemoryError("made to fail")

    monkeypatch.setattr(seen.tiers[0]._table, "renewed", fail)  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        seen.renew(np.array([1]), content(27).reshape(1, -1), np.array([], int))
    assert (seen.tiers[0].locate(np.array([0, 1])) >= 0).tolist() == [True, False]
    seen.close()
