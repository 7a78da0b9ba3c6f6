"""What is computed of two caches' logits, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from eval.studies.remainder import perplexity_of
from hf_offload_cache.tuning import distance, divergence, perplexity_over


def test_distance_of_hand_made_logits() -> None:
    """KL of (1/2, 1/2) to (1/4, 3/4), and of equals; the likeliest token differs in one step of two."""
    reference = torch.tensor([[1.0, 1.0 + 1e-6], [3.0, 1.0]]).log()
    other = torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log()
    found = distance(reference, other)
    assert found["kl"] == pytest.approx((0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) / 2, abs=1e-5)
    assert found["top1"] == 0.5
    torch.testing.assert_close(divergence(reference, other.log_softmax(-1)), torch.tensor([2 * found["kl"], 0.0]))


def test_perplexity_of_hand_made_logits() -> None:
    reference = torch.tensor([[1.0, 1.0, 0.0], [1.0, 2.0, 1.0], [1.0, 1.0, 1.0]]).log()
    other = torch.tensor([[1.0, 3.0, 0.0], [1.0, 6.0, 1.0], [9.0, 1.0, 1.0]]).log()
    ids = torch.tensor([[2, 0, 2]])
    assert perplexity_over(reference, other, ids) == pytest.approx(2.0)
    assert perplexity_over(other, reference, ids) == pytest.approx(0.5)
    assert perplexity_over(reference, other, ids[:, :1]) is None
    answer, word = (ids[:, :1], ids), (ids[:, :1], ids[:, :1])
    both = torch.cat([reference, reference[:1]]), torch.cat([other, other[:1]])
    assert perplexity_of(*both, [answer, word]) == pytest.approx(2.0)
    assert perplexity_of(reference[:2], other[:2], [word, word]) is None
