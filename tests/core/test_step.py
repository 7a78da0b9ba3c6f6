"""A step's view of its masks: what hides nothing is no mask, and each is looked at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import Fake, fake_cuda

from hf_offload_cache.core import PlainMasks, Step


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


# Masks on a device: what was plain is plain one column later

def causal(queries: int, columns: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    seen = torch.ones(2, 1, queries, columns, dtype=torch.bool).tril(columns - queries)
    return seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)


def waits(earlier: PlainMasks, mask: torch.Tensor, **given: Any) -> tuple[int, bool]:
    """How often a step of one token waits for a device that has its `mask`, and whether it is plain for the step."""
    with fake_cuda() as counts:
        one, there = step(), Fake(mask)
        earlier.begin(one, {name: Fake(value) for name, value in given.items()})
        counts.clear()
        streamed, visible = one.streamed(there), one.visible(there)
        assert streamed == one.streamed(there) and visible is one.visible(there)  # once a step
        assert one.changes(there) == (visible is not None)
        return counts.syncs.total(), streamed == (None, None) and visible is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_step_waits_for_no_mask_that_was_plain_in_an_earlier_one(dtype: torch.dtype) -> None:
    earlier, padded = PlainMasks(), causal(2, 50, dtype)
    padded[1, ..., :3] = False if dtype == torch.bool else torch.finfo(dtype).min
    usual = waits(earlier, causal(2, 40, dtype))[0]
    assert usual == 1
    assert [waits(earlier, causal(2, columns, dtype)) for columns in (41, 42, 104)] == [(0, True)] * 3
    assert waits(earlier, causal(2, 105, dtype)) == (usual, True)  # looked at again after 64 tokens
    assert waits(earlier, causal(2, 106, dtype)) == (0, True)
    assert waits(earlier, causal(2, 50, dtype)) == (usual, True)  # after a crop
    assert waits(earlier, causal(3, 52, dtype))[0] == 1 and waits(earlier, causal(2, 51, dtype)) == (0, True)
    assert waits(earlier, padded)[1] is False and waits(earlier, causal(2, 51, dtype))[0] == 1


def test_a_mask_of_the_caller_is_looked_at_in_each_step() -> None:
    earlier, seen = PlainMasks(), torch.ones(2, 40, dtype=torch.int64)
    waits(earlier, causal(2, 41), attention_mask=seen)
    assert waits(earlier, causal(2, 42), attention_mask=torch.ones(2, 41)) == (1, True)
    hidden, mask = torch.ones(2, 42), causal(2, 43)
    hidden[1, 7] = 0
    mask[1, ..., 7] = False
    assert waits(earlier, mask, attention_mask=hidden)[1] is False


@pytest.mark.parametrize("tokens", [1, 2])
def test_what_else_may_decide_on_a_mask_is_no_earlier_step(tokens: int) -> None:
    """A call with another tensor, or of several tokens, is looked at, and so is the step after it."""
    earlier, kinds = PlainMasks(), {} if tokens > 1 else {"token_type_ids": torch.zeros(2, 1)}
    waits(earlier, causal(2, 41))
    other = Step(2, 5, tokens, selects=True)
    earlier.begin(other, kinds)
    assert other.plain_masks is None
    assert waits(earlier, causal(2, 42))[0] == 1


def test_masks_of_a_host_are_looked_at_in_each_step() -> None:
    """Nobody waits for them."""
    earlier = PlainMasks()
    for columns in (41, 42):
        one, mask = step(), causal(2, columns)
        earlier.begin(one, {})
        mask[1, ..., : columns - 41] = False
        assert (one.visible(mask) is None) == (one.streamed(mask) == (None, None)) == (columns == 41)
