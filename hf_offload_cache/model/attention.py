"""Attention over blocks, merged by log-sum-exp, and the way back to the model's own attention function."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_QUERY_BLOCK = 512
"""Queries that the reference computes at a time: bounds its scores to a few MiB."""


def own_attention(module: torch.nn.Module, implementation: str) -> AttentionFunction:
    """The attention function that `module` would call under `implementation` without us.

    "eager" is not registered: it is the `eager_attention_forward` beside the module's class (or one of its bases).
    """
    if implementation in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for base in type(module).__mro__:
        function = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise RuntimeError(f"{type(module).__name__}: no attention function for {implementation!r} was found")


def additive_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask (·, 1, q, T), boolean (True: visible) or additive, as an additive one whose hidden places are -inf."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))


def visible_columns(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which of the T columns the last query sees: boolean (·, T), or None for all."""
    if mask is None:
        return None
    last = mask[:, 0, -1]
    return last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2


def attend_once(
    attention: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the model's `attention` gives for one query a row, (B, H, 1, D), over all of keys and values (B, Hkv, t, D).

    Where it is a plain softmax, the query heads of one key head go in as so many queries of it: keys and values are
    then not repeated for each, which is most of the time of a call this small. Equal up to rounding.
    """
    plain = all(kwargs.get(name) is None for name in ("softcap", "s_aux")) and not kwargs.get("output_attentions")
    if args or not plain or query.shape[-1] != values.shape[-1]:
        return attention(module, query, keys, values, mask, *args, **kwargs)
    grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    mask = None if mask is None else mask.expand(-1, -1, grouped.shape[2], -1)
    scaling = kwargs.get("scaling")
    output = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scaling)
    return output.reshape(query.shape[0], 1, *query.shape[1:2], query.shape[3]), None


def stream_attention(
    query: torch.Tensor,
    history: Iterable[tuple[torch.Tensor, torch.Tensor]],
    own: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query (B, H, q, D) over blocks of keys and values (B, Hkv, t, D), one at a time.

    `history` gives consecutive blocks that every query may see; `own` is the block that ends with the queries' own
    tokens; together they are T tokens. `mask` (·, 1, q, T) as the model made
    it, or None: causal, aligned at the lower right. `softcap` bounds scores by tanh; `s_aux` (H,) is a logit a head
    that joins the denominator alone. A query that sees nothing gives zeros.

    Each block is merged into a running float32 result by its log-sum-exp: equal to one softmax over all blocks up to
    float32 rounding. Blocks are not kept. Returns (B, q, H, Dv) in the query's dtype, contiguous.
    """
    batch, heads, num_queries, dim = query.shape
    scaling = dim**-0.5 if scaling is None else scaling
    total: torch.Tensor | None = None
    log_sum = torch.full((batch, heads, num_queries), float("-inf"), device=query.device)
    position = 0
    for keys, values in itertools.chain(history, [own]):
        length = keys.shape[2]
        causal = mask is None and keys is own[0] and num_queries > 1
        part_mask = None if mask is None else additive_mask(mask[..., position : position + length])
        part, part_log_sum = attend_block(
            query, keys, values, part_mask, causal=causal, scaling=scaling, softcap=softcap
        )
        position += length
        merged = torch.logaddexp(log_sum, part_log_sum)
        old_weight = torch.exp(log_sum - merged).nan_to_num_(0.0).unsqueeze(-1)
        new_weight = torch.exp(part_log_sum - merged).nan_to_num_(0.0).unsqueeze(-1)
        total = part * new_weight if total is None else total.mul_(old_weight).add_(part * new_weight)
        log_sum = merged
    assert total is not None
    if s_aux is not None:
        sink = s_aux.float().reshape(1, heads, 1)
        total *= torch.exp(log_sum - torch.logaddexp(log_sum, sink)).unsqueeze(-1)
    return total.transpose(1, 2).to(query.dtype).contiguous()


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

    `mask` is additive, (·, 1, q, t). `causal`: the block ends with the queries' own tokens. Takes PyTorch's fused CPU
    kernel where it applies (same values up to rounding, a tenth of the time), else `attend_block_reference`.
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


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "no gradient flows through a history that hf_offload_cache brought back from its store: "
            "run the forward under torch.no_grad(), or train with DynamicCache"
        )


def no_backward(tensor: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """`tensor` (a leaf), whose values joined a graph that `beside` is part of: a backward pass that comes here raises
    instead of being silently wrong."""
    if not (torch.is_grad_enabled() and beside.requires_grad):
        return tensor
    return _NoBackward.apply(tensor.requires_grad_())
