"""How far what a model says with one cache is from what it says with another: what tuning and benchmarks measure."""

from __future__ import annotations

import torch


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || logits) in nats, of each step: logits (..., V), or logarithms of probabilities, to (...)."""
    sure, other = reference.log_softmax(-1), logits.log_softmax(-1)
    return (sure.exp() * (sure - other)).sum(-1)


def distance(reference: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """Of logits (..., V): the mean over steps of `divergence`, and the share of steps whose likeliest token is the
    same."""
    same = reference.argmax(-1) == logits.argmax(-1)
    return {"kl": float(divergence(reference, logits).mean()), "top1": float(same.float().mean())}


def perplexity_over(reference: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> float | None:
    """The perplexity of ids (1, S) by logits (S, V), each after the token of its place, over that by the reference's;
    None of a single token."""
    following = ids[0, 1:]
    if not following.numel():
        return None
    losses = [torch.nn.functional.cross_entropy(said[:-1].float(), following) for said in (logits, reference)]
    return float((losses[0] - losses[1]).exp())
