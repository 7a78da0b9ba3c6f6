"""Clusters that the same queries want lie side by side, and what waits for queries is nowhere lost."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.errors import StoreFullError
from hf_offload_cache.fetch import Storage
from hf_offload_cache.methods.cluster import (
    HELD_BACK,
    ClusterCache,
    ClusterConfig,
    ClusterForm,
    ClusterHistory,
    chain,
    co_retrieved,
    in_order,
    in_pools,
    new_clusters,
    pairs,
)
from hf_offload_cache.methods.cluster.plan import ordering
from hf_offload_cache.model import Geometry
from hf_offload_cache.testing.histories import CONFIG, FORM, some_keys_and_values

TOKENS = HELD_BACK + 80


def test_pairs_are_counted_that_a_token_wants() -> None:
    """Four clusters along four axes; each query wants the two keys along its own two largest components."""
    queries = np.array([[[9, 8, 0, 0], [8, 9, 0, 0], [0, 8, 9, 0], [0, 0, 0, 9]]], dtype=np.float32)
    counts = np.array([1, 1, 1, 2])
    together = co_retrieved(queries, np.eye(4, dtype=np.float32), counts, 2)
    assert together.tolist() == [[0, 2, 0, 0], [2, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_heads_want_together() -> None:
    queries = np.zeros((2, 1, 3), dtype=np.float32)
    queries[0, 0, 0], queries[1, 0, 2] = 9, 9
    together = co_retrieved(queries, np.eye(3, dtype=np.float32), np.ones(3, dtype=np.int32), 2)
    assert together.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


def test_a_chain_goes_on_with_whom_the_last_is_wanted_with() -> None:
    together = np.zeros((6, 6), dtype=np.float32)
    for pair, often in {(4, 1): 5, (1, 2): 4, (4, 2): 1, (0, 5): 2}.items():
        together[pair] = together[pair[::-1]] = often
    order = chain(together)
    assert order.tolist()[:3] == [1, 4, 2], "1 is wanted most often, 4 most often with it"
    assert order.tolist()[3:5] == [0, 5] and sorted(order) == list(range(6))


def wanted_together(count: int, often: dict[tuple[int, int], int]) -> np.ndarray:
    together = np.zeros((count, count), dtype=np.float32)
    for pair, times in often.items():
        together[pair] = together[pair[::-1]] = times
    return together


def test_pairs_are_those_wanted_together_most_often() -> None:
    """The most frequent pair of all, then of those that are left; of equal ones each cluster is in one."""
    two, alone = pairs(wanted_together(7, {(0, 1): 5, (1, 2): 9, (2, 3): 7, (3, 4): 1, (0, 6): 4}))
    assert two.tolist() == [[1, 2], [0, 6], [3, 4]] and alone.tolist() == [5]
    alike = np.ones((9, 9), dtype=np.float32) - np.eye(9, dtype=np.float32)
    two, alone = pairs(alike)
    assert sorted([*two.reshape(-1).tolist(), *alone.tolist()]) == list(range(9)) and len(two) == 4


@pytest.mark.parametrize("lead", [0, 1, 2, 3, 8])
def test_pairs_begin_behind_those_that_lead(lead: int) -> None:
    together = wanted_together(8, {(0, 5): 5, (3, 4): 4, (1, 7): 3, (4, 1): 2})
    order = in_pools(together, lead)
    assert sorted(order.tolist()) == list(range(8))
    found = {frozenset(pair) for pair in order[lead:].reshape(-1)[: (8 - lead) // 2 * 2].reshape(-1, 2).tolist()}
    strongest = [frozenset(pair) for pair in ((0, 5), (3, 4), (1, 7))]
    kept = [pair for pair in strongest if pair in found]
    assert kept == strongest[: len(kept)] and len(kept) >= min(3, (8 - lead) // 2), "the weakest lead, if any must"
    if lead == 2:
        places = {int(cluster): place for place, cluster in enumerate(order)}
        assert abs(places[4] - places[1]) <= 3, "pairs that are wanted together are partners"


@pytest.mark.parametrize("before", [0, 1])
def test_a_pair_is_adjacent_on_the_disk(storage: Storage, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = history_of(storage, 1)
    pages, fewest = history.clustered.pages, 2 * HELD_BACK
    if before:
        pages.give(np.array([0]), pages.reserve(np.array([0, 0]))[1:])
    assert pages.half_empty(0) == before
    history.holds_back = True
    history.append(*some_keys_and_values(1, fewest, 1))
    count = history.units // 2 * 2
    paired = wanted_together(history.units, {(a, a + count // 2): 1 for a in range(count // 2)})
    monkeypatch.setattr("hf_offload_cache.methods.cluster.new_clusters.co_retrieved", lambda *given: paired)
    history.place(torch.zeros(1, 1, 1, FORM.key_width), 8)
    one = np.arange(count // 2)
    rows, none = np.zeros_like(one), np.zeros_like(one)
    first = [pages.records(rows, clusters, none) for clusters in (one, one + count // 2)]
    adjacent = np.abs(first[0] - first[1]) == 1
    assert adjacent.sum() >= count // 2 - before - 1, "all but those that lead"
    history.close()


def history_of(storage: Storage, rows: int = 2) -> ClusterHistory:
    form = ClusterForm(size=6, capacity=12)
    return ClusterHistory(storage, FORM, rows, torch.device("cpu"), CONFIG, "layer 0", form, lambda records: None)


@pytest.fixture
def storage() -> Storage:
    return Storage(CONFIG, None)


def places(history: ClusterHistory) -> np.ndarray:
    own = history.clustered
    return np.sort(own.pages.records(*in_order(own.page_counts)))


def test_what_queries_want_together_is_adjacent(storage: Storage) -> None:
    """Two clusters that one query wants lie next to each other, across the ends of their pools, or in one."""
    history = history_of(storage, 1)
    history.holds_back = True
    keys, values = some_keys_and_values(1, TOKENS, 1)
    history.append(keys, values)
    partition = history.clustered.partition
    assert history.held_back
    centroids = partition.centroids[0].astype(np.float32)
    own = centroids[[3, 17]] / (centroids[[3, 17]] ** 2).sum(1, keepdims=True)
    query = torch.from_numpy(200 * own.sum(0)).reshape(1, 1, 1, -1)
    history.place(query, int(partition.counts[0, [3, 17]].sum()) - 1)
    pages = history.clustered.pages
    which = np.array([0, 0]), np.array([3, 17])
    first, step, pool = pages.records(*which, np.array([0, 0])), pages.steps(*which), pages.pool
    begins = first - np.where(step < 0, pool - 1, 0)
    assert abs(int(begins[0] - begins[1])) <= pool, "in one pool, or in pools side by side"
    for part, came in zip(history.whole(), (keys, values), strict=True):
        assert torch.equal(part, came)
    history.close()


def test_order_changes_places_alone(storage: Storage) -> None:
    keys, values = some_keys_and_values(2, TOKENS, 2)
    plain, held = history_of(storage), history_of(storage)
    held.holds_back = True
    for history in (plain, held):
        history.append(keys, values)
    queries = torch.randn(2, 3, 8, FORM.key_width, generator=torch.Generator().manual_seed(1))
    held.place(queries, 40)
    assert not held.held_back
    mine, other = held.clustered, plain.clustered
    assert np.array_equal(mine.labels, other.labels) and len(places(held)) == len(places(plain))
    assert np.array_equal(mine.pages.pools, other.pages.pools)
    which = np.zeros(plain.units, dtype=int), np.arange(plain.units), np.zeros(plain.units, dtype=int)
    assert (mine.pages.records(*which) != other.pages.records(*which)).mean() > 0.5
    for one, two in zip(held.whole(), plain.whole(), strict=True):
        assert torch.equal(one, two)


def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What clusters that are ordered wait for."""
    begin, counts = threading.Event(), new_clusters.co_retrieved

    def counted(*given: Any) -> np.ndarray:
        assert begin.wait(60)
        return counts(*given)

    monkeypatch.setattr(new_clusters, "co_retrieved", counted)
    return begin


