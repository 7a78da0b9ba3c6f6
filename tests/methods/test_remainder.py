"""The remainder of a step: estimated from compact keys, attended to as one entry for each query head."""

from __future__ import annotations

import copy
import dataclasses
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

from eval.studies.watch import attended_columns
from hf_offload_cache import ClusterCache, DiskSwapCache
from hf_offload_cache.core import Rows, SelectiveLayer, selective_layer
from hf_offload_cache.errors import ContextError
from hf_offload_cache.history import RecordFormat, Sealed
from hf_offload_cache.memory import DryRun, MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import (
    CANDIDATES,
    CodedKeys,
    LowRankPredictor,
    LowRankShared,
    Rules,
    default_summary_bytes,
    fit_coding,
    remainder,
)
from hf_offload_cache.predictors import Predictor, Query, value_maps
from hf_offload_cache.predictors.value_maps import LeastSquares, asked, token_weights

fit_maps, fit_bytes, PromptQueries = remainder.fit_maps, remainder.fit_bytes, remainder.PromptQueries
KV, HEADS, DIM, VALUE, GROUP, UNITS, BUDGET = 2, 4, 16, 20, 4, 300, 12
FORMS = {heads: RecordFormat.of_sizes((heads, DIM, heads, VALUE), torch.float32, GROUP) for heads in (1, KV)}
"""Values are wider than keys."""
APART = pytest.mark.parametrize("heads", [1, KV], ids=["together", "apart"])
"""Rows of a sequence."""
KINDS = {
    "coded": Rules(None, 4, summary_bytes=12, remainder=True),
    "int8": Rules(torch.int8, 4, 16, remainder=True),
    "float32": Rules(torch.float32, 4, 16, remainder=True),
}


