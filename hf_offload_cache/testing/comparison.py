"""What two caches gave for the same input, compared by tokens and by the logits of every step.

Tokens alone prove little: a model's first choice can stay the same when its history is lost or its padding ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOLERANCE = 2e-3
"""Largest difference of a logit, in standard deviations of the reference's logits (float32, streamed blocks)."""


@dataclass(frozen=True)
class Decoded:
    """What a case produced: token ids (rows, length) and the logits of every step (steps, rows, vocabulary)."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Comparison:
    """How far a result is from its reference; `deviation` in standard deviations of the reference's logits."""

    same_tokens: bool
    deviation: float
    bitwise: bool

    @property
    def exact(self) -> bool:
        """Same tokens, and logits within the tolerance."""
        return self.same_tokens and self.deviation <= TOLERANCE


def compare(reference: Decoded, result: Decoded) -> Comparison:
    """Tokens and logits of `result` against those of `reference`; infinitely far when shapes or NaN differ.

    Raises `ValueError` for a reference whose logits are not numbers.
    """
    same_tokens = torch.equal(reference.tokens, result.tokens)
    expected, got = reference.logits, result.logits
    if expected.shape != got.shape:
        return Comparison(same_tokens, float("inf"), False)
    finite = expected.isfinite()
    if not finite.any() or expected.isnan().any():
        raise ValueError("the reference's logits are not numbers: the comparison would prove nothing")
    if not torch.equal(expected[~finite], got[~finite]) or not got[finite].isfinite().all():
        return Comparison(same_tokens, float("inf"), False)
    difference = (expected[finite] - got[finite]).abs().max() / expected[finite].std()
    return Comparison(same_tokens, float(difference), same_tokens and torch.equal(expected, got))
