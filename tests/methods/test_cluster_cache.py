"""`ClusterCache`: exact over its clusters, and attending to what it names, while these are made, joined and split."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_cache import checked
from harness import generate, prompt
from long_llama import feed, long_model
from pairwise import combinations
from transformers import DynamicCache

from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.methods.cluster import ClusterCache, ClusterConfig, ClusterHistory, ClusterLayer, new_clusters
from hf_offload_cache.methods.cluster import cache as cluster
from hf_offload_cache.model import Geometry
from hf_offload_cache.stores import MappedTable
from hf_offload_cache.testing import open_descriptors

LENGTH = 300
SMALL: dict[str, Any] = {
    "cluster_size": 8, "cluster_capacity": 16, "append_buffer": 6, "join_every": 4, "num_recent": 8, "group_size": 4,
    "engine": "memory",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cluster_size": 1}, "cluster_size must be at least 2"),
        ({"cluster_size": 32, "cluster_capacity": 16}, "cluster_capacity must be at least 32"),
        ({"cluster_capacity": 3}, "cluster_capacity must be at least 4"),
        ({"append_buffer": -1}, "append_buffer must be at least 0"),
        ({"join_every": 0}, "join_every must be at least 1"),
        ({"split_threshold": 0}, "split_threshold must be a number above 0"),
        ({"split_threshold": True}, "split_threshold must be a number above 0"),
        ({"split_threshold": float("inf")}, "split_threshold must be a number above 0"),
        ({"cluster_size": 10**6}, "cluster_size must be at most 4096"),
        ({"append_buffer": 10**7}, "append_buffer must be at most 4096"),
        ({"join_every": 10**6}, "join_every must be at most 4096"),
        ({"selected_share": 2.0}, "selected_share must be a number above 0"),
        ({"num_selected": 0}, "num_selected must be at least 1"),
        ({"cluster_size": 32, "cluster_capacity": 81}, "cluster_capacity must be at most 2.5 times"),
        ({"num_clusters": 0}, "num_clusters must be at least 1"),
        ({"centroids": "host"}, "centroids must be one of"),
        ({"centroids": "disk", "encryption_key": "key"}, "use centroids='memory'"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClusterConfig(**fields)


def test_without_what_makes_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install 'hf-offload-cache"):
        ClusterCache(long_model())


@pytest.mark.parametrize(("number", "capacity", "found"), [(10, 64, 10), (1, 400, 1), (1000, 16, 292 / 6.4)])
def test_as_many_clusters_as_are_wanted(number: int, capacity: int, found: float) -> None:
    model, fields = long_model(), {**SMALL, "cluster_size": capacity // 2, "cluster_capacity": capacity}
    with ClusterCache(model, num_clusters=number, **fields) as cache:
        feed(cache, prompt(model, 1, LENGTH))
        used = cache.layers[1].history.clustered.partition.used
        assert (abs(used - found) <= 0.1 * found).all()


def test_centroids_on_the_disk_change_nothing_but_where_they_are(tmp_path: Path) -> None:
    """The same tokens, of the same clusters, and less memory."""
    model, told = long_model(), {}
    ids = prompt(model, 2, LENGTH)
    before = open_descriptors()
    for place in ("memory", "disk"):
        with ClusterCache(model, path=tmp_path, num_selected=60, centroids=place, **SMALL) as cache:
            tokens = generate(model, cache, ids, max_new_tokens=90).tokens
            partition = cache.layers[1].history.clustered.partition
            told[place] = tokens, partition.centroids.copy(), cache.report().memory_bytes, partition.nbytes
    assert torch.equal(told["memory"][0], told["disk"][0]) and np.array_equal(told["memory"][1], told["disk"][1])
    assert told["disk"][3] < told["memory"][3] / 3 and told["disk"][2] < told["memory"][2]
    del partition  # a view of the table keeps it
    assert not list(tmp_path.iterdir()) and open_descriptors() == before


@pytest.mark.parametrize(
    ("fields", "how"),
    combinations(
        ({"exact": True}, {"exact": "bitwise"}, {"num_selected": 4000}),
        ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}),
    ),
)
def test_exact_over_what_is_in_clusters(fields: dict[str, Any], how: dict[str, Any]) -> None:
    """Greedy, beams and verified candidates: `DynamicCache`'s tokens; all that is held is attended to."""
    model, rows = long_model(), 1 if "prompt_lookup_num_tokens" in how else 2
    ids = prompt(model, rows, LENGTH)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=24, **how)
    with ClusterCache(model, block_tokens=64, **SMALL, **fields) as cache:
        found = generate(model, cache, ids, max_new_tokens=24, **how)
        assert torch.equal(found.tokens, expected.tokens)
        assert fields != {"num_selected": 4000} or cache.report().selected_fraction == 1.0


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_attends_to_what_is_named(device: str, padded: bool) -> None:
    """Gather by gather, while clusters are joined and split; each key head as many tokens."""
    cls, model = checked(ClusterCache), long_model().to(device)
    ids = prompt(model, 2, LENGTH).to(device)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :40] = 0
    with cls(model, num_selected=60, **SMALL) as cache:
        before = generate(model, cache, ids, attention_mask=mask, max_new_tokens=2).tokens
        units = cache.layers[1].history.units
        generate(model, cache, before, max_new_tokens=120, attention_mask=torch.cat([mask, mask.new_ones(2, 2)], 1))
        assert len(cls.gathers) > 300 and cache.layers[1].history.units > units + 4
        own = cache.layers[1].history.clustered
        assert (own.buffer.counts <= own.buffer.most + 4).all()


