"""Which chunks a step of `AbstractTreeCache` reads, and which of their tokens it attends to: without the host.

It is what `likely`, `bounds`, `standing`, `front` and `shares` compute on a processor, in single precision. Of equal
chunks and tokens the first come first.

Shapes: B sequences, H query heads; R rows (sequences, or their key heads if these choose apart) of K key heads with D
channels and h query heads each; n chunks of G tokens; S selected chunks.

A step that is captured as a CUDA graph has room for more chunks and latest keys than there are: see `ranking`. Chunks
that do not exist stand last, so that `stand` and `front` need not know how many there are: fewer chunks than exist are
chosen.
"""

from __future__ import annotations

from typing import Any

import torch

from .on_a_device import with_kernel

TOKENS = 64
"""Tokens, and chunks, of a program."""
LOWEST = -3e38
"""Upper bound of a chunk whose bounds are NaN: below all others. Its lower bound is -inf."""


def chunk_bytes(rows: int, heads: int, chunks: int) -> int:
    """Upper bound on the device memory of a step's choice of chunks, for so many query `heads` a row."""
    return rows * chunks * (8 * heads + 20)


def look_bytes(rows: int, heads: int, tokens: int, recent: int) -> int:
    """Upper bound on the device memory to choose among the `tokens` of a row's chunks, with `recent` later keys."""
    return rows * (4 * heads * tokens + 8 * heads * (tokens // TOKENS + recent // TOKENS + 2) + tokens)


@with_kernel()
def limits(
    states: torch.Tensor, abstracts: torch.Tensor, scaling: float, expected: bool, count: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower bounds (R, h, n) float32 of the scores of each chunk's keys (LeoAM, section 4.2). Both are new,
    and never NaN.

    Args:
        states: (B, H, D), contiguous in the last dimension.
        abstracts: (R, n, 2, K, D): the minimum and the maximum of each key component; contiguous in the last dimension.
        scaling: factor of all scores.
        expected: the first are `likely`'s expected maxima instead of `bounds`'.
        count: () int64, on the device: number of chunks that exist; the others get -inf. None: all.
    """
    rows, chunks, _, key_heads, dim = abstracts.shape
    grouped = (states.float() * scaling).reshape(rows, key_heads, -1, dim)
    least, most = abstracts.float().permute(2, 0, 3, 4, 1)
    ranges = most - least
    lowest, products = grouped @ least, grouped @ ranges
    below = grouped.clamp(max=0) @ ranges
    reach = (products + (grouped.square() @ ranges.square()).sqrt_()) / 2 if expected else products - below
    high, low = ((lowest + more).view(rows, -1, chunks) for more in (reach, below))
    high, low = high.masked_fill_(high.isnan(), LOWEST), low.masked_fill_(low.isnan(), -torch.inf)
    if count is not None:
        missing = torch.arange(chunks, device=high.device) >= count
        high, low = high.masked_fill_(missing, -torch.inf), low.masked_fill_(missing, -torch.inf)
    return high, low


@with_kernel()
def stand(high: torch.Tensor, low: torch.Tensor, places: int, apart: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where chunks stand for the heads of a row, at most and at least, as `standing` ranks them: (R, n) float32 each,
    new. The `apart` first chunks stand above all, at most.

    Args:
        high, low: of `limits`.
        places: first places of each head that give points, at most n.
    """
    heads = high.shape[1]
    queues, order = high.sort(dim=2, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(2, order, torch.arange(high.shape[2], device=high.device).expand_as(order))
    points = (places - ranks).clamp_(min=0).float()
    most = points.amax(1) + points.sum(1) / (heads * places + 1)
    beaten = torch.searchsorted(-queues[:, :, :places].contiguous(), -low)  # whose upper bound is above
    least = (places - beaten).float().masked_fill_(ranks >= places, 0)
    most[:, :apart] = torch.inf
    return most, least.amax(1)


@with_kernel()
def front(most: torch.Tensor, least: torch.Tensor, group: int, wanted: int, budget: int) -> torch.Tensor:
    """The chunks at the front of each row's queue (LeoAM, section 4.2), as the function of this name chooses them on a
    processor: (R, `budget` or n) int32, ascending up to the first -1, new.

    Args:
        most, least: of `stand`; contiguous.
        group: G.
        wanted: important tokens that the chunks must contain, at least 1.
        budget: most chunks of a row, at least 1.
    """
    count = most.shape[1]
    queue, order = most.sort(dim=1, descending=True, stable=True)
    above = torch.searchsorted(-queue, -least.gather(1, order))
    place = torch.arange(count, device=most.device)
    whole = torch.maximum(above, place + 1)
    counted = torch.zeros(len(most), count + 1, dtype=torch.int64, device=most.device)
    counted = counted.scatter_add_(1, whole, torch.ones_like(whole)).cumsum(1)[:, 1:] * (group - 1) + place + 1
    length = (counted < wanted).sum(1, keepdim=True) + 1
    units = torch.where(place < length, order, count)[:, :budget].sort(1).values
    return units.masked_fill(units == count, -1).int()


@with_kernel()
def look(
    query: torch.Tensor, data: torch.Tensor, slots: torch.Tensor, recent: torch.Tensor, form: Any, scaling: float,
    wanted: int, apart: int, count: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Keep the `wanted` most important tokens of the chunks in slots: (R, S, G) bool, new. Important is what has large
    shares in the attention to all of these and the latest tokens, summed over a row's heads (LeoAM, section 4.2). Sums
    that are NaN count as 0.

    Args:
        query: (B, H, D), contiguous in the last dimension.
        data: (R, M, E) payloads of `form`, as for `slots.attend`.
        slots: (R, S) int32; -1: none.
        recent: keys (R, K, t, D) of the latest tokens, contiguous in the last dimension.
        scaling: factor of the scores.
        wanted: tokens to keep of each row, those of `apart` included.
        apart: first tokens of each row, which are kept.
        count: () int64, on the device: number of the first `recent` keys that exist; None: all. There may be anything
            in the others.
    """
    rows, (_, key_heads, _, dim) = len(slots), recent.shape
    at = slots.clamp(min=0).long()[..., None].expand(-1, -1, data.shape[2])
    entries = form.unpacked(data.gather(1, at).flatten(0, 1)).reshape(rows, -1, form.entry_width)
    hidden = (slots < 0).repeat_interleave(form.group_size, 1)
    keys = form.split(entries.masked_fill(hidden[..., None], 0))[0]
    grouped = (query.float() * scaling).reshape(rows, key_heads, -1, dim)
    if count is not None:
        missing = torch.arange(recent.shape[2], device=recent.device) >= count
        recent = recent.masked_fill(missing[:, None], 0)
    scores = torch.cat([grouped @ keys.float().transpose(2, 3), grouped @ recent.float().transpose(2, 3)], 3)
    scores[..., : hidden.shape[1]].masked_fill_(hidden[:, None, None], -torch.inf)
    if count is not None:
        scores[..., hidden.shape[1] :].masked_fill_(missing, -torch.inf)
    importance = scores.softmax(3)[..., : hidden.shape[1]].sum((1, 2)).nan_to_num_()
    importance[:, :apart] = torch.inf
    importance.masked_fill_(hidden, -1)
    order = importance.sort(dim=1, descending=True, stable=True).indices[:, :wanted]
    keep = torch.zeros_like(hidden).scatter_(1, order, True) & ~hidden
    return keep.view(*slots.shape, form.group_size)
