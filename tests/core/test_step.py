"""A step's view of its masks: what hides nothing is no mask, and each is looked at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import Fake, fake_cuda, on_the_device, values_of
from harness import COMMON, build, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import Step


def step() -> Step:
    return Step(2, 5, 1, selects=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_that_hides_nothing_is_none(dtype: torch.dtype) -> None:
    one = step()
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool) if dtype == torch.bool else torch.zeros(2, 1, 1, 6, dtype=dtype)
    assert one.seen is None
    assert one.visible(None) is None
    assert one.visible(mask) is None
    assert one.seen is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_what_the_last_query_sees(dtype: torch.dtype) -> None:
    hidden = torch.ones(2, 1, 3, 6, dtype=torch.bool).tril(3)
    hidden[1, :, :, :2] = False
    mask = hidden
    if dtype != torch.bool:
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(~hidden, torch.finfo(dtype).min)
    one = step()
    found = one.visible(mask)
    assert found is not None and found.dtype == torch.bool
    assert found.tolist() == [[True] * 6, [False] * 2 + [True] * 4]
    assert one.seen is found
    causal = torch.ones(1, 1, 3, 6, dtype=torch.bool).tril(3)
    assert one.visible(causal) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_hides_nothing_and_changes_attention(dtype: torch.dtype) -> None:
    """A finite additive mask is no padding, and is not to be left out either."""
    one, mask = step(), torch.zeros(2, 1, 1, 6, dtype=dtype)
    assert not one.changes(None) and not one.changes(mask)
    biased = mask.clone()
    biased[1, ..., 2] = -2.0
    assert one.visible(biased) is None and one.changes(biased)
    hidden = mask.clone()
    hidden[0, ..., 0] = torch.finfo(dtype).min
    assert one.visible(hidden) is not None and one.changes(hidden)
    assert not one.changes(torch.ones(2, 1, 1, 6, dtype=torch.bool))
    assert one.changes(torch.tensor([True, False])[None, None, None])


def test_each_mask_is_looked_at_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of layers with a mask each: not once a layer."""
    looks: list[torch.Tensor] = []
    every = torch.Tensor.all

    def watched(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        looks.append(tensor)
        return every(tensor, *arguments)

    monkeypatch.setattr(torch.Tensor, "all", watched)
    one = step()
    masks = [torch.ones(2, 1, 1, 6, dtype=torch.bool) for _ in range(2)]
    masks[1][0, ..., 0] = False
    found = [one.visible(masks[layer % 2]) for layer in range(10)]
    assert len(looks) == 2
    assert found[0] is None
    assert all(each is found[1] for each in found[1::2])
    step().visible(masks[0])
    assert len(looks) == 3


def test_a_layer_by_itself_selects_with_one_query_over_a_history() -> None:
    assert Step.alone(2, 5, 1).selects
    assert not Step.alone(2, 0, 1).selects
    assert not Step.alone(2, 5, 2).selects
    assert not Step.alone(2, 5, 1).decodes
    assert Step(1, 5, 1, selects=True, started=0.0).decodes


# Masks on a device: a step waits once for each

def causal(columns: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    seen = torch.ones(2, 1, 1, columns, dtype=torch.bool)
    return seen if dtype == torch.bool else torch.zeros(seen.shape, dtype=dtype)


def looked(mask: torch.Tensor) -> tuple[int, bool, torch.Tensor | None]:
    """How often a step of one token waits for a device that has its `mask`, whether the mask changes attention, and
    what the query sees."""
    with fake_cuda() as counts:
        one, there = step(), Fake(mask)
        visible, changes = one.visible(there), one.changes(there)
        assert one.visible(there) is visible
        return counts.syncs.total(), changes, None if visible is None else values_of(visible)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
def test_a_step_waits_once_for_a_device_to_see_what_its_mask_hides(dtype: torch.dtype) -> None:
    assert looked(causal(40, dtype)) == (1, False, None)
    padded = causal(40, dtype)
    padded[1, ..., :3] = False if dtype == torch.bool else torch.finfo(dtype).min
    waits, changes, visible = looked(padded)
    assert (waits, changes) == (1, True)
    assert visible is not None and visible.tolist() == [[True] * 40, [False] * 3 + [True] * 37]
    if dtype != torch.bool:
        biased = causal(40, dtype)
        biased[0, ..., 2] = -2.0
        assert looked(biased)[1:] == (True, None)


def test_a_mask_that_begins_to_hide_a_token_is_seen_in_the_same_step() -> None:
    """The second step's mask has a column too few: transformers hides the latest token, though no value is 0."""
    config = LlamaConfig(**COMMON, attn_implementation="eager")
    ids, shown = prompt(build(LlamaForCausalLM, config), 1, 402), torch.ones(1, 401)

    def logits(model: Any, cache: Any, put: Any) -> torch.Tensor:
        with torch.no_grad():
            model(put(ids[:, :400]), past_key_values=cache)
            parts = ids[:, 400:].split(1, 1)
            steps = [model(put(part), past_key_values=cache, attention_mask=put(shown)).logits for part in parts]
        return torch.cat([values_of(one) for one in steps], 1)

    expected = logits(build(LlamaForCausalLM, config), DynamicCache(config=config), lambda tensor: tensor)
    fields: Any = {"num_selected": 512, "engine": "memory"}
    with on_the_device(build(LlamaForCausalLM, config)) as (model, _), DiskSwapCache(model, **fields) as cache:
        torch.testing.assert_close(logits(model, cache, Fake), expected)
