"""What the fields given to `open` do: the configuration decides, what was captured fills what it leaves open."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Decoded, build, config_of, prompt
from saved_contexts import rewrite_state, same
from transformers import LlamaForCausalLM

from hf_offload_cache import DiskSwapCache, calibrate
from hf_offload_cache.errors import ConfigError, ContextError

FIELDS: dict[str, Any] = {
    "group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 48, "reuse_capacity": 16, "rank": 8,
    "engine": "mapped", "look_ahead": True,
}  # fmt: skip
LONG = 620
"""Tokens of a prompt: more than the 512 that an adapter is made of."""
GIVEN = (20, 340, 24)
"""Tokens for each of the three layers."""


@functools.cache
def model() -> Any:
    """Three offloaded layers whose attention is not equally dense."""
    config = config_of("llama")
    config.max_position_embeddings = 2048
    made = build(LlamaForCausalLM, config)
    with torch.no_grad():
        made.model.layers[1].self_attn.q_proj.weight.mul_(5)  # attends to a few tokens
    return made


def prefilled(**fields: Any) -> DiskSwapCache:
    cache = DiskSwapCache(model(), **{**FIELDS, **fields})
    feed(cache, prompt(model(), 1, LONG))
    return cache


def feed(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model()(tokens, past_key_values=cache).logits[:, -1]


def answer(cache: Any) -> Decoded:
    token, tokens, logits = torch.tensor([[17]]), [], []
    for _ in range(4):
        logits.append(feed(cache, token))
        token = logits[-1].argmax(-1, keepdim=True)
        tokens.append(token)
    return Decoded(torch.cat(tokens, 1), torch.stack(logits))


@functools.cache
def expected(budgets: Any) -> Decoded:
    with prefilled(layer_budgets=budgets) as cache:
        return answer(cache)


def saved(folder: Path, budgets: Any, decoded: bool) -> Path:
    """A context; `decoded`: after a step was made and taken back, so that budgets were measured."""
    with prefilled(layer_budgets=budgets) as cache:
        if decoded:
            feed(cache, torch.tensor([[17]]))
            cache.crop(-1)
        cache.save(folder / "context")
    return folder / "context"


def test_budgets_matter() -> None:
    """Else the tests below would show nothing."""
    assert not same(expected("uniform"), expected("measured")) and not same(expected("uniform"), expected(GIVEN))


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("before", ["uniform", "measured", GIVEN], ids=str)
@pytest.mark.parametrize("now", ["uniform", GIVEN], ids=str)
def test_layer_budgets_that_are_named_on_opening_apply(before: Any, now: Any, decoded: bool, tmp_path: Path) -> None:
    context = saved(tmp_path, before, decoded)
    with DiskSwapCache.open(context, model(), engine="mapped", layer_budgets=now) as cache:
        assert same(answer(cache), expected(now))


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("before", ["uniform", "measured", GIVEN], ids=str)
def test_layer_budgets_that_are_left_open_are_as_they_were(before: Any, decoded: bool, tmp_path: Path) -> None:
    context = saved(tmp_path, before, decoded)
    with DiskSwapCache.open(context, model(), engine="mapped") as cache:
        assert same(answer(cache), expected(before))


def test_given_budgets_are_no_measured_ones(tmp_path: Path) -> None:
    """Opened to be measured, nothing was measured yet; and what was given could be above what measuring may give."""
    with DiskSwapCache.open(saved(tmp_path, GIVEN, True), model(), engine="mapped", layer_budgets="measured") as cache:
        assert same(answer(cache), expected("uniform"))


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("before", ["measured", GIVEN], ids=str)
def test_a_budget_decides_over_captured_layer_budgets(before: Any, decoded: bool, tmp_path: Path) -> None:
    """It is kept to, whatever the layers had; and where they fit into it as they are, they stay."""
    context, fields = saved(tmp_path, before, decoded), {"engine": "mapped", "max_context": 700, "num_selected": 48}
    for memory in (400_000, 600_000, "100MiB"):
        with DiskSwapCache.open(context, model(), memory=memory, **fields) as cache:
            answer(cache)
            feed(cache, prompt(model(), 1, 30, seed=4))
            answer(cache)
            assert cache.config.layer_budgets == (before if memory == "100MiB" else "uniform")
            assert cache.report().peak_memory_bytes <= cache.report().memory_budget


def test_measured_budgets_are_followed_by_measuring_again(tmp_path: Path) -> None:
    """A budget that was restored is not for good: after a turn that doubles the context, all is measured anew."""
    context = saved(tmp_path, "measured", True)
    turn = prompt(model(), 1, LONG + 40, seed=11)
    with prefilled(layer_budgets="measured") as cache, DiskSwapCache.open(context, model(), engine="mapped") as other:
        feed(cache, torch.tensor([[17]]))
        cache.crop(-1)
        for each in (cache, other):
            feed(each, turn)
        assert same(answer(cache), answer(other))


@pytest.mark.parametrize("share", [-0.5, float("nan"), float(2**40), "1", True])
def test_shares_that_no_measuring_gives_are_refused(share: Any, tmp_path: Path) -> None:
    context = saved(tmp_path, "measured", True)
    rewrite_state(context, None, lambda tree: tree["budgets"]["share"].update({1: share}))
    with pytest.raises(ContextError, match="budgets"):
        DiskSwapCache.open(context, model(), engine="mapped")


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    """What is stored was made with another one, or with none."""
    texts = [prompt(model(), 1, 560, seed=3)]
    calibrate(model(), texts, rank=8).save(tmp_path / "adapter")
    for own in (None, str(tmp_path / "adapter")):
        (tmp_path / str(own is None)).mkdir()
        context = tmp_path / str(own is None) / "context"
        with prefilled(adapter=own) as cache:
            cache.save(context)
            before = answer(cache)
        with pytest.raises(ConfigError, match="adapter is fixed in a saved context"):
            DiskSwapCache.open(context, model(), adapter=str(tmp_path / "adapter"))
        with DiskSwapCache.open(context, model(), adapter=None) as cache:
            assert same(answer(cache), before)


@pytest.mark.parametrize(("field", "value"), [("group_size", 8), ("rank", 4), ("summary_dtype", "float32")])
def test_the_stored_format_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    context = saved(tmp_path, "uniform", False)
    with pytest.raises(ConfigError, match=f"{field} is fixed in a saved context"):
        DiskSwapCache.open(context, model(), **{field: value})
