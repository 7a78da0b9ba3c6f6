"""A step's view of its masks: what hides nothing is no mask, and each is looked at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
