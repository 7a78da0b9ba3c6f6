"""A history in clusters holds what came, whatever was split, cut, shared and frozen."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.errors import StoreError, StoreFullError
from hf_offload_cache.fetch import Storage
from hf_offload_cache.history import History, RecordFormat
from hf_offload_cache.methods.cluster import (
    HELD_BACK,
    ClusteredEntries,
    ClusterForm,
    ClusterHistory,
    fullest,
    in_order,
    new_clusters,
    streaming,
)
from hf_offload_cache.methods.cluster import entries as clustered_entries
from hf_offload_cache.methods.cluster.partition import counted
from hf_offload_cache.stores import aligned_empty
from hf_offload_cache.testing.histories import CONFIG, FORM, HistoryTests, some_keys_and_values

CLUSTERS = ClusterForm(size=6, capacity=12, threshold=1.0, append_buffer=5, join_every=4)


class NobodyReads:
    """Of who is told what is written anew."""

    def stale(self, records: np.ndarray) -> None: ...

    def renewed(self, records: np.ndarray, payloads: torch.Tensor, gone: np.ndarray) -> None: ...


class TestClusterHistory(HistoryTests):
    def make_history(self, storage: Storage, form: RecordFormat, rows: int, config: OffloadConfig) -> History:
        return ClusterHistory(storage, form, rows, torch.device("cpu"), config, "layer 0", CLUSTERS, NobodyReads())

    def restore_history(
        self, storage: Storage, tree: dict[str, Any], parts: Sequence[Any], config: OffloadConfig
    ) -> History:
        device = torch.device("cpu")
        return ClusterHistory.restore(storage, tree, parts, device, config, "layer 0", CLUSTERS, NobodyReads())


@contextmanager
def filled(rows: int, tokens: int, clusters: ClusterForm = CLUSTERS) -> Iterator[Case]:
    storage = Storage(CONFIG, None)
    try:
        case = Case(storage, rows, clusters)
        case.append(tokens)
        yield case
    finally:
        storage.close()


class Case:
    """A history, and all that came beside it."""

    def __init__(self, storage: Storage, rows: int, clusters: ClusterForm) -> None:
        self.storage, self.told, self.seed = storage, list[int](), 0
        self.renewals: list[tuple[np.ndarray, torch.Tensor, np.ndarray]] = []
        device = torch.device("cpu")
        self.history = ClusterHistory(storage, FORM, rows, device, CONFIG, "layer 0", clusters, self)
        self.keys, self.values = some_keys_and_values(rows, 0)

    def stale(self, records: np.ndarray) -> None:
        self.told += records.tolist()

    def renewed(self, records: np.ndarray, payloads: torch.Tensor, gone: np.ndarray) -> None:
        self.renewals.append((records.copy(), payloads.clone(), gone.copy()))

    def append(self, tokens: int) -> None:
        self.seed += 1
        keys, values = some_keys_and_values(self.history.rows, tokens, self.seed)
        self.history.append(keys, values)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    def truncate(self, length: int) -> None:
        self.history.truncate(length)
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def select_rows(self, rows: list[int]) -> None:
        self.history.select_rows(torch.tensor(rows))
        self.keys, self.values = self.keys[rows], self.values[rows]

    def check(self) -> None:
        """What is held is what came; what is known of clusters is what their keys say; members are in order."""
        history, own = self.history, self.history.clustered
        for part, came in zip(history.whole(), (self.keys, self.values), strict=True):
            assert torch.equal(part, came)
        partition, points = own.partition, self.keys.transpose(1, 2).flatten(2).numpy()
        assert (own.buffer.counts <= own.buffer.most + own.buffer.joining).all() and (own.stored >= 0).all()
        most = partition.capacity + 5 + own.buffer.joining
        assert (partition.counts.sum(1) == own.sealed).all() and (partition.counts <= most).all()
        assert (own.page_counts <= own.pages.largest).all()
        for row in range(history.rows):
            for cluster in range(partition.used[row]):
                members = points[row, : own.sealed][own.labels[row] == cluster]
                assert partition.counts[row, cluster] == len(members)
                if len(members):
                    np.testing.assert_allclose(partition.centroids[row, cluster], members.mean(0), rtol=5e-3, atol=2e-3)
                    apart = ((members - members.mean(0)) ** 2).sum(1).mean()
                    np.testing.assert_allclose(partition.variances[row, cluster], apart, rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("few", [0, 9])
def test_attention_to_earlier_tokens_reads_no_later_pages(few: int) -> None:
    """Before the latest call, whose first tokens were in the tail: these are given from there, and no page of theirs is
    read. Without the tail, only the first pages of their clusters are. With a `few` tokens before, of which some are
    buffered: these are given, too."""
    with filled(1, 300) as case:
        case.append(few)
        history, own, stop = case.history, case.history.clustered, 300 + few
        assert own.waiting.any() == bool(few)
        before, pages = own.sealed, int(own.page_counts.sum())
        case.append(HELD_BACK + 40)
        case.storage.prefetcher.flush()  # what is still to be written is not read
        assert own.sealed > stop and history.left is not None and history.left[1] == before < stop
        for tail in (history.left, None):
            history.left = tail
            for until in (stop, before, before + 1):
                read = history.store.bytes_read
                blocks = list(history.blocks(until))
                records = (history.store.bytes_read - read) // history.store.record_bytes
                positions = np.concatenate([block.positions for block in blocks], 1)[0]
                order = torch.from_numpy(np.argsort(positions)[(positions < 0).sum() :])
                for part, whole in (("keys", case.keys), ("values", case.values)):
                    entries = torch.cat([getattr(block, part)[0] for block in blocks], 1)
                    assert torch.equal(entries[:, order], whole[0, :, :until])
                in_pages = counted(own.labels[:, before:until], own.partition.clusters)
                assert records == pages + (0 if tail is not None else (-(-in_pages // FORM.group_size)).sum())
        history.truncate(400 + few)
        assert history.left is None


CHANGES = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("steps"), st.integers(1, 30)),
    st.tuples(st.just("truncate"), st.floats(0.5, 1)),
    st.tuples(st.just("select_rows"), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("freeze"), st.none()),
    st.tuples(st.just("sweep"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=8), st.sampled_from((4, 10)))
def test_whatever_happens(changes: list[tuple[str, Any]], join_every: int) -> None:
    with filled(2, 60, replace(CLUSTERS, join_every=join_every)) as case:
        for name, how in changes:
            if name == "append":
                case.append(how)
            elif name == "steps":
                for _ in range(how):
                    case.append(1)
            elif name == "truncate":
                case.truncate(max(1, int(how * case.history.length)))
            elif name == "select_rows":
                case.select_rows([row % case.history.rows for row in how])
            elif name == "settle":
                case.history.clustered.settle_all()
                assert not case.history.clustered.buffer.counts.any()
            elif name == "freeze":
                case.history.freeze()
            else:
                case.history.sweep(always=True)
            case.check()


def test_clusters_grow_and_are_split_and_the_rest_of_the_disk_is_theirs() -> None:
    """Steps alone, of a long decode: what has come is in more clusters, none too large, in pools for two each."""
    with filled(2, 60) as case:
        before = case.history.units
        for _ in range(200):
            case.append(1)
        own = case.history.clustered
        own.settle_all()
        case.check()
        assert case.history.units > before + 10 and own.partition.counts.max() <= 12
        assert own.partition.to_split.sum() <= 2, "what is still too wide is so until something joins it"
        pages = own.page_counts
        records = own.pages.records(*in_order(pages))
        assert len(np.unique(records)) == records.size, "no page is of two clusters"
        assert 2 * len(own.pages.pools) <= own.partition.used.sum() + 2, "at most one cluster a row has no partner"


def test_what_is_written_anew_is_told_before_and_after() -> None:
    """Every record whose content changes; and what lies there then."""
    with filled(1, 90) as case:
        store, pages = case.history.store, case.history.clustered.pages
        for _ in range(60):
            case.storage.prefetcher.flush()
            there = pages.records(*in_order(case.history.clustered.page_counts))
            before = aligned_empty(len(there), FORM.record_bytes)
            store.read(there, before)
            case.told.clear()
            case.renewals.clear()
            case.append(1)
            case.storage.prefetcher.flush()
            after = aligned_empty(len(there), FORM.record_bytes)
            store.read(there, after)
            changed = set(there[(before != after).any(1).numpy()].tolist())
            assert changed <= set(case.told)
            for records, payloads, gone in case.renewals:
                lies = aligned_empty(len(records), FORM.record_bytes)
                store.read(records, lies)
                assert torch.equal(FORM.payload(lies), payloads)
                changed -= {*records.tolist(), *gone.tolist()}
            assert not changed


def test_a_write_that_fails_loses_nothing() -> None:
    for number in range(6):
        with filled(2, 60) as case:
            write, results = case.storage.prefetcher.write, iter([None] * number + [StoreError(5, "told once")])

            def failing(*given: Any, write: Any = write, results: Any = results) -> None:
                if (error := next(results, None)) is not None:
                    raise error
                write(*given)

            case.storage.prefetcher.write = failing  # type: ignore[method-assign]
            failures = 0
            for tokens in [30, *[1] * 40, 50]:
                try:
                    case.append(tokens)
                except StoreError:
                    failures += 1
                    case.seed -= 1
                    case.history.truncate(case.keys.shape[2])  # of what joins in parts some have come
                    case.check()
                    case.append(tokens)
                case.check()
            assert failures == 1


@pytest.mark.parametrize("tokens", [5, 31, 100, 255])
def test_a_call_of_some_tokens_joins_the_clusters_that_there_are(tokens: int) -> None:
    """A turn's question, as decoded tokens do, whatever the tail held; a long call makes clusters of its own."""
    for before in (400, 403, 409):
        with filled(2, before) as case:
            own, sealed = case.history.clustered, case.history.clustered.sealed
            case.append(tokens)
            for labels in own.labels:
                assert np.isin(labels[sealed:], labels[:sealed]).sum() >= 0.9 * (own.sealed - sealed)
            case.check()
            sealed = own.sealed
            case.append(HELD_BACK + 8)
            assert not any(np.isin(labels[sealed:], labels[:sealed]).any() for labels in own.labels)


