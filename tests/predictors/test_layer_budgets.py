"""A total spread over layers, and how many groups a step takes of its share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gathers import selections
from harness import generate, prompt
from long_llama import LONG, long_model, run, sparse

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import Step
from hf_offload_cache.errors import ConfigError
from hf_offload_cache.fetch import Fetched, Fetcher
from hf_offload_cache.methods.disk_swap import MOST, DiskSwapLayer, spread
from hf_offload_cache.model import AttentionCall
from hf_offload_cache.tuning import calibrate_budgets


def curve(needed: int, length: int) -> np.ndarray:
    """Mass captured by m = 0.. groups of a layer that needs `needed` of them for all of it, each as much."""
    return np.minimum(np.arange(length) / needed, 1.0)


def test_a_dense_layer_takes_what_sharp_ones_leave() -> None:
    """Ten groups a layer on the mean: the one that needs 30 gets 25, those that need 5 get 5."""
    curves = np.stack([curve(30, 31), curve(5, 31), curve(5, 31), curve(5, 31)])
    assert spread(curves, 10).tolist() == [25, 5, 5, 5]


def test_layers_alike_get_alike() -> None:
    assert spread(np.stack([curve(40, 31)] * 5), 10).tolist() == [10] * 5


@pytest.mark.parametrize("seed", range(20))
def test_the_total_is_kept_and_well_spent(seed: int) -> None:
    """For concave curves of any density: the sum is the uniform one's, the bounds hold, and no move of one group from a
    layer to another would make the product larger."""
    generator = np.random.default_rng(seed)
    layers, mean = int(generator.integers(2, 12)), int(generator.integers(3, 30))
    most, least = MOST * mean, mean // 3
    rates = generator.uniform(0.02, 1.0, layers)
    curves = 1 - np.exp(-rates[:, None] * np.arange(most + 1))
    groups = spread(curves, mean)
    assert groups.sum() == layers * mean
    assert groups.min() >= least
    assert groups.max() <= most
    logs = np.log(curves + 1e-3)
    gained = [logs[i, groups[i] + 1] - logs[i, groups[i]] for i in range(layers) if groups[i] < most]
    lost = [logs[i, groups[i]] - logs[i, groups[i] - 1] for i in range(layers) if groups[i] > least]
    assert not gained or not lost or max(gained) <= min(lost) + 1e-9


def test_given_budgets_are_kept_and_come_back_after_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens for each layer, whole groups, the sinks' group beside them; slots in proportion."""
    with sparse(layer_budgets=(80, 20, 20)) as cache:
        for _ in range(2):
            with selections(monkeypatch) as seen:
                run(cache, max_new_tokens=3)
            sizes = {layer.layer_idx: groups.shape[1] for layer, groups in seen}
            assert sizes == {0: 21, 1: 6, 2: 6}
            slots = {layer.layer_idx: layer.fetcher.tiers[0].capacity for layer in cache.selective}
            assert slots == {0: 31, 1: 9, 2: 9}  # 60 tokens on the mean of 40: 120, 30, 30; and the sinks
            cache.reset()


@pytest.mark.parametrize("budgets", [(40, 40), (40, 40, 0), (40, 40, 1.5), "dense"])
def test_budgets_that_cannot_be(budgets: Any) -> None:
    with pytest.raises(ConfigError, match="layer_budgets"):
        sparse(layer_budgets=budgets)


def make_one_layer_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's keys are made alike, the others' apart."""
    projection = DiskSwapLayer.update

    def flat(self: DiskSwapLayer, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return projection(self, keys * 0.01 if self.layer_idx == 1 else keys * 4, values, *args, **kwargs)

    monkeypatch.setattr(DiskSwapLayer, "update", flat)


def test_measured_budgets_follow_the_density(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose keys are made alike attends to all of them: it gets more than the mean, at the same total."""
    make_one_layer_dense(monkeypatch)
    with sparse(layer_budgets="measured") as cache:
        with selections(monkeypatch) as seen:
            run(cache, max_new_tokens=3)
        sizes = {layer.layer_idx: groups.shape[1] - 1 for layer, groups in seen}
        assert sum(sizes.values()) == 3 * 10
        assert sizes[1] > 10 > min(sizes.values())
        assert all(layer.predictor.latest_queries is None for layer in cache.selective)