def test_clusters_are_ordered_while_others_attend(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens before them are read meanwhile. They lie where they would if nobody had waited."""
    keys, values = some_keys_and_values(2, 2 * TOKENS, 2)
    queries = torch.randn(2, 3, 8, FORM.key_width, generator=torch.Generator().manual_seed(1))
    at_once, later, begin = history_of(storage), history_of(storage), waiting(monkeypatch)
    begin.set()
    for history in (at_once, later):
        history.append(keys[:, :, :TOKENS], values[:, :, :TOKENS])
        history.holds_back = True
        history.append(keys[:, :, TOKENS:], values[:, :, TOKENS:])
    at_once.place(queries, 40)
    begin.clear()
    booked, new = storage.account.by_owner["packing"], later.clustered._unplaced
    assert new is not None
    later.order(queries, 40)
    later.order(queries, 40)  # which is under way
    assert storage.account.by_owner["packing"] - booked == ordering(new.most) > 0
    for part, came in zip(later.whole(TOKENS), (keys, values), strict=True):
        assert torch.equal(part, came[:, :, :TOKENS])
    assert later.held_back
    begin.set()
    later.place()
    assert storage.account.by_owner["packing"] == booked and not later.held_back
    which = np.zeros(later.units, dtype=int), np.arange(later.units), np.zeros(later.units, dtype=int)
    assert np.array_equal(later.clustered.pages.records(*which) - later.clustered.pages.records(*which)[0],
                          at_once.clustered.pages.records(*which) - at_once.clustered.pages.records(*which)[0])
    for part, came in zip(later.whole(), (keys, values), strict=True):
        assert torch.equal(part, came)


@pytest.mark.parametrize("how", ["truncate", "close"])
def test_clusters_that_are_ordered_may_be_dropped(
    storage: Storage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = some_keys_and_values(2, TOKENS, 2)
    history, begin = history_of(storage), waiting(monkeypatch)
    history.holds_back = True
    history.append(keys, values)
    history.order(torch.zeros(2, 3, 8, FORM.key_width), 40)
    begin.set()
    if how == "close":
        history.close()
    else:
        history.truncate(0)
        assert not history.held_back and not history.length and not history.units
    assert not storage.account.by_owner["packing"]


def test_without_an_order_clusters_lie_as_they_were_made(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the thread is raised once; what it would have ordered is whole."""
    keys, values = some_keys_and_values(2, TOKENS, 2)
    history = history_of(storage)
    history.holds_back = True
    history.append(keys, values)

    def fails(*given: Any) -> np.ndarray:
        raise MemoryError("no room for tables")

    monkeypatch.setattr(new_clusters, "co_retrieved", fails)
    with pytest.raises(MemoryError, match="no room for tables"):
        history.place(torch.zeros(2, 3, 8, FORM.key_width), 40)
    assert history.held_back and not storage.account.by_owner["packing"]
    history.place()
    for part, came in zip(history.whole(), (keys, values), strict=True):
        assert torch.equal(part, came)


def test_within_a_budget_attention_waits_for_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Storage(replace(CONFIG, memory="1GiB"), None)
    try:
        form, config = ClusterForm(size=6, capacity=12), replace(CONFIG, memory="1GiB")
        history = ClusterHistory(
            limited, FORM, 2, torch.device("cpu"), config, "layer 0", form, lambda records: None
        )  # fmt: skip
        history.holds_back = True
        history.append(*some_keys_and_values(2, TOKENS, 2))
        history.order(torch.zeros(2, 3, 8, FORM.key_width), 40)
        assert not history.held_back
    finally:
        limited.close()
    geometry, plans = Geometry.uniform(2, 9, 3, 64), []
    for fields in ({}, {"memory": "1GiB"}):
        plans.append(ClusterCache.plan(geometry, ClusterConfig(num_selected=64, **fields), 8192, 1).prefill["packing"])
    assert 0 < plans[0] - plans[1] <= ordering(512)


@pytest.mark.parametrize("what", ["blocks", "extents", "append", "freeze", "select_rows", "truncate"])
def test_what_needs_it_placed_places_it(storage: Storage, what: str) -> None:
    history = history_of(storage)
    history.holds_back = True
    keys, values = some_keys_and_values(2, TOKENS, 3)
    history.append(keys, values)
    assert history.held_back
    more, others = some_keys_and_values(2, 1, 4)
    calls = {
        "blocks": lambda: list(history.blocks()), "extents": lambda: history.extents(np.zeros((2, 1), dtype=np.int64)),
        "append": lambda: history.append(more, others), "freeze": history.freeze,
        "select_rows": lambda: history.select_rows(torch.tensor([1, 0])), "truncate": lambda: history.truncate(100),
    }  # fmt: skip
    calls[what]()  # type: ignore[no-untyped-call]
    assert not history.held_back
    kept = 100 if what == "truncate" else TOKENS
    order = [1, 0] if what == "select_rows" else [0, 1]
    for part, came in zip(history.whole(kept), (keys, values), strict=True):
        assert torch.equal(part, came[order][:, :, :kept])


@pytest.mark.parametrize("before", [0, 3, 100])
def test_what_could_not_be_placed_is_taken_back(
    storage: Storage, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = history_of(storage)
    keys, values = some_keys_and_values(2, before, 5)
    if before:
        history.append(keys, values)
    limits, units = history.clustered.partition.limits.copy(), history.units
    history.holds_back = True
    history.append(*some_keys_and_values(2, TOKENS, 6))
    assert history.held_back and history.units > units

    def full(count: int) -> np.ndarray:
        raise StoreFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(history.store, "allocate", full)
        for _ in range(2):
            with pytest.raises(StoreFullError):
                history.place()
        assert history.held_back
        history.truncate(before)
    assert not history.held_back and history.length == before and history.units == units
    assert np.array_equal(history.clustered.partition.limits, limits)
    for part, came in zip(history.whole(), (keys, values), strict=True):
        assert torch.equal(part, came)
    more, others = some_keys_and_values(2, TOKENS, 7)
    history.append(more, others)
    for part, came in zip(history.whole(), (torch.cat([keys, more], 2), torch.cat([values, others], 2)), strict=True):
        assert torch.equal(part, came)


def test_few_tokens_wait_for_nobody(storage: Storage) -> None:
    history = history_of(storage)
    history.holds_back = True
    history.append(*some_keys_and_values(2, HELD_BACK // 2, 8))
    assert not history.held_back


