"""KVSwap's own rule of selection, and groups at random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import fresh, generate, prompt, unchanged
from long_llama import LONG, SPARSE, long_model

from eval.baselines import swap_variants
from eval.baselines.swap_variants import InputLookAhead, PaperPredictor, PaperSwapCache, RandomSwapCache
from hf_offload_cache.fetch import Choice, Fetcher
from hf_offload_cache.predictors import Query


@pytest.fixture(autouse=True)
def model_as_it_was() -> Iterator[None]:
    with unchanged(long_model()):
        yield


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What is gathered, step by step and layer by layer."""
    found: list[np.ndarray] = []
    gather = Fetcher.gather

    def watched(fetcher: Any, history: Any, choice: Choice, *given: Any) -> Any:
        found.append(np.array(choice.units))
        return gather(fetcher, history, choice, *given)

    monkeypatch.setattr(Fetcher, "gather", watched)
    return found


def sparse(kind: Any, **fields: Any) -> Any:
    return kind(long_model(), **{**SPARSE, **fields})


@pytest.mark.parametrize("kind", [PaperSwapCache, RandomSwapCache])
@pytest.mark.parametrize(("sinks", "reuse"), [(4, 60), (6, 0)])
def test_every_selection_is_well_formed(kind: Any, sinks: int, reuse: int, chosen: list[np.ndarray]) -> None:
    with sparse(kind, num_sinks=sinks, reuse_capacity=reuse) as cache:
        generate(long_model(), cache, prompt(long_model(), 2, LONG), max_new_tokens=6)
    assert len(chosen) == 5 * 3
    count = -(-sinks // 4)
    for groups in chosen:
        assert groups.shape == (2, 10 + count)
        assert (np.diff(groups, axis=1) > 0).all() and (groups[:, :count] == np.arange(count)).all()


def test_the_papers_rule_looks_ahead_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first layer are decided before their own query is there: what is asked for is what was read."""
    asked: list[tuple[int, bool]] = []
    select = PaperPredictor.select

    def watched(predictor: PaperPredictor, query: Query, budget: int, guess: bool) -> Choice:
        asked.append(([layer.predictor for layer in cache.selective].index(predictor), guess))
        return select(predictor, query, budget, guess)

    monkeypatch.setattr(PaperPredictor, "select", watched)
    with sparse(PaperSwapCache, reuse_capacity=0) as cache:
        generate(long_model(), cache, prompt(long_model(), 1, LONG), max_new_tokens=5)
        assert asked == [(0, False), (1, True), (2, True)] * 4
        report = cache.report()
    assert report.hit_rate == 0
    assert report.prefetch_hit_rate == pytest.approx(2 / 3)


def test_the_papers_source_is_the_previous_layers_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither attention nor feed-forward part of the layer before add anything, the guess is the query."""
    model, guesses, true = fresh("llama"), {}, {}
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    predict = InputLookAhead.predict

    def watched(ahead: InputLookAhead, layer_idx: int, output: torch.Tensor) -> torch.Tensor | None:
        guesses[layer_idx] = predict(ahead, layer_idx, output)
        return guesses[layer_idx]

    monkeypatch.setattr(swap_variants.InputLookAhead, "predict", watched)
    fields: dict[str, Any] = {"group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 16}
    with PaperSwapCache(model, engine="memory", **fields) as cache, torch.no_grad():
        learn = cache.look_ahead.learn

        def noted(layer_idx: int, query: torch.Tensor) -> None:
            true[layer_idx] = query
            learn(layer_idx, query)

        for layer in cache.selective:
            layer.watch_query = noted
        ids = prompt(model, 2, 60)
        model(ids[:, :59], past_key_values=cache)
        model(ids[:, 59:], past_key_values=cache)
    near = 1e-4 * float(true[1].abs().max())
    torch.testing.assert_close(guesses[1], true[1], rtol=0, atol=near)
    assert (guesses[2] - true[2]).abs().max() > 0.01 * true[2].abs().max()
