"""Chunks judged by abstracts, and tokens by their keys: against all scores, computed plainly."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache import AbstractTreeConfig
from hf_offload_cache.fetch import Choice
from hf_offload_cache.history import RecordFormat, Sealed
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.abstract_tree import AbstractTreePredictor, bounds, likely, shares, standing
from hf_offload_cache.predictors import Query
from hf_offload_cache.testing import PredictorTests


class TestAbstractTreePredictor(PredictorTests):
    """All tokens are wanted, so as many chunks are fetched as there can be."""

    config = AbstractTreeConfig(chunk_size=4, num_sinks=PredictorTests.num_sinks, num_selected=PredictorTests.tokens)

    def make_predictor(self, rows: int, account: MemoryAccount) -> AbstractTreePredictor:
        return AbstractTreePredictor(self.form, rows, self.config, account)


CHUNK, CHUNKS, HEADS = 16, 20, 6
TOKENS = CHUNK * CHUNKS
FORM = RecordFormat(2, 8, 2, 4, torch.float32, CHUNK)
SCALING = 8**-0.5


class Case:
    """Two rows of keys that resemble their neighbours, a predictor that has learned of them, and a query."""

    def __init__(self, **fields: Any) -> None:
        generator = torch.Generator().manual_seed(2)
        common = torch.randn(2, 2, CHUNKS, 8, generator=generator).repeat_interleave(CHUNK, 2)
        self.keys = torch.randn(2, 2, TOKENS, 8, generator=generator) + 2 * common
        config = AbstractTreeConfig(chunk_size=CHUNK, **{"num_sinks": 3, "num_selected": 40, **fields})
        self.predictor = AbstractTreePredictor(FORM, 2, config, MemoryAccount())
        sealed = Sealed(CHUNKS, TOKENS, [(self.keys, self.keys)], lambda: iter([(self.keys, self.keys)]))
        self.predictor.learn(sealed, self.keys, None)
        self.states = 2 * torch.randn(2, HEADS, 8, generator=generator)
        values = torch.randn(2, 2, TOKENS, 4, generator=generator)
        self.entries = FORM.entries(self.keys, values, torch.empty(2, TOKENS, FORM.entry_width))
        self.products = (self.states.unflatten(1, (2, 3)) @ self.keys.transpose(2, 3)).flatten(1, 2)

    def choose(self, budget: int, visible: torch.Tensor | None = None) -> tuple[np.ndarray, Choice]:
        """The chunks that are fetched, and the choice."""
        query = Query(self.states, SCALING, visible, lambda: self.keys[:, :, :0])
        deciding = cast(Generator[Choice, torch.Tensor, Choice], self.predictor.select(query, budget, False))
        asked = next(deciding)
        fetched = self.entries.unflatten(1, (CHUNKS, CHUNK))[torch.arange(2)[:, None], np.maximum(asked.units, 0)]
        with pytest.raises(StopIteration) as end:
            deciding.send(fetched)
        assert np.array_equal(end.value.value.units, asked.units)
        return asked.units, end.value.value

    def tokens(self, choice: Choice) -> list[list[int]]:
        """The tokens that each row keeps."""
        assert choice.keep is not None
        places = choice.units[:, :, None] * CHUNK + np.arange(CHUNK)
        return [row[keep].tolist() for row, keep in zip(places, choice.keep, strict=True)]


def test_bounds_hold_and_are_attained_by_a_corner() -> None:
    """No key of a chunk scores above or below; and the bound is a sum over components of the better end."""
    case = Case()
    parts = case.keys.unflatten(2, (CHUNKS, CHUNK))
    upper, lower = bounds(case.states, parts.amin(3), parts.amax(3))
    scores = case.products.unflatten(2, (CHUNKS, CHUNK))
    assert (scores <= upper.unsqueeze(3) + 1e-4).all() and (scores >= lower.unsqueeze(3) - 1e-4).all()
    ends = torch.stack([parts.amin(3), parts.amax(3)], 3).repeat_interleave(3, 1)  # (2, H, n, 2, D)
    each = case.states[:, :, None, None] * ends
    torch.testing.assert_close(upper, each.amax(3).sum(-1))
    torch.testing.assert_close(lower, each.amin(3).sum(-1))
    single = case.keys[:, :, :5]
    exact = bounds(case.states, single, single)
    torch.testing.assert_close(exact[0], case.products[..., :5])
    torch.testing.assert_close(exact[1], case.products[..., :5])


def test_what_is_likely_is_so_of_independent_keys() -> None:
    case = Case()
    single = case.keys[:, :, :5]
    for found in likely(case.states, single, single):
        torch.testing.assert_close(found, case.products[..., :5])
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 2, 200, 64, 32, generator=generator) * torch.linspace(0.2, 3, 32) + torch.arange(32.0)
    states = torch.randn(1, 6, 32, generator=generator)
    least, most = keys.amin(3), keys.amax(3)
    found, lowest = likely(states, least, most)
    upper, lower = bounds(states, least, most)
    torch.testing.assert_close(lowest, lower, rtol=1e-4, atol=1e-3)
    highest = (states.unflatten(1, (2, 3))[:, :, None] @ keys.transpose(3, 4)).amax(4).transpose(2, 3).flatten(1, 2)
    assert (found <= upper + 1e-3).all()
    assert ((found - highest).mean(2).abs() < 0.01 * (upper - lower).mean(2)).all()
    for dtype in (torch.bfloat16, torch.float16):
        some = likely(states.to(dtype), 30 * least.to(dtype), 30 * most.to(dtype))
        torch.testing.assert_close(some[0], 30 * found, rtol=0.02, atol=30)


def test_where_chunks_stand() -> None:
    """First in a head's queue by the upper bound; at least, as if each stood at its lower bound."""
    upper = np.array([[[900, 500, 800, 100, 0], [1, 2, 3, 9, 4]]], dtype=np.float32)
    lower = np.array([[[850, 0, 450, 0, 0], [0, 0, 0, 3.5, 0]]], dtype=np.float32)
    most, least = standing(upper, lower, 3)
    assert np.floor(most).tolist() == [[3, 1, 2, 3, 2]]  # 2 and 4 are second in one queue each
    assert most[0, 2] > most[0, 4]  # and 2 third in the other
    # 0: none is above 850; 2: 900 and 500 (and its own 800) are above 450; 3: itself and 4 are above 3.5
    assert least is not None and least.tolist() == [[2, 0, 0, 1, 0]]
    assert standing(upper, np.zeros_like(upper), 3)[1] is None
    assert standing(upper, np.minimum(upper, 2.9), 2)[1] is None  # of the second head's two first ones the least is 4


