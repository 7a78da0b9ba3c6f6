"""Which units a step attends to, and an estimate of the others, by codes of keys: without the host.

It is what `rank_units` and `mean_components` of `DiskSwapCache` compute on a processor, in single precision: the
products that a processor computes with 8-bit queries are computed with queries in bfloat16 here, and all units are
ranked with all components at every step.

Shapes: B sequences, H query heads, K key heads, D channels of a key; U units of G tokens; codes of `counts` components
of 8, 4 and 2 bits, r in all, in N bytes. A sequence has one row, or one for each key head if these choose apart: R rows
of h query heads each.

A step that is captured as a CUDA graph has fixed shapes. Its tensors have room for more keys or units than there are,
and the functions read from the device, at each replay, how many there are: `count`, () int64. Without it all count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .on_a_device import with_kernel

BLOCK = 64
"""Units whose scores are summed up together."""
HIDDEN = -1e30
"""Score of a unit that must not count."""
LEAST = -80.0
"""Least logarithm of a weight; less is as little."""
MOST_UNITS = 1 << 15
"""Most units of a row that are ranked; for more, a program of `pick` would not have the registers."""
PROGRAMS = 264
"""Most programs that share a step's sums over tokens, if the heads are fewer."""

Counts = tuple[int, int, int]


class Asks(NamedTuple):
    """What makes low-rank queries of a layer's keys, on their device: arguments of `project`."""

    queries: torch.Tensor
    scale: torch.Tensor
    mean: torch.Tensor
    offsets: torch.Tensor


