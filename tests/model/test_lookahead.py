"""The look-ahead query against the query that the next layer then makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import fresh, prompt, tiny
from pairwise import combinations

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.model import LookAhead

FIELDS: dict[str, Any] = {"group_size": 4, "num_recent": 8, "num_selected": 512, "look_ahead": True, "engine": "memory"}

FOUND: dict[str, tuple[set[int], set[int]]] = {
    "llama": ({0, 1, 2}, {1, 2}),
    "mistral": ({0, 1, 2}, {1, 2}),
    "qwen3": ({0, 1, 2}, {1, 2}),
    "phi3": ({0, 1, 2}, {1, 2}),
    "opt": ({0, 1, 2}, {1, 2}),
    "gpt_neox": ({0, 1, 2}, {1, 2}),
    "gemma3": ({1, 3}, {3}),  # 0 and 2 slide; the rotary embedding of 1 comes too late, that of 3 from 1
    "gpt_oss": ({1, 3}, {1, 3}),
    "deepseek_v2": (set(), set()),  # a low-rank query in two parts, put together from several projections
}
"""Model -> layers whose way from stream to query is found, and layers whose query is guessed."""


def silence_mlps(model: Any) -> None:
    """MLPs that add nothing, so that the stream after attention is the next layer's input."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in ("down_proj", "fc2", "dense_4h_to_h"):
            for parameter in module.parameters():
                parameter.data.zero_()


class Watch:
    """Keeps what is predicted for each layer, and the queries that the layers then make."""

    def __init__(self, cache: DiskSwapCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.predicted: dict[int, torch.Tensor] = {}
        self.true: dict[int, torch.Tensor] = {}
        predict = LookAhead.predict
        attend = DiskSwapCache.layer_class.attend

        def watched_predict(ahead: LookAhead, layer_idx: int, output: torch.Tensor) -> torch.Tensor | None:
            query = predict(ahead, layer_idx, output)
            if query is not None:
                self.predicted[layer_idx] = query
            return query

        def watched_attend(layer: Any, call: Any) -> Any:
            self.true[layer.layer_idx] = call.query.detach().clone()
            return attend(layer, call)

        monkeypatch.setattr(LookAhead, "predict", watched_predict)
        monkeypatch.setattr(DiskSwapCache.layer_class, "attend", watched_attend)


def watch_steps(model: Any, monkeypatch: pytest.MonkeyPatch, rows: int = 1, mask: Any = None, **fields: Any):
    """Prefill and three steps; yields after each step the queries predicted and made."""
    with DiskSwapCache(model, **{**FIELDS, **fields}) as cache, torch.no_grad():
        watch = Watch(cache, monkeypatch)
        model(prompt(model, rows, 40), past_key_values=cache, attention_mask=mask)
        yield cache, watch
        for seed in range(3):
            watch.predicted.clear()
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(rows, 1)], 1)
            positions = None if mask is None else mask.sum(1, keepdim=True) - 1
            model(prompt(model, rows, 1, seed), past_key_values=cache, attention_mask=mask, position_ids=positions)
            yield cache, watch


@pytest.mark.parametrize("name", FOUND)
def test_which_layers_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection after prefill, a guess in every step; nothing where nothing fits."""
    found, guessed = FOUND[name]
    steps = watch_steps(tiny(name), monkeypatch)
    cache, watch = next(steps)
    sights = cache.look_ahead.sights
    assert {index for index, sight in sights.items() if sight.recipe} == found
    assert watch.predicted == {}
    for _, watch in steps:
        assert set(watch.predicted) == guessed
        for layer_idx, query in watch.predicted.items():
            assert query.shape == watch.true[layer_idx].shape
            assert query.isfinite().all()


@pytest.mark.parametrize(
    ("name", "padded"),
    combinations(("llama", "qwen3", "phi3", "opt", "gpt_neox", "mistral", "gemma3"), (False, True)),
)
def test_equal_when_only_the_mlp_is_missing(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(name)
    silence_mlps(model)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    steps = watch_steps(model, monkeypatch, 2, mask if padded else None)
    next(steps)
    for _, watch in steps:
        assert watch.predicted
        for layer_idx, query in watch.predicted.items():
            true = watch.true[layer_idx]
            torch.testing.assert_close(query, true, rtol=0, atol=1e-4 * float(true.abs().max()))


def test_the_mlp_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = watch_steps(fresh("llama"), monkeypatch)
    next(steps)
    _, watch = next(steps)
    difference = (watch.predicted[1] - watch.true[1]).abs().max()
    assert difference > 0.01 * watch.true[1].abs().max()


def test_nothing_of_a_long_prefill_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    booked: list[int] = []
    leave = DiskSwapCache.leave_attention

    def watched(cache: DiskSwapCache, layer_idx: int, output: torch.Tensor) -> None:
        for sight in cache.look_ahead.sights.values():
            if sight.residual is not None:
                sizes.append(sight.residual.untyped_storage().nbytes())
        booked.append(cache.storage.account.by_owner["look-ahead"])
        leave(cache, layer_idx, output)

    monkeypatch.setattr(DiskSwapCache, "leave_attention", watched)
    model = tiny("llama")
    with DiskSwapCache(model, **FIELDS) as cache, torch.no_grad():
        model(prompt(model, 2, 200), past_key_values=cache)
        one = 2 * 64 * 4
        assert set(sizes) == {one}
        assert booked == [one, 2 * one, 3 * one]  # a stream a layer; what was normed is gone once the query is known
        assert cache.report().peak_memory_bytes >= 4 * one
        for sight in cache.look_ahead.sights.values():
            assert (sight.residual, sight.rotary) == (None, None)
        assert cache.look_ahead._normed is None
        assert cache.storage.account.by_owner["look-ahead"] == 0


def test_what_is_planned_is_what_is_held() -> None:
    """The account's peak, with sliding layers and after an interrupted step; nothing once a step has ended."""
    account = MemoryAccount()
    ahead = LookAhead(account)
    block, attention = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    hidden = torch.ones(3, 7, 4)
    for blocks in (2, 4):  # the first one does not end
        for layer_idx in range(blocks):
            ahead.enter_block(layer_idx, block, hidden)
            ahead.enter_attention(layer_idx, attention, hidden, None)
    assert account.peak == sum(LookAhead.planned(4, 4, 4, 3).values()) == 5 * 3 * 4 * 4
    ahead.end_step()
    assert account.current == 0


def test_what_no_memory_is_left_for_is_not_kept() -> None:
    account = MemoryAccount(limit=40)
    ahead = LookAhead(account)
    block = torch.nn.Linear(4, 4)
    ahead.enter_block(0, block, torch.ones(2, 1, 4))
    ahead.enter_block(1, block, torch.ones(2, 1, 4))
    assert ahead.sights[0].residual is not None and ahead.sights[1].residual is None
    ahead.enter_attention(1, block, torch.ones(2, 1, 4), None)
    assert account.current == 2 * 4 * 4
    ahead.end_step()
    assert account.current == 0


def test_a_model_that_is_gone_is_not_held() -> None:
    """Blocks are held weakly: predictions for a model that was collected are none."""
    ahead = LookAhead(MemoryAccount())
    block, attention = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    hidden = torch.ones(1, 1, 4)
    for layer_idx in (0, 1):
        ahead.enter_block(layer_idx, block, hidden)
        ahead.enter_attention(layer_idx, attention, hidden, None)
    del block, attention
    assert ahead.sights[1].block() is None
    assert ahead.predict(1, hidden) is None
    assert ahead.predict(5, hidden) is None