@pytest.mark.parametrize("selected", [32, 100])
def test_clusters_that_are_larger_than_what_is_selected(selected: int) -> None:
    cls, model = checked(ClusterCache), long_model()
    with cls(model, num_selected=selected, cluster_size=128, look_ahead=False, engine="memory") as cache:
        feed(cache, prompt(model, 1, 900))
        for step in range(100):
            feed(cache, prompt(model, 1, 1, seed=step))
        group, layer = 16, cache.layers[1]
        latest = layer.history.length - layer.held
        assert cache.report().selected_fraction * 1000 <= selected + 2 * group + latest + 32


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_share_of_what_is_held(share: float) -> None:
    """Tokens, not places of pages that clusters do not fill."""
    model = long_model()
    with ClusterCache(model, num_selected=None, selected_share=share, look_ahead=False, engine="memory") as cache:
        feed(cache, prompt(model, 1, 2000))
        feed(cache, prompt(model, 1, 1))
        layer = cache.layers[1]
        assert isinstance(layer, ClusterLayer) and layer.selecting is not None
        group = layer.history.form.group_size
        assert layer.held <= 2000 and share * layer.held <= layer.budget * group <= share * layer.held + 2 * group


def test_slots_change_nothing_where_rows_share_clusters() -> None:
    def logits(**fields: Any) -> torch.Tensor:
        model = long_model()
        with ClusterCache(model, num_selected=60, look_ahead=False, **SMALL, **fields) as cache:
            feed(cache, prompt(model, 1, LENGTH))
            cache.batch_repeat_interleave(3)
            return torch.stack([feed(cache, prompt(model, 3, 1, seed=step)) for step in range(20)])

    assert torch.equal(logits(reuse_capacity=0), logits(reuse_capacity=40))


def test_what_comes_after_a_crop_is_not_taken_for_what_lay_there_before() -> None:
    def logits(reuse_capacity: int) -> torch.Tensor:
        model, fields = long_model(), {**SMALL, "cluster_size": 4, "cluster_capacity": 8, "num_selected": 4 * LENGTH}
        with ClusterCache(model, **fields, reuse_capacity=reuse_capacity) as cache:
            feed(cache, prompt(model, 1, 200))
            feed(cache, prompt(model, 1, 100, seed=1))
            cache.batch_repeat_interleave(2)  # no more tokens join what rows share: they make clusters
            for step in range(3):
                feed(cache, prompt(model, 2, 1, seed=step))
            cache.crop(-130)
            return torch.stack([feed(cache, prompt(model, 2, 1, seed=step)) for step in range(30)])

    assert torch.equal(logits(0), logits(4 * LENGTH))


