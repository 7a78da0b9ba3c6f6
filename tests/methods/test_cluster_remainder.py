"""The remainder of a step of `ClusterCache`: clusters that were not selected, estimated from their centroids."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from long_models import long_tiny
from torch.profiler import ProfilerActivity, profile, record_function
from torch_memory import most_held

from hf_offload_cache import ClusterCache
from hf_offload_cache.core import SelectiveLayer, selective_layer
from hf_offload_cache.errors import ContextError
from hf_offload_cache.history import RecordFormat, Sealed
from hf_offload_cache.kernels import clusters, fits
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.cluster import remainder

FIELDS: dict[str, Any] = {
    "group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 32, "cluster_size": 8, "engine": "memory",
    "look_ahead": False, "remainder": True,
}  # fmt: skip
LENGTH = 1100
fit_bytes, fit_maps = remainder.fit_bytes, remainder.fit_maps


@functools.cache
def ids(rows: int = 1, tokens: int = LENGTH) -> torch.Tensor:
    return harness.prompt(long_tiny("llama"), rows, tokens)


@pytest.fixture
def filled() -> Iterator[ClusterCache]:
    with ClusterCache(long_tiny("llama"), **FIELDS) as cache:
        with torch.no_grad():
            long_tiny("llama")(ids(), past_key_values=cache)
        yield cache


Step = tuple[Any, Any, Any, Any, torch.Tensor]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Layer, call, choice, fetched and output of each step."""
    seen: list[Step] = []
    combine = SelectiveLayer.combine

    def watched(layer: Any, call: Any, choice: Any, fetched: Any, visible: Any) -> Any:
        output, weights = combine(layer, call, choice, fetched, visible)
        held = dataclasses.replace(fetched, entries=fetched.entries.clone())  # layers share the memory
        seen.append((layer, call, choice, held, output.float()))
        return output, weights

    monkeypatch.setattr(SelectiveLayer, "combine", watched)
    return seen


