"""Attention over one block of keys and values, with the log-sum-exp that merges it with others."""

from __future__ import annotations

import torch

_QUERY_BLOCK = 512
"""Queries that the reference computes at a time: bounds its scores to a few MiB."""


def attend_block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one block: float32 (B, H, q, Dv) and its log-sum-exp (B, H, q), -inf where nothing is seen.

    `mask` is additive, (·, 1 or Hkv, q, t). `causal`: the block ends with the queries' own tokens. Takes PyTorch's
    fused CPU kernel where it applies (same values up to rounding, a tenth of the time), else `attend_block_reference`.
    """
    fused = (
        query.device.type == "cpu"
        and softcap is None
        and query.shape[-1] == values.shape[-1]
        and (not causal or query.shape[2] == keys.shape[2])
        and not (torch.is_grad_enabled() and query.requires_grad)
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )
    if not fused:
        return attend_block_reference(query, keys, values, mask, causal=causal, scaling=scaling, softcap=softcap)
    groups = query.shape[1] // keys.shape[1]
    if groups > 1:
        keys = keys.repeat_interleave(groups, 1)
        values = values.repeat_interleave(groups, 1)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(groups, 1)
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=None if mask is None else mask.to(query.dtype), scale=scaling
    )
    if mask is not None:  # the kernel leaves the log-sum of a row that sees nothing undefined
        log_sum = log_sum.masked_fill(mask.amax(-1) == float("-inf"), float("-inf"))
        output = output.masked_fill((log_sum == float("-inf")).unsqueeze(-1), 0.0)
    return output.float(), log_sum


def attend_block_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_block` in plain float32 tensor operations."""
    batch, heads, num_queries, _ = query.shape
    num_kv, length = keys.shape[1], keys.shape[2]
    keys32, values32 = keys.float().unsqueeze(2), values.float().unsqueeze(2)
    outputs, log_sums = [], []
    for start in range(0, num_queries, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, num_queries)
        part = query[:, :, start:stop].float().unflatten(1, (num_kv, heads // num_kv))
        scores = part @ keys32.transpose(-1, -2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask[:, :, None, start:stop]
        if causal:
            rows = torch.arange(start, stop, device=query.device)[:, None] + (length - num_queries)
            scores = scores.masked_fill(torch.arange(length, device=query.device) > rows, float("-inf"))
        log_sum = scores.logsumexp(-1)
        weights = torch.exp(scores - log_sum.nan_to_num(neginf=0.0).unsqueeze(-1))
        outputs.append((weights @ values32).flatten(1, 2))
        log_sums.append(log_sum.flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(log_sums, 2)
