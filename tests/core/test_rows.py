"""Heads as rows of their own: what is folded comes back, and each row is one head of one sequence."""

from __future__ import annotations

import pytest
import torch

from hf_offload_cache.core import Rows

B, HK, T, D = 2, 3, 5, 4


def test_joined_heads_are_left_as_they_are() -> None:
    rows, tensor = Rows(), torch.randn(B, HK, T, D)
    index = torch.tensor([1, 0, 1])
    assert rows.fold(tensor) is tensor
    assert rows.unfold(tensor) is tensor
    assert rows.expand(index) is index


def test_each_row_is_one_head_of_one_sequence() -> None:
    rows, keys = Rows(HK), torch.randn(B, HK, T, D)
    folded = rows.fold(keys)
    assert folded.shape == (B * HK, 1, T, D)
    for row in range(B * HK):
        assert torch.equal(folded[row, 0], keys[row // HK, row % HK])
    assert torch.equal(rows.unfold(folded), keys)


@pytest.mark.parametrize("chosen", [[1, 0], [1, 1, 0], [0], []])
def test_sequences_that_change_places_take_their_heads_along(chosen: list[int]) -> None:
    rows, keys, index = Rows(HK), torch.randn(B, HK, T, D), torch.tensor(chosen, dtype=torch.int64)
    assert torch.equal(rows.fold(keys)[rows.expand(index)], rows.fold(keys[index]))
