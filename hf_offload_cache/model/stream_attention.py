"""Attention over a history that comes in blocks, in any order, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .block_attention import attend_block, attend_block_reference
from .masks import additive_mask, mask_at

Block = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys and values (B, Hkv, t, D), and their positions: integers (t,) for all, (B, t) or (B, Hkv, t); -1 where an entry
is none. No positions, or None: the block follows those before it."""


def stream_attention(
    query: torch.Tensor,
    history: Iterable[Block],
    own: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    seen: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query (B, H, q, D) over blocks of keys and values, one at a time.

    `own` is the block that ends with the queries' own tokens, in order. `history` gives what comes before it and what
    every query may see: blocks in any order, all with positions, or all without and in order. `mask` (·, 1, q, T) is as
    the model made it, with a column for each position, the last ones for `own`; None: of `own` a query sees what does
    not come after it, aligned at the lower right. `seen` (·, 1, 1, ·) is what all queries see of the history, whatever
    the mask says of it. `softcap` bounds scores by tanh; `s_aux` (H,) is a logit a head that joins the denominator
    alone. An entry at position -1 is seen by no query; a query that sees nothing gives zeros.

    Each block is merged into a running float32 result by its log-sum-exp: equal to one softmax over all blocks up to
    float32 rounding. A block is used up before the next is asked for. Returns (B, q, H, Dv) in the query's dtype,
    contiguous.
    """
    heads, num_queries, dim = query.shape[1:]
    scaling = dim**-0.5 if scaling is None else scaling
    before = mask if seen is None else seen
    total: torch.Tensor | None = None
    log_sum: torch.Tensor

    def merge(keys: torch.Tensor, values: torch.Tensor, part_mask: torch.Tensor | None, causal: bool) -> None:
        nonlocal total, log_sum
        part, part_log_sum = attend_block(
            query, keys, values, part_mask, causal=causal, scaling=scaling, softcap=softcap
        )
        part_log_sum = part_log_sum.float()  # of a query in float64 the kernel's is too
        if total is None:
            total, log_sum = part.float(), part_log_sum
            return
        share = torch.sigmoid(part_log_sum - log_sum).nan_to_num_(0.0)  # of what both have seen; nan: nothing
        total.lerp_(part.float(), share.unsqueeze(-1))
        log_sum = torch.logaddexp(log_sum, part_log_sum)

    begin = 0
    for keys, values, *rest in history:
        positions = rest[0] if rest else None
        if positions is None:
            stop = begin + keys.shape[2]
            merge(keys, values, None if before is None else additive_mask(before[..., begin:stop]), False)
            begin = stop
        else:
            merge(keys, values, mask_at(before, positions), False)
    keys, values = own
    last = None if mask is None else additive_mask(mask[..., mask.shape[-1] - keys.shape[2] :])
    merge(keys, values, last, mask is None and num_queries > 1)
    assert total is not None
    if s_aux is not None:
        sink = s_aux.float().reshape(1, heads, 1)
        total *= torch.exp(log_sum - torch.logaddexp(log_sum, sink)).unsqueeze(-1)
    return total.transpose(1, 2).to(query.dtype).contiguous()


def stream_attention_reference(
    query: torch.Tensor,
    history: Iterable[Block],
    own: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    seen: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """`stream_attention` as one softmax: every entry is put at its position, a row and a head at a time, and what no
    entry was put at is hidden. Holds the whole history."""
    blocks = [(block[0], block[1], block[2] if len(block) == 3 else None) for block in history]
    batch, num_heads, num_queries, dim = query.shape
    heads, value_dim, length = own[0].shape[1], own[1].shape[3], own[0].shape[2]
    end = max([0, *(int(p.max()) + 1 for _, _, p in blocks if p is not None)])
    end = max(end, sum(keys.shape[2] for keys, _, p in blocks if p is None))
    end = end if mask is None else mask.shape[-1] - length
    keys = torch.zeros(batch, heads, end + length, dim, dtype=query.dtype, device=query.device)
    values = torch.zeros(batch, heads, end + length, value_dim, dtype=query.dtype, device=query.device)
    held = torch.zeros(batch, heads, end + length, dtype=torch.bool, device=query.device)
    begin = 0
    for block_keys, block_values, positions in [*blocks, (*own, torch.arange(end, end + length, device="cpu"))]:
        if positions is None:
            positions = torch.arange(begin, begin + block_keys.shape[2], device="cpu")
            begin += block_keys.shape[2]
        while positions.ndim < 2:
            positions = positions.unsqueeze(0)
        positions = (positions if positions.ndim == 3 else positions.unsqueeze(1)).expand(batch, heads, -1)
        for row in range(batch):
            for head in range(heads):
                here = positions[row, head].to(query.device)
                real = here >= 0
                keys[row, head, here[real]] = block_keys[row, head, real]
                values[row, head, here[real]] = block_values[row, head, real]
                held[row, head, here[real]] = True
    places = torch.arange(end + length, device=query.device)
    ends = torch.arange(num_queries, device=query.device)[:, None] + end + length - num_queries
    if mask is not None:
        bias = mask_at(mask, places)
    else:
        bias = torch.zeros(1, 1, num_queries, end + length, dtype=torch.float32, device=query.device)
        bias.masked_fill_(places > ends, -torch.inf)
    if seen is not None:
        before = mask_at(seen, places[:end]).expand(-1, -1, num_queries, -1)
        rows = max(len(before), len(bias))
        bias = torch.cat([before.expand(rows, -1, -1, -1), bias[..., end:].expand(rows, -1, -1, -1)], -1)
    bias = bias.expand(batch, heads, num_queries, -1).masked_fill(~held.unsqueeze(2), float("-inf"))
    scale = dim**-0.5 if scaling is None else scaling
    output, log_sum = attend_block_reference(query, keys, values, bias, causal=False, scaling=scale, softcap=softcap)
    if s_aux is not None:
        sink = s_aux.float().reshape(1, num_heads, 1)
        output *= torch.exp(log_sum - torch.logaddexp(log_sum, sink)).nan_to_num(0.0).unsqueeze(-1)
    return output.transpose(1, 2).to(query.dtype).contiguous()