def test_rows_that_share_clusters_write_to_pages_of_their_own() -> None:
    with filled(1, 60) as case:
        case.select_rows([0, 0])
        own = case.history.clustered
        shared = set(own.pages.records(*in_order(own.page_counts)).tolist())
        case.told.clear()
        for _ in range(40):
            case.append(1)
        case.check()
        assert not shared & set(case.told)
        alone = [set(own.pages.records(np.full(3, row), np.arange(3), np.zeros(3, int)).tolist()) for row in range(2)]
        assert alone[0] == alone[1] <= shared
        new = in_order(np.where(np.arange(own.page_counts.shape[1]) >= 9, own.page_counts, 0))
        assert len(np.unique(own.pages.records(*new))) == new[0].size


def test_a_full_disk_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No place for clusters of a prompt, nor for a part of one that is split: told as such, and all goes on."""
    for tokens in (30, 1):
        with filled(2, 60) as case, monkeypatch.context() as patch:
            patch.setattr(case.history.store, "allocate", full)
            with pytest.raises(StoreFullError):
                for _ in range(60):
                    case.append(tokens)
                    case.check()
            case.seed -= 1
            case.history.truncate(case.keys.shape[2])
            case.check()
            patch.undo()
            case.append(tokens)
            case.check()


def full(count: int) -> np.ndarray:
    """`allocate` of a store that can grow no more."""
    if count:
        raise StoreFullError(28, "no room")
    return np.empty(0, dtype=np.int64)


def test_a_page_that_was_cut_and_is_filled_anew_is_told() -> None:
    with filled(1, 100) as case:
        own = case.history.clustered
        for _ in range(30):
            case.append(1)
        own.settle_all()
        there = set(own.pages.records(*in_order(own.page_counts)).tolist())
        case.truncate(100)
        left = set(own.pages.records(*in_order(own.page_counts)).tolist())
        case.told.clear()
        for _ in range(60):
            case.append(1)
        own.settle_all()
        again = set(own.pages.records(*in_order(own.page_counts)).tolist()) & (there - left)
        assert again and again <= set(case.told)


def test_what_was_cropped_leaves_no_clusters_behind() -> None:
    """Question after question of one document, each taken back: tables are as large as after the first."""
    with filled(2, 200) as case:
        sizes = set()
        for _ in range(6):
            case.append(90)
            sizes.add(int(case.history.clustered.partition.used.max()))
            case.truncate(200)
            case.check()
        assert max(sizes) - min(sizes) <= 4


def test_a_crop_reads_what_stays_of_clusters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where all goes, and nothing of what is dropped whole."""
    read = list[int]()
    asks = ClusteredEntries.read

    def watched(own: ClusteredEntries, *which: np.ndarray) -> torch.Tensor:
        read.append(len(which[0]))
        return asks(own, *which)

    monkeypatch.setattr(ClusteredEntries, "read", watched)
    with filled(2, 300) as case:
        own = case.history.clustered
        case.append(300)
        pages = -(-np.minimum(own.stored, counted(own.labels[:, :280], own.partition.clusters)) // 4)
        case.truncate(280)
        assert sum(read) <= pages.sum() and len(read) < 40, "some pages at a time"
        case.check()
        read.clear()
        case.truncate(0)
        assert not read and own.partition.clusters == 0


def test_pools_that_no_row_names_are_given_back() -> None:
    with filled(1, 400) as case:
        case.select_rows([0] * 6)
        pages, shares = case.history.clustered.pages, []
        for turn in range(120):
            case.select_rows([min(turn % 3, 1), 0, 1, 2, 3, 4])
            case.history.sweep()
            case.append(4)
            shares.append(len(pages._owned) / len(pages.pools))
        assert max(shares) <= 2
        case.check()


@pytest.mark.parametrize("stop", [None, 1700, 3])
def test_blocks_have_no_places_that_no_row_fills(stop: int | None) -> None:
    """Attention takes its time over what is none, too."""
    with filled(3, 4000) as case:
        blocks = list(case.history.blocks(stop))
        held = [(block.positions >= 0).sum(1) for block in blocks if block.positions is not None]
        assert all(0 < each.max() == block.keys.shape[2] for each, block in zip(held, blocks, strict=True))
        assert sum(held).tolist() == [4000 if stop is None else stop] * 3


def test_what_streaming_takes_is_in_the_account() -> None:
    with filled(3, 4000) as case:
        own, account = case.history.clustered, case.storage.account
        list(case.history.blocks())
        tracemalloc.start()
        held = [account.by_owner["packing"] for _ in case.history.blocks()]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        block = 3 * CONFIG.block_tokens
        assert min(held[:-1]) == streaming(own.form, int(own.page_counts.sum()), block, own.sealed)
        assert most <= 1.1 * min(held[:-1]) and account.by_owner["packing"] == 0


def test_a_freeze_that_fails_leaves_nothing_to_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of what is stored may be frozen then: what comes makes clusters of its own, in pools of its own."""

    def fails(*_: Any) -> None:
        raise StoreError("too many files")

    with filled(2, 100) as case:
        with monkeypatch.context() as patch:
            patch.setattr("hf_offload_cache.methods.cluster.history.frozen", fails)
            with pytest.raises(StoreError, match="too many files"):
                case.history.freeze()
        own = case.history.clustered
        before = own.pages.records(*in_order(own.page_counts))
        for _ in range(40):
            case.append(1)
        own.settle_all()
        case.check()
        after = own.pages.records(*in_order(own.page_counts))
        assert set(before.tolist()) < set(after.tolist()), "what was there is where it was"
        assert (own.partition.closed.sum(1) > 0).all() and not own.partition.closed.all()


def test_many_are_clustered_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_clusters, "BATCH", 64)
    with filled(2, 64 + 64 + 40 + CONFIG.num_recent) as case:
        case.check()
        labels = case.history.clustered.labels
        for row in labels:
            batches = [set(own.tolist()) for own in row.reshape(3, -1)]
            assert [batches[0] & batches[1], batches[1] & batches[2], batches[0] & batches[2]] == [set(), set(), set()]


def test_so_many_clusters_are_made_of_all_batches_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_clusters, "BATCH", 64)
    form = ClusterForm(size=6, capacity=24, threshold=4.0, append_buffer=16, number=12)
    with filled(2, 64 + 64 + 40 + CONFIG.num_recent, form) as case:
        used = case.history.clustered.partition.used
        assert (used >= 12).all() and (used < 18).all(), "12 of three batches, and halves of those beyond the capacity"


def test_clusters_grow_together_and_only_what_is_written_anew_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(2, 300, ClusterForm(size=6, capacity=12, threshold=4.0, append_buffer=40, join_every=4)) as case:
        own, group = case.history.clustered, FORM.group_size
        for _ in range(24):
            case.append(1)
        rows, clusters = (grows := (own.waiting > 0) & ~own.partition.to_split).nonzero()
        assert rows.size > 10
        stored, waiting = own.stored[rows, clusters], own.waiting[rows, clusters]
        partly = stored % group > 0
        assert partly.any() and not partly.all()
        asked, written = list[int](), list[np.ndarray]()
        read, write = own.read, case.storage.prefetcher.write

        def asks(*which: np.ndarray) -> torch.Tensor:
            asked.extend(own.pages.records(*which).tolist())
            return read(*which)

        def writes(store: Any, ids: np.ndarray, records: torch.Tensor) -> None:
            written.append(ids)
            write(store, ids, records)

        monkeypatch.setattr(case.storage.prefetcher, "write", writes)
        monkeypatch.setattr("hf_offload_cache.methods.cluster.plan.piece_bytes", lambda queue: 4 * FORM.record_bytes)
        own.settle(asks, rows, clusters)
        case.check()
        assert not (own.waiting[grows]).any()
        assert asked == own.pages.records(rows, clusters, stored // group)[partly].tolist()
        pages = -(-(stored % group + waiting) // group)
        assert sum(map(len, written)) == pages.sum() == len(set(np.concatenate(written).tolist()))
        assert max(map(len, written)) <= 4 and len(written) <= 1 + pages.sum() / 3
        assert all((np.diff(ids) > 0).all() for ids in written), "those side by side go in one request"


def test_what_grows_is_written_with_what_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(2, 300, ClusterForm(size=6, capacity=12, threshold=1.0, append_buffer=40, join_every=4)) as case:
        own, write, written = case.history.clustered, case.storage.prefetcher.write, list[np.ndarray]()
        for _ in range(24):
            case.append(1)
        rows, clusters = own.waiting.nonzero()
        wide, used = own.partition.to_split[rows, clusters], own.partition.used.sum()
        assert wide.any() and not wide.all()
        ends = own.pages.records(rows, clusters, own.stored[rows, clusters] // FORM.group_size)[~wide]

        def writes(store: Any, ids: np.ndarray, records: torch.Tensor) -> None:
            written.append(ids)
            write(store, ids, records)

        monkeypatch.setattr(case.storage.prefetcher, "write", writes)
        monkeypatch.setattr(clustered_entries, "most_settled", lambda *given: 1000)
        own.settle(own.read, rows, clusters)
        case.check()
        assert not own.waiting.any()
        split = int(own.partition.used.sum() - used)
        assert 0 < split < wide.sum(), "there was room for some alone"
        assert len(written) <= split + 1, "what had no room to be split grows together"  # one may give several parts
        assert np.isin(ends, written[0]).all()


def test_where_there_is_room_for_few_the_widest_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(2, 300, ClusterForm(size=6, capacity=12, threshold=0.3, append_buffer=40, join_every=4)) as case:
        own = case.history.clustered
        for _ in range(36):
            case.append(1)
        rows, clusters = own.waiting.nonzero()
        counts, variances = own.partition.counts[rows, clusters], own.partition.variances[rows, clusters].copy()
        free = own.partition.to_split[rows, clusters] & (counts <= own.partition.capacity)
        monkeypatch.setattr(clustered_entries, "most_settled", lambda *given: 1000)
        own.settle(own.read, rows, clusters)
        split = own.partition.counts[rows, clusters] < counts
        for row in range(2):
            was, stays = (variances[free & (rows == row) & own] for own in (split, ~split))
            assert len(was) and len(stays) and was.min() >= stays.max()


def test_the_fullest_leave_until_the_rest_has_room() -> None:
    waiting = np.array([[0, 3, 1, 2], [1, 0, 0, 0]])
    for most, expected in ((0, [(0, 1), (0, 2), (0, 3), (1, 0)]), (2, [(0, 1), (0, 3)]), (3, [(0, 1)]), (6, [])):
        rows, clusters = fullest(waiting, most)
        assert sorted(zip(rows.tolist(), clusters.tolist(), strict=True)) == expected


def test_what_cannot_be_written_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a batch: those before it are settled, the others as they were."""
    with filled(2, 300, ClusterForm(size=6, capacity=12, threshold=4.0, append_buffer=40, join_every=4)) as case:
        own, write, calls = case.history.clustered, case.storage.prefetcher.write, list[int]()
        for _ in range(24):
            case.append(1)
        waited = own.waiting.copy()

        def fails(store: Any, ids: np.ndarray, records: torch.Tensor) -> None:
            calls.append(len(ids))
            if len(calls) == 3:
                raise StoreError("no space")
            write(store, ids, records)

        with monkeypatch.context() as patch:
            patch.setattr(case.storage.prefetcher, "write", fails)
            with pytest.raises(StoreError, match="no space"):
                own.settle_all()
        left = own.waiting
        assert 0 < (left > 0).sum() < (waited > 0).sum()
        same = np.zeros(left.shape, dtype=bool)
        same[:, : waited.shape[1]] = left[:, : waited.shape[1]] == waited
        assert (same | (left == 0)).all(), "all of a cluster, or nothing"
        case.check()
        own.settle_all()
        assert not own.waiting.any()
        case.check()


def test_splits_of_one_batch_stop_where_there_is_no_room_for_more() -> None:
    """Each cluster has place for the largest one on the disk: those that are too wide, and not full, wait for room."""
    clusters = ClusterForm(size=6, capacity=15, threshold=0.05, append_buffer=200, join_every=4)
    with filled(2, 300, clusters) as case:
        own = case.history.clustered
        for _ in range(160):
            case.append(1)
        own.settle_all()
        case.check()
        room = own.partition.counts.sum(1) * own.partition.most_room / own.partition.capacity
        assert (own.partition.used > 0.9 * room).all(), "there was more to split than room"
        assert own.partition.clusters <= clusters.most_clusters(own.sealed, own.form.group_size)
