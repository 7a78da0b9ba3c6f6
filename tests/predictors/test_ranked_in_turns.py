"""Few of many units: all are ranked at every fourth step, and in between those that mattered most."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from hf_offload_cache.errors import ContextError
from hf_offload_cache.history import RecordFormat, Sealed
from hf_offload_cache.memory import MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import (
    CANDIDATES,
    CodedKeys,
    FittedKeys,
    LowRankPredictor,
    LowRankShared,
    Rules,
    few_of_many,
)
from hf_offload_cache.predictors import Query

KV, HEADS, DIM, GROUP, UNITS, BUDGET = 2, 4, 16, 4, 200, 6
FORM = RecordFormat.of_sizes((KV, DIM, KV, DIM), torch.float32, GROUP)
RULES = {"coded": Rules(None, 4, summary_bytes=12), "int8": Rules(torch.int8, 4, 16)}


def predictor(kind: str, rows: int, phase: int = 0) -> LowRankPredictor:
    account = MemoryAccount()
    shared = LowRankShared(account, Workspace(account, "scores"))
    return LowRankPredictor(FORM, rows, RULES[kind], shared, "layer 0", phase=phase)


def keys_of(rows: int, units: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, KV, units * GROUP, DIM, generator=torch.Generator().manual_seed(seed))


def learn(
    one: LowRankPredictor, keys: torch.Tensor, fresh: int | None = None, visible: torch.Tensor | None = None,
    spoilt: float | None = None,
) -> None:  # fmt: skip
    """`spoilt`: all elements of a query."""
    fresh = keys.shape[2] if fresh is None else fresh
    sealed = Sealed(keys.shape[2] // GROUP, keys.shape[2], [(keys[:, :, -fresh:],) * 2], lambda: iter([(keys, keys)]))
    shape = len(keys), HEADS, 40 if fresh == keys.shape[2] else 1, DIM
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if spoilt is not None:
        queries[0, 1, 0] = spoilt
    one.learn(sealed, queries, visible)


def query_of(rows: int, seed: int) -> Query:
    """Of attention that is far from even, as most of a model's is."""
    states = 4 * torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(100 + seed))
    return Query(states, DIM**-0.5, None, functools.partial(keys_of, rows, 2, 7))


