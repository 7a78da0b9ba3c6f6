"""The twins of the kernels that choose clusters on a device: against the processor's way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from harness import prompt
from long_llama import long_model

from hf_offload_cache.kernels.clusters import choose, rest, score
from hf_offload_cache.methods.cluster import ClusterCache, ClusterLayer
from hf_offload_cache.predictors import Query

SIZES: dict[str, Any] = {"num_recent": 8, "join_every": 16, "look_ahead": False, "engine": "memory", "remainder": True}


@contextmanager
def a_layer(rows: int, steps: int, **fields: Any) -> Iterator[ClusterLayer]:
    """A layer with decoded tokens, some of which are buffered."""
    model = long_model()
    with torch.no_grad(), ClusterCache(model, **{**SIZES, **fields}) as cache:
        for part in prompt(model, rows, 1100 + steps).split([1100, *[1] * steps], 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        layer = cache.layers[1]
        assert isinstance(layer, ClusterLayer)
        yield layer


def tables_of(layer: ClusterLayer) -> torch.Tensor:
    own, count = layer.history.clustered, layer.config.num_sinks
    clusters = own.partition.clusters
    sinks = [np.bincount(labels[:count], minlength=clusters) for labels in own.labels]
    return torch.from_numpy(np.stack([own.partition.counts, own.stored, np.stack(sinks)]).astype(np.int32))


def queries(layer: ClusterLayer, rows: int, real: bool) -> torch.Tensor:
    """(B, H, D): like keys that are there, or random."""
    made = torch.Generator().manual_seed(0)
    dim = layer.history.form.key_width
    states = torch.randn(rows, 4, dim, generator=made)
    if not real:
        return states
    keys = layer.history.whole()[0].squeeze(1).unflatten(0, (rows, -1))  # (B, Hk, T, D)
    some = torch.randint(keys.shape[2], (4 // keys.shape[1],), generator=made)
    return 3 * (keys[:, :, some].flatten(1, 2).float() + 0.3 * states)


def same_choice(layer: ClusterLayer, query: Query, scored: Any, tables: torch.Tensor, budget: int) -> Any:
    """The processor's choice; the kept entries and shares of the device's, which has the same entries of the same
    clusters in the same pages."""
    predictor, own, form = layer.predictor, layer.history.clustered, layer.history.form
    assert predictor is not None
    choice = predictor.select(query, budget, False)
    assert isinstance(choice, type(layer.choose(query))) and choice.keep is not None
    most = layer.most_records(layer.config, form.group_size, budget)
    sizes = most, most, own.pages.largest, form.group_size
    units, keep, kept, shares, left = choose(*scored, tables, budget * form.group_size, *sizes)
    lost = [predictor.lost(query, choice, estimated) for estimated in (False, True)]
    torch.testing.assert_close((left.sum(1) / query.states[..., 0].numel()).tolist(), lost, rtol=1e-4, atol=1e-6)
    for row, clusters in enumerate(choice.units):
        entry = np.arange(choice.keep.shape[2])
        expected = [
            (cluster, int(place))
            for cluster, chosen in zip(clusters.tolist(), choice.keep[row], strict=True)
            for place in entry[chosen & (entry < own.stored[row, cluster])] if cluster >= 0
        ]  # fmt: skip
        found = []
        for unit, chosen in zip(units[row].tolist(), keep[row], strict=True):
            assert bool(chosen.any()) == (unit >= 0)
            cluster, page = divmod(unit, own.pages.largest)
            found += [(cluster, page * form.group_size + int(place)) for place in chosen.nonzero()]
        assert found == expected
        there = units[row][units[row] >= 0]
        assert there.tolist() == sorted(set(there.tolist())) and (units[row, len(there) :] == -1).all()
        assert np.array_equal(kept[row], np.bincount([one for one, _ in expected], minlength=kept.shape[1]))
    return choice, kept, shares


@pytest.mark.parametrize("what", ["a head's query", "all queries", "a centroid", "a recent key", "the first token"])
def test_what_is_not_a_number_is_chosen_as_on_the_processor(what: str) -> None:
    """It counts for nothing: of clusters without a share the first are chosen."""
    with a_layer(2, 30, num_selected=40, cluster_size=10, cluster_capacity=16) as layer:
        own, form = layer.history.clustered, layer.history.form
        states, centroids = queries(layer, 2, True), own.partition.centroids
        recent = form.split(layer.history.recent.clone())[0]
        spoilt: dict[str, Any] = {
            "a head's query": states[:, :1], "all queries": states, "a centroid": centroids[:, 3],
            "a recent key": recent[1, :, 2], "the first token": centroids[:, own.labels[0, 0]],
        }  # fmt: skip
        spoilt[what][..., -1] = np.nan
        query = Query(states, form.key_dim**-0.5, None, lambda: recent)
        tables, means = tables_of(layer), torch.from_numpy(centroids.copy())
        scored = score(states, means, tables, recent[:, 0], query.scaling)
        for budget in (layer.budget, 1, 4 * layer.budget):
            _, kept, shares = same_choice(layer, query, scored, tables, budget)
            assert not shares.isnan().any() and kept.any()
        if what == "a centroid":
            assert not shares[:, 3].any() and shares.any(1).all()
        if what == "all queries":
            assert not shares.any() and kept[:, 0].all()


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(
    ("rows", "steps", "fields"),
    [
        (2, 30, {"num_selected": 40, "cluster_size": 10, "cluster_capacity": 16}),
        (1, 41, {"num_selected": 200}),
        (1, 3, {"num_selected": 16, "cluster_size": 60}),
        (2, 20, {"num_selected": 64, "num_sinks": 0, "append_buffer": 40}),
    ],
)
def test_choices_and_estimates_equal_the_processors(
    rows: int, steps: int, fields: dict[str, Any], real: bool
) -> None:
    """The same entries of the same clusters in the same pages, and the estimate of all others."""
    with a_layer(rows, steps, **fields) as layer:
        own, form, predictor = layer.history.clustered, layer.history.form, layer.predictor
        assert predictor is not None and predictor.maps is not None and (steps == 3 or own.waiting.any())
        states, scaling = queries(layer, rows, real), form.key_dim**-0.5
        query = Query(states, scaling, None, lambda: form.split(layer.history.recent)[0])
        tables, means = tables_of(layer), torch.from_numpy(own.partition.centroids.copy())
        recent = form.split(layer.history.recent)[0][:, 0]
        scored = score(states, means, tables, recent, scaling)
        for budget in (layer.budget, 1, layer.budget + 3, 4 * layer.budget):
            choice, kept, shares = same_choice(layer, query, scored, tables, budget)
            host = predictor.shares(query, own.partition.counts)
            np.testing.assert_allclose(shares, np.where(own.stored > 0, host, 0), rtol=1e-4, atol=1e-9)
            on_device = [torch.from_numpy(np.asarray(part)) for part in (
                predictor.maps.maps, predictor.maps.scale, predictor.maps.log_ratio
            )]  # fmt: skip
            value, weight = rest(scored[0], means, tables, kept, *on_device, rows)
            assert choice.next is not None
            estimates = predictor.estimate([query], [choice.next])
            assert estimates is not None
            bias, values = estimates.bias[:, :, 0], form.split(estimates.entries)[1][:, 0]
            heads = bias.shape[1] // (len(values) // rows)
            for head in range(bias.shape[1]):
                entries = values.unflatten(0, (rows, -1))[:, head // heads, head % heads]
                torch.testing.assert_close(value[:, head], entries, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(weight, bias.amax(2), rtol=1e-5, atol=1e-5)


def test_of_equal_clusters_the_first_are_chosen() -> None:
    """Three of four, the last of which gives its latest entry only; entry 0 is the row's first token."""
    tables = torch.tensor([[[3, 2, 3, 5]], [[3, 2, 3, 4]], [[0, 0, 0, 1]]]).int()
    scored = score(torch.zeros(1, 1, 2), torch.zeros(1, 4, 2).half(), tables, torch.zeros(1, 0, 2), 1.0)
    units, keep, kept, shares, left = choose(*scored, tables, 8, 9, 5, 2, 3)
    assert units.tolist() == [[0, 2, 4, 6, -1]] and kept.tolist() == [[3, 2, 1, 1]]
    assert keep.tolist() == [[[True] * 3, [True, True, False], [False, False, True], [True, False, False], [False] * 3]]
    torch.testing.assert_close(shares, torch.full((1, 4), 1 / 13))
    torch.testing.assert_close(left, torch.tensor([[5 / 13], [5 / 13]]))
    assert choose(*scored, tables, 8, 3, 5, 2, 3)[0].tolist() == [[0, 6, -1, -1, -1]]  # no room for another page
