"""A choice of groups for each key head: the choices, and what a model's steps, contexts, budgets and reports make of
them. `test_remainder.py` has the estimates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from checked_cache import Gathers
from long_models import LENGTH, dynamic, follow, long_fresh, long_tiny, singles, sparse, step

from hf_offload_cache import DiskSwapCache, DiskSwapConfig, tune
from hf_offload_cache.contexts import read_manifest
from hf_offload_cache.core import Rows, SelectiveLayer
from hf_offload_cache.errors import ConfigError
from hf_offload_cache.history import RecordFormat, Sealed
from hf_offload_cache.memory import MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import CANDIDATES, LowRankPredictor, LowRankShared, Rules
from hf_offload_cache.model import Geometry
from hf_offload_cache.predictors import Query

BATCH, KV, HEADS, DIM, GROUP, BUDGET, SINKS, LATEST = 2, 3, 6, 16, 4, 6, 4, 10
EXACT = Rules(torch.float32, SINKS, KV * DIM)
"""Compact keys of all directions: scores are those of the keys."""
CODED = Rules(None, SINKS, summary_bytes=18)


def some(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys_of(units: int) -> torch.Tensor:
    return some(BATCH, KV, units * GROUP + LATEST, DIM, seed=0)


def learned(rules: Rules, units: int, visible: torch.Tensor | None = None) -> LowRankPredictor:
    """A predictor of the first `units` units, whose keys arrive in two parts."""
    account = MemoryAccount()
    form = RecordFormat.of_sizes((1, DIM, 1, DIM), torch.float32, GROUP)
    shared = LowRankShared(account, Workspace(account, "scores"))
    one = LowRankPredictor(form, BATCH * KV, rules, shared, "layer 0", heads=KV)
    parts = [(part, part) for part in Rows(KV).fold(keys_of(units))[:, :, :-LATEST].split([7, units * GROUP - 7], 2)]
    seen = None if visible is None else visible[:, : units * GROUP]
    one.learn(Sealed(units, units * GROUP, parts, lambda: iter(parts)), some(BATCH, HEADS, 40, DIM, seed=5), seen)
    return one


def asked(units: int, seed: int, visible: torch.Tensor | None = None) -> Query:
    states, latest = 3 * some(BATCH, HEADS, DIM, seed=seed), Rows(KV).fold(keys_of(units))[:, :, -LATEST:]
    return Query(states, DIM**-0.5, visible, lambda: latest)


def padding(units: int) -> torch.Tensor:
    visible = torch.ones(BATCH, units * GROUP + LATEST, dtype=torch.bool)
    visible[0, :37] = False
    return visible


def own_best(units: int, query: Query, visible: torch.Tensor | None) -> list[list[int]]:
    """For each key head of each sequence, the units of sinks and those of the largest sum, over its query heads, of the
    softmax weight of a unit's best token."""
    keys, chosen = keys_of(units), []
    for row in range(BATCH):
        seen = torch.ones(keys.shape[2], dtype=torch.bool) if visible is None else visible[row]
        first = int(seen.int().argmax())
        sinks = sorted({token // GROUP for token in range(first, first + SINKS)})
        alone = [*range(first, first + SINKS), *range(units * GROUP, keys.shape[2])]
        for head in range(KV):
            states = query.states[row].unflatten(0, (KV, -1))[head]
            scores = (states @ keys[row, head].T * DIM**-0.5).masked_fill(~seen, -torch.inf)
            best = scores[:, : units * GROUP].unflatten(1, (-1, GROUP)).amax(2)
            best[:, sinks] = -torch.inf
            weights = torch.cat([best, scores[:, alone]], 1).softmax(1)[:, :units].sum(0)
            chosen.append(sorted([*sinks, *weights.topk(BUDGET - len(sinks)).indices.tolist()]))
    return chosen


@pytest.mark.parametrize("padded", [False, True])
def test_each_head_chooses_its_own_best(padded: bool) -> None:
    """As a plain ranking by the keys themselves does for each head; so does a guess that nothing was ranked before."""
    units, visible = 150, padding(150) if padded else None
    one = learned(EXACT, units, visible)
    for seed in range(1, 6):
        query = asked(units, seed, visible)
        one.prompted(query.scaling)
        guess: Any = one.select(query, BUDGET, True)
        choice: Any = one.select(query, BUDGET, False)
        wanted = own_best(units, query, visible)
        assert guess.units.tolist() == choice.units.tolist() == wanted
        assert len({tuple(own) for own in wanted}) == BATCH * KV, "no two heads choose the same"


@pytest.mark.parametrize("padded", [False, True])
def test_steps_between_rankings_choose_among_each_heads_own_candidates(padded: bool) -> None:
    """The same query again chooses what it chose; another chooses among what mattered most to that head."""
    units, visible = 400, padding(400) if padded else None
    one = learned(CODED, units, visible)
    first: Any = one.select(asked(units, 1, visible), BUDGET, False)
    assert one.fitted.in_turns(BUDGET) and one._latest is not None and one._beyond is not None
    assert one._latest.shape == (BATCH * KV, units) and one._beyond.shape == (BATCH * KV, HEADS // KV)
    ranked = one._latest.copy()
    again: Any = one.select(asked(units, 1, visible), BUDGET, False)
    same = [len(set(a) & set(b)) for a, b in zip(first.units, again.units, strict=True)]
    assert one._since == 1 and min(same) >= BUDGET - 1
    candidates = np.argsort(-ranked, 1)[:, : CANDIDATES * BUDGET]
    weights = [np.take_along_axis(latest, first.units, 1) for latest in (one._latest, ranked)]
    np.testing.assert_allclose(*weights, rtol=0.1, atol=0.01)  # nearly the same candidates share the softmax
    other: Any = one.select(asked(units, 2, visible), BUDGET, False)
    for own, allowed in zip(other.units, candidates, strict=True):
        assert len(set(own) - set(allowed)) <= 1
    tree = {**one.capture(), "units": units}
    twin = learned(CODED, units, visible)
    twin.close()
    twin.restore(tree)
    swapped = torch.tensor([1, 0])
    twin.select_rows(Rows(KV).expand(swapped))
    query = asked(units, 3, visible)
    back = None if visible is None else visible[swapped]
    recent = Rows(KV).fold(keys_of(units)[swapped])[:, :, -LATEST:]
    moved: Any = twin.select(Query(query.states[swapped], query.scaling, back, lambda: recent), BUDGET, False)
    expected: Any = one.select(query, BUDGET, False)
    assert np.array_equal(moved.units, expected.units[Rows(KV).expand(swapped)])


# In a model

APART: dict[str, Any] = {"heads_apart": True, "rank": None, "reuse_capacity": 40}


def prefilled(model: Any, cache: Any, tokens: int = LENGTH) -> None:
    step(model, cache, harness.prompt(model, 1, tokens))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "phi3", "qwen3_next"])
@pytest.mark.parametrize("fields", [{"num_selected": 1024}, {"exact": True}], ids=["all", "exact"])
def test_everything_attended_to_is_exact(name: str, fields: dict[str, Any], checked_gathers: Gathers) -> None:
    """Two padded rows with two beams each: the tokens of `DynamicCache`, whether all groups are selected or the cache
    is exact."""
    model, mask = long_tiny(name), harness.padding(2, LENGTH, 101)
    ids = harness.prompt(model, 2, LENGTH).masked_fill(mask == 0, harness.PAD)
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 2, "max_new_tokens": 6}
    expected = harness.generate(model, dynamic(model), ids, **options)
    with sparse(model, **{**APART, **fields}) as cache:
        harness.assert_exact(expected, harness.generate(model, cache, ids, **options))
        assert {layer.rows.heads for layer in cache.offloaded if layer.state == "tagged"} == {2}
    assert bool(checked_gathers.calls) == ("exact" not in fields)