def ranking_bytes(
    batch: int, heads: int, rows: int, units: int, rank: int, near: int, among: int, others: int, dim: int
) -> int:
    """Upper bound on the device memory of a step's ranking and estimate, for `near` keys with exact scores, `among`
    units picked in each row, estimates of so many `others` tokens a row, and values of `dim` channels."""
    own = batch * heads // rows  # query heads of a row
    together, programs = max(16, min(32, 1 << (own - 1).bit_length())), rows * -(-own // 32)
    programs = max(programs, min(PROGRAMS, programs * (others // 64 + 1)))
    sums = 4 * programs * together * (max(16, 1 << rank.bit_length()) + 2) if others else 0
    results = 4 * batch * heads * (2 * rank + near + units + 2 * (units // BLOCK + 1) + dim + 4)
    return results + sums + 4 * rows * (units + among + 1)


@with_kernel()
def project(
    states: torch.Tensor, queries: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor, offsets: torch.Tensor,
    sinks: torch.Tensor, recent: torch.Tensor, scaling: float, count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Low-rank queries (KVSwap, equation 1) of a step's `states` (B, H, D), and the exact scores of a few keys.

    Args:
        queries: (K, D, r) int8: the projection, times `scale` (r,) float32.
        mean: (K, D) float32, of the keys, which codes do not contain.
        offsets: (r,) float32: what a stored component stands for, less the component.
        sinks, recent: keys (B, K, n, D) and (B, K, t, D) that get exact scores; contiguous in the last dimension.
        scaling: factor of all scores.
        count: number of the first `recent` keys that exist; the others get -inf.

    Returns `low` (B, H, r) bfloat16 and `constant` (B, H) float32, so that a token's score is the product of `low` with
    its stored components, plus `constant`; and the scores `near` (B, H, n + t) float32. All are new.
    """
    batch, heads, dim = states.shape
    grouped = states.float().view(batch, len(mean), -1, dim)
    low = (grouped @ queries.float()).mul_(scale * scaling).flatten(1, 2).to(torch.bfloat16)
    constant = (grouped @ mean[:, :, None]).view(batch, heads) * scaling + low.float() @ offsets
    exact = torch.cat([sinks, recent], 2).float()
    near = (grouped @ exact.transpose(2, 3)).view(batch, heads, -1) * scaling
    if count is not None:
        missing = torch.arange(recent.shape[2], device=near.device) >= count
        near[:, :, sinks.shape[2] :].masked_fill_(missing, -torch.inf)
    return low, constant, near


def components(codes: torch.Tensor, counts: Counts, group: int) -> torch.Tensor:
    """Components (B, r, G, U) int8 of `codes` (B, N G, U) uint8. Byte n of token g is in line n G + g."""
    wide, four, two = counts
    stored = codes.unflatten(1, (-1, group))
    pairs, quads = stored[:, wide : wide + four // 2], stored[:, wide + four // 2 :]
    parts = [stored[:, :wide], pairs & 15, pairs >> 4, *(quads >> shift & 3 for shift in (0, 2, 4, 6) if two)]
    return torch.cat([part.view(torch.int8) for part in parts], 1)


@with_kernel()
def score(
    low: torch.Tensor, constant: torch.Tensor, codes: torch.Tensor, counts: Counts, group: int, apart: int,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The largest score of each unit's tokens (KVSwap, section 3.3, ReduceMax), for each query head.

    Args:
        low, constant: of `project`.
        codes: (B, N G, U) uint8, see `components`; contiguous in the last dimension.
        apart: number of first units that must not count.
        count: number of units that exist.

    Returns `best` (B, H, U) float32, `HIDDEN` for units that do not count; and of each `BLOCK` units their largest
    score `tops` (B, H, U / BLOCK, rounded up) float32 and `sums`, of the same shape, of exp(score - top).
    """
    stored = components(codes, counts, group).flatten(2).to(torch.bfloat16)
    products = (low.float() @ stored.float()).unflatten(2, (group, -1))
    best = products.amax(2).add_(constant[..., None])
    best[..., :apart] = HIDDEN
    if count is not None:
        best.masked_fill_(torch.arange(best.shape[2], device=best.device) >= count, HIDDEN)
    padded = torch.nn.functional.pad(best, (0, -best.shape[2] % BLOCK), value=HIDDEN).unflatten(2, (-1, BLOCK))
    tops = padded.amax(3)
    weights = (padded - tops[..., None]).exp_().masked_fill_(padded <= HIDDEN, 0)
    return best, tops, weights.sum(3)


@with_kernel()
def share(
    best: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, near: torch.Tensor, rows: int, apart: int,
    count: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Importance (R, U) float32 of each unit, new: the softmax weight of its best token, summed over the row's query
    heads. The softmax is over all units and the keys with exact scores. The `apart` first units have infinity. Heads
    with a score that is NaN do not count, so none is NaN.

    Args:
        best, tops, sums: of `score`.
        near: (B, H, n) float32, of `project`.
        rows: R.
        count: number of units that exist; the others have -inf, also among the first.
    """
    every = torch.cat([tops, near], 2)
    top = every.amax(2, keepdim=True)
    total = (sums * (tops - top).exp()).sum(2, keepdim=True) + (near - top).exp().sum(2, keepdim=True)
    weights = ((best - top).clamp_(min=LEAST).exp_() / total).nan_to_num_()
    importance = weights.view(rows, -1, best.shape[2]).sum(1)
    importance[:, :apart] = torch.inf
    if count is not None:
        importance.masked_fill_(torch.arange(importance.shape[1], device=importance.device) >= count, -torch.inf)
    return importance


@with_kernel()
def pick(importance: torch.Tensor, wanted: int, among: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `wanted` most important units of each row, and those that follow: (R, wanted) and (R, among - wanted) int32,
    both ascending. Of units with equal importance, lower indices come first. Third, (R,) float32: the importance of all
    other units, summed where it is positive and finite. All are new.

    Args:
        importance: (R, U) float32, no NaN; contiguous.
        wanted, among: at most U each, `wanted` at most `among`.
    """
    order = importance.sort(dim=1, descending=True, stable=True).indices.int()
    units, others, left = order[:, :wanted], order[:, wanted:among], importance.gather(1, order[:, among:].long())
    left = left.masked_fill((left <= 0) | left.isinf(), 0).sum(1)
    return units.sort(1).values, others.sort(1).values, left


@with_kernel()
def rest(
    low: torch.Tensor, constant: torch.Tensor, codes: torch.Tensor, counts: Counts, group: int, others: torch.Tensor,
    maps: torch.Tensor, scale: torch.Tensor, log_ratio: torch.Tensor, offsets: torch.Tensor,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What attention to the units `others` would add, estimated: for each query head its mean value, and the logarithm
    of its weight.

    Args:
        low, constant, codes, counts, group: as for `score`.
        others: (R, n) int32 units, n at least 1; each row's query heads have the row's own.
        maps: (B, m + 1, Hv, Dv) int8, from the first m components and a constant to values, times `scale` (B, m + 1)
            float32. Each value head serves as many query heads.
        log_ratio: (B, H) float32, added to the logarithms.
        offsets: (r,) float32, as for `project`.
        count: number of units that exist. Others do not count; each row has at least one that does.

    Returns `value` (B, H, Dv) float32 and `weight` (B, H) float32: the logarithm of the sum of exp(score) over the
    units' tokens. Both are new.
    """
    (batch, heads, _), (rows, _), inputs = low.shape, others.shape, maps.shape[1] - 1
    each = rows // batch
    stored = components(codes, counts, group).repeat_interleave(each, 0)
    at = others.long()[:, None, None].expand(-1, stored.shape[1], group, -1)
    chosen = stored.gather(3, at).flatten(2).to(torch.bfloat16).float()  # (R, r, G n)
    asked = low.float().view(rows, heads // each, -1)
    scores = asked @ chosen + constant.view(rows, -1, 1)
    if count is not None:
        scores.masked_fill_((others >= count).repeat(1, group)[:, None], -torch.inf)
    top = scores.amax(2, keepdim=True)
    weights = (scores - top).clamp_(min=LEAST).exp_()
    if count is not None:
        weights.masked_fill_(scores == -torch.inf, 0)
    total = weights.sum(2, keepdim=True)
    mean = (weights @ chosen[:, :inputs].transpose(1, 2)) / total + offsets[:inputs]
    wide = (maps.float() * scale[..., None, None]).transpose(1, 2)  # (B, Hv, m + 1, Dv)
    by_head = mean.view(batch, wide.shape[1], -1, inputs)
    value = by_head @ wide[:, :, :-1] + wide[:, :, -1:]
    return value.view(batch, heads, -1), (total.log() + top).view(batch, heads) + log_ratio


@with_kernel()
def encode(
    keys: torch.Tensor, mean: torch.Tensor, projection: torch.Tensor, scale: torch.Tensor, counts: Counts,
    codes: torch.Tensor, group: int, first: int,
) -> None:  # fmt: skip
    """Code the keys of tokens and put them into their places (the compact keys of KVSwap, section 3.2, in fewer bits).

    A component's code is the floor of its projection, within the range of its bits.

    Args:
        keys: (B, K, t, D), contiguous in the last dimension.
        mean: (K D,) float32, subtracted from the keys of all heads, joined.
        projection: (K D, r) int8, times `scale` (r,) float32.
        codes: (B, N G, U) uint8, see `components`, contiguous in the last dimension; changed at the tokens from `first`
            on: there is room for them.
    """
    tokens, (wide, four, two) = keys.shape[2], counts
    flat = keys.transpose(1, 2).flatten(2).float() - mean
    found = (flat @ projection.float()).mul_(scale).floor_().transpose(1, 2)  # (B, r, t)
    eight, pairs, quads = found.split([wide, four, two], 1)
    parts = [eight.clamp(-128, 127).remainder(256)]
    if four:
        low, high = pairs.clamp(-8, 7).chunk(2, 1)
        parts.append(low + 16 * high + 8 * 17)
    if two:
        ones = quads.clamp(-2, 1).chunk(4, 1)
        parts.append(ones[0] + 4 * ones[1] + 16 * ones[2] + 64 * ones[3] + 2 * 85)
    token = torch.arange(first, first + tokens, device=keys.device)
    codes.unflatten(1, (-1, group))[:, :, token % group, token // group] = torch.cat(parts, 1).to(torch.uint8)
