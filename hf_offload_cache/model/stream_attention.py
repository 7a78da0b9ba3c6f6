"""Attention over a history in blocks, in any order, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from ..kernels.mixed_attention import merge as merge_parts
from .masks import additive_mask, mask_at

# Attention over one block of keys and values

_QUERY_BLOCK = 512
"""Queries that the reference computes at a time: limits its scores to a few MiB."""

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
    sighted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one block: (B, H, q, Dv), of a kernel in the query's type, else float32; and its log-sum-exp (B,
    H, q), -inf for a query that sees nothing.

    `mask` is additive, (·, 1 or Hkv, q or 1, t). `causal`: the block ends with the queries' own tokens. `sighted`: each
    query sees something, whatever the mask. Uses one of PyTorch's fused kernels if one applies (same values up to
    rounding; ten times as fast on a CPU), else `attend_block_reference`.
    """
    same_ends = not causal or query.shape[2] == keys.shape[2]
    if softcap is None and same_ends and not (torch.is_grad_enabled() and query.requires_grad):
        fused = _fused(query, keys, values, mask, causal, scaling)
        if fused is not None:
            output, log_sum = fused
            blind = None if mask is None or sighted else mask.amax(-1) == float("-inf")
            if blind is not None and blind.shape[1] > 1:
                blind = blind.repeat_interleave(query.shape[1] // blind.shape[1], 1)
            # kernels leave the log-sum undefined if a row sees nothing; on a GPU, to ask whether one does takes longer
            if blind is not None and (not blind.is_cpu or bool(blind.any())):
                log_sum = log_sum.masked_fill(blind, float("-inf"))
                output = output.masked_fill((log_sum == float("-inf")).unsqueeze(-1), 0.0)
            return output, log_sum
    return attend_block_reference(query, keys, values, mask, causal=causal, scaling=scaling, softcap=softcap)


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> Attended | None:
    """By the fastest kernel that takes these and returns its log-sum-exp; None: there is none. Each key head, and its
    head of the bias if this has as many, is for as many query heads. Keys and values are copied only on a CPU, for
    queries that do not see the same keys."""
    same_width, groups = query.shape[-1] == values.shape[-1], query.shape[1] // keys.shape[1]
    joins = groups > 1 and not causal and (bias is None or bias.shape[2] == 1)
    as_queries = len(query), keys.shape[1], -1, query.shape[3]  # heads of a key head as further queries: read it once
    if query.device.type == "cpu" and same_width and hasattr(torch.ops.aten, _CPU_KERNEL):
        if groups > 1 and not joins:
            keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
            bias = bias if bias is None or bias.shape[1] == 1 else bias.repeat_interleave(groups, 1)
        bias = None if bias is None else bias.to(query.dtype)
        output, log_sum = getattr(torch.ops.aten, _CPU_KERNEL)(
            query.reshape(as_queries) if joins else query, keys, values, 0.0, causal, attn_mask=bias, scale=scale
        )
        return (output.reshape(*query.shape[:3], -1), log_sum.reshape(query.shape[:3])) if joins else (output, log_sum)
    if query.device.type != "cuda" or torch.version.hip is not None:
        return None
    asked = SDPAParams(query, keys, values, None, 0.0, causal, groups > 1)
    if bias is None and same_width and can_use_flash_attention(asked):
        return _flash(query, keys, values, bias, causal, scale)
    alone = query[:, :: groups]  # one query head of each key head
    if not can_use_efficient_attention(SDPAParams(alone, keys, values, None, 0.0, causal, False)):
        return None
    if groups == 1 or joins:
        output, log_sum = _efficient(query.reshape(as_queries), keys, values, bias, causal, scale)
        return output.reshape(*query.shape[:3], -1), log_sum.reshape(query.shape[:3])
    parts = [_efficient(query[:, head::groups], keys, values, bias, causal, scale) for head in range(groups)]
    outputs, log_sums = zip(*parts, strict=True)
    return torch.stack(outputs, 2).flatten(1, 2), torch.stack(log_sums, 2).flatten(1, 2)


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
    if bias is not None:  # each of its rows must begin at a multiple of 16 bytes
        length = keys.shape[2]
        if bias.dtype != query.dtype or any(stride % 16 for stride in bias.stride()[:-1]):
            bias = torch.nn.functional.pad(bias.to(query.dtype), (0, -length % 16))[..., :length]
        bias = bias.expand(*query.shape[:3], length)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    output, log_sum, *_ = kernel(query, keys, values, bias, True, 0.0, causal, scale=scale)
    return output, log_sum[..., : query.shape[2]]  # it has a multiple of 32 queries


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


Block = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys and values (B, Hkv, t, D), and their positions: integers (t,) for all, (B, t) or (B, Hkv, t); -1 for no entry.
No positions, or None: the block follows those before it. Without a mask for the history, an additive mask (B, 1 or Hkv,
1, t) in their place: it hides what is no entry, and each key head has some."""


def stream_attention(
    query: torch.Tensor,
    history: Iterable[Block],
    own: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    seen: torch.Tensor | None = None,
    attended: Attended | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query (B, H, q, D) over blocks of keys and values, one at a time.

    `own` is the block that ends with the queries' own tokens, in order. `history` is everything before it that every
    query may see: blocks in any order, all with positions, or all without and in order; without a mask for it, some of
    them may be without, whose entries are all seen, or have a mask of their own. `mask` (·, 1, q, T) is the model's,
    with a column per position, the last ones for `own`; None: a query sees the tokens of `own` up to itself, aligned at
    the lower right. `seen` (·, 1, 1, ·) is the part of the history that all queries see, whatever the mask says of it.
    `attended` is the result for other history, float32, which this call changes. `softcap` bounds scores by tanh;
    `s_aux` (H,) is a logit per head that joins the denominator only. No query sees an entry at position -1; a query
    that sees nothing gives zeros.

    Each block is merged into a running float32 result by its log-sum-exp: equal to one softmax over all blocks up to
    float32 rounding. A block is finished before the next is requested. Returns (B, q, H, Dv) in the query's dtype,
    contiguous.
    """
    heads, num_queries, dim = query.shape[1:]
    scaling = dim**-0.5 if scaling is None else scaling
    before = mask if seen is None else seen
    total: torch.Tensor | None = None
    log_sum: torch.Tensor
    if attended is not None:
        total, log_sum = attended

    def merge(
        keys: torch.Tensor, values: torch.Tensor, part_mask: torch.Tensor | None, causal: bool, sighted: bool = False
    ) -> None:
        nonlocal total, log_sum
        part, part_log_sum = attend_block(
            query, keys, values, part_mask, causal=causal, scaling=scaling, softcap=softcap, sighted=sighted
        )
        part_log_sum = part_log_sum.float()  # the kernel returns float64 for a float64 query
        if total is None:
            total, log_sum = part.float(), part_log_sum
            return
        if total.is_cuda:
            merge_parts(total, log_sum, part, part_log_sum)
            return
        share = torch.sigmoid(part_log_sum - log_sum).nan_to_num_(0.0)  # the part's weight; nan: neither sees anything
        total.lerp_(part.float(), share.unsqueeze(-1))
        log_sum = torch.logaddexp(log_sum, part_log_sum)

    begin = 0
    for keys, values, *rest in history:
        positions = rest[0] if rest else None
        if positions is None:
            stop = begin + keys.shape[2]
            merge(keys, values, None if before is None else additive_mask(before[..., begin:stop]), False)
            begin = stop
        elif positions.is_floating_point():
            query = query.contiguous()  # which each block's kernel would copy
            merge(keys, values, positions, False, True)
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
