"""The directions that keys are kept in: those of most energy, or those that matter most to the queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

_OTHER_QUERIES = 0.3
"""Times the queries' mean energy, in every direction, is added to what was seen of them: for truncated keys."""
QUERIES_SEEN, _APART = 512, 8
"""The latest of a call that tell in what metric keys are best approximated, and how far apart they are taken."""
LEAST_QUERIES = 32
"""Of one call, for them to tell in what metric keys are best approximated."""
PART = 128
"""Tokens, of all rows together, that are taken to float32 at a time."""


def parts(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys (B, Hk, T, D) in pieces of as many tokens as are taken to float32 at a time."""
    return keys.split(max(1, PART // keys.shape[0]), 2)


def fitting_bytes(width: int, batch: int) -> int:
    """What making an adapter takes meanwhile: a moment, its eigenvectors, twice as much for LAPACK; a part in float32,
    and masked."""
    return 4 * 4 * width * width + 2 * 4 * max(batch, PART) * width


def principal_directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading eigenvectors (W, rank), float32, of a second moment K^T K (W, W): the right singular vectors
    of K (KVSwap, section 3.2), most energy first."""
    vectors = torch.linalg.eigh(moment.float())[1]
    return vectors[:, -rank:].flip(-1).contiguous()


def query_moment(queries: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """The second moment (Hk, D, D), float32, of queries (B, H, n, D) by key head; of the last 64, taken 8 apart."""
    queries = queries[:, :, -QUERIES_SEEN:][:, :, ::_APART]
    grouped = queries.detach().float().unflatten(1, (num_key_heads, -1)).permute(1, 0, 2, 3, 4).flatten(1, 3)
    return grouped.transpose(1, 2) @ grouped / grouped.shape[1]


def identity_roots(num_key_heads: int, dim: int, device: torch.device) -> torch.Tensor:
    """The metric (Hk, D, D) in which all directions count alike."""
    return torch.eye(dim, device=device, dtype=torch.float32).expand(num_key_heads, dim, dim)


def roots_of(moment: torch.Tensor, others: float = _OTHER_QUERIES) -> torch.Tensor:
    """Square roots (Hk, D, D) of the second moment of queries: the metric that keys are to be approximated in.

    A rank spent where queries never point is lost, however large the keys are there. A part of the identity, `others`
    times the queries' mean energy, is mixed in, for what other queries may ask.
    """
    moment = moment.clone()
    level = moment.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    moment += others * level[:, None, None] * torch.eye(moment.shape[1], device=moment.device, dtype=torch.float32)
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.transpose(1, 2)


def scaled_directions(moment: torch.Tensor, roots: torch.Tensor, rank: int) -> torch.Tensor:
    """As `principal_directions`, in the metric of `roots` (Hk, D, D): a projection (W, rank) of keys, most energy of
    scores first. With `reconstruction`, the best that scores of such queries can be approximated with at this rank."""
    scaled, shape = moment, (roots.shape[0], roots.shape[1], moment.shape[0])
    for _ in range(2):
        scaled = (roots @ scaled.view(shape)).flatten(0, 1).t().contiguous()
    directions = principal_directions(scaled, rank)
    return (roots @ directions.view(*shape[:2], rank)).flatten(0, 1)


def reconstruction(moment: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
    """(W, r): what compact keys k A (adapter A) times its transpose come nearest to the keys, in least squares under
    the second moment. For orthonormal directions of largest energy, those themselves."""
    product = moment @ adapter
    gram = adapter.t() @ product
    level = 1e-6 * gram.diagonal().mean().clamp_min(1e-30)
    gram = gram + level * torch.eye(gram.shape[0], device=gram.device, dtype=torch.float32)
    return torch.linalg.solve(gram, product.t()).t().contiguous()


@dataclass(frozen=True)
class Directions:
    """What compact keys are made with, of all keys of a layer."""

    adapter: torch.Tensor
    """(Hk D, r) float32: the projection of keys."""
    queries: torch.Tensor
    """(Hk D, r) float32: the projection of queries that goes with it."""
    deviation: torch.Tensor
    """(r,): root mean square of each component of a compact key."""

    @classmethod
    def of(
        cls,
        keys: Iterator[torch.Tensor],
        width: int,
        num_key_heads: int,
        visible: torch.Tensor | None,
        rank: int,
        adapter: torch.Tensor | None,
        seen: torch.Tensor | None,
    ) -> Self:
        """Of `keys`, parts (B, Hk, t, D) in order, one pass; `visible` (B or 1, tokens) leaves padding out.

        `adapter`: calibrated, taken as it is; else the best `rank` directions, in the metric of the queries `seen`
        (B, H, q, D), or of most energy where there are none.
        """
        moment, position, rows = torch.zeros(0, dtype=torch.float32, device="cpu"), 0, 0
        for part in (piece for block in keys for piece in parts(block)):
            flat, stop = part.transpose(1, 2).flatten(2).float(), position + part.shape[2]
            if not position:
                moment = torch.zeros(width, width, device=part.device, dtype=torch.float32)
            if visible is not None:
                flat = flat * visible[:, position:stop, None]
            position, rows = stop, part.shape[0]
            flat = flat.flatten(0, 1)
            moment.addmm_(flat.t(), flat)
        rows = rows * position if visible is None else max(1, int(visible[:, :position].expand(rows, -1).sum()))
        if adapter is not None:
            adapter = adapter.to(moment.device)
        elif seen is None:
            adapter = principal_directions(moment, min(rank, rows))
        else:
            adapter = scaled_directions(moment, roots_of(query_moment(seen, num_key_heads)), min(rank, rows))
        deviation = ((moment @ adapter * adapter).sum(0) / rows).clamp_min(0).sqrt()
        return cls(adapter, reconstruction(moment, adapter), deviation)
