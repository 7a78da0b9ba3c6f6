"""Replacement policies: which slots go, in what order, and that each is given once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.fetch import FirstIn, MostUsed, Policy, SlotTable
from hf_offload_cache.kernels.slots import EVERY_STEP, LATER
from hf_offload_cache.methods.cluster import ClusterAligned


def aligned(sizes: np.ndarray) -> Callable[[int], Policy]:
    """`ClusterAligned` with clusters of these sizes, by record."""
    return partial(ClusterAligned, sizes=lambda records: sizes[records])


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def evicted(policy: Policy, count: int, in_use: np.ndarray) -> list[int]:
    """The slots that `count` records get, the last of them."""
    taken, got = policy.place(np.arange(100, 100 + count), in_use)
    assert taken.tolist() == list(range(count - len(got), count))
    return got.tolist()


def test_the_slot_that_was_filled_longest_ago_goes_first() -> None:
    policy = FirstIn(4)
    assert evicted(policy, 2, slots()) == [0, 1]
    assert evicted(policy, 3, slots()) == [2, 3, 0]
    assert evicted(policy, 4, slots()) == [1, 2, 3, 0]
    assert evicted(policy, 0, slots()) == []
    policy.used(slots(2, 0))
    assert evicted(policy, 4, slots()) == [1, 2, 3, 0], "whatever is wanted again"


def test_slots_in_use_stay() -> None:
    policy = FirstIn(4)
    assert evicted(policy, 3, slots(0, 2, 2)) == [1, 3]
    assert evicted(policy, 3, slots(0, 1, 2, 3)) == []
    assert evicted(policy, 3, slots()) == [0, 2, 1]


def test_emptied_slots_are_the_next() -> None:
    policy = FirstIn(5)
    policy.place(np.arange(5), slots())
    policy.emptied(slots(3, 1))
    assert evicted(policy, 3, slots()) == [3, 1, 0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), capacity=st.integers(0, 6))
def test_every_slot_once_whatever_happens(data: st.DataObject, capacity: int) -> None:
    policy = FirstIn(capacity)
    some = st.lists(st.integers(0, max(0, capacity - 1)), unique=True, max_size=capacity)
    nbytes = policy.nbytes
    for _ in range(6):
        what = data.draw(st.sampled_from(["place", "used", "emptied"]))
        if what == "place":
            count = data.draw(st.integers(0, capacity))
            in_use = slots(*data.draw(some))
            got = policy.place(np.arange(count), in_use)[1].tolist()
            assert len(got) == len(set(got)) == min(count, capacity - len(in_use))
            assert not set(got) & set(in_use.tolist())
        else:
            getattr(policy, what)(slots(*data.draw(some)))
        assert policy.nbytes == nbytes
    assert sorted(evicted(policy, capacity, slots())) == list(range(capacity))


def step(table: SlotTable, *wanted: int) -> int:
    """What a tier does with the records that a step wants. Returns how many were resident."""
    records = np.array(wanted)
    lie = table.locate(records)
    if (lie >= 0).any():
        table.used(lie[lie >= 0])
    if (lie < 0).any():
        table.insert(records[lie < 0], lie[lie >= 0])
    return int((lie >= 0).sum())


def test_what_is_wanted_in_every_other_step_is_not_pushed_out_by_what_is_wanted_once() -> None:
    hits = {}
    for policy in (MostUsed, FirstIn):
        table = SlotTable(2, policy)
        hits[policy] = sum(step(table, *((0, 1) if turn % 2 == 0 else (10 + turn, 11 + turn))) for turn in range(40))
    assert hits == {MostUsed: 36, FirstIn: 0}  # but for the first two times


def test_what_was_wanted_long_ago_makes_room() -> None:
    table = SlotTable(1, MostUsed)
    for _ in range(500):
        step(table, 3)
    assert [step(table, 4) for _ in range(8)].index(1) <= 9
    assert table.locate(np.array([3, 4])).tolist() == [-1, 0]


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=9), max_size=25),
    capacity=st.integers(0, 7),
)
def test_the_frequency_table_against_one_that_counts_plainly(steps: list[list[int]], capacity: int) -> None:
    table, uses = SlotTable(capacity, MostUsed), np.zeros(201)
    for wanted in steps:
        before = set((table.locate(np.arange(201)) >= 0).nonzero()[0].tolist())
        hit = [record for record in wanted if record in before]
        uses[wanted] += 1
        uses[hit] = np.minimum(uses[hit], EVERY_STEP)
        step(table, *wanted)
        lie = table.locate(np.arange(201))
        inside = set((lie >= 0).nonzero()[0].tolist())
        assert len(inside) == len(set(lie[lie >= 0].tolist())) == min(capacity, len(before | set(wanted)))
        assert before & set(wanted) <= inside  # this step takes from them
        outside = set(wanted) - inside
        free = inside - (before & set(wanted))
        if outside and free:
            assert max(uses[list(outside)]) <= min(uses[list(free)]) * (1 + 1e-5)
        if not set(wanted) <= before:
            uses /= LATER
    rehearsed = SlotTable(capacity, MostUsed)
    rehearsed.rehearse(201)
    assert table.nbytes <= rehearsed.nbytes + 4 * 2 * 201


def test_what_is_forgotten_is_the_next_to_go_and_counts_as_new() -> None:
    table = SlotTable(3, MostUsed)
    for _ in range(4):
        step(table, 1, 2, 3)
    table.forget(np.array([2, 9]))
    step(table, 5)
    step(table, 5)
    assert set(table.locate(np.array([1, 3, 5])).tolist()) == {0, 1, 2}
    step(table, 2)
    assert table.locate(np.array([2])).tolist() == [-1]


def test_pages_of_small_clusters_stay_first() -> None:
    sizes = np.ones(100, dtype=np.uint16)
    sizes[[1, 2, 3]] = 16
    table = SlotTable(2, aligned(sizes))
    step(table, 1, 2)
    step(table, 4, 5)
    assert (table.locate(np.array([1, 2, 4, 5])) >= 0).tolist() == [False, False, True, True]
    for _ in range(5):
        step(table, 3)
    assert table.locate(np.array([3]))[0] >= 0


def test_what_was_written_anew_lately_stays_in_the_share_that_is_reserved() -> None:
    def table_with(*renewed: int) -> SlotTable:
        table = SlotTable(8, aligned(np.ones(1000, dtype=np.uint16)))
        step(table, *range(8))
        for record in renewed:
            table.renewed(table.locate(np.array([record])))
            step(table, 100 + record, 100 + record + 50)  # time goes on
        return table

    def push_out(table: SlotTable, times: int) -> None:
        for turn in range(times):
            wanted = range(10 + 10 * turn, 18 + 10 * turn)
            step(table, *wanted)
            step(table, *wanted)

    for renewed, kept in (((3,), [3]), ((3, 5), [5]), ((), [])):
        table = table_with(*renewed)
        before = [record for record in range(8) if table.locate(np.array([record]))[0] >= 0]
        assert set(kept) <= set(before)
        push_out(table, 2)
        assert [record for record in range(8) if table.locate(np.array([record]))[0] >= 0] == kept
        push_out(table, ClusterAligned._LATELY)
        assert (table.locate(np.arange(8)) < 0).all()


def test_books_of_the_aligned_policy_are_planned() -> None:
    table, rehearsed = (SlotTable(16, aligned(np.ones(200, dtype=np.uint16))) for _ in range(2))
    step(table, *range(200))
    rehearsed.rehearse(200)
    assert table.nbytes <= rehearsed.nbytes + 8


def test_an_emptied_slot_is_filled_though_it_was_renewed() -> None:
    table = SlotTable(8, aligned(np.ones(1000, dtype=np.uint16)))
    step(table, *range(8))
    table.renewed(table.locate(np.array([3])))
    table.forget(np.array([3]))
    step(table, 50)
    assert table.locate(np.array([50]))[0] >= 0 and (table.locate(np.array([0, 1, 2, 4])) >= 0).all()


def test_what_is_written_anew_is_no_step() -> None:
    """Counts do not get older by it."""
    table = SlotTable(2, MostUsed)
    step(table, 1, 2)
    one = table._policy._one  # type: ignore[attr-defined]
    table.insert(np.array([7]), np.array([0, 1]), wanted=False)
    assert table._policy._one == one  # type: ignore[attr-defined]
    step(table, 8)
    assert table._policy._one > one  # type: ignore[attr-defined]
