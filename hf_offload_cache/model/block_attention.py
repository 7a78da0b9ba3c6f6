"""Attention over one block of keys and values, with the log-sum-exp that merges it with others."""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

_QUERY_BLOCK = 512
"""Queries that the reference computes at a time: bounds its scores to a few MiB."""

_CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"

Attended = tuple[torch.Tensor, torch.Tensor]
"""Output (B, H, q, Dv) and log-sum-exp (B, H, q)."""


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

    `mask` is additive, (·, 1 or Hkv, q or 1, t). `causal`: the block ends with the queries' own tokens. Takes one of
    PyTorch's fused kernels where one applies (same values up to rounding; on a CPU in a tenth of the time), else
    `attend_block_reference`.
    """
    groups = query.shape[1] // keys.shape[1]
    same_ends = not causal or query.shape[2] == keys.shape[2]
    if softcap is None and same_ends and not (torch.is_grad_enabled() and query.requires_grad):
        every_key, every_value = (
            part.repeat_interleave(groups, 1) if groups > 1 else part for part in (keys, values)
        )
        bias = mask if mask is None or mask.shape[1] == 1 or groups == 1 else mask.repeat_interleave(groups, 1)
        fused = _fused(query, every_key, every_value, bias, causal, scaling)
        if fused is not None:
            output, log_sum = fused
            if bias is not None:  # kernels leave the log-sum of a row that sees nothing undefined
                log_sum = log_sum.masked_fill(bias.amax(-1) == float("-inf"), float("-inf"))
                output = output.masked_fill((log_sum == float("-inf")).unsqueeze(-1), 0.0)
            return output.float(), log_sum
    return attend_block_reference(query, keys, values, mask, causal=causal, scaling=scaling, softcap=softcap)


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> Attended | None:
    """By the fastest kernel that takes these and tells its log-sum-exp; None: there is none. As many heads in all."""
    call, same_width = (query, keys, values, bias, causal, scale), query.shape[-1] == values.shape[-1]
    if query.device.type == "cpu" and same_width and hasattr(torch.ops.aten, _CPU_KERNEL):
        return _on_cpu(*call)
    if query.device.type != "cuda" or torch.version.hip is not None:
        return None
    asked = SDPAParams(query, keys, values, None, 0.0, causal, False)
    if bias is None and same_width and can_use_flash_attention(asked):
        return _flash(*call)
    return _efficient(*call) if can_use_efficient_attention(asked) else None


def _on_cpu(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> Attended:
    bias = None if bias is None else bias.to(query.dtype)
    kernel = getattr(torch.ops.aten, _CPU_KERNEL)
    return kernel(query, keys, values, 0.0, causal, attn_mask=bias, scale=scale)


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> Attended:
    assert bias is None, "this kernel takes none"
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output, log_sum, *_ = kernel(query, keys, values, 0.0, causal, False, scale=scale)
    return output, log_sum


def _efficient(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> Attended:
    if bias is not None:  # each of its rows has to begin at a multiple of 16 bytes
        length = keys.shape[2]
        bias = torch.nn.functional.pad(bias.to(query.dtype), (0, -length % 16))[..., :length]
        bias = bias.expand(*query.shape[:3], length)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    output, log_sum, *_ = kernel(query, keys, values, bias, True, 0.0, causal, scale=scale)
    return output, log_sum[..., : query.shape[2]]  # it comes in multiples of 32 queries


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
            scores = scores + (mask if mask.shape[2] == 1 else mask[:, :, start:stop]).unsqueeze(2)
        if causal:
            rows = torch.arange(start, stop, device=query.device)[:, None] + (length - num_queries)
            scores = scores.masked_fill(torch.arange(length, device=query.device) > rows, float("-inf"))
        log_sum = scores.logsumexp(-1)
        weights = torch.exp(scores - log_sum.nan_to_num(neginf=0.0).unsqueeze(-1))
        outputs.append((weights @ values32).flatten(1, 2))
        log_sums.append(log_sum.flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(log_sums, 2)