def some(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys_and_values(rows: int, units: int = UNITS) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of few directions, and values that follow from them but for a little noise, as a model's partly do."""
    keys = some(rows, KV, units * GROUP, 8, seed=0) @ some(8, DIM, seed=1)
    values = keys @ some(DIM, VALUE, seed=2) / 8 + 0.1 * some(rows, KV, units * GROUP, VALUE, seed=3)
    return keys, values


def empty(kind: str, batch: int, heads: int = 1, account: MemoryAccount | None = None) -> LowRankPredictor:
    account = MemoryAccount() if account is None else account
    shared = LowRankShared(account, Workspace(account, "scores"), wanted=lambda tokens: BUDGET)
    return LowRankPredictor(FORMS[KV // heads], batch * heads, KINDS[kind], shared, "layer 0", heads=heads)


def learned(
    kind: str, batch: int, visible: torch.Tensor | None = None, units: int = UNITS, plain: bool = False,
    heads: int = 1,
) -> LowRankPredictor:  # fmt: skip
    """`plain`: keys of all directions, whose components have several widths."""
    one = empty(kind, batch, heads)
    one.prompted(DIM**-0.5)
    keys, values = keys_and_values(batch, units)
    keys, values = map(Rows(heads).fold, (some(*keys.shape, seed=0) if plain else keys, values))
    parts = list(zip(keys.split([5, units * GROUP - 5], 2), values.split([5, units * GROUP - 5], 2), strict=True))
    one.learn(Sealed(units, units * GROUP, parts, lambda: iter(parts)), some(batch, HEADS, 40, DIM, seed=5), visible)
    return one


def query(batch: int, seed: int, visible: torch.Tensor | None = None, heads: int = 1) -> Query:
    states = some(batch, HEADS, DIM, seed=100 + seed)
    return Query(states, DIM**-0.5, visible, lambda: Rows(heads).fold(keys_and_values(batch, 2)[0]))


def tokens_of(units: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((units[:, None] * GROUP + np.arange(GROUP)).ravel())


def entries_of(estimates: Any, head: int, at: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithmic mass (B,) and value (B, D) for a query head: exactly one entry is for it."""
    own = estimates.bias[:, head, at]
    column = int((own[0] > -1e30).nonzero().squeeze())
    assert (own.isneginf().sum(1) == own.shape[1] - 1).all()
    heads = len(estimates.entries) // len(own)
    keys, values = map(Rows(heads).unfold, FORMS[KV // heads].split(estimates.entries))
    assert not keys.any()
    return own[:, column], values[:, head // (HEADS // KV), column]


def rows_of(row: int, heads: int) -> dict[int, int]:
    """Query head -> its row of a choice, for a sequence."""
    return {head: row * heads + head * heads // HEADS for head in range(HEADS)}


@APART
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [False, True])
def test_it_is_the_twins(kind: str, hidden: bool, heads: int) -> None:
    """The entry is the weighted mean of mapped components over the tokens of the next units, of their mass."""
    visible = None
    if hidden:
        visible = torch.ones(2, UNITS * GROUP, dtype=torch.bool)
        visible[0, :70] = False
    one = learned(kind, 2, visible, heads=heads)
    asked = query(2, 0, visible, heads)
    choice: Any = one.select(asked, BUDGET, False)
    assert choice.next.shape == (2 * heads, (CANDIDATES - 1) * BUDGET)
    estimates = one.estimate([asked], [choice.next])
    compact, maps = one.fitted.keys, one.fitted.maps
    assert estimates is not None and compact is not None and maps is not None
    for chosen, left in zip(choice.units, choice.next, strict=True):
        assert not set(left) & set(chosen) and len(set(left)) == len(left)
    for row in range(2):
        components = compact.components(slice(row, row + 1), torch.arange(UNITS * GROUP))[0]
        components = (components + torch.from_numpy(compact.offsets)[:, None])[: compact.leading].t()
        low = torch.from_numpy(compact.low_rank_query(asked.states)[row])
        scored = compact.scored(low.numpy(), row, None, GROUP, None)
        by_unit = scored.by_unit(scored.scores())
        scores = torch.from_numpy(by_unit.transpose(0, 2, 1).reshape(HEADS, -1)) * DIM**-0.5
        linear = maps.maps[row].float() * maps.scale[row][:, None, None]
        mapped = torch.einsum("tr,rhd->htd", torch.cat([components, torch.ones(len(components), 1)], 1), linear)
        for head, own_row in rows_of(row, heads).items():
            tokens = tokens_of(choice.next[own_row])
            if visible is not None:
                tokens = tokens[visible[row, tokens]]
            weights = scores[head, tokens].exp()
            value = weights @ mapped[head // (HEADS // KV), tokens] / weights.sum()
            mass = weights.sum().log() + maps.ratio[row, head].log()
            own = entries_of(estimates, head)
            torch.testing.assert_close(own[0][row], mass, rtol=0, atol=0.05)  # low-rank queries in 8 bits
            torch.testing.assert_close(own[1][row], value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [True, False])
def test_long_parts_fit_as_short_ones(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maps of three rows, in many pieces and in one, and as on a device, where kernels compare entries. Padding, of
    which one row has more than text, has no part in them, even if it is not finite; with compact keys of all that keys
    have, estimates are true."""
    padding = torch.tensor([[0], [40], [900]])
    visible = torch.arange(UNITS * GROUP) >= padding if padded else None
    one, (keys, values) = learned(kind, 3, visible), keys_and_values(3)
    compact, queries, made = one.fitted.keys, some(3, HEADS, 40, DIM, seed=5), []
    assert compact is not None
    if visible is not None:
        values = values.masked_fill(~visible[:, None, :, None], torch.nan)
        keys = keys.masked_fill(~visible[:, None, :, None], torch.inf)
    for part, alone, heads in [(128, False, 1), (1 << 14, False, 1), (999, True, 1), (128, False, KV), (999, True, KV)]:
        monkeypatch.setattr(remainder, "has_step", lambda *_, alone=alone: alone)
        made_of = compact, lambda: zip(keys.split(500, 2), values.split(500, 2), strict=True), FORMS[KV], queries
        chosen = BUDGET, CANDIDATES * BUDGET
        maps = fit_maps(*made_of, DIM**-0.5, chosen, visible, MemoryAccount(), heads, part)
        assert maps is not None
        made.append(maps)
    short, long, there, apart, apart_there = made
    torch.testing.assert_close(apart_there.ratio, apart.ratio, rtol=1e-3, atol=0)
    assert (apart_there.maps.int() - apart.maps.int()).abs().max() <= 1
    assert one.fitted.maps is not None
    for maps in (long, there, one.fitted.maps):
        torch.testing.assert_close(maps.ratio, short.ratio, rtol=1e-3, atol=0)
        torch.testing.assert_close(maps.scale, short.scale, rtol=1e-3, atol=0)
        assert (maps.maps.int() - short.maps.int()).abs().max() <= 1
    assert short.maps.float().std() > 10
    assert kind != "float32" or (short.ratio - 1).abs().max() < 1e-3


@pytest.mark.parametrize("padded", [True, False])
def test_maps_are_of_least_weighted_squares(padded: bool) -> None:
    """As normal equations in float64 say, of tokens added in two parts. A token without attention has a tenth of the
    mean weight."""
    rows, tokens, rank = 2, 90, 5
    components, values, attention = (
        some(rows, *shape, tokens, seed=seed) for seed, shape in enumerate([(rank,), (KV, VALUE), (KV,)])
    )
    values, attention = values.mT, attention.square()
    seen = torch.arange(tokens) >= torch.tensor([[0], [40]]) if padded else torch.ones(rows, tokens, dtype=torch.bool)
    attention = attention.masked_fill(~seen[:, None], 0)
    attention[..., 50:60] = 0
    weights = token_weights(attention, FORMS[KV], seen if padded else None)
    sums = LeastSquares(rows, rank + 1, FORMS[KV], torch.device("cpu"))
    for part in (slice(0, 30), slice(30, tokens)):
        given = components[..., part], values[:, :, part], weights[..., part]
        sums.add(*given, *([seen[:, part]] if padded else []))
    found = sums.solved()
    for row in range(rows):
        inputs = torch.cat([components[row], torch.ones(1, tokens)])[:, seen[row]].double()
        deviation = inputs.square().mean(1).sqrt()
        for head in range(KV):
            own = attention[row, head, seen[row]].double()
            weighted = inputs * (own / own.mean() + 0.1)
            gram = weighted @ inputs.t() + 1e-4 * inputs.shape[1] * deviation.square().diag()
            expected = torch.linalg.solve(gram, weighted @ values[row, head, seen[row]].double())
            torch.testing.assert_close(found[row, :, head].double(), expected, rtol=1e-4, atol=1e-5)


def test_queries_of_a_fit_are_the_latest_first() -> None:
    for count in (1, 15, 16, 40, 512, 700):
        queries = torch.arange(float(count)).view(1, 1, count, 1)
        states, behind = asked(queries)
        assert states.flatten().tolist() == [count - 1 - after for after in behind] and behind[0] == 0
        assert len(behind) == (14 if count == 40 else min(count, 16))


def test_queries_of_a_prompt_in_pieces() -> None:
    """At most so many of the latest 512, evenly apart, each with what it sees; and which tokens are padding. The last
    pieces' take the place of older ones."""
    account, form = MemoryAccount(), RecordFormat.of_sizes((1, 1, 1, 1), torch.float32, GROUP)
    held: Any = None
    for most in (64, 9):
        for first, stop, expected in (
            (0, 600, range(88, 600, 8)),
            (600, 700, [*range(192, 600, 8), *range(600, 700, 8)]),
            (700, 710, [*range(208, 600, 8), *range(600, 700, 8), 700, 708]),
        ):
            queries = torch.arange(float(first), stop).view(1, 1, -1, 1).expand(2, 3, -1, -1)
            visible = torch.ones(1, stop, dtype=torch.bool)
            held = PromptQueries.after(held, queries, stop - 4, visible, most, form, account)
            wanted = [*expected] if most == 64 else None
            found = held.states[1, 2, :, 0].tolist()
            assert held.states.shape[2] <= most and (held.ends == np.array(found) + 1 - 4).all()
            assert wanted is None or found == wanted
            assert held.visible.shape == (2, stop) and held.visible.all()
            assert account.by_owner["compact keys"] == 2 * (3 * len(found) * 4 + stop)
        held.select_rows(torch.tensor([1]))
        assert account.by_owner["compact keys"] == 3 * len(found) * 4 + stop
        held.close()
        held = None
    assert account.current == 0


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "shared", "dim", "tokens"),
    [
        (1, 3, 3, 64, 6000), (4, 3, 3, 64, 2048), (1, 1, 4, 256, 6000), (1, 2, 7, 64, 1200), (8, 1, 4, 256, 2048),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 8, 4, 128, 3000), (2, 8, 4, 128, 3000))),
        pytest.param(16, 3, 3, 64, 2048, marks=pytest.mark.slow),
    ],
)
def test_fitting_takes_what_the_plan_says(
    rows: int, heads: int, shared: int, dim: int, tokens: int, padded: bool
) -> None:
    keys, values = (some(rows, heads, tokens, dim, seed=seed).bfloat16() for seed in (0, 1))
    queries = some(rows, heads * shared, 600, dim, seed=2).bfloat16()
    form, account = RecordFormat.of_sizes((heads, dim, heads, dim), torch.bfloat16, GROUP), MemoryAccount()
    coding = fit_coding(lambda: iter([keys]), tokens, heads, None, default_summary_bytes(heads * dim), queries)
    compact = CodedKeys(coding, heads, rows, account, Workspace(account, "scores"), GROUP)
    compact.append(keys)
    visible = (torch.arange(tokens) > 60).expand(rows, -1) if padded else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as held, record_function("fit"):
        blocks = zip(keys.split(1024, 2), values.split(1024, 2), strict=True)
        assert fit_maps(compact, lambda: blocks, form, queries, dim**-0.5, (200, 1000), visible, account)
    planned = fit_bytes(form, rows, compact.leading, heads * shared, tokens)
    assert 0.5 * planned < most_held(held, "fit") <= planned


