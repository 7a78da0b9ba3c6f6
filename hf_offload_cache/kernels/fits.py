"""How maps from keys to values are fitted: which clusters queries do not select, the attention that tokens of a sample
get there, and the sums of the regression.

Shapes: R rows; q queries of h query heads each; C clusters a row; n tokens of a sample, each in a cluster, with keys of
D channels. Query head i of query j is line j h + i.
"""

from __future__ import annotations

import torch

from .on_a_device import with_kernel
from .ranking import HIDDEN, LEAST

POINTS = 64
"""Tokens whose attention is summed up together."""
MOST = 60.0
"""Largest logarithm of a token's attention: a token may score far above its cluster."""


@with_kernel()
def unselected(
    scores: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, members: torch.Tensor, heads: int, wanted: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clusters that queries do not select. A query selects those whose keys get the largest shares of its heads'
    attention, until these hold `wanted` keys in total. Of clusters with equal shares, lower indices come first.

    Args:
        scores, tops, sums: (R, q h, C) and (R, q h, ·) float32, contiguous: of `clusters.score`.
        members: (R, C) int32, contiguous in the last dimension: each cluster's number of keys.
        heads: h.

    Returns `left` (R, q, C) bool, the clusters with keys that are not selected; and `total` (R, q h) float32, the
    logarithm of the sum over all keys. Both are new.
    """
    top = tops.amax(2)
    total = top + (sums * (tops - top[..., None]).exp()).sum(2).log()
    of_heads = (scores - total[..., None]).exp_().nan_to_num_(0).masked_fill_(scores <= HIDDEN, 0)
    shares = of_heads.unflatten(1, (-1, heads)).sum(2)
    held = members[:, None].expand_as(shares)
    order = shares.masked_fill(held == 0, -1).sort(dim=2, descending=True, stable=True).indices
    ordered = held.gather(2, order)
    behind = (ordered.cumsum(2) - ordered >= wanted) & (ordered > 0)
    return torch.empty_like(behind).scatter_(2, order, behind), total


@with_kernel()
def weigh(
    states: torch.Tensor, keys: torch.Tensor, labels: torch.Tensor, left: torch.Tensor, total: torch.Tensor,
    scores: torch.Tensor | None, seen: torch.Tensor | None, scaling: float, ends: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The attention that tokens get from queries that do not select their clusters.

    Args:
        states: (R, q h, D), of any type, contiguous in the last dimension.
        keys: (R, n, D), of any type, contiguous in the last dimension.
        labels: (R, n) int32, contiguous in the last dimension: each token's cluster.
        left, total: (R, q, C) bool, contiguous, and (R, q h) float32: of `unselected`.
        scores: (R, q h, C) float32, contiguous: of the clusters' centroids. None: there is no estimate.
        seen: (R, n) bool, contiguous in the last dimension, excludes padding.
        scaling: factor of the products of states and keys.
        ends: query j sees token t if t `ends[0]` < `ends[1]` - j `ends[2]`.

    Returns `weights` (R, n) float32, summed over queries; and `mass` (2, R, q h, n / `POINTS`, rounded up) float32, the
    sums over so many tokens, and what they would be if each token scored as its centroid (0 without `scores`). Both are
    new.
    """
    count, each, queries = keys.shape[1], labels.long(), left.shape[1]
    step, apart = ends[0], ends[2]
    products = (states.float() @ keys.float().mT).mul_(scaling).nan_to_num_(HIDDEN, torch.inf, -torch.inf)
    last = ends[1] - apart * torch.arange(queries, device=keys.device)
    there = left.gather(2, each[:, None].expand(-1, queries, -1))
    there &= step * torch.arange(count, device=keys.device) < last[:, None]
    if seen is not None:
        there &= seen[:, None]
    hidden = ~there[:, :, None].expand(-1, -1, states.shape[1] // queries, -1).flatten(1, 2)
    found = products.sub_(total[..., None]).clamp_(LEAST, MOST).exp_().masked_fill_(hidden, 0)
    parts = [found, torch.zeros_like(found)]
    if scores is not None:
        guessed = scores.gather(2, each[:, None].expand(-1, states.shape[1], -1))
        parts[1] = guessed.sub_(total[..., None]).clamp_(LEAST, MOST).exp_().masked_fill_(hidden, 0)
    padded = torch.nn.functional.pad(torch.stack(parts), (0, -count % POINTS))
    return found.sum(1), padded.unflatten(3, (-1, POINTS)).sum(4)


@with_kernel()
def add_squares(
    components: torch.Tensor, offsets: torch.Tensor | None, values: torch.Tensor, weights: torch.Tensor,
    seen: torch.Tensor | None, sums: torch.Tensor, squares: torch.Tensor,
) -> None:  # fmt: skip
    """Add tokens to the sums of a weighted regression of values on components and a constant.

    Args:
        components: (b, r, n), of any type and any strides.
        offsets: (r,) float32, added to them; None: nothing is.
        values: (b, V, n, Dv), of any type, contiguous in the last dimension, of V heads.
        weights: (b, V, n) float32, contiguous in the last dimension.
        seen: (b, n) bool, contiguous in the last dimension, excludes padding. Its components may be anything, its
            values are finite.
        sums: (b, V, r + 1, r + 1 + Dv) float32, contiguous: products of the inputs, the components and 1, with each
            other and with the values, by weight; changed.
        squares: (b, r + 1) float32, contiguous: of the inputs; changed.
    """
    wide = components.float() if offsets is None else components + offsets[:, None]
    inputs, count = torch.cat([wide, torch.ones_like(wide[:, :1])], 1), components.shape[1] + 1
    if seen is not None:
        inputs.masked_fill_(~seen[:, None], 0)
    weighted = inputs[:, None] * weights[:, :, None]  # (b, V, r + 1, n)
    sums[..., :count].add_((weighted.flatten(1, 2) @ inputs.mT).unflatten(1, (-1, count)))
    sums[..., count:].add_(weighted @ values.float())
    squares.add_(torch.linalg.vecdot(inputs, inputs))
