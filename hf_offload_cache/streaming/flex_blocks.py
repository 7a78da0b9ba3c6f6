"""Attention over active blocks by FlexAttention: one kernel for all heads and blocks, where there is one."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


def has_kernel(device: torch.device) -> bool:
    """There is a kernel that leaves blocks out, and it is worth being compiled: on a CPU that takes longer than many a
    prefill."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attend_blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, active: torch.Tensor, before: int, block: int, *,
    scaling: float, softcap: float | None, compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Attention of query (1, H, q, D), whose tokens are the last q of keys (1, Hk, T, D) and values (1, Hk, T, Dv).

    Args:
        active: (Hk, blocks of queries, blocks of keys) bool, on the query's device: a query's own block among them.
        before: tokens before the queries, whole blocks.
        compiled: a kernel that skips the others; False: all scores, and a mask over them.

    Returns (1, q, H, Dv), contiguous.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    groups = query.shape[1] // keys.shape[1]
    first = before // block
    of_heads = active.repeat_interleave(groups, 0)
    behind = torch.tensor(before, device=query.device)  # as a number it would be compiled in

    def sees(batch: Any, head: Any, asked: Any, key: Any) -> Any:
        return of_heads[head, asked // block, key // block] & (asked + behind >= key)

    def capped(score: Any, batch: Any, head: Any, asked: Any, key: Any) -> Any:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    own = torch.zeros_like(of_heads)
    places = torch.arange(of_heads.shape[1], device=own.device)
    own[:, places, places + first] = True
    partly, whole = _indices(own), _indices(of_heads & ~own)
    mask = BlockMask.from_kv_blocks(
        *partly, *whole, BLOCK_SIZE=block, mask_mod=sees, seq_lengths=(query.shape[2], keys.shape[2])
    )
    attend = _compiled() if compiled else flex_attention
    output = attend(query, keys, values, capped, mask, scale=scaling, enable_gqa=groups > 1)
    return output.transpose(1, 2).contiguous()


def _indices(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (H, Q, K) bool how many there are in each row, (1, H, Q), and which come first, (1, H, Q, K)."""
    order = dense.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return dense.sum(-1, dtype=torch.int32)[None], order.to(torch.int32)[None]


@functools.cache
def _compiled() -> Any:
    """Compiled for the first length, and for any where another comes."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