@settings(max_examples=50, deadline=None)
@given(heads=st.integers(1, 4), chunks=st.integers(1, 30), places=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_standing_against_a_plain_count(heads: int, chunks: int, places: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    upper = generator.random((2, heads, chunks), dtype=np.float32)
    lower = upper - generator.random(upper.shape, dtype=np.float32)
    most, least = standing(upper, lower, places)
    places = min(places, upper.shape[2])
    for row in range(2):
        for chunk in range(upper.shape[2]):
            ranks = (upper[row] > upper[row, :, chunk : chunk + 1]).sum(1)
            worst = (upper[row] > lower[row, :, chunk : chunk + 1]).sum(1)
            assert int(most[row, chunk]) == max(0, places - ranks.min())
            inside = ranks < places
            expected = np.maximum(0, places - worst)[inside].max() if inside.any() else 0
            assert (0 if least is None else least[row, chunk]) == expected


def test_shares_of_each_head_sum_to_one() -> None:
    case = Case()
    case.states[:, 2] *= 10
    here, there = case.keys[:, :, :100], case.keys[:, :, 100:]
    scaled = case.states * SCALING
    found = [shares(scaled, here, there), shares(scaled, there, here)]
    whole = np.concatenate(found, 1)
    assert whole.sum(1) == pytest.approx([HEADS, HEADS], rel=1e-5)
    products = (case.states.unflatten(1, (2, 3)) @ case.keys.transpose(2, 3)).flatten(1, 2)
    np.testing.assert_allclose(whole, (products * SCALING).softmax(-1).sum(1).numpy(), rtol=1e-4, atol=1e-9)


def test_the_best_chunks_are_fetched_and_their_best_tokens_kept() -> None:
    case = Case()
    units, choice = case.choose(6)
    parts = case.keys.unflatten(2, (CHUNKS, CHUNK))
    upper, lower = (bound.numpy() for bound in likely(case.states, parts.amin(3), parts.amax(3)))
    most, _ = standing(upper, lower, 6)
    most[:, 0] = np.inf
    for row, kept in enumerate(case.tokens(choice)):
        assert units[row].tolist() == sorted(np.argsort(-most[row])[:6].tolist())
        there = (units[row][:, None] * CHUNK + np.arange(CHUNK)).reshape(-1)
        shares = (case.products[row][:, there] * SCALING).softmax(-1).sum(0)
        shares[:3] = torch.inf
        assert kept == sorted(there[shares.topk(43).indices].tolist())


def test_a_guess_names_what_would_be_fetched() -> None:
    case = Case()
    query = Query(case.states, SCALING, None, lambda: case.keys[:, :, :0])
    guess = case.predictor.select(query, 6, True)
    assert isinstance(guess, Choice) and guess.keep is None
    assert np.array_equal(guess.units, case.choose(6)[0])


def test_padding_is_not_kept_and_sinks_are_where_a_row_begins() -> None:
    case = Case()
    visible = torch.ones(2, TOKENS + 9, dtype=torch.bool)
    visible[1, : 5 * CHUNK + 7] = False
    units, choice = case.choose(6, visible)
    first, second = case.tokens(choice)
    assert first[:3] == [0, 1, 2] and len(first) == len(second) == 43
    begin = 5 * CHUNK + 7
    assert units[1].min() == 5 and second[:3] == [begin, begin + 1, begin + 2]


def test_a_row_with_little_that_is_no_padding_keeps_all_of_that() -> None:
    case = Case()
    visible = torch.ones(2, TOKENS, dtype=torch.bool)
    visible[1, : -CHUNK - 4] = False
    units, choice = case.choose(6, visible)
    kept = case.tokens(choice)
    assert len(kept[0]) == 43 and kept[1] == list(range(TOKENS - CHUNK - 4, TOKENS))
    assert units[1].tolist() == [CHUNKS - 2, CHUNKS - 1, -1, -1, -1, -1]


def test_what_is_judged_is_counted() -> None:
    """All chunks, and half as many as the tokens of those that are fetched: two tokens are one evaluation."""
    case = Case()
    case.choose(6)
    assert case.predictor.judged == 2 * TOKENS
    assert case.predictor.evaluations == 2 * (CHUNKS + 6 * CHUNK // 2)


def test_chunks_that_a_row_does_not_have_keep_nothing() -> None:
    """A row brings fewer chunks than another: what stands for the others is zeros, which score above its tokens."""
    case = Case(num_selected=16, num_sinks=0)
    case.keys[0] = -case.states[0].unflatten(0, (2, 3)).mean(1)[:, None] * (1 + torch.arange(CHUNKS)).repeat_interleave(
        CHUNK
    )[:, None]  # fmt: skip
    case.predictor.truncate(0)
    both = [(case.keys, case.keys)]
    case.predictor.learn(Sealed(CHUNKS, TOKENS, both, lambda: iter(both)), case.keys, None)
    case.entries = FORM.entries(case.keys, torch.zeros(2, 2, TOKENS, 4), torch.empty(2, TOKENS, FORM.entry_width))
    units, choice = case.choose(10)
    assert (units[0] < 0).any() and (units[1] >= 0).all()
    assert choice.keep is not None and choice.keep.sum((1, 2)).tolist() == [16, 16]
    assert not choice.keep[units < 0].any()


def test_large_scores_in_half_precision() -> None:
    """Products beyond 65,504, of scores that are not: scaled before they are made."""
    keys = torch.full((1, 1, 4, 64), 30.0, dtype=torch.float16)
    keys[:, :, 2] *= 1.01
    found = shares(torch.full((1, 2, 64), 40.0, dtype=torch.float16) * 0.125, keys, keys[:, :, :0])
    assert np.isfinite(found).all() and found[0].argmax() == 2
