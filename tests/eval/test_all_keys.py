"""The baselines that judge by all keys, and by fixed chunks: what they choose, and that all of it is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from eval import synthetic
from eval.baselines.all_keys import ChunkJudgedCache, FixedChunksCache, TokenJudgedCache
from eval.baselines.tree_variants import AllHalvesTreeCache, BoundsChunksCache, BoundsTreeCache, DescendingTreeCache
from hf_offload_cache.fetch import Choice
from hf_offload_cache.methods.abstract_tree import AbstractTreeCache

SHAPE = synthetic.Shape(layers=2, heads=4, kv_heads=2, head_dim=64, hidden=48, intermediate=64, vocabulary=128)
TOKENS, CHUNK = 600, 16
FIELDS: dict[str, Any] = {"chunk_size": CHUNK, "num_recent": 8, "num_sinks": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return synthetic.build_model(SHAPE)


def decoded(model: Any, cache: Any, steps: int = 2) -> torch.Tensor:
    synthetic.fill(cache, model, SHAPE, TOKENS, 2)
    inputs = synthetic.Inputs(SHAPE, 0.9, batch=2)
    for _ in range(steps):
        logits = synthetic.decode_step(model, cache, inputs.next())
    return (logits / logits.std()).float()


@pytest.mark.parametrize(
    "kind", [TokenJudgedCache, ChunkJudgedCache, FixedChunksCache, BoundsChunksCache, DescendingTreeCache]
)
def test_attention_to_all_of_it_is_exact(kind: type[AbstractTreeCache], model: Any, tmp_path: Path) -> None:
    with kind(model, tmp_path, num_selected=TOKENS - 16, **FIELDS) as cache:
        found = decoded(model, cache)
    torch.testing.assert_close(found, decoded(model, DynamicCache(config=model.config)), rtol=0, atol=2e-2)


@pytest.mark.parametrize("kind", [TokenJudgedCache, ChunkJudgedCache, FixedChunksCache])
def test_what_is_read_and_attended_to(kind: type[AbstractTreeCache], model: Any) -> None:
    """By all keys: everything is brought, and the best tokens, or chunks, are attended to; by abstracts: the chunks."""
    choices: list[Choice] = []
    queries: dict[int, torch.Tensor] = {}
    with kind(model, engine="memory", num_selected=64, reuse_capacity=0, **FIELDS) as cache:
        assert cache.selecting is not None
        cache.selecting.watch = lambda layer_idx, choice: choices.append(choice)
        for layer in cache.selective:
            layer.watch_query = lambda layer_idx, states: queries.__setitem__(layer_idx, states[:, :, -1])
        decoded(model, cache, steps=1)
        layer = cache.selective[0]
        units, choice = layer.history.units, choices[0]
        keys, values = layer.rows.fold(layer.whole()[0]), layer.history.length
        scores = queries[0].unflatten(1, (2, 2)).flatten(0, 1).float() @ keys[:, 0].float().transpose(1, 2)
        weights = (scores * layer.scaling).softmax(-1).sum(1)[:, : units * CHUNK].numpy()
        assert values > units * CHUNK
    if kind is FixedChunksCache:
        assert choice.units.shape == (4, 64 // CHUNK + 1) and choice.keep is None
        return
    assert choice.units.shape == (4, units) and choice.keep is not None
    weights[:, :3] = np.inf
    if kind is TokenJudgedCache:
        assert (choice.keep.reshape(4, -1).sum(1) == 64 + 3).all()
        least_in = np.where(choice.keep.reshape(4, -1), weights, np.inf).min(1)
        most_out = np.where(choice.keep.reshape(4, -1), -np.inf, weights).max(1)
    else:
        best = weights.reshape(4, units, CHUNK).max(2)
        whole = choice.keep.all(2)
        assert (whole == choice.keep.any(2)).all() and (whole.sum(1) == -(-67 // CHUNK)).all()
        least_in, most_out = np.where(whole, best, np.inf).min(1), np.where(whole, -np.inf, best).max(1)
    assert (least_in >= most_out * (1 - 1e-2)).all()  # bfloat16 queries


def chosen(kind: type[AbstractTreeCache], model: Any) -> tuple[list[Choice], float]:
    """What the layers of a step choose, and what was judged over judging all tokens."""
    choices: list[Choice] = []
    alone: dict[str, Any] = {"dense_layers": 0, "early_steps": 0, "num_opened": 160}
    with kind(model, engine="memory", num_selected=64, reuse_capacity=0, **alone, **FIELDS) as cache:
        assert cache.selecting is not None
        cache.selecting.watch = lambda layer_idx, choice: choices.append(choice)
        decoded(model, cache, steps=1)
        predictors: list[Any] = [layer.predictor for layer in cache.selective]
    return choices, sum(one.evaluations for one in predictors) / sum(one.judged / 2 for one in predictors)


def test_halves_of_chunks_find_the_same_tokens_and_take_more() -> None:
    """Almost the same: a token that bounds leave out may be one that an exact search takes."""
    model = synthetic.build_model(SHAPE)
    (tokens, judged), (halves, more), (every, most) = (
        chosen(kind, model) for kind in (AbstractTreeCache, DescendingTreeCache, AllHalvesTreeCache)
    )
    for one, two in ((tokens, halves), (tokens, every)):
        for own, other in zip(one, two, strict=True):
            assert np.array_equal(own.units, other.units) and own.keep is not None and other.keep is not None
            assert (own.keep & other.keep).sum() / own.keep.sum() > 0.9
    assert judged <= more < most


def test_bounds_rank_chunks_otherwise() -> None:
    model = synthetic.build_model(SHAPE)
    (likely, _), (by_bounds, _) = (chosen(kind, model) for kind in (AbstractTreeCache, BoundsTreeCache))
    alike = [np.array_equal(one.units, two.units) for one, two in zip(likely, by_bounds, strict=True)]
    assert not all(alike)
    assert all(one.units.shape == two.units.shape for one, two in zip(likely, by_bounds, strict=True))