def test_a_crop_a_second_turn_and_a_fork_are_exact() -> None:
    model = long_model()
    ids, more = prompt(model, 1, LENGTH), prompt(model, 1, 90, seed=5)
    plain = DynamicCache(config=model.config)
    with ClusterCache(model, exact=True, **SMALL) as cache:
        for held in (cache, plain):
            feed(held, ids)
            for place in range(60):
                feed(held, more[:, place : place + 1])
            held.crop(-75)
            feed(held, more[:, :30])
        twin, other = cache.fork(), DynamicCache(config=model.config)
        feed(other, ids), feed(other, more[:, :60]), other.crop(-75), feed(other, more[:, :30])
        for place in range(30, 60):
            step = more[:, place : place + 1]
            torch.testing.assert_close(feed(cache, step), feed(plain, step))
            torch.testing.assert_close(feed(twin, step.flip(0) + 1), feed(other, step.flip(0) + 1))
        twin.close()


def test_a_long_turn_attends_to_what_is_buffered() -> None:
    """Tokens of a short turn are buffered. A long turn makes new clusters, and nothing has moved the buffered ones to
    their pages yet."""
    model = long_model()
    ids, plain = prompt(model, 1, LENGTH + 320), DynamicCache(config=model.config)
    with ClusterCache(model, **SMALL) as cache:
        for part in ids.split([LENGTH, 9, 311], 1):
            torch.testing.assert_close(feed(cache, part), feed(plain, part))
        assert cache.layers[1].history.clustered.waiting.any()


def test_a_context_that_does_not_fit_keeps_its_clusters(tmp_path: Path) -> None:
    """Their sizes are what is stored: other fields give way."""
    model, fields = long_model(), {**SMALL, "cluster_size": 40, "cluster_capacity": 100}
    with ClusterCache(model, num_selected=4000, **fields) as cache:
        ids = prompt(model, 1, LENGTH)
        feed(cache, ids)
        cache.save(tmp_path / "one")
    with ClusterCache.open(tmp_path / "one", model, memory="2/1", max_context=1000) as cache:
        assert (cache.config.cluster_size, cache.config.cluster_capacity) == (40, 100)
        assert cache.config.num_selected < 4000
        assert generate(model, cache, torch.cat([ids, ids[:, :1]], 1), max_new_tokens=3).tokens.shape[1] == LENGTH + 4


@pytest.mark.parametrize("capacity", [24, 64, 100])
def test_a_budget_keeps_to_the_capacity_that_is_given(capacity: int) -> None:
    model = long_model()
    with ClusterCache.for_budget(model, "11/10", max_context=1000, cluster_capacity=capacity) as cache:
        assert cache.config.cluster_capacity == capacity
    with pytest.raises(BudgetError):
        ClusterCache.for_budget(model, "8KiB", max_context=1000, cluster_capacity=capacity)


@pytest.mark.parametrize(("share", "every", "centroids"), [(6, 32, "memory"), (13, 1, "disk")])
def test_what_gives_way_in_a_budget_first(share: int, every: int, centroids: str) -> None:
    geometry = Geometry.uniform(30, 9, 3, 64)
    memory = 8192 * 30 * 2 * 3 * 64 * 2 // share
    config = ClusterCache.fit(geometry, memory, 8192, 1, {"engine": "direct"})
    assert isinstance(config, ClusterConfig)
    assert (config.join_every, config.centroids) == (every, centroids)
    assert (config.num_selected, config.cluster_size, config.append_buffer) == (800, 12, 16)


