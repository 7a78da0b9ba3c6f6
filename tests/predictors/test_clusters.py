"""`ClusterPredictor` takes the clusters whose centroids have most of the attention, until they hold what is wanted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from harness import prompt
from long_llama import feed, long_model

from hf_offload_cache.methods.cluster import ClusterCache, ClusterLayer
from hf_offload_cache.predictors import Query

FIELDS: dict[str, Any] = {"num_recent": 8, "join_every": 16, "look_ahead": False, "engine": "memory"}


def twin(layer: ClusterLayer, states: torch.Tensor, wanted: int, sinks: int) -> list[dict[int, set[int]]]:
    """By row: cluster -> which of its entries are taken. Of queries (B, H, D), which are scaled; no padding."""
    own, history = layer.history.clustered, layer.history
    rows, found = own.partition.rows, []
    recent = history.form.split(history.recent)[0][:, 0].double()
    for row, heads in enumerate(states.double().reshape(rows, -1, states.shape[2])):
        count = torch.from_numpy(own.partition.counts[row].astype(np.float64))
        logits = heads @ torch.from_numpy(own.partition.centroids[row].astype(np.float64)).T
        total = torch.cat([logits + count.log(), heads @ recent[row].T], 1).logsumexp(1, keepdim=True)
        share = (logits - total).exp().sum(0)
        first = Counter(own.labels[row, :sinks].tolist())
        left, taken = wanted - int(own.buffer.counts[row]) - sinks, dict[int, set[int]]()
        for cluster in sorted(range(len(share)), key=lambda cluster: -float(share[cluster])):
            there = int(own.stored[row, cluster])
            if left > 0 and there:
                taken[cluster] = set(range(there - min(there, left), there))
                left -= there
        for cluster, count in first.items():
            taken.setdefault(cluster, set()).update(range(count))
        found.append(taken)
    return found


@pytest.mark.parametrize("selected", [40, 150])
def test_the_best_clusters_are_taken_until_they_hold_what_is_wanted(selected: int) -> None:
    model = long_model()
    with ClusterCache(model, num_selected=selected, cluster_size=10, cluster_capacity=16, **FIELDS) as cache:
        feed(cache, prompt(model, 2, 600))
        for step in range(30):
            feed(cache, prompt(model, 2, 1, seed=step))
        layer = cache.layers[1]
        assert isinstance(layer, ClusterLayer) and layer.predictor is not None
        states = torch.randn(2, 4, layer.history.form.key_width, generator=torch.Generator().manual_seed(0))
        query = Query(states, 1.0, None, lambda: layer.history.form.split(layer.history.recent)[0])
        choice = layer.predictor.select(query, layer.budget, False)
        expected = twin(layer, states, layer.budget * layer.history.form.group_size, cache.config.num_sinks)
        for row, taken in enumerate(expected):
            units = choice.units[row][choice.units[row] >= 0].tolist()
            kept = [set(keep.nonzero()[0].tolist()) for keep in choice.keep[row]]
            held = layer.history.clustered.stored[row]
            assert {unit: own & set(range(held[unit])) for unit, own in zip(units, kept, strict=False)} == taken


def test_of_first_tokens_in_clusters_larger_than_what_is_wanted_these_alone_are_taken() -> None:
    model = long_model()
    with ClusterCache(model, num_selected=8, cluster_size=120, **FIELDS) as cache:
        feed(cache, prompt(model, 1, 700))
        layer = cache.layers[1]
        assert isinstance(layer, ClusterLayer) and layer.predictor is not None
        states = torch.randn(1, 4, layer.history.form.key_width, generator=torch.Generator().manual_seed(0))
        query = Query(states, 1.0, None, lambda: layer.history.form.split(layer.history.recent)[0])
        choice = layer.predictor.select(query, 1, False)
        per_page = layer.history.form.group_size
        for row, own in enumerate(choice.units):
            kept = []
            for place, cluster in enumerate(own[own >= 0]):
                members = np.flatnonzero(layer.history.clustered.labels[row] == cluster)
                members = members[: layer.history.clustered.stored[row, cluster]]  # the others wait
                kept += members[choice.keep[row, place][: len(members)]].tolist()
            assert set(range(cache.config.num_sinks)) <= set(kept) and len(kept) <= per_page


@pytest.mark.parametrize("budget", [3, 9])
def test_pages_are_no_more_than_planned(budget: int) -> None:
    model = long_model()
    with ClusterCache(model, num_selected=100, cluster_size=12, **FIELDS) as cache:
        feed(cache, prompt(model, 1, 900))
        layer = cache.layers[1]
        assert isinstance(layer, ClusterLayer) and layer.predictor is not None
        query = Query(
            torch.zeros(1, 4, layer.history.form.key_width), 1.0, None,
            lambda: layer.history.form.split(layer.history.recent)[0],
        )  # fmt: skip
        choice = layer.predictor.select(query, budget, False)
        pages = np.where(choice.units >= 0, choice.records, 0).sum(1)
        assert (pages <= layer.most_records(layer.config, layer.history.form.group_size, budget)).all()
