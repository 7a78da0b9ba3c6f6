"""Clusters that a device makes: what they hold, where it is written, and how far keys are from their means, on a device
that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import CUDA, Fake, fake_cuda, on_the_device, values_of
from harness import COMMON, build, prompt
from torch_memory import most_held
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache.errors import BudgetError
from hf_offload_cache.fetch import Storage
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.methods.cluster import (
    ClusterCache,
    ClusterConfig,
    ClusterForm,
    ClusterHistory,
    DeviceClusters,
    NewClusters,
    Partition,
    arrivals,
    clusters_of_rows,
    new_clusters,
    on_device,
)
from hf_offload_cache.methods.cluster.arrivals import Arrivals
from hf_offload_cache.methods.cluster.plan import clustering_there, parts_there, writing_there
from hf_offload_cache.model import Geometry
from hf_offload_cache.testing.histories import CONFIG, FORM, some_keys_and_values

CLUSTERS = ClusterForm(size=6, capacity=12, append_buffer=5, join_every=4)


class NobodyReads:
    """Copies of no records."""

    def stale(self, records: np.ndarray) -> None: ...

    def renewed(self, records: np.ndarray, payloads: torch.Tensor, gone: np.ndarray) -> None: ...


@pytest.fixture
def device() -> Iterator[Any]:
    with fake_cuda() as counts:
        yield counts


def made(engine: str, tmp_path: Any, rows: int = 3, form: RecordFormat = FORM) -> tuple[Storage, ClusterHistory]:
    config = replace(CONFIG, engine=engine, write_queue="64KiB")
    storage = Storage(config, tmp_path)
    storage.pinned = engine == "memory"
    return storage, ClusterHistory(storage, form, rows, CUDA, config, "layer 0", CLUSTERS, NobodyReads())


def of_host(*tensors: Any) -> list[torch.Tensor]:
    return [tensor.inner for tensor in tensors]


def check(history: ClusterHistory, keys: torch.Tensor, values: torch.Tensor) -> None:
    """The history holds these; what is known of clusters is what their keys say, and none is too large."""
    for part, expected in zip(of_host(*history.whole()), (keys, values), strict=True):
        assert torch.equal(part, expected)
    own = history.clustered
    partition, points = own.partition, keys.transpose(1, 2).flatten(2).numpy()
    assert own.sealed and (partition.counts.sum(1) == own.sealed).all()
    assert (partition.counts <= partition.capacity).all() and (partition.counts[:, 0] > 0).all()
    for row in range(history.rows):
        for cluster in range(partition.used[row]):
            members = points[row, : own.sealed][own.labels[row] == cluster]
            assert len(members) == partition.counts[row, cluster] > 0
            np.testing.assert_allclose(partition.centroids[row, cluster], members.mean(0), rtol=1e-3, atol=1e-3)
            variance = ((members - members.mean(0)) ** 2).sum(1).mean()
            np.testing.assert_allclose(partition.variances[row, cluster], variance, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", ["memory", "mapped"])
@pytest.mark.parametrize("batch", [1 << 14, 90])
def test_all_rows_are_clustered_and_written_together(
    engine: str, batch: int, device: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several calls, the first of which is all new and the next ones of which begin with the tail. Clusters on a
    disk wait for the queries, which order them; the order of records in memory does not matter."""
    monkeypatch.setattr(new_clusters, "BATCH", batch)
    monkeypatch.setattr(Arrivals, "points", None)
    monkeypatch.setattr(Arrivals, "entries", None)
    storage, history = made(engine, tmp_path)
    history.holds_back = True
    keys, values = some_keys_and_values(3, 700)
    queries = torch.randn(3, 2, 9, FORM.key_width)
    try:
        for start, stop in ((0, 300), (300, 303), (303, 700)):
            device.clear()
            history.append(Fake(keys[:, :, start:stop].clone()), Fake(values[:, :, start:stop].clone()))
            assert history.held_back == (engine == "mapped" and stop != 303)
            history.place(Fake(queries), 40)
            if stop != 303:
                waits = -(-(stop - start - 8) // batch)
                assert device.syncs == {"kernels/on_a_device.py:to_host": waits} and not device.blocking
                assert device.launches.total() <= 40 + 30 * waits
                made_of = history.clustered.partition
                mean = (made_of.counts * made_of.variances).sum(1) / made_of.counts.sum(1)
                np.testing.assert_allclose(made_of.limits, CLUSTERS.threshold * mean, rtol=1e-5)
            check(history, keys[:, :, :stop], values[:, :, :stop])
    finally:
        storage.close()


def test_what_there_is_no_room_for_is_made_in_parts(device: Any, tmp_path: Any) -> None:
    """A row at a time, in pages of a piece; the clusters are the same, and so are their places."""
    keys, values = some_keys_and_values(5, 400)
    found, form = [], replace(FORM, group_size=2)
    for limit in (None, 0):
        storage, history = made("memory", tmp_path, 5, form)
        booked = []
        has_room, hold = storage.account.has_room, storage.account.hold
        storage.account.has_room = (lambda nbytes: False) if limit == 0 else has_room  # type: ignore[method-assign]
        storage.account.hold = lambda owner, nbytes, *_, hold=hold, booked=booked: (  # type: ignore[method-assign]
            booked.append(nbytes) if owner == "packing" else None, hold(owner, nbytes)
        )  # fmt: skip
        try:
            history.append(Fake(keys), Fake(values))
            check(history, keys, values)
            own = history.clustered
            found.append((own.labels.copy(), own.pages._first.copy(), own.partition.centroids.copy(), booked, device))
            part = parts_there(5, storage.write_queue)[0 if limit is None else -1]
            count, new = own.sealed, own.partition.clusters
            expected = clustering_there(form, CLUSTERS, count, part), writing_there(form, count, new, part)
            assert booked[:2] == [*expected]
            assert limit is None or writing_there(form, count, new, (1, 1 << 20)) > expected[1]  # a row has several
        finally:
            storage.close()
    for whole, parts in zip(found[0][:3], found[1][:3], strict=True):
        assert np.array_equal(whole, parts)
    assert found[0][3] > found[1][3]


def test_the_longest_part_leaves_room_for_the_write_queue(device: Any, tmp_path: Any) -> None:
    storage, history = made("memory", tmp_path, 5)
    keys, values = map(Fake, some_keys_and_values(5, 100))
    coming = Arrivals(FORM, history.tail.entries, keys, values, 100)
    parts = parts_there(5, storage.write_queue)
    assert [rows for rows, _ in parts] == [5, 3, 2, 1, 1] and parts[-1][1] < parts[0][1]
    try:
        for part, following in zip(parts, [*parts[1:], parts[-1]], strict=True):
            needed = writing_there(FORM, 100_000, 9_000, part)
            for spare, expected in ((0, part), (-1, following)):
                storage.account.limit = storage.account.current + needed + storage.write_queue + spare
                found = history.clustered._part(coming, partial(writing_there, FORM, 100_000, 9_000))
                assert found == (expected, writing_there(FORM, 100_000, 9_000, expected)), (part, spare)
    finally:
        storage.account.limit = None
        storage.close()


@pytest.mark.parametrize("more", [1.0, 1.1, 1.5])
def test_a_prompt_keeps_to_its_budget(more: float, tmp_path: Any) -> None:
    """That of the plan, and more: what packing takes leaves room for the queue of what is packed."""
    model, rows, tokens = build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 2048})), 2, 900
    ids = prompt(model, rows, tokens)
    fields: Any = {"max_context": tokens, "max_batch": rows, "num_selected": 64, "write_queue": "64KiB"}
    fields["engine"] = "memory"  # as `auto` would be for this device
    with on_the_device(model) as (on_device, _), torch.no_grad():
        geometry, config = Geometry.of(on_device), ClusterConfig(**fields, memory="1GiB", reuse_capacity=0)
        assert geometry.device == "cuda"
        memory = int(more * ClusterCache.plan(geometry, config, tokens, rows).prefill_bytes)
        exact = on_device(Fake(ids), past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits
        with ClusterCache(on_device, path=tmp_path, memory=memory, reuse_capacity=0, **fields) as cache:
            found = on_device(Fake(ids), past_key_values=cache, logits_to_keep=1).logits
            peak, packed = cache.storage.account.peak, cache.selective[0].history.clustered.sealed
    assert packed > 800 and 0.5 * memory < peak <= memory
    torch.testing.assert_close(found.inner, exact.inner, rtol=1e-3, atol=1e-3)


def test_rows_that_others_join_are_not_clustered(device: Any, tmp_path: Any) -> None:
    """Rows without open clusters alone make new ones, of few tokens."""
    storage, history = made("memory", tmp_path, 4)
    keys, values = some_keys_and_values(4, 300)
    try:
        history.append(Fake(keys[:, :, :280].clone()), Fake(values[:, :, :280].clone()))
        used = history.clustered.partition.used.copy()
        history.clustered.partition._closed[[0, 2]] = True
        for token in range(280, 300):
            history.append(Fake(keys[:, :, token : token + 1].clone()), Fake(values[:, :, token : token + 1].clone()))
        now = history.clustered.partition.used
        assert (now[[0, 2]] > used[[0, 2]]).all() and history.clustered.buffer.counts[[1, 3]].all()
        for part, expected in zip(of_host(*history.whole()), (keys, values), strict=True):
            assert torch.equal(part, expected)
    finally:
        storage.close()


def test_a_processor_clusters_keys_that_are_too_wide_for_kernels(
    device: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST_CHANNELS", FORM.key_width - 1)
    storage, history = made("mapped", tmp_path)
    keys, values = some_keys_and_values(3, 300)
    try:
        history.append(Fake(keys), Fake(values))
        assert not device.launches["kernels/on_a_device.py:run"]
        check(history, keys, values)
    finally:
        storage.close()


def test_what_comes_later_is_joined_settled_and_cut_without_a_blocking_copy(device: Any, tmp_path: Any) -> None:
    """Tokens one by one, then clusters rewritten and split, then a crop into them."""
    storage, history = made("memory", tmp_path)
    keys, values = some_keys_and_values(3, 400)
    keys[:, :, 300:] *= 3  # wide clusters, which are split
    try:
        history.append(Fake(keys[:, :, :300].clone()), Fake(values[:, :, :300].clone()))
        used = history.clustered.partition.used.sum()
        storage.catch_up(history.store, history.device)  # as a step does
        device.clear()
        for token in range(300, 400):
            storage.prefetcher.flush()  # what still arrives from the device is copied behind that
            history.append(Fake(keys[:, :, token : token + 1].clone()), Fake(values[:, :, token : token + 1].clone()))
        storage.prefetcher.flush()
        history.clustered.settle_all()
        assert history.clustered.partition.used.sum() > used + 3 and not device.blocking
        assert set(device.syncs) == {"kernels/on_a_device.py:to_host"}  # pages are read and written without a wait
        assert storage.account.by_owner["stream buffers"] == storage.account.by_owner["stream buffers, host"] == 0
        assert not history.clustered.buffer.counts.any()
        assert history.store not in storage._copies  # the device fills records in place: a step need not wait for them
        check(history, keys, values)
        history.truncate(250)
        assert not device.blocking
        check(history, keys[:, :, :250], values[:, :, :250])
    finally:
        storage.close()


def test_tokens_join_the_clusters_that_a_processor_would_choose(device: Any, tmp_path: Any) -> None:
    """Also where clusters are closed, and where keys and means are not numbers. Counts and means on the device become
    those of the host."""
    storage, history = made("memory", tmp_path)
    keys, values = some_keys_and_values(3, 330)
    keys[0, :, 300], keys[1, :, 301, 0], keys[2, :, 299:303] = torch.nan, torch.nan, keys[2, :, 299:300].clone()
    try:
        history.append(Fake(keys[:, :, :290].clone()), Fake(values[:, :, :290].clone()))
        own, partition = history.clustered, history.clustered.partition
        copies, labels = DeviceClusters(own, 2, storage.account), list[np.ndarray]()
        partition._closed[0, :3], partition._closed[1, ::2], partition._centroids[2, 4, 1] = True, True, np.nan
        first, made_of = own.sealed, partition.clusters

        def joined(coming: Any) -> bool:
            points = values_of(coming.points_of(np.arange(3), 0, coming.count).float()).numpy()
            labels.append(partition.nearest(points))
            _, tables = copies.latest
            device.clear()
            assert copies.join(coming) and own.late and not device.syncs and not device.blocking
            assert values_of(tables)[0].sum() == partition.counts.sum() + 3 * coming.count
            centroids, found = map(values_of, copies.latest)
            own.catch_up()
            assert np.array_equal(own.labels[:, own.sealed - coming.count :], labels[-1])
            assert np.array_equal(found[0].numpy(), partition.counts)
            np.testing.assert_allclose(centroids.numpy(), partition.centroids, rtol=2e-3, atol=1e-4)
            return True

        own.join_there = joined
        for token in range(290, 330):
            history.append(Fake(keys[:, :, token : token + 1].clone()), Fake(values[:, :, token : token + 1].clone()))
        expected = np.concatenate(labels, 1)
        assert expected.shape[1] > 30
        assert expected[0, 300 - first] == 3 and expected[1, 301 - first] == 1
        assert not ((expected[1] % 2 == 0) & (expected[1] < made_of)).any()  # later ones are open
        assert not (expected[2] == 4).any() and len(set(expected[2, 299 - first : 303 - first])) == 1
        assert storage.account.by_owner["packing"] == 0
    finally:
        storage.close()


@pytest.mark.parametrize(
    "why", ["too many keys", "not the latest clusters", "no open cluster", "no memory", "no host memory"]
)
def test_what_cannot_join_on_a_device_changes_nothing(
    why: str, device: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, history = made("memory", tmp_path)
    keys, values = some_keys_and_values(3, 304)
    try:
        history.append(Fake(keys[:, :, :300].clone()), Fake(values[:, :, :300].clone()))
        own, copies, account = history.clustered, DeviceClusters(history.clustered, 2, storage.account), storage.account
        before = [values_of(one) for one in copies.latest]
        latest = [Fake(part[:, :, 300:].clone()) for part in (keys, values)]
        coming = Arrivals(FORM, history.tail.entries, *latest, 4)
        if why == "too many keys":
            monkeypatch.setattr(on_device, "MOST_JOINING", 3)
        elif why == "not the latest clusters":
            own.changes.note_all()
        elif why == "no open cluster":
            own.partition._closed[1] = True
        else:  # of the device or the host
            monkeypatch.setattr(account, "host", {*account.host, "stream buffers, host"})
            name, held = ("limit", account.current - account.host_bytes), ("host_limit", account.host_bytes)
            monkeypatch.setattr(account, *(name if why == "no memory" else held))
        sealed = own.sealed
        if why == "no memory":
            with pytest.raises(BudgetError):
                copies.join(coming)
        else:
            assert not copies.join(coming)
        account.limit = account.host_limit = None
        assert own.sealed == sealed and not own.late and not own.buffer.counts.any()
        assert all(torch.equal(values_of(now), one) for now, one in zip(copies.latest, before, strict=True))
    finally:
        storage.close()


def test_copies_that_a_budget_refuses_are_freed_once(device: Any, tmp_path: Any) -> None:
    storage, history = made("memory", tmp_path)
    keys, values = (Fake(part) for part in some_keys_and_values(3, 2400))
    try:
        history.append(keys[:, :, :300], values[:, :, :300])
        copies, account = DeviceClusters(history.clustered, 2, storage.account), storage.account
        few = copies.latest[1].shape[2]
        history.append(keys[:, :, 300:], values[:, :, 300:])
        account.limit = account.current - account.host_bytes - 1
        for _ in range(2):
            with pytest.raises(BudgetError):
                assert copies.latest
        account.limit = None
        centroids, tables = copies.latest
        partition = history.clustered.partition
        assert tables.shape[2] > few and np.array_equal(values_of(tables)[0].numpy(), partition.counts)
        assert np.array_equal(values_of(centroids).numpy(), partition.centroids)
        copies.close()
        assert account.by_owner["centroids"] == 0
    finally:
        storage.close()


def texts_keys(rows: int, count: int, dim: int) -> torch.Tensor:
    """Keys like a text's: a few channels of large mean, directions of unequal energy, neighbours that are alike."""
    generator = torch.Generator().manual_seed(0)
    energy = torch.logspace(0.7, -0.7, dim)
    topics = torch.randn(rows, count // 24 + 1, dim, generator=generator).repeat_interleave(24, 1)[:, :count]
    words = torch.randn(rows, 300, dim, generator=generator)
    drawn = (300 * torch.rand(rows, count, generator=generator) ** 3).long()
    words = words.gather(1, drawn[..., None].expand(-1, -1, dim))
    noise = torch.randn(rows, count, dim, generator=generator)
    return (0.6 * topics + words + 0.6 * noise) * energy + 8 * (torch.arange(dim) % 13 == 0)


@pytest.mark.parametrize(("size", "capacity", "most"), [(12, 32, 1.02), (32, 64, 1.02), (12, 16, 1.05)])
def test_clusters_of_a_device_are_as_close_as_the_processors(size: int, capacity: int, most: float) -> None:
    """The keys' squared distance to their means, and the number of clusters."""
    points = texts_keys(3, 1536, 32)
    of_rows, partition = Partition(3, 32, size, capacity, 1.25), Partition(3, 32, size, capacity, 1.25)
    labels, counts, _, variances = clusters_of_rows(
        points, partition.wanted(np.arange(3), 1536, 1536), capacity
    )
    for row in range(3):
        of_rows.add(row, points[row].numpy())
    expected = (of_rows.counts * of_rows.variances).sum(1)
    found = (counts * variances).sum(1).numpy()
    assert (found <= most * expected).all(), found / expected
    assert int(counts.max()) <= capacity and labels.max() < counts.shape[1]
    assert ((counts > 0).sum(1).numpy() <= 1.05 * of_rows.used).all()


def test_rows_may_want_different_numbers() -> None:
    points, wanted = texts_keys(3, 200, 8), [1, 20, 7]
    labels, counts, means, _ = clusters_of_rows(points, np.array(wanted), 300)
    assert [len(own.unique()) for own in labels] == wanted and (counts > 0).sum(1).tolist() == wanted
    for row, number in enumerate(wanted):
        alone = clusters_of_rows(points[row : row + 1], np.array([number]), 300)
        assert torch.equal(labels[row], alone[0][0]) and torch.equal(means[row, :number], alone[2][0, :number])


def test_equal_keys_and_keys_that_are_not_finite() -> None:
    """Runs of as many as a cluster holds; and no number out of range."""
    labels, counts, _, variances = clusters_of_rows(torch.ones(1, 50, 4), np.array([5]), 12)
    assert counts[0].sort(descending=True).values[:6].tolist() == [10] * 5 + [0] and not variances.any()
    assert torch.equal(labels[0], torch.arange(50, dtype=torch.int32) // 10)
    points = torch.ones(1, 50, 4)
    points[0, 7] = torch.nan
    labels, counts, _, _ = clusters_of_rows(points, np.array([5]), 12)
    assert counts.sum() == 50 and int(labels.max()) < int((counts > 0).sum())


@pytest.mark.parametrize("part", [(8, 64 << 20), (2, 64 << 20), (1, 1 << 16)])
def test_no_more_is_packed_than_booked(part: tuple[int, int], tmp_path: Any) -> None:
    """On tensors of the host, whose memory torch's profiler knows."""
    form = RecordFormat(1, 64, 1, 64, torch.bfloat16, 16)
    generator, rows, count = torch.Generator().manual_seed(0), part[0], 2000
    keys, values, held = (torch.randn(*shape, generator=generator).bfloat16() for shape in (
        (rows, 1, 1900, 64), (rows, 1, 1900, 64), (rows, 100, 128)
    ))  # fmt: skip
    coming, partition = Arrivals(form, held, keys, values, count), Partition(rows, 64, 12, 32, 1.25)
    labels = np.zeros((rows, count), dtype=np.int64)
    new = NewClusters(partition, np.arange(rows), coming, labels)
    numbers = np.concatenate([np.arange(used) for used in partition.used])
    of_rows = np.repeat(np.arange(rows), partition.used)
    places = np.stack([4 * np.arange(len(of_rows)), np.ones(len(of_rows), dtype=np.int64)], 1)
    storage = Storage(CONFIG, tmp_path)
    storage.copied_out = lambda records, store: (records, None)  # type: ignore[method-assign]
    storage.prefetcher.write = lambda *_: None  # type: ignore[method-assign]
    store: Any = None
    profiled = torch.profiler.profile(profile_memory=True)
    with profiled as seen, torch.profiler.record_function("packing"):
        new._pack(storage, store, form, np.arange(rows), of_rows, numbers, places, part[1])
    booked = writing_there(form, count, new.most, part)
    assert 0.3 * booked < most_held(seen, "packing") <= booked
    storage.close()


def test_the_kernels_functions_are_what_a_device_launches(device: Any) -> None:
    points = Fake(texts_keys(2, 300, 8))
    clusters_of_rows(points, np.array([25, 25]), 24)
    assert device.launches["kernels/on_a_device.py:run"] == 3 * (1 + 3) + 1 + 4 + 3 + 1 + 3
    assert device.launches.total() == 24 + 5 and not device.syncs