def chosen(one: LowRankPredictor, seed: int, rows: int = 2) -> np.ndarray:
    choice: Any = one.select(query_of(rows, seed), BUDGET, False)
    assert choice.units.shape == (rows, BUDGET) and (np.diff(choice.units) > 0).all()
    assert (choice.units[:, 0] == 0).all()
    return choice.units


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was ranked, "all" or "some", select by select."""
    seen: list[str] = []
    rank, among = FittedKeys.rank, FittedKeys.rank_among
    monkeypatch.setattr(FittedKeys, "rank", lambda *a, **k: [seen.append("all"), rank(*a, **k)][1])
    monkeypatch.setattr(FittedKeys, "rank_among", lambda *a, **k: [seen.append("some"), among(*a, **k)][1])
    return seen


@pytest.mark.parametrize(("phase", "fulls"), [(0, [0, 4, 8]), (1, [0, 3, 7]), (2, [0, 2, 6]), (3, [0, 1, 5, 9])])
def test_layers_take_turns(phase: int, fulls: list[int], ranked: list[str]) -> None:
    one, keys = predictor("coded", 2, phase), keys_of(2, UNITS)
    learn(one, keys)
    for seed in range(10):
        chosen(one, seed)
    assert [step for step, what in enumerate(ranked) if what == "all"] == fulls


@pytest.mark.parametrize(("kind", "units"), [("coded", 150), ("int8", UNITS)])
def test_where_many_are_wanted_or_nothing_is_rough_all_are_ranked(kind: str, units: int, ranked: list[str]) -> None:
    one, keys = predictor(kind, 2), keys_of(2, units)
    learn(one, keys)
    assert few_of_many(BUDGET, UNITS) and not few_of_many(BUDGET, 150)
    for seed in range(3):
        chosen(one, seed)
    assert ranked == ["all"] * 3


def test_the_same_query_chooses_the_same(ranked: list[str]) -> None:
    one, keys = predictor("coded", 2), keys_of(2, UNITS)
    learn(one, keys)
    first = chosen(one, 0)
    assert one.fitted.keys is not None and one.fitted.keys.has_rough_form
    again = chosen(one, 0)
    assert all(len(set(a) & set(b)) >= BUDGET - 1 for a, b in zip(again, first, strict=True))
    best = one.fitted.rank(query_of(2, 0), BUDGET).importance
    candidates = np.argsort(-best, 1)[:, : CANDIDATES * BUDGET]
    other, free = chosen(one, 1), predictor("coded", 2)
    learn(free, keys)
    for row, wanted in enumerate(chosen(free, 1)):
        assert len(set(other[row]) - set(candidates[row]) - {0}) <= 1
        assert set(wanted) - set(candidates[row])  # it would have wanted others too
    assert ranked == ["all", "some", "all", "some", "all"]


def test_what_was_sealed_since_is_looked_at() -> None:
    one, keys = predictor("coded", 2), keys_of(2, UNITS)
    learn(one, keys)
    chosen(one, 0)
    states = query_of(2, 1).states.view(2, KV, HEADS // KV, DIM).mean(2)
    more = torch.cat([keys, (3 * states)[:, :, None].expand(-1, -1, GROUP, -1)], 2)
    learn(one, more, GROUP)
    assert (chosen(one, 1)[:, -1] == UNITS).all()


def test_a_prompt_begins_anew(ranked: list[str]) -> None:
    one, free, keys = predictor("coded", 2), predictor("coded", 2), keys_of(2, 2 * UNITS)
    learn(one, keys[:, :, : UNITS * GROUP])
    chosen(one, 0)
    one.prompted(DIM**-0.5)
    for each in (one, free):
        learn(each, keys)
    assert (chosen(one, 1) == chosen(free, 1)).all()
    assert ranked == ["all"] * 3


def test_sinks_that_come_later_change_no_codes() -> None:
    one, keys = predictor("coded", 2), keys_of(2, UNITS + 1)
    learn(one, keys[:, :, : UNITS * GROUP])
    assert one.fitted.sinks is not None and isinstance(one.fitted.keys, CodedKeys)
    coding, sinks, one.fitted.sinks = one.fitted.keys.coding, one.fitted.sinks, None
    learn(one, keys, GROUP)
    assert one.fitted.keys.coding is coding
    assert torch.equal(one.fitted.sinks.keys, sinks.keys) and torch.equal(sinks.keys, keys[:, :, :4])


def test_nothing_is_left_of_nothing() -> None:
    """A crop of all units, then others: a guess ranks all of them."""
    one, keys = predictor("coded", 2), keys_of(2, UNITS)
    learn(one, keys)
    chosen(one, 0)
    one.truncate(0)
    other = predictor("coded", 2)
    other.restore({**one.capture(), "units": 0})
    learn(one, keys_of(2, UNITS, 3))
    assert one.select(query_of(2, 1), BUDGET, True).units.shape == (2, BUDGET)


def test_it_goes_on_after_changes_as_what_was_captured_does() -> None:
    one, keys = predictor("coded", 2, 2), keys_of(2, UNITS)
    learn(one, keys)
    chosen(one, 0)
    chosen(one, 1)
    tree = {**one.capture(), "units": UNITS}
    again, swapped = predictor("coded", 2), predictor("coded", 2)
    again.restore(tree)
    swapped.restore(tree)
    swapped.select_rows(torch.tensor([1, 0]))
    for seed in range(2, 9):
        query = query_of(2, seed)
        units = one.select(query, BUDGET, False).units
        assert np.array_equal(units, again.select(query, BUDGET, False).units)
        back = dataclasses.replace(query, states=query.states[[1, 0]], recent=lambda: keys_of(2, 2, 7)[[1, 0]])
        assert np.array_equal(units[[1, 0]], swapped.select(back, BUDGET, False).units)
    one.truncate(UNITS - 3)
    assert one.tables_nbytes >= 2 * (UNITS - 3) * 4 and chosen(one, 0).max() < UNITS - 3
    for wrong in ({"since": 4}, {"since": None}, {"latest": tree["latest"][:1]}, {"latest": tree["latest"].double()}):
        with pytest.raises(ContextError, match=f"{next(iter(wrong))} of its ranking is"):
            predictor("coded", 2).restore({**tree, **wrong})
    with pytest.raises(ContextError, match="its ranking has sizes"):
        predictor("coded", 2).restore({**tree, "units": UNITS - 1})


def test_a_guess_goes_by_the_latest_and_leaves_it() -> None:
    """The sinks are among what it chooses; the next choice is as if nothing had been guessed, also the first one."""
    one, free = predictor("coded", 2), predictor("coded", 2)
    for each in (one, free):
        learn(each, keys_of(2, UNITS))
    for seed in range(6):
        guessed: Any = one.select(query_of(2, seed + 50), BUDGET, True)
        assert (guessed.units[:, 0] == 0).all() and (np.diff(guessed.units) > 0).all()
        assert np.array_equal(chosen(one, seed), chosen(free, seed))


def test_what_is_known_of_the_rest_gives_candidates_the_weight_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    one, keys, looked_at = predictor("coded", 2), keys_of(2, UNITS), []
    learn(one, keys)
    best_of_units = CodedKeys.best_of_units

    def watched(self: CodedKeys, *arguments: Any, units: Any = None) -> np.ndarray:
        looked_at.extend([] if units is None else [units])
        return best_of_units(self, *arguments, units=units)

    even = dataclasses.replace(query_of(2, 0), states=query_of(2, 0).states / 8)  # there the rest weighs much
    with monkeypatch.context() as watching:
        watching.setattr(CodedKeys, "best_of_units", watched)
        ranking = one.fitted.rank(even, BUDGET)
    candidates = np.stack(looked_at)
    assert candidates.shape == (2, CANDIDATES * BUDGET) and ranking.beyond is not None and ranking.beyond.min() > 1.5
    expected = np.take_along_axis(ranking.importance, candidates, 1)
    found = one.fitted.rank_among(even, candidates, ranking.beyond)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (one.fitted.rank_among(even, candidates) > 1.2 * expected).all()


@pytest.mark.parametrize("kind", RULES)
def test_keys_that_are_not_finite_spoil_no_others(kind: str) -> None:
    """They and padding that is NaN count as padding, in a fit. Queries that are not finite count as 0."""
    keys, tokens = keys_of(2, UNITS), UNITS * GROUP
    others, spoilt, visible = torch.ones(2, tokens, dtype=torch.bool), keys.clone(), torch.ones(2, tokens).bool()
    spoilt[1, 1, 77, 3], spoilt[1, 0, 300], spoilt[0, :, :9] = torch.nan, torch.inf, torch.nan
    visible[0, :9] = others[0, :9] = False
    others[1, [77, 300]] = False
    one, other = predictor(kind, 2), predictor(kind, 2)
    learn(one, spoilt, visible=visible, spoilt=torch.nan)
    learn(other, keys, visible=others, spoilt=0)
    fitted, expected = (values_in(each.fitted.keys.fitted_state()) for each in (one, other))
    assert len(fitted) >= 3 and all(map(torch.equal, fitted, expected))
    assert all(bool(each.float().isfinite().all()) for each in fitted)
    places = torch.arange(tokens)
    ours, theirs = (each.fitted.keys.components(slice(None), places).transpose(1, 2) for each in (one, other))
    assert torch.equal(ours[others], theirs[others]) and others.sum() == 2 * tokens - 11


@pytest.mark.parametrize("kind", RULES)
def test_keys_none_of_which_is_finite_are_fitted_all_the_same(kind: str) -> None:
    one = predictor(kind, 2)
    learn(one, keys_of(2, UNITS) * torch.nan)
    assert one.ready(UNITS)
    with np.errstate(invalid="ignore"):
        chosen(one, 0)


def values_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree that have elements."""
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and each.numel()]