@APART
@pytest.mark.parametrize("units", [UNITS, 7 * UNITS])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_closer_to_full_attention(kind: str, units: int, heads: int) -> None:
    """The attention error is less than a fifth of that of dropping, if values follow from keys. The maps of the
    longer history are fitted to a sample."""
    one, (keys, values) = learned(kind, 1, units=units, heads=heads), keys_and_values(1, units)
    dropped = estimated = 0.0
    for seed in range(8):
        asked = query(1, seed, heads=heads)
        choice: Any = one.select(asked, BUDGET, False)
        estimates = one.estimate([asked], [choice.next])
        for head, row in rows_of(0, heads).items():
            tokens = tokens_of(choice.units[row])
            own_keys, own_values = keys[0, head // 2], values[0, head // 2]
            scores = own_keys @ asked.states[0, head] * DIM**-0.5
            candidates = torch.cat([tokens, tokens_of(choice.next[row])])
            wanted = scores[candidates].softmax(0) @ own_values[candidates]
            mass, value = entries_of(estimates, head)
            near = scores[tokens].softmax(0) @ own_values[tokens]
            both = torch.cat([scores[tokens], mass]).softmax(0) @ torch.cat([own_values[tokens], value])
            dropped += float((near - wanted).square().sum())
            estimated += float((both - wanted).square().sum())
    assert estimated < dropped / 5


@APART
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("units", "budget"), [(UNITS, 2 * BUDGET), (UNITS, BUDGET), (2 * 8 * CANDIDATES * BUDGET, BUDGET)]
)
def test_an_estimate_uses_the_rankings_scores(kind: str, units: int, budget: int, heads: int) -> None:
    """It is as if the units that are left were scored again, whether a step scored all units with all components or,
    of the longer histories, candidates. These are neither chosen nor sinks."""
    one = learned(kind, 1, units=units, plain=True, heads=heads)
    for seed in range(6):
        asked = query(1, seed, heads=heads)
        choice: Any = one.select(asked, budget, False)
        kept = one.fitted._scored
        used, anew = (one.estimate([asked], [choice.next]) for _ in range(2))
        assert (kept is None) == (kind != "coded" and units > 16 * budget)  # without a rough form, none are kept
        assert used is not None and anew is not None
        torch.testing.assert_close(used.bias, anew.bias, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(used.entries, anew.entries, rtol=1e-4, atol=1e-4)
        for chosen, left in zip(choice.units, choice.next, strict=True):
            assert not set(left) & {*chosen, 0} and len(set(left)) == len(left)
        assert 0 <= choice.next.shape[1] - (CANDIDATES - 1) * budget <= 1  # the sinks' unit is selected, no candidate
        if kept is None:
            continue
        assert (kept[1].groups is None) == (units <= 16 * budget)
        if kept[1].groups is not None:
            assert set(choice.next.ravel()) <= set(kept[1].groups)
            if heads == 1:
                assert set(kept[1].groups) <= {*choice.next[0], *choice.units[0]}
            assert CANDIDATES * budget <= len(kept[1].groups) <= heads * CANDIDATES * budget


@pytest.mark.parametrize("memory", [None, 2 << 20, 8 << 20])
def test_scores_take_a_share_of_a_budget(memory: int | None) -> None:
    """A step scores all groups of more than 9K tokens with all components only if a sixteenth of the budget suffices.
    """
    units = 2400
    one = learned("coded", 1, units=units, plain=True)
    one.fitted.rules = dataclasses.replace(KINDS["coded"], memory=memory)
    asked = query(1, 0)
    choice: Any = one.select(asked, units // 10, False)
    kept = one.fitted._scored
    assert kept is not None and (kept[1].groups is None) == (memory != 2 << 20)
    used, anew = (one.estimate([asked], [choice.next]) for _ in range(2))
    assert used is not None and anew is not None
    torch.testing.assert_close(used.bias, anew.bias, rtol=1e-5, atol=1e-5)
    run = DryRun()
    one.fitted.rehearse(run, units * GROUP, HEADS, units // 10)
    scored = units if memory != 2 << 20 else 2304  # four for each selected are fewer
    assert run.passing("scores")[1] >= scored * GROUP * 4 * HEADS


@APART
def test_each_query_has_its_own_entries(heads: int) -> None:
    """Each of several queries sees only its own entries. Units that another query chose are dropped from them."""
    one = learned("coded", 2, heads=heads)
    asked = [query(2, seed, heads=heads) for seed in range(3)]
    left = [one.select(each, BUDGET, False).next for each in asked]  # type: ignore[union-attr]
    left[1][1, 5:] = -1
    together = one.estimate(asked, left)
    width = FORMS[KV // heads].entry_width
    assert together is not None and together.entries.shape == (2 * heads, 3 * HEADS // KV, width)
    for at, each in enumerate(asked):
        alone = one.estimate([each], [left[at]])
        for head in range(HEADS):
            torch.testing.assert_close(entries_of(together, head, at), entries_of(alone, head))


@APART
def test_nothing_left_has_no_mass(heads: int) -> None:
    one, asked = learned("coded", 1, heads=heads), query(1, 0, heads=heads)
    estimates = one.estimate([asked], [np.full((heads, 3), -1)])
    assert estimates is not None and estimates.bias.isneginf().all() and not estimates.entries.any()
    assert one.select(asked, UNITS, False).next is None  # type: ignore[union-attr]


def watched_weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The attention (B, Hk, tokens) by which each of the following fits weighs its sample."""
    weights: list[torch.Tensor] = []
    weigh = remainder._Asked.weigh

    def weighed(self: Any, *given: Any) -> torch.Tensor:
        weights.append(weigh(self, *given))
        return weights[-1].clone()

    monkeypatch.setattr(remainder._Asked, "weigh", weighed)
    return weights


@APART
@pytest.mark.parametrize("units", [UNITS, 7 * UNITS])
@pytest.mark.parametrize("part", [16, 128, 1 << 14])
def test_weights_are_the_twins(units: int, part: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's weight is the softmax over the first unit and the sample, each of whose tokens stands for several,
    summed over the queries and heads whose remainder has the token, however many are scored at a time."""
    keys, values = keys_and_values(2, units)
    queries, visible = some(2, HEADS, 16, DIM, seed=5), torch.ones(2, units * GROUP, dtype=torch.bool)
    visible[1, 20:50] = False
    coding = fit_coding(lambda: iter([keys]), units * GROUP, KV, visible, KINDS["coded"].summary_bytes or 0, queries)
    compact = CodedKeys(coding, KV, 2, account := MemoryAccount(), Workspace(account, "scores"), GROUP)
    compact.append(keys)
    weights, chosen, every = watched_weights(monkeypatch), (BUDGET, CANDIDATES * BUDGET), -(-units * GROUP // 4096)
    made_of = compact, lambda: iter([(keys, values)]), FORMS[KV], queries, DIM**-0.5, chosen, visible
    assert fit_maps(*made_of, account, heads, part)
    sample = np.arange(1 + (every - 1) // 2, units, every)
    tokens = tokens_of(np.array([0, *sample]))
    wanted, candidates = (round((count - 1) / every) for count in chosen)
    expected = torch.zeros(2, KV, len(sample), GROUP)
    for row in range(2):
        components = compact.components(slice(row, row + 1), tokens)[0].float()
        for at in range(16):
            low, constant = compact.asking(queries[row : row + 1, :, at], DIM**-0.5)
            seen = units - (15 - at + GROUP - 1) // GROUP  # units that end before the query
            scores = (low[0] @ components + constant[0]).masked_fill(~visible[row, tokens], -torch.inf)
            scores[:, tokens >= seen * GROUP] = -torch.inf
            scores[:, GROUP:] += np.log(every)
            attention = scores.softmax(1).unflatten(1, (-1, GROUP))[:, 1:]
            best = scores.unflatten(1, (-1, GROUP)).amax(2).softmax(1)[:, 1:]
            order = best.unflatten(0, (heads, -1)).sum(1).argsort(1, descending=True)
            rest = torch.zeros(heads, len(sample)).scatter_(1, order[:, wanted:candidates], 1)
            attention *= rest.repeat_interleave(HEADS // heads, 0)[..., None] / every
            expected[row] += attention.unflatten(0, (KV, -1)).sum(1)
    torch.testing.assert_close(weights[0].unflatten(2, (-1, GROUP)), expected, rtol=1e-3, atol=1e-6)
    assert (expected > 0).sum() > 2 * KV * BUDGET


@pytest.mark.parametrize(("units", "every"), [(300, 1), (1024, 1), (1025, 2), (2049, 3)])
def test_a_sample_has_4096_tokens(units: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most, in units that lie evenly among all, without the first."""
    weights = watched_weights(monkeypatch)
    one = learned("coded", 1, units=units)
    assert one.fitted.maps is not None
    assert weights[0].shape == (1, KV, len(range(1 + (every - 1) // 2, units, every)) * GROUP)


@APART
@pytest.mark.parametrize("seen", [30, 150], ids=["fewer than the candidates", "more"])
def test_a_query_of_a_fit_sees_no_later_units(seen: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later units, and the one that a query sees a part of, get no weight and change no mass, whatever keys they have.
    Without `ends`, each of the latest queries sees what came before it."""
    (keys, values), queries, end = keys_and_values(2), some(2, HEADS, 16, DIM, seed=5), seen * GROUP
    coding = fit_coding(lambda: iter([keys]), UNITS * GROUP, KV, None, KINDS["coded"].summary_bytes or 0, queries)
    others = torch.cat([keys[:, :, :end], 9 * some(*keys[:, :, end:].shape, seed=7)], 2)
    weights = watched_weights(monkeypatch)

    def fitted(keys: torch.Tensor, ends: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The maps' ratio, and the attention to all units but the first."""
        weights.clear()
        compact = CodedKeys(coding, KV, 2, account := MemoryAccount(), Workspace(account, "scores"), GROUP)
        compact.append(keys)
        chosen = BUDGET, CANDIDATES * BUDGET
        made_of = compact, lambda: iter([(keys, values)]), FORMS[KV], queries
        maps = fit_maps(*made_of, DIM**-0.5, chosen, None, account, heads, ends=ends)
        assert maps is not None
        return maps.ratio, weights[0]

    ends = np.full(16, end + GROUP - 1)
    (ratio, own), (ratio_of_others, own_of_others) = fitted(keys, ends), fitted(others, ends)
    assert torch.equal(ratio, ratio_of_others) and torch.equal(own, own_of_others) and (own > 0).sum() > 2 * KV * 16
    assert not own[..., end - GROUP :].any() and (ratio != 1).all()
    ends = UNITS * GROUP - np.arange(16)[::-1]
    (ratio, own), (by_default, own_by_default) = fitted(others, ends), fitted(others, None)
    assert torch.equal(ratio, by_default) and torch.equal(own, own_by_default)
    assert own[..., end - GROUP :].any()


def test_a_short_prompt_and_no_queries_have_none() -> None:
    assert learned("coded", 1, units=200).fitted.maps is None
    one = learned("coded", 1)
    assert one.fitted.maps is not None
    one.truncate(0)
    assert one.fitted.maps is None and one.estimate([query(1, 0)], [np.arange(3)[None]]) is None


@APART
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_contexts_keep_it(kind: str, heads: int) -> None:
    one, asked = learned(kind, 2, heads=heads), query(2, 0, heads=heads)
    left = one.select(asked, BUDGET, False).next  # type: ignore[union-attr]
    before = one.estimate([asked], [left])
    tree = {**one.capture(), "units": UNITS}
    account = MemoryAccount()
    other = empty(kind, 2, heads, account)
    other.restore(tree)
    after = other.estimate([asked], [left])
    assert before is not None and after is not None
    assert torch.equal(before.entries, after.entries) and torch.equal(before.bias, after.bias)
    moved = Rows(heads).expand(torch.tensor([1, 1, 0]))
    other.select_rows(moved)
    states = asked.states[[1, 1, 0]]
    rows = other.estimate([dataclasses.replace(asked, states=states)], [left[moved]])
    assert rows is not None and torch.equal(rows.entries, before.entries[moved])
    plain = empty(kind, 2, heads, account)
    plain.fitted.rules = dataclasses.replace(KINDS[kind], remainder=False)
    plain.restore(tree)
    assert plain.fitted.maps is None and plain.select(asked, BUDGET, False).next is None  # type: ignore[union-attr]
    for part in (one, other, plain):
        part.close()
    assert not account.by_owner["adapters"]


@APART
@pytest.mark.parametrize("kind", KINDS)
def test_the_fitted_state_of_a_stream_has_it(kind: str, heads: int) -> None:
    """A stream's keys are learned without queries: the maps that arrived with the fitted state stay. Whether heads
    choose apart is no part of it."""
    one, other = learned(kind, 1), empty(kind, 1, heads)
    state = one.fitted_state()
    assert state is not None
    other.restore({**state, "units": 0})
    keys, values = keys_and_values(1)
    parts = [(Rows(heads).fold(keys), Rows(heads).fold(values))]
    other.learn(Sealed(UNITS, UNITS * GROUP, parts, lambda: iter(parts)), torch.empty(1, HEADS, 0, DIM), None)
    asked, left = query(1, 0), np.arange(20, 60)[None]
    before, after = one.estimate([asked], [left]), other.estimate([asked], [left.repeat(heads, 0)])
    for head in range(HEADS):
        for found, wanted in zip(entries_of(after, head), entries_of(before, head), strict=True):
            torch.testing.assert_close(found, wanted)  # sums of float32, of fewer heads at a time


@pytest.mark.parametrize("change", [{"maps": torch.zeros(2, 3, 2, 16, dtype=torch.int8)}, {"ratio": torch.ones(2, 3)}])
def test_a_context_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    tree = learned("coded", 2).capture()
    tree = {**tree, "maps": {**tree["maps"], **change}, "units": UNITS}
    with pytest.raises(ContextError, match="remainder"):
        empty("coded", 2).restore(tree)


# In a model: the step's attention is that over the gathered entries and the estimated ones

FIELDS: dict[str, Any] = {
    "group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 32, "look_ahead": True, "engine": "memory",
    "remainder": True,
}  # fmt: skip
LENGTH = 1100


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attention of each sparse step with estimates, and what a plain softmax in float32 makes of the same entries."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    combine = SelectiveLayer.combine

    def watched(layer: Any, call: Any, choice: Any, fetched: Any, visible: Any) -> Any:
        output, weights = combine(layer, call, choice, fetched, visible)
        if fetched.estimates is not None:
            seen.append((output.float(), plain(layer, call, choice, fetched)))
        return output, weights

    monkeypatch.setattr(SelectiveLayer, "combine", watched)
    return seen


def plain(layer: Any, call: Any, choice: Any, fetched: Any) -> torch.Tensor:
    history, bias = layer.history, fetched.estimates.bias
    keys, values = (layer.rows.unfold(part).float() for part in history.form.split(fetched.entries))
    batch, heads, count, _ = call.query.shape
    keys, values = (part.repeat_interleave(heads // part.shape[1], 1) for part in (keys, values))
    scores = torch.einsum("bhqd,bhtd->bhqt", call.query.float(), keys) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    chosen = fetched.of_chosen(history.positions(choice.units))
    latest = np.arange(history.length - history.recent.shape[1], history.length)
    places = np.concatenate([chosen, np.broadcast_to(latest, (len(chosen), len(latest)))], 1)
    stored = scores[..., : places.shape[1]]
    at = torch.from_numpy(places).unflatten(0, (batch, -1))[:, :, None]
    at = at.repeat_interleave(heads // at.shape[1], 1)
    if call.mask is None:
        hidden = at > (history.length - count + torch.arange(count))[:, None]
    else:
        mask = call.mask.expand(batch, heads, count, -1)
        shown = mask if mask.dtype == torch.bool else mask > -1e4
        hidden = ~shown.gather(-1, at.clamp(min=0).expand(-1, -1, count, -1))
    hidden = hidden | (at < 0)
    stored.masked_fill_(hidden, -torch.inf)
    scores[..., places.shape[1] :] += bias
    if call.s_aux is not None:
        extra = call.s_aux.float()[None, :, None, None].expand(batch, -1, count, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhqt,bhtd->bqhd", weights, values)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("way", ["greedy", "left padding", "candidates"])
@pytest.mark.parametrize("apart", [False, True])
def test_steps_attend_to_it(name: str, way: str, apart: bool, outputs: list[Any]) -> None:
    model = long_tiny(name)
    rows = 2 if way == "left padding" else 1
    ids = harness.prompt(model, rows, LENGTH)
    options: dict[str, Any] = {"max_new_tokens": 4}
    if way == "left padding":
        options["attention_mask"] = harness.padding(rows, LENGTH)
    if way == "candidates":
        ids = harness.repetitive_prompt(model, LENGTH)
        options |= {"prompt_lookup_num_tokens": 3, "max_new_tokens": 16}
    with DiskSwapCache(model, **FIELDS, heads_apart=apart) as cache:
        harness.generate(model, cache, ids, **options)
    assert outputs
    for output, wanted in outputs:
        torch.testing.assert_close(output, wanted, rtol=2e-3, atol=2e-4)
    if way == "candidates":
        assert any(output.shape[1] > 1 for output, _ in outputs)


@pytest.mark.parametrize(
    ("dtype", "bits", "apart"),
    [*itertools.product((torch.bfloat16, torch.float16), (None, 8), (False, True)), (torch.float64, None, False)],
)
def test_steps_in_other_types_attend_to_it(
    dtype: torch.dtype, bits: int | None, apart: bool, outputs: list[Any]
) -> None:
    """Within the rounding of the model's type, or of float32, over entries in 8 bits too."""
    model = copy.deepcopy(long_tiny("llama")).to(dtype)
    with DiskSwapCache(model, **FIELDS, entry_bits=bits, heads_apart=apart) as cache:
        harness.generate(model, cache, harness.prompt(model, 1, LENGTH), max_new_tokens=4)
    assert len(outputs) == 3 * 3
    for output, wanted in outputs:
        rounding = 8 * max(torch.finfo(one).eps for one in (dtype, torch.float32)) * float(wanted.abs().max())
        torch.testing.assert_close(output, wanted, rtol=0.02, atol=rounding, check_dtype=False)


def test_off_and_everything_selected_estimate_nothing(outputs: list[Any]) -> None:
    model = long_tiny("llama")
    ids = harness.prompt(model, 1, LENGTH)
    everything = {"num_selected": 2 * LENGTH}
    logits = []
    for fields in ({"remainder": False}, everything, {**everything, "remainder": False}):
        with DiskSwapCache(model, **{**FIELDS, **fields}) as cache:
            logits.append(harness.generate(model, cache, ids, max_new_tokens=4).logits)
    assert not outputs
    assert all(map(torch.equal, logits[1], logits[2]))
    assert not all(map(torch.equal, logits[0], logits[1]))


@pytest.mark.parametrize("way", ["one", "left padding"])
@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize(
    ("cache_class", "apart"), [(DiskSwapCache, False), (DiskSwapCache, True), (ClusterCache, True)]
)
def test_the_report_has_the_lost_mass(
    cache_class: Any, apart: bool, remainder: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where groups have one token and compact keys all components, and where each key is its cluster's centroid, it is
    the true one."""
    model, true = long_tiny("llama"), []
    monkeypatch.setattr(selective_layer, "LOOKED_AT", 1)
    combine = SelectiveLayer.combine

    def watched(layer: Any, call: Any, choice: Any, fetched: Any, visible: Any) -> Any:
        keys, heads = layer.whole()[0].clone(), call.query.shape[1]
        if cache_class is ClusterCache:
            clustered = layer.history.clustered
            means = clustered.partition.centroids[np.arange(layer.history.rows)[:, None], clustered.labels]
            keys[:, :, : means.shape[1]] = layer.rows.unfold(torch.from_numpy(means).to(keys.dtype)[:, None])
        left = torch.ones(layer.history.rows, keys.shape[2])
        for row, columns in enumerate(attended_columns(layer, choice, fetched)):
            left[row, columns] = 0
            if fetched.estimates is not None:
                others = layer.history.positions(choice.next)[row]
                left[row, torch.from_numpy(others[others >= 0])] = 0
        left = left.unflatten(0, (len(keys), -1)).repeat_interleave(heads * len(keys) // len(left), 1)
        keys = keys.repeat_interleave(heads // keys.shape[1], 1)
        scores = torch.einsum("bhd,bhtd->bht", call.query[:, :, 0], keys) * call.scaling
        if visible is not None:
            scores.masked_fill_(~visible[:, None], -torch.inf)
        true.append(float((scores.softmax(2) * left).sum(2).mean()))
        return combine(layer, call, choice, fetched, visible)

    monkeypatch.setattr(SelectiveLayer, "combine", watched)
    ids, options = harness.prompt(model, 2 if way == "left padding" else 1, LENGTH), {"max_new_tokens": 4}
    if way == "left padding":
        options["attention_mask"] = harness.padding(2, LENGTH)
    width = model.config.num_key_value_heads * model.config.head_dim
    complete = {"group_size": 1, "rank": width, "summary_dtype": "float32", "heads_apart": apart}
    own = complete if cache_class is DiskSwapCache else {}
    with cache_class(model, **{**FIELDS, "remainder": remainder, **own}) as cache:
        harness.generate(model, cache, ids, **options)
        lost = cache.report().lost_mass
    assert len(true) == 3 * 3
    assert lost == pytest.approx(np.mean(true), rel=1e-3) and lost > 0.01


@pytest.mark.parametrize("lost", [np.nan, np.inf, None, "no method"])
def test_a_lost_mass_that_is_not_known_is_not_counted(lost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_layer, "LOOKED_AT", 1)
    if lost == "no method":  # a predictor of one's own may be any object with the other methods
        monkeypatch.delattr(LowRankPredictor, "lost")
        monkeypatch.delattr(Predictor, "lost")
    else:
        monkeypatch.setattr(LowRankPredictor, "lost", lambda *given: lost)
    model = long_tiny("llama")
    with DiskSwapCache(model, **FIELDS) as cache:
        harness.generate(model, cache, harness.prompt(model, 1, LENGTH), max_new_tokens=4)
        report = cache.report()
    assert report.lost_mass is None and report.estimated_mass and "attention mass lost" in str(report)


@pytest.mark.parametrize("apart", [False, True])
def test_a_second_turn_fits_again_and_a_saved_context_has_it(
    apart: bool, tmp_path: Path, outputs: list[Any]
) -> None:
    model = long_tiny("llama")
    ids = harness.prompt(model, 1, LENGTH + 700)
    with DiskSwapCache(model, **FIELDS, heads_apart=apart) as cache:
        maps = list(turns(model, cache, [ids[:, :LENGTH], ids[:, LENGTH : LENGTH + 1], ids[:, LENGTH + 1 :]]))
        assert all(each is not None for each in maps[0])
        assert [a is b for a, b in zip(maps[0], maps[1], strict=True)] == [True] * len(maps[0])
        assert all(a is not b for a, b in zip(maps[1], maps[2], strict=True))
        cache.save(tmp_path / "context")
        token = ids[:, :1]
        with torch.no_grad():
            wanted = model(token, past_key_values=cache).logits
    with DiskSwapCache.open(tmp_path / "context", model, engine="memory") as cache, torch.no_grad():
        assert torch.equal(model(token, past_key_values=cache).logits, wanted)
    assert outputs


def turns(model: Any, cache: Any, parts: list[torch.Tensor]) -> Iterator[list[Any]]:
    for part in parts:
        with torch.no_grad():
            model(part, past_key_values=cache)
        yield [layer.predictor.fitted.maps for layer in cache.layers]


def test_a_copy_of_maps_that_fails_is_not_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    account, device = MemoryAccount(), torch.device("cpu")
    maps = value_maps.ValueMaps(RecordFormat(2, 8, 2, 8, torch.float32, 4), (1, 4, 4), account)
    maps.ratio.fill_(1)
    held = account.current

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(value_maps, "to_device", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        maps.on(device)
    assert account.current == held
    monkeypatch.undo()
    there = maps.on(device)
    assert account.current == held + sum(one.nbytes for one in there) > held
    maps.changed()
    assert account.current == held