def step(cache: ClusterCache, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = long_tiny("llama")(ids()[:, :1], past_key_values=cache, **options).logits
    return logits


def test_a_step_attends_to_its_twin(filled: ClusterCache, steps: list[Step]) -> None:
    """An entry for each query head: the mapped mean of the centroids that were not selected, weighted by the sizes of
    their clusters and exp(score), and the logarithm of that sum, times the prompt's ratio, in the mask."""
    step(filled)
    assert len(steps) == 3
    for layer, call, choice, fetched, output in steps:
        history, maps = layer.history, layer.predictor.maps
        clustered, key_heads = history.clustered, layer.rows.heads
        shared = call.query.shape[1] // key_heads
        keys, values = (part[:, 0].float() for part in history.form.split(fetched.entries))
        places = fetched.of_chosen(history.positions(choice.units))
        places = np.where(fetched.valid, places, -1)
        latest = np.arange(history.length - history.recent.shape[1], history.length)
        there = np.concatenate([places >= 0, np.ones((key_heads, len(latest)), dtype=bool)], 1)
        for row in range(key_heads):
            left = choice.next[row][choice.next[row] >= 0]
            used = (clustered.stored[row] > 0).nonzero()[0]
            assert set(left) | set(choice.units[row]) >= set(used) and not set(left) & set(choice.units[row])
            means = torch.from_numpy(clustered.partition.centroids[row, left]).float()
            sizes = torch.from_numpy(clustered.stored[row, left]).float()
            linear = maps.maps[row, :, 0].float() * maps.scale[row][:, None]
            for head in range(shared):
                state = call.query[0, row * shared + head, 0].float() * call.scaling
                weights = sizes * (means @ state).exp()
                value = torch.cat([weights @ means / weights.sum(), torch.ones(1)]) @ linear
                mass = weights.sum().log() + maps.ratio[row, head].log()
                scores = torch.cat([keys[row, : there.shape[1]] @ state, mass[None]])
                scores[:-1][~torch.from_numpy(there[row])] = -torch.inf
                wanted = scores.softmax(0) @ torch.cat([values[row, : there.shape[1]], value[None]])
                torch.testing.assert_close(output[0, 0, row * shared + head], wanted, rtol=2e-3, atol=2e-4)


def test_it_is_nearer_to_full_attention_where_values_follow_from_keys(steps: list[Step]) -> None:
    """Put into the cache in place of a model's: keys of few directions, and values linear in them."""
    model, errors = long_tiny("llama"), {}
    some = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    shape = model.config.num_key_value_heads, LENGTH, model.config.head_dim
    keys = some(1, shape[0], LENGTH, 4) @ some(4, shape[2])
    values = keys @ some(shape[2], shape[2]) / 8 + 0.1 * some(1, *shape)
    queries = some(1, model.config.num_attention_heads, LENGTH, shape[2])
    from eval.studies.contexts import Context, replay

    layers = model.config.num_hidden_layers
    context = Context(ids(), [keys] * layers, [values] * layers, [queries] * layers)
    for estimated in (False, True):
        with ClusterCache(model, **{**FIELDS, "remainder": estimated}) as cache:
            replay(cache, model, context)
            steps.clear()
            step(cache)
            layer, call, *_, output = steps[0]
            own, other = (part[0].float() for part in layer.whole())
            shared = call.query.shape[1] // own.shape[0]
            states = call.query[0, :, 0].float().unflatten(0, (-1, shared)) * call.scaling
            full = (states @ own.transpose(1, 2)).softmax(2) @ other
            errors[estimated] = float((output[0, 0] - full.flatten(0, 1)).square().sum())
    assert errors[True] < errors[False] / 3


@pytest.mark.parametrize("score", [1.0, float("nan"), float("inf")])
def test_a_share_that_is_not_finite_is_no_number_of_the_report(
    score: float, filled: ClusterCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selective_layer, "LOOKED_AT", 1)
    own = selective_layer.millionths

    def looked(call: Any, scaling: float, keys: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        return own(call, scaling, keys * score, mask, count)

    monkeypatch.setattr(selective_layer, "millionths", looked)
    step(filled)
    mass = filled.report().estimated_mass
    assert mass is not None and 0 <= mass <= 1 and (mass > 0) == (score == 1)


def test_huge_scores_leave_it_finite() -> None:
    """So sharp queries that exp of a token's score less that of the centroids overflows."""
    model = copy.deepcopy(long_tiny("llama"))
    with torch.no_grad(), ClusterCache(model, **FIELDS) as cache:
        for block in model.model.layers:
            block.self_attn.q_proj.weight.mul_(60)
        model(ids(), past_key_values=cache)
        assert torch.isfinite(model(ids()[:, :1], past_key_values=cache).logits).all()
        for layer in cache.layers:
            maps = layer.predictor.maps
            assert torch.isfinite(maps.scale).all() and torch.isfinite(maps.ratio).all()


def test_without_it_nothing_is_estimated(steps: list[Step]) -> None:
    """Nor below 1,024 tokens, nor where everything is selected."""
    for fields, tokens in (({"remainder": False}, LENGTH), ({}, 900), ({"num_selected": 2 * LENGTH}, LENGTH)):
        with ClusterCache(long_tiny("llama"), **{**FIELDS, **fields}) as cache:
            with torch.no_grad():
                long_tiny("llama")(ids()[:, :tokens], past_key_values=cache)
            step(cache)
    assert not [fetched for *_, fetched, _ in steps if fetched.estimates is not None]


@pytest.mark.parametrize("way", ["left padding", "candidates"])
def test_rows_of_padding_and_candidates_have_it(way: str, steps: list[Step]) -> None:
    model, rows = long_tiny("llama"), 2 if way == "left padding" else 1
    options: dict[str, Any] = {"max_new_tokens": 12}
    given = ids(rows)
    if way == "left padding":
        options["attention_mask"] = harness.padding(rows, LENGTH)
    else:
        given = harness.repetitive_prompt(model, LENGTH)
        options["prompt_lookup_num_tokens"] = 3
    with ClusterCache(model, **FIELDS) as cache:
        harness.generate(model, cache, given, **options)
    found = [(held.estimates, call.query.shape[2]) for _, call, _, held, _ in steps if held.estimates is not None]
    assert found and all(estimates.bias.shape[2] == queries for estimates, queries in found)
    assert way == "left padding" or max(queries for _, queries in found) > 1
    for estimates, queries in found:
        own = estimates.bias > -torch.inf
        assert (own.sum(3) == 1).all() and estimates.entries.isfinite().all()
        assert own.shape[3] == queries * model.config.num_attention_heads // model.config.num_key_value_heads


def test_a_saved_context_has_it_and_a_wrong_one_is_refused(filled: ClusterCache, tmp_path: Path) -> None:
    filled.save(tmp_path / "context")
    wanted = step(filled)
    with ClusterCache.open(tmp_path / "context", long_tiny("llama"), engine="memory") as cache:
        assert torch.equal(step(cache), wanted)
    layer: Any = filled.layers[0]
    tree = layer.predictor.capture()
    without = {"maps": {**tree["maps"], "ratio": None}}
    for wrong, message in (({"fitted_at": 0}, "were fitted at 0"), (without, "remainder")):
        with pytest.raises(ContextError, match=message):
            layer.make_predictor().restore({**tree, **wrong, "units": 0})


def test_a_second_turn_fits_again(filled: ClusterCache) -> None:
    maps = [layer.predictor.maps for layer in filled.layers]  # type: ignore[attr-defined]
    step(filled)
    assert [layer.predictor.maps for layer in filled.layers] == maps  # type: ignore[attr-defined]
    with torch.no_grad():
        long_tiny("llama")(ids(), past_key_values=filled)
    for layer, before in zip(filled.layers, maps, strict=True):
        assert layer.predictor.maps is not before and before.maps.numel() == 0  # type: ignore[attr-defined]
        assert layer.predictor.fitted_at > 2 * LENGTH - 100  # type: ignore[attr-defined]


def sampled(rows: int, heads: int, dim: int, tokens: int, count: int) -> tuple[Any, ...]:
    """Arguments of `fit_maps`: sealed keys and values in two parts, clusters of them at random, and queries."""
    made = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(rows, 1, tokens, dim, generator=made).bfloat16() for _ in range(2))
    labels = torch.randint(0, count, (rows, tokens), generator=made).numpy().astype(np.uint16)
    sizes = np.stack([np.bincount(own, minlength=count) for own in labels]).astype(np.int32)
    means = torch.randn(rows, count, dim, generator=made).half().numpy()
    parts = list(zip(keys.split([500, tokens - 500], 2), values.split([500, tokens - 500], 2), strict=True))
    form = RecordFormat.of_sizes((1, dim, 1, dim), torch.bfloat16, 8)
    queries = torch.randn(rows, heads, 600, dim, generator=made).bfloat16()
    return Sealed(count, tokens, parts, lambda: iter(parts)), form, labels, means, sizes, queries, dim**-0.5


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("sizes", [(2, 3, 64, 6000, 500), (1, 8, 256, 2048, 100), (1, 32, 16, 4000, 300)])
def test_fitting_takes_what_the_plan_says(sizes: tuple[int, ...], padded: bool) -> None:
    """Rows that are fitted together have the maps that they have alone."""
    (rows, heads, _, tokens, count), (sealed, form, *given) = sizes, sampled(*sizes)
    visible = (torch.arange(tokens) > 60).expand(rows, -1) if padded else None
    given += [200, visible, MemoryAccount()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as held, record_function("fit"):
        alone = fit_maps(sealed, form, *given)
    assert 0.8 * fit_bytes(form, heads, count) < most_held(held, "fit") <= fit_bytes(form, heads, count)
    together = fit_maps(sealed, form, *given, together=rows)
    assert (alone.maps.int() - together.maps.int()).abs().max() <= 1 and alone.maps.float().std() > 10
    torch.testing.assert_close(alone.ratio, together.ratio)


def test_tokens_weigh_what_queries_that_leave_their_clusters_pay_them() -> None:
    """As loops in float64 say, of a query that sees fewer tokens than the next one; of equal clusters the first are
    selected."""
    (rows, queries, heads, count, tokens, dim), made = (2, 3, 2, 7, 20, 8), torch.Generator().manual_seed(0)
    states, means, keys = (
        torch.randn(rows, size, dim, generator=made) for size in (queries * heads, count, tokens)
    )
    means[:, 3:5] = means[:, 2:3]
    labels = torch.randint(0, count - 1, (rows, tokens), generator=made).int()
    members = torch.stack([torch.bincount(own, minlength=count) for own in labels]).int()
    scored = clusters.score(states, means.half(), members[None], means[:, :0], 1.0)
    left, total = fits.unselected(*scored, members, heads, 8)
    weights, mass = fits.weigh(states, keys, labels, left, total, scored[0], None, 1.0, (2, 39, 10))
    wanted, masses = torch.zeros(rows, tokens).double(), torch.zeros(2, rows, queries * heads).double()
    for row in range(rows):
        scores = states[row].double() @ means[row].half().double().T
        every = (scores.exp() * members[row]).sum(1)
        for query in range(queries):
            lines = range(query * heads, query * heads + heads)
            shares = sum(scores[line].exp() / every[line] for line in lines)
            order, chosen, begun = sorted(range(count), key=lambda one: (-round(float(shares[one]), 9), one)), [], 0
            for cluster in order:
                if members[row, cluster] and begun < 8:
                    chosen.append(cluster)
                    begun += int(members[row, cluster])
            others = [one for one in range(count) if one not in chosen and members[row, one]]
            assert left[row, query].nonzero().flatten().tolist() == others
            for token, line in itertools.product(range(tokens), lines):
                if 2 * token < 39 - 10 * query and int(labels[row, token]) in others:
                    paid = (keys[row, token].double() @ states[row, line].double()).exp() / every[line]
                    wanted[row, token] += paid
                    masses[0, row, line] += paid
                    masses[1, row, line] += scores[line, labels[row, token]].exp() / every[line]
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mass.sum(3).double(), masses, rtol=1e-4, atol=1e-6)