def test_a_padded_row_does_not_count_padding_as_density() -> None:
    """The curve of a padded row is that of the row alone: at full rank in float32, up to rounding."""
    model, curves = long_model(), []
    ids = prompt(model, 1, LONG)
    for padding in (0, 40):
        mask = torch.cat([torch.zeros(1, padding, dtype=torch.long), torch.ones_like(ids)], 1)
        padded = torch.cat([ids.new_zeros(1, padding), ids], 1)
        with sparse(rank=32, summary_dtype="float32", layer_budgets="measured") as cache, torch.no_grad():
            model(padded, attention_mask=mask, past_key_values=cache)
            curves.append([layer.density(30, mask.bool() if padding else None) for layer in cache.selective])
    np.testing.assert_allclose(curves[0], curves[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("sinks", "left"), [(4, 14), (4, 8), (0, 8)])
def test_nothing_is_measured_of_sinks_alone(sinks: int, left: int) -> None:
    """A crop leaves the sinks' unit and the tail, or the tail alone: there is nothing to spread budgets by."""
    model = long_model()
    ids = prompt(model, 1, LONG)
    with sparse(num_sinks=sinks, layer_budgets="measured") as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(left - LONG)
        expected = model(torch.cat([ids[:, :left], ids[:, :1]], 1)).logits[:, -1]
        found = model(ids[:, :1], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_measures_without_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows what of it is padding when it measures, before the step's mask is there."""
    make_one_layer_dense(monkeypatch)
    seen: list[Any] = []
    density = DiskSwapLayer.density

    def watched(self: DiskSwapLayer, most: int, visible: torch.Tensor | None = None) -> Any:
        seen.append(density(self, most, visible))
        return seen[-1]

    monkeypatch.setattr(DiskSwapLayer, "density", watched)
    model, curves = long_model(), []
    ids = prompt(model, 1, LONG)
    for padding in (0, 260):
        mask = torch.cat([torch.zeros(1, padding, dtype=torch.long), torch.ones_like(ids)], 1)
        padded = torch.cat([ids.new_full((1, padding), 3), ids], 1)
        with sparse(rank=32, summary_dtype="float32", layer_budgets="measured") as cache:
            generate(model, cache, padded, attention_mask=mask, max_new_tokens=3)
        curves.append(np.stack(seen))
        seen.clear()
    assert curves[0].shape == (3, MOST * 10 + 1)
    np.testing.assert_allclose(curves[0], curves[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("target", [0.3, 0.6, 1.0])
def test_a_step_stops_at_its_target(monkeypatch: pytest.MonkeyPatch, target: float) -> None:
    """Attention made sharp; full rank, float32: the groups taken hold the share asked for, and one less would not; or
    the budget is spent."""
    seen: list[tuple[int, float, float]] = []
    decode = DiskSwapLayer.decode

    def watched(self: Any, call: AttentionCall, step: Step) -> Any:
        query = call.query
        with selections(monkeypatch) as chosen:
            out = decode(self, call, step)
        groups = chosen[0][1][0]
        keys = self.history.whole()[0].repeat_interleave(query.shape[1] // self.history.form.num_key_heads, 1)
        share = torch.softmax(query @ keys.transpose(-1, -2) * self.scaling, -1)[0, :, 0].mean(0)
        size = self.history.form.group_size
        of_groups = share[: self.history.units * size].view(-1, size).sum(1)
        mass = share[self.history.units * size :].sum() + of_groups[torch.from_numpy(groups.copy())].sum()
        seen.append((len(groups), float(mass), float(of_groups[torch.from_numpy(groups[1:].copy())].min())))
        return out

    scale = DiskSwapLayer.attend

    def sharp(self: Any, call: AttentionCall) -> Any:
        return scale(self, dataclasses.replace(call, query=12 * call.query))

    monkeypatch.setattr(DiskSwapLayer, "attend", sharp)
    monkeypatch.setattr(DiskSwapLayer, "decode", watched)
    with sparse(rank=32, summary_dtype="float32", target_mass=target) as cache:
        run(cache, max_new_tokens=4)
        report = cache.report()
    assert len(seen) == 9
    for count, mass, least in seen:
        assert count == 11 or mass >= target - 0.02
        assert count == 1 or mass - least < target + 0.02
    if target == 0.3:
        assert min(count for count, *_ in seen) < 8
    if target == 1.0:
        assert {count for count, *_ in seen} == {11}
    assert report.captured_mass == pytest.approx(np.mean([mass for _, mass, _ in seen]), abs=0.03)


def test_without_a_target_no_mass_is_reported() -> None:
    with sparse() as cache:
        run(cache, max_new_tokens=3)
        assert cache.report().captured_mass is None


def test_measuring_again_only_where_the_length_has_doubled() -> None:
    """Two short turns after a long prompt leave the budgets as they are."""
    model = long_model()
    ids = prompt(model, 1, LONG + 40)
    fields: dict[str, Any] = {"group_size": 4, "num_selected": 40, "num_recent": 8, "layer_budgets": "measured"}
    with DiskSwapCache(model, engine="memory", **fields) as cache:
        generate(model, cache, ids[:, :LONG], max_new_tokens=2)
        before = dict(cache.selecting.shares)
        with torch.no_grad():
            model(ids[:, : 20], past_key_values=cache)
        assert all(layer.predictor.latest_queries is None for layer in cache.selective)
        assert cache.selecting.shares == before != {}


def test_budgets_from_sample_text_are_those_of_a_prompt_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text that is the prompt: what the cache measures by itself; and a cache takes them."""
    model = long_model()
    ids = prompt(model, 1, LONG)
    fields: dict[str, Any] = {"group_size": 4, "num_recent": 8}
    with DiskSwapCache(model, num_selected=40, layer_budgets="measured", engine="memory", **fields) as cache:
        generate(model, cache, ids, max_new_tokens=2)
        measured = {index: round(share * 40) for index, share in cache.selecting.shares.items()}
    budgets = calibrate_budgets(model, [ids], num_selected=40, **fields)
    assert dict(enumerate(budgets)) == measured
    assert sum(budgets) == 3 * 40
    with DiskSwapCache(model, num_selected=40, layer_budgets=budgets, engine="memory", **fields) as cache:
        with selections(monkeypatch) as seen:
            generate(model, cache, ids, max_new_tokens=2)
        assert {layer.layer_idx: 4 * (groups.shape[1] - 1) for layer, groups in seen} == measured


def test_text_too_short_to_choose_from() -> None:
    with pytest.raises(ValueError, match="num_selected=400"):
        calibrate_budgets(long_model(), [prompt(long_model(), 1, 200)])


def test_the_queries_are_off_the_account_before_selecting_takes_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a tight budget both would not fit."""
    held: list[int] = []
    gather = Fetcher.gather

    def watched(self: Fetcher, *arguments: Any) -> Fetched:
        held.append(cache.storage.account.by_owner["tables"])
        return gather(self, *arguments)

    monkeypatch.setattr(Fetcher, "gather", watched)
    with sparse(layer_budgets="measured") as cache:
        with torch.no_grad():
            long_model()(prompt(long_model(), 1, LONG), past_key_values=cache)
        before = cache.storage.account.by_owner["tables"]
        queries = sum(layer.predictor.latest_queries.nbytes for layer in cache.selective)
        run_one = prompt(long_model(), 1, 1, seed=3)
        with torch.no_grad():
            long_model()(run_one, past_key_values=cache)
    assert queries > 0
    assert held[0] == before - queries
