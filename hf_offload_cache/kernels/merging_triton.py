"""Triton's kernels of `merging`, for a CUDA device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ELEMENTS = 1 << 12
"""Elements that a program merges."""


@triton.jit(do_not_specialize=["heads", "queries"])
def _merge(  # type: ignore[no-untyped-def]
    total, log_sum, part, part_log_sum, heads, queries, dim, total_row, total_head, total_query, sum_row, sum_head,
    sum_query, part_row, part_head, part_query, more_row, more_head, more_query, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(1).to(tl.int64)
    row, head = own // heads, own % heads
    query, channel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    there = query < queries
    inside = there[:, None] & (channel < dim)[None, :]
    log_sum += row * sum_row + head * sum_head + query * sum_query
    total += row * total_row + head * total_head + query[:, None] * total_query + channel[None, :]
    part += row * part_row + head * part_head + query[:, None] * part_query + channel[None, :]
    before = tl.load(log_sum, mask=there, other=float("-inf"))
    more = tl.load(
        part_log_sum + row * more_row + head * more_head + query * more_query, mask=there, other=float("-inf")
    )
    top = tl.maximum(before, more)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither sees anything
    added = tl.exp(more - top)
    both = tl.exp(before - top) + added
    share = tl.where(both > 0, added / both, 0.0)[:, None]
    old = tl.load(total, mask=inside, other=0.0)
    new = tl.load(part, mask=inside, other=0.0).to(tl.float32)
    tl.store(total, old + (new - old) * share, mask=inside)
    tl.store(log_sum, tl.where(both > 0, tl.log(both) + top, float("-inf")), mask=there)


def merge(
    total: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, part_log_sum: torch.Tensor
) -> None:
    """As `merging.merge`."""
    batch, heads, queries, dim = total.shape
    channels = triton.next_power_of_2(dim)
    rows = max(1, _ELEMENTS // channels)
    grid: Any = (triton.cdiv(queries, rows), batch * heads)
    strides = [stride for one in (total, log_sum, part, part_log_sum) for stride in one.stride()[:3]]
    _merge[grid](total, log_sum, part, part_log_sum, heads, queries, dim, *strides, rows, channels)
