"""Attention of many queries to stored latents, of which each query sees few: no keys and values are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .attention_call import AttentionCall
from .masks import shown
from .stream_attention import Attended

_SPARSER = 6
"""Stored tokens that some query sees, over those that one sees, from which on this is faster than making keys and
values of them."""
_PAIRS = 512
"""Pairs of a query and a token whose latents are gathered at a time, about: they fit a core's cache."""
_JOINED = 4096
"""Fewest tokens of the history at a time: results of more parts take longer to merge."""
_MOST_BYTES = 160 << 20
"""Most bytes of the queries that are moved to the latents' width; their results take as many."""
_ROWS = 32
"""Most queries at a time."""
_EXPANDED = 64
"""A head's key and value together are at most so wide, or as wide as the latents: a plan does not know it."""
_CHECKED = 8
"""Tokens by which a map is checked."""

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Makes keys and values (B, H, n, D) and (B, H, n, Dv) of two latents (B, 1, n, ·)."""


def latents_bytes(
    batch: int, queries: int, heads: int, width: int, count: int, expanded: int, stored: int
) -> int | None:
    """Most bytes that `attend_to_latents` uses; None: too many, or there is a faster way.

    `width`: of both latents, W; `count`: tokens that a query chooses, K; `expanded`: width of a head's key and value
    together; `stored`: tokens that are joined, at most."""
    rows = batch * queries
    if 4 * rows * heads * width > _MOST_BYTES or expanded > max(width, _EXPANDED):
        return None
    maps = 4 * heads * (width + 1 + _CHECKED) * expanded  # in float32, and at first as much in the model's type
    moved = 8 * rows * heads * width
    some = 16 * _ROWS * heads * width + 16 * max(_PAIRS, count) * heads
    joined = 8 * batch * stored * width + 4 * max(_PAIRS, count) * width
    return max(48 * rows * count, 16 * rows * count + maps + max(maps, moved + some + joined))


def planned_bytes(batch: int, context: int, heads: int, width: int, count: int, block: int) -> int:
    """Most bytes that `attend_to_latents` uses for any piece of a prompt of so many tokens: see `latents_bytes`."""
    if context <= _SPARSER * count:
        return 0
    most, expanded = min(context, _MOST_BYTES // (4 * batch * heads * width)), max(width, _EXPANDED)
    return latents_bytes(batch, most, heads, width, count, expanded, min(context, _JOINED + block)) or 0


def bytes_of_call(
    call: AttentionCall, chosen: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor], seen: int, stored: int,
    block: int, value_dim: int,
) -> int | None:  # fmt: skip
    """As `latents_bytes`, of a call with the arguments of `attend_to_latents`. None also if the queries together have
    `seen` few of the `stored` tokens, or on a device. `value_dim`: width Dv of a value."""
    query, count = call.query, chosen.shape[2]
    if seen < _SPARSER * count or query.device.type != "cpu" or own[0].shape[1] != 1:
        return None
    (batch, heads, queries, dim), width = query.shape, own[0].shape[3] + own[1].shape[3]
    return latents_bytes(batch, queries, heads, width, count, dim + value_dim, min(stored, _JOINED + block))


def attend_to_latents(
    call: AttentionCall,
    expand: Expand,
    chosen: torch.Tensor,
    mask: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    blocks: Iterable[tuple[torch.Tensor, torch.Tensor, Any]],
) -> Attended | None:
    """Attention of a call's queries to stored latents: output (B, H, q, Dv), float32, and its log-sum-exp (B, H, q),
    -inf for a query that sees none. None, with nothing read, if this way does not apply. See `bytes_of_call`.

    `chosen` (B, q, K): indices of tokens, -1 for none. `mask` (B, 1, q, T) hides what was not chosen, and padding; its
    last columns are for the `own` latents (B, 1, q, ·) of the queries. `blocks` yields the stored latents (B, 1, t, ·)
    in order. Keys and values must be linear in the latents, which is checked: then the map is moved from the latents to
    the query and to the output.
    """
    query, end = call.query, mask.shape[3] - own[0].shape[2]
    index = chosen.long().clamp_min_(0)
    picked = mask[:, 0].gather(2, index)
    visible = shown(picked) & (chosen >= 0) & (index < end)
    places, order = index.masked_fill_(~visible, end).sort(2)
    if bool(((places[..., 1:] == places[..., :-1]) & (places[..., 1:] < end)).any()):
        return None  # the mask counts such a token once
    maps = _linear_map(expand, own)
    if maps is None or maps[0].shape[2] != query.shape[3]:
        return None
    bias = None
    if mask.dtype != torch.bool:
        bias = picked.masked_fill(~visible, 0.0).gather(2, order).float()
        bias = bias if bool(bias.any()) else None
    del index, picked, visible, order
    (batch, heads, queries, dim), width = query.shape, maps[0].shape[1]
    flat = query.transpose(1, 2).reshape(-1, heads, dim)
    moved = torch.empty(len(flat), heads, width, dtype=torch.float32, device=query.device)
    for some, result in zip(flat.split(_ROWS), moved.split(_ROWS), strict=True):
        result.copy_(((some.float() * call.scaling).transpose(0, 1) @ maps[0].transpose(1, 2)).transpose(0, 1))
    total, log_sum = _attend(moved, places.reshape(len(flat), -1), queries, bias, blocks, call.softcap)
    del moved
    output = total.new_empty(len(flat), heads, maps[1].shape[2])
    for some, result in zip(total.split(_ROWS), output.split(_ROWS), strict=True):
        result.copy_((some.transpose(0, 1) @ maps[1]).transpose(0, 1))
    shape = batch, queries, heads, -1
    return output.view(shape).transpose(1, 2), log_sum.view(shape)[..., 0].transpose(1, 2)


def _linear_map(expand: Expand, own: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Matrices (H, W, D) and (H, W, Dv), float32, by which keys and values follow from both latents (W wide together);
    None: they do not. Found by the keys and values of unit vectors, of which those of other tokens are the sums."""
    widths = [part.shape[3] for part in own]
    some = torch.cat([part[:1, :, :_CHECKED] for part in own], 3)
    unit = torch.eye(sum(widths), dtype=some.dtype, device=some.device)[None, None]
    asked = torch.cat([unit, torch.zeros_like(unit[:, :, :1]), some], 2)
    maps = []
    for made in expand(*asked.split(widths, 3)):
        found, zero, expected = made[0].float().split([sum(widths), 1, some.shape[2]], 1)
        tolerance = max(1e-5, 4 * torch.finfo(made.dtype).eps) * expected.abs().max()
        if bool(zero.any()) or not bool(((some[0].float() @ found - expected).abs() <= tolerance).all()):
            return None
        maps.append(found)
    return maps[0], maps[1]