def test_heads_attend_to_choices_of_their_own(checked_gathers: Gathers) -> None:
    model = long_tiny("llama")
    with sparse(model, **APART) as cache:
        prefilled(model, cache)
        for token in singles(model, 1, 4):
            step(model, cache, token)
        assert len(checked_gathers) == 4 * len(cache.selective)
    assert all(len(units) == 2 for _, units in checked_gathers.calls)
    assert any(not np.array_equal(*units) for _, units in checked_gathers.calls)


@pytest.mark.parametrize("selected", [8, 16])
def test_no_group_is_selected_and_estimated(selected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sequence that is nearly all padding, so that a head has fewer other groups than it may estimate."""
    model, tokens, seen = long_fresh("llama"), 1600, []
    combine = SelectiveLayer.combine

    def watched(layer: Any, call: Any, choice: Any, fetched: Any, visible: Any) -> Any:
        assert fetched.estimates is not None
        for units, others in zip(choice.units, choice.next, strict=True):
            others = others[others >= 0]
            assert len(set(others)) == len(others) and not set(others) & set(units)
            seen.append(len(others))
        return combine(layer, call, choice, fetched, visible)

    monkeypatch.setattr(SelectiveLayer, "combine", watched)
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[0, : tokens - 40] = 0
    fields = {**APART, "group_size": 1, "summary_bytes": 16, "num_recent": 4, "num_selected": selected, "num_sinks": 2}
    with sparse(model, **fields, remainder=True) as cache:
        harness.generate(model, cache, harness.prompt(model, 1, tokens), attention_mask=mask, max_new_tokens=6)
        lost = cache.report().lost_mass
    assert min(seen) < max(seen) == (CANDIDATES - 1) * (selected + 2) and (lost is None or 0 <= lost < 1)


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_saved_context_and_a_fork_go_on_with_the_same_tokens(
    bits: int | None, look_ahead: bool, tmp_path: Path
) -> None:
    """Also after a crop into what is stored."""
    model, tokens = long_tiny("llama"), singles(long_tiny("llama"), 1, 24)
    fields = {**APART, "entry_bits": bits, "look_ahead": look_ahead}
    with sparse(model, **fields) as cache:
        prefilled(model, cache)
        follow(model, cache, tokens[:3])
        cache.save(tmp_path / "saved")
        with DiskSwapCache.open(tmp_path / "saved", model) as opened, cache.fork() as forked:
            assert opened.config.heads_apart
            for part in (tokens[3:12], tokens[12:]):
                wanted = follow(model, cache, part).logits
                assert torch.equal(follow(model, opened, part).logits, wanted)
                assert torch.equal(follow(model, forked, part).logits, wanted)
                for one in (cache, opened, forked):
                    one.crop(LENGTH - 30)


def test_a_saved_context_says_whether_heads_are_apart(tmp_path: Path) -> None:
    model = long_tiny("llama")
    for apart in (True, False):
        with sparse(model, **{**APART, "heads_apart": apart}) as cache:
            prefilled(model, cache)
            cache.save(tmp_path / str(apart))
        assert read_manifest(tmp_path / str(apart)).config["heads_apart"] is apart
        words = f"heads_apart is fixed in a saved context, to {apart}, and cannot be {not apart}"
        with pytest.raises(ConfigError, match=words):
            DiskSwapCache.open(tmp_path / str(apart), model, heads_apart=not apart)
        with DiskSwapCache.open(tmp_path / str(apart), model, memory="1/2", max_context=2048) as opened:
            assert opened.config.heads_apart is apart
            step(model, opened, singles(model, 1, 1)[0])


@pytest.mark.parametrize("look_ahead", [False, True])
def test_one_key_head_is_never_apart(look_ahead: bool) -> None:
    """The field changes nothing for such a model."""
    model = long_fresh("llama", num_key_value_heads=1)
    logits = []
    for apart in (False, True):
        with sparse(model, **{**APART, "heads_apart": apart, "look_ahead": look_ahead}) as cache:
            prefilled(model, cache)
            logits.append(follow(model, cache, singles(model, 1, 6)).logits)
            assert cache.offloaded[0].rows.heads == 1
    assert torch.equal(*logits)


def test_reports_count_the_rows_of_heads(tmp_path: Path) -> None:
    """Without slots a step reads each head's records: as many bytes as one choice for all, in twice as many records;
    the share of tokens that it attends to is the same."""
    model, reports = copy.deepcopy(long_tiny("llama")).to(torch.bfloat16), {}
    fields = {"rank": None, "engine": "direct", "path": tmp_path, "look_ahead": False, "group_size": 64}
    assert RecordFormat.of_sizes((1, 16, 1, 16), torch.bfloat16, 64).record_bytes == 4096
    for apart in (False, True):
        with sparse(model, **fields, heads_apart=apart, reuse_capacity=0, num_selected=128) as cache:
            prefilled(model, cache)
            cache.storage.prefetcher.flush()  # what is still to be written is not read
            before = cache.report()
            follow(model, cache, singles(model, 1, 3))
            assert cache.offloaded[0].history.form.record_bytes == (4096 if apart else 8192)
            reports[apart] = before, cache.report()
    (_, together), (before, apart_) = reports[False], reports[True]
    assert apart_.bytes_read - before.bytes_read == together.bytes_read - reports[False][0].bytes_read > 0
    assert apart_.selected_fraction == together.selected_fraction < 1
    assert apart_.hit_rate == together.hit_rate == 0
    with sparse(model, **fields, heads_apart=True, reuse_capacity=1024, num_selected=128) as cache:
        prefilled(model, cache)
        token = singles(model, 1, 1)[0]
        for _ in range(8):
            step(model, cache, token)
            cache.crop(-1)
        assert 0.5 < cache.report().hit_rate < 1  # all but the first reads


def test_budgets_keep_it_and_never_choose_it() -> None:
    geometry = Geometry.uniform(30, 9, 3, 64)
    memory = geometry.full_kv_bytes(8192, 1) // 13
    for goal in (None, "speed", "fidelity"):
        assert DiskSwapCache.fit(geometry, memory, 8192, 1, {}, goal).heads_apart is False
        config: Any = DiskSwapCache.fit(geometry, memory, 8192, 1, {"heads_apart": True}, goal)
        assert config.heads_apart is True
        plan = DiskSwapCache.plan(geometry, config, 8192, 1)
        assert plan.peak_bytes <= memory
    together, apart = (DiskSwapConfig(heads_apart=heads, num_selected=400) for heads in (False, True))
    plans = [DiskSwapCache.plan(geometry, config, 8192, 1) for config in (together, apart)]
    assert plans[0].disk_bytes == plans[1].disk_bytes and plans[0].full_kv_bytes == plans[1].full_kv_bytes
    for owner in ("reuse slots", "staging", "selection", "rolling tail", "compact keys"):
        assert plans[0].decode[owner] == plans[1].decode[owner]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"heads_apart must be one of \(True, False\), got 1"):
        DiskSwapConfig(heads_apart=1)  # type: ignore[arg-type]
    model = long_tiny("llama")
    with pytest.raises(ConfigError, match="heads_apart cannot be set: tuning decides it, or does not use it"):
        tune(model, memory="1/2", max_context=1024, heads_apart=True)
