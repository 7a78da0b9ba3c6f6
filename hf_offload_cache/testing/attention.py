"""Attention over a history in one softmax: the reference for `stream_attention`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..model.masks import mask_at
from ..model.stream_attention import Block, attend_block_reference


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
    """`stream_attention` as one softmax over the complete history. Each entry is copied to its position, one row and
    head at a time, and positions without an entry are hidden."""
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