def _joined(blocks: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Both latents of each token, (B, n, W) float32, of several blocks at a time."""
    parts, count = list[torch.Tensor](), 0
    for keys, values, *_ in blocks:
        parts.append(torch.cat([keys[:, 0], values[:, 0]], 2).float())
        count += keys.shape[2]
        if count >= _JOINED:
            yield torch.cat(parts, 1)
            parts, count = [], 0
    if parts:
        yield torch.cat(parts, 1)


def _attend(
    query: torch.Tensor, places: torch.Tensor, queries: int, bias: torch.Tensor | None, blocks: Iterable[Any],
    softcap: float | None,
) -> Attended:  # fmt: skip
    """Attention of scaled queries (R, H, W), of which so many `queries` are of one sequence, to the tokens at their
    `places` (R, K), ascending, with a `bias` (B, q, K): output (R, H, W) and log-sum-exp (R, H). Places behind the last
    block are for none."""
    (_, heads, width), count = query.shape, places.shape[1]
    bias = None if bias is None else bias.reshape(-1, count)
    total = query.new_zeros(query.shape)
    most = query.new_full((len(query), heads, 1), float("-inf"))
    sums = most.new_zeros(most.shape)
    gathered = query.new_empty(max(_PAIRS, count), width)  # pages of a new one each time would take longer
    begin, first = 0, places.new_zeros(len(places))
    for latents in _joined(blocks):
        length = latents.shape[1]
        latents = latents.flatten(0, 1)
        begin += length
        last = torch.searchsorted(places, places.new_full((len(places), 1), begin))[:, 0]
        counts, rows = (last - first).sort(descending=True)
        sizes, at = counts[counts > 0].tolist(), 0
        while at < len(sizes):
            widest = sizes[at]
            some = rows[at : min(at + max(1, min(_ROWS, _PAIRS // widest)), len(sizes))]
            at += len(some)
            columns = first.index_select(0, some)[:, None] + torch.arange(widest, device=places.device)
            beyond = columns >= last.index_select(0, some)[:, None]
            columns.clamp_(max=count - 1)
            index = places.index_select(0, some).gather(1, columns) - (begin - length)
            index = index.masked_fill_(beyond, 0) + (some // queries * length)[:, None]
            entries = gathered[: index.numel()]
            torch.index_select(latents, 0, index.reshape(-1), out=entries)
            entries = entries.view(*index.shape, width)
            scores = torch.bmm(query.index_select(0, some), entries.transpose(1, 2))
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if bias is not None:
                scores += bias.index_select(0, some).gather(1, columns)[:, None]
            if sizes[at - 1] < widest:
                scores.masked_fill_(beyond[:, None], float("-inf"))
            before = most.index_select(0, some)
            now = torch.maximum(before, scores.amax(2, keepdim=True))
            weights, shrink = scores.sub_(now).exp_(), (before - now).exp_()
            total.index_copy_(0, some, total.index_select(0, some).mul_(shrink).baddbmm_(weights, entries))
            sums.index_copy_(0, some, sums.index_select(0, some) * shrink + weights.sum(2, keepdim=True))
            most.index_copy_(0, some, now)
        first = last
    total /= sums.clamp_min(torch.finfo(sums.dtype).tiny)
    return total, (most + sums.log())[..., 0]
