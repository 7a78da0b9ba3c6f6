"""The remainder of a step: estimated from compact keys, attended to as one entry for each query head."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from long_models import long_tiny

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import SelectiveLayer
from hf_offload_cache.errors import ContextError
from hf_offload_cache.history import RecordFormat, Sealed
from hf_offload_cache.memory import DryRun, MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import CANDIDATES, LowRankPredictor, LowRankShared, Rules
from hf_offload_cache.predictors import Query

KV, HEADS, DIM, VALUE, GROUP, UNITS, BUDGET = 2, 4, 16, 20, 4, 300, 12
FORM = RecordFormat.of_sizes((KV, DIM, KV, VALUE), torch.float32, GROUP)
"""Values are wider than keys."""
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


def learned(
    kind: str, rows: int, visible: torch.Tensor | None = None, units: int = UNITS, plain: bool = False
) -> LowRankPredictor:
    """`plain`: keys of all directions, whose components have several widths."""
    account = MemoryAccount()
    shared = LowRankShared(account, Workspace(account, "scores"), wanted=lambda tokens: BUDGET)
    one = LowRankPredictor(FORM, rows, KINDS[kind], shared, "layer 0")
    one.prompted(DIM**-0.5)
    keys, values = keys_and_values(rows, units)
    keys = some(*keys.shape, seed=0) if plain else keys
    parts = list(zip(keys.split([5, units * GROUP - 5], 2), values.split([5, units * GROUP - 5], 2), strict=True))
    one.learn(Sealed(units, units * GROUP, parts, lambda: iter(parts)), some(rows, HEADS, 40, DIM, seed=5), visible)
    return one


def query(rows: int, seed: int, visible: torch.Tensor | None = None) -> Query:
    states = some(rows, HEADS, DIM, seed=100 + seed)
    return Query(states, DIM**-0.5, visible, lambda: keys_and_values(rows, 2)[0])


def tokens_of(units: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((units[:, None] * GROUP + np.arange(GROUP)).ravel())


def entries_of(estimates: Any, head: int, at: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithmic mass (B,) and value (B, D) for a query head: exactly one entry is for it."""
    own = estimates.bias[:, head, at]
    column = int((own[0] > -1e30).nonzero().squeeze())
    assert (own.isneginf().sum(1) == own.shape[1] - 1).all()
    keys, values = FORM.split(estimates.entries)
    assert not keys.any()
    return own[:, column], values[:, head // (HEADS // KV), column]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [False, True])
def test_it_is_the_twins(kind: str, hidden: bool) -> None:
    """The entry is the weighted mean of mapped components over the tokens of the next units, of their mass."""
    visible = None
    if hidden:
        visible = torch.ones(2, UNITS * GROUP, dtype=torch.bool)
        visible[0, :70] = False
    one = learned(kind, 2, visible)
    asked = query(2, 0, visible)
    choice: Any = one.select(asked, BUDGET, False)
    assert choice.next.shape == (2, (CANDIDATES - 1) * BUDGET)
    estimates = one.estimate([asked], [choice.next])
    compact, maps = one.fitted.keys, one.fitted.maps
    assert estimates is not None and compact is not None and maps is not None
    for row in range(2):
        assert not set(choice.next[row]) & set(choice.units[row]) and len(set(choice.next[row])) == choice.next.shape[1]
        components = compact.components(row, torch.arange(UNITS * GROUP))
        low = torch.from_numpy(compact.low_rank_query(asked.states)[row])
        scored = compact.scored(low.numpy(), row, None, GROUP, None)
        by_unit = scored.by_unit(scored.scores())
        scores = torch.from_numpy(by_unit.transpose(0, 2, 1).reshape(HEADS, -1)) * DIM**-0.5
        tokens = tokens_of(choice.next[row])
        if visible is not None:
            tokens = tokens[visible[row, tokens]]
        linear = maps.maps[row].float() * maps.scale[row][:, None, None]
        mapped = torch.einsum("tr,rhd->htd", torch.cat([components, torch.ones(len(components), 1)], 1), linear)
        for head in range(HEADS):
            weights = scores[head, tokens].exp()
            value = weights @ mapped[head // (HEADS // KV), tokens] / weights.sum()
            mass = weights.sum().log() + maps.ratio[row, head].log()
            own = entries_of(estimates, head)
            torch.testing.assert_close(own[0][row], mass, rtol=0, atol=0.05)  # low-rank queries in 8 bits
            torch.testing.assert_close(own[1][row], value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("units", [UNITS, 7 * UNITS])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_nearer_to_full_attention(kind: str, units: int) -> None:
    """The attention error is less than a fifth of that of dropping, if values follow from keys. The maps of the
    longer history are fitted to a sample."""
    one, (keys, values) = learned(kind, 1, units=units), keys_and_values(1, units)
    dropped = estimated = 0.0
    for seed in range(8):
        asked = query(1, seed)
        choice: Any = one.select(asked, BUDGET, False)
        estimates = one.estimate([asked], [choice.next])
        tokens = tokens_of(choice.units[0])
        for head in range(HEADS):
            own_keys, own_values = keys[0, head // 2], values[0, head // 2]
            scores = own_keys @ asked.states[0, head] * DIM**-0.5
            candidates = torch.cat([tokens, tokens_of(choice.next[0])])
            wanted = scores[candidates].softmax(0) @ own_values[candidates]
            mass, value = entries_of(estimates, head)
            near = scores[tokens].softmax(0) @ own_values[tokens]
            both = torch.cat([scores[tokens], mass]).softmax(0) @ torch.cat([own_values[tokens], value])
            dropped += float((near - wanted).square().sum())
            estimated += float((both - wanted).square().sum())
    assert estimated < dropped / 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("units", "budget"), [(UNITS, 2 * BUDGET), (UNITS, BUDGET), (2 * 8 * CANDIDATES * BUDGET, BUDGET)]
)
def test_an_estimate_uses_the_rankings_scores(kind: str, units: int, budget: int) -> None:
    """It is as if the units that are left were scored again, whether a step scored all units with all components or,
    of the longer histories, candidates. These are neither chosen nor sinks."""
    one = learned(kind, 1, units=units, plain=True)
    for seed in range(6):
        asked = query(1, seed)
        choice: Any = one.select(asked, budget, False)
        kept = one.fitted._scored
        used, anew = (one.estimate([asked], [choice.next]) for _ in range(2))
        assert (kept is None) == (kind != "coded" and units > 16 * budget)  # without a rough form, none are kept
        assert used is not None and anew is not None
        torch.testing.assert_close(used.bias, anew.bias, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(used.entries, anew.entries, rtol=1e-4, atol=1e-4)
        assert not set(choice.next[0]) & {*choice.units[0], 0}
        assert 0 <= choice.next.shape[1] - (CANDIDATES - 1) * budget <= 1  # the sinks' unit is selected, no candidate
        if kept is None:
            continue
        assert (kept[1].groups is None) == (units <= 16 * budget)
        if kept[1].groups is not None:
            assert set(kept[1].groups) <= {*choice.next[0], *choice.units[0]}
            assert len(kept[1].groups) == CANDIDATES * budget


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


def test_each_query_has_its_own_entries() -> None:
    """Each of several queries sees only its own entries. Units that another query chose are dropped from them."""
    one = learned("coded", 2)
    asked = [query(2, seed) for seed in range(3)]
    left = [one.select(each, BUDGET, False).next for each in asked]  # type: ignore[union-attr]
    left[1][1, 5:] = -1
    together = one.estimate(asked, left)
    assert together is not None and together.entries.shape == (2, 3 * HEADS // KV, FORM.entry_width)
    for at, each in enumerate(asked):
        alone = one.estimate([each], [left[at]])
        for head in range(HEADS):
            torch.testing.assert_close(entries_of(together, head, at), entries_of(alone, head))


def test_nothing_left_has_no_mass() -> None:
    one, asked = learned("coded", 1), query(1, 0)
    estimates = one.estimate([asked], [np.full((1, 3), -1)])
    assert estimates is not None and estimates.bias.isneginf().all() and not estimates.entries.any()
    assert one.select(asked, UNITS, False).next is None  # type: ignore[union-attr]


def test_a_short_prompt_and_no_queries_have_none() -> None:
    assert learned("coded", 1, units=200).fitted.maps is None
    one = learned("coded", 1)
    assert one.fitted.maps is not None
    one.truncate(0)
    assert one.fitted.maps is None and one.estimate([query(1, 0)], [np.arange(3)[None]]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_contexts_keep_it(kind: str) -> None:
    one, asked = learned(kind, 2), query(2, 0)
    left = one.select(asked, BUDGET, False).next  # type: ignore[union-attr]
    before = one.estimate([asked], [left])
    tree = {**one.capture(), "units": UNITS}
    account = MemoryAccount()
    other = LowRankPredictor(FORM, 2, KINDS[kind], LowRankShared(account, Workspace(account, "scores")), "layer 0")
    other.restore(tree)
    after = other.estimate([asked], [left])
    assert before is not None and after is not None
    assert torch.equal(before.entries, after.entries) and torch.equal(before.bias, after.bias)
    other.select_rows(torch.tensor([1, 1, 0]))
    states = asked.states[[1, 1, 0]]
    rows = other.estimate([dataclasses.replace(asked, states=states)], [left[[1, 1, 0]]])
    assert rows is not None and torch.equal(rows.entries, before.entries[[1, 1, 0]])
    plain = LowRankPredictor(
        FORM, 2, dataclasses.replace(KINDS[kind], remainder=False),
        LowRankShared(account, Workspace(account, "scores")), "layer 0",
    )  # fmt: skip
    plain.restore(tree)
    assert plain.fitted.maps is None and plain.select(asked, BUDGET, False).next is None  # type: ignore[union-attr]
    for part in (one, other, plain):
        part.close()
    assert not account.by_owner["adapters"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_fitted_state_of_a_stream_has_it(kind: str) -> None:
    """A stream's keys are learned without queries: the maps that arrived with the fitted state stay."""
    one, account = learned(kind, 1), MemoryAccount()
    other = LowRankPredictor(FORM, 1, KINDS[kind], LowRankShared(account, Workspace(account, "scores")), "layer 0")
    state = one.fitted_state()
    assert state is not None
    other.restore({**state, "units": 0})
    parts = [keys_and_values(1)]
    other.learn(Sealed(UNITS, UNITS * GROUP, parts, lambda: iter(parts)), torch.empty(1, HEADS, 0, DIM), None)
    asked, left = query(1, 0), np.arange(20, 60)[None]
    before, after = one.estimate([asked], [left]), other.estimate([asked], [left])
    assert before is not None and after is not None
    assert torch.equal(before.entries, after.entries) and torch.equal(before.bias, after.bias)


@pytest.mark.parametrize("change", [{"maps": torch.zeros(2, 3, 2, 16, dtype=torch.int8)}, {"ratio": torch.ones(2, 3)}])
def test_a_context_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    one, account = learned("coded", 2), MemoryAccount()
    tree = one.capture()
    tree = {**tree, "maps": {**tree["maps"], **change}, "units": UNITS}
    other = LowRankPredictor(FORM, 2, KINDS["coded"], LowRankShared(account, Workspace(account, "scores")), "layer 0")
    with pytest.raises(ContextError, match="remainder"):
        other.restore(tree)


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
    keys, values = (part.float() for part in history.form.split(fetched.entries))
    batch, heads, count, _ = call.query.shape
    keys, values = (part.repeat_interleave(heads // part.shape[1], 1) for part in (keys, values))
    scores = torch.einsum("bhqd,bhtd->bhqt", call.query.float(), keys) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    chosen = fetched.of_chosen(history.positions(choice.units))
    latest = np.arange(history.length - history.recent.shape[1], history.length)
    places = np.concatenate([chosen, np.broadcast_to(latest, (batch, len(latest)))], 1)
    stored = scores[..., : places.shape[1]]
    at = torch.from_numpy(places.clip(min=0))[:, None, None]
    if call.mask is None:
        hidden = at > (history.length - count + torch.arange(count))[:, None]
    else:
        mask = call.mask.expand(batch, 1, count, -1)
        shown = mask if mask.dtype == torch.bool else mask > -1e4
        hidden = ~shown.gather(-1, at.expand(-1, -1, count, -1))
    hidden = hidden | torch.from_numpy(places < 0)[:, None, None]
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
def test_steps_attend_to_it(name: str, way: str, outputs: list[Any]) -> None:
    model = long_tiny(name)
    rows = 2 if way == "left padding" else 1
    ids = harness.prompt(model, rows, LENGTH)
    options: dict[str, Any] = {"max_new_tokens": 4}
    if way == "left padding":
        options["attention_mask"] = harness.padding(rows, LENGTH)
    if way == "candidates":
        ids = harness.repetitive_prompt(model, LENGTH)
        options |= {"prompt_lookup_num_tokens": 3, "max_new_tokens": 16}
    with DiskSwapCache(model, **FIELDS) as cache:
        harness.generate(model, cache, ids, **options)
    assert outputs
    for output, wanted in outputs:
        torch.testing.assert_close(output, wanted, rtol=2e-3, atol=2e-4)
    if way == "candidates":
        assert any(output.shape[1] > 1 for output, _ in outputs)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_16_bits_attend_to_it(dtype: torch.dtype, bits: int | None, outputs: list[Any]) -> None:
    """Within the rounding of the model's type, over entries in 8 bits too."""
    model = copy.deepcopy(long_tiny("llama")).to(dtype)
    with DiskSwapCache(model, **FIELDS, entry_bits=bits) as cache:
        harness.generate(model, cache, harness.prompt(model, 1, LENGTH), max_new_tokens=4)
    assert len(outputs) == 3 * 3
    for output, wanted in outputs:
        rounding = 8 * torch.finfo(dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(output, wanted, rtol=0.02, atol=rounding)


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


def test_a_second_turn_fits_again_and_a_saved_context_has_it(tmp_path: Path, outputs: list[Any]) -> None:
    model = long_tiny("llama")
    ids = harness.prompt(model, 1, LENGTH + 700)
    with DiskSwapCache(model, **FIELDS) as cache:
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