def test_a_prompt_is_placed_by_its_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that writes; after the layer's attention they are in its order."""
    given: list[tuple[Any, int]] = []
    threads, order, co_retrieved = set[str](), ClusterHistory.order, new_clusters.co_retrieved

    def told(history: ClusterHistory, queries: Any, wanted: int) -> None:
        given.append((tuple(queries.shape), wanted))
        order(history, queries, wanted)
        assert history.held_back

    def counted(*those: Any) -> np.ndarray:
        threads.add(threading.current_thread().name)
        return co_retrieved(*those)

    monkeypatch.setattr(ClusterHistory, "order", told)
    monkeypatch.setattr(new_clusters, "co_retrieved", counted)
    model = long_model()
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    queries = (heads, model.config.num_attention_heads // heads, 32, model.config.head_dim)
    with ClusterCache(model, num_selected=60, **SMALL) as cache:
        feed(cache, prompt(model, 1, LENGTH))
        assert given == [(queries, 60)] * layers
        assert not any(layer.history.held_back for layer in cache.offloaded)
        feed(cache, prompt(model, 1, LENGTH, seed=2))
        assert given == [(queries, 60)] * (2 * layers)
        assert threads == {cache.storage.prefetcher._writes.threads[0].name}


def test_centroids_on_the_disk_are_in_memory_while_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's rest after its attention; the next one's are asked for while it attends."""
    told: list[tuple[str, int]] = []
    for name in ("will_need", "rest"):
        monkeypatch.setattr(MappedTable, name, lambda table, name=name: told.append((name, id(table))))
    model = long_model()
    with ClusterCache(model, path=tmp_path, num_selected=60, centroids="disk", look_ahead=False, **SMALL) as cache:
        feed(cache, prompt(model, 1, LENGTH))
        told.clear()
        feed(cache, prompt(model, 1, 1))
        tables = [id(layer.history.clustered.partition._table) for layer in cache.offloaded]
        order = [("will_need", tables[1]), ("rest", tables[0]), ("will_need", tables[2]), ("rest", tables[1])]
        assert told == [*order, ("rest", tables[2])]
        told.clear()
        cache.offloaded[1].end_step()  # of a layer that no attention came to
        assert told == [("rest", tables[1])]


@pytest.mark.parametrize("fields", [{"num_recent": 0}, {"look_ahead": "sometimes"}])
def test_other_fields_are_checked_where_a_share_is_selected(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ClusterConfig(num_selected=None, **fields)
    config = ClusterConfig(num_selected=None)
    assert config.attended(1000) == config.tokens_fetched(1000) == 100


@pytest.mark.parametrize("how", [{}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_layers_take_turns_to_settle_what_is_at_hand(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once for as many tokens as leave the tail together, however many a call has; no two in one step."""
    told: dict[int, list[int]] = {}
    crowded: list[bool] = []
    settle = ClusterLayer.settle

    def noted(layer: ClusterLayer, choice: Any, fetched: Any) -> None:
        told.setdefault(layer.layer_idx, []).append(layer.length)
        before = layer.history.clustered.buffer.counts  # type: ignore[attr-defined]
        settle(layer, choice, fetched)
        buffer = layer.history.clustered.buffer  # type: ignore[attr-defined]
        crowded.append(int(before.max()) > buffer.most)
        assert buffer.counts.max() <= buffer.most

    monkeypatch.setattr(ClusterLayer, "settle", noted)
    model = long_model()
    with ClusterCache(model, num_selected=60, **SMALL) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=60, **how)
        layers = len(cache.layers)
    assert any(crowded), "some of what waited was not at hand, or too much of it was"
    assert sorted(told) == list(range(layers)) and all(len(lengths) >= 5 for lengths in told.values())
    if not how:
        for layer_idx, lengths in told.items():
            turns = (np.array(lengths) + layer_idx) // SMALL["group_size"]
            assert (np.diff(turns) == 1).all() and len(turns) >= 59 // SMALL["group_size"]
        assert not set(told[0]) & set(told[1])
