"""Our names in transformers' tables: an attention function and a mask function for each that a model may have had."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..history.autocast import autocast_dtype
from .attention_call import TAG, AttentionCall, AttentionFunction, Tag, own_attention, run_own
from .untraced import untraced

PREFIX = "hf_offload_cache_"
"""Before the name of the implementation that a config had: the name tells what to delegate to. Never holds "flash"."""
ALWAYS = ("sdpa", "eager")
"""Implementations that every transformers has."""
_OWN_KERNELS = ("flash", "flex", "paged")
"""Parts of names whose masks are of another kind, or whose names transformers treats in a way of its own."""


def replaceable(implementation: str) -> bool:
    """Whether attention by `implementation` can go through ours."""
    attention, masks = _tables()
    known = implementation in ALWAYS or (implementation in attention and implementation in masks)
    return known and not any(part in implementation for part in _OWN_KERNELS)


def register(implementation: str) -> None:
    """Make our name for `implementation` known to transformers: the attention function and the mask function."""
    attention, masks = _tables()
    own = functools.partial(run_own, implementation)
    attention.register(PREFIX + implementation, functools.partial(_attention, implementation, own))
    masks.register(PREFIX + implementation, masks[implementation])


def _tables() -> tuple[Any, Any]:
    """transformers' attention functions and mask functions; with them comes all that makes models."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def _attention(
    implementation: str,
    own: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tag = getattr(key, TAG, None)
    if tag is None:
        return own_attention(module, implementation)(module, query, key, value, attention_mask, *args, **kwargs)
    autocast = autocast_dtype(query.device)
    return _attend(tag, AttentionCall(own, module, query, key, value, attention_mask, args, kwargs, autocast))


@untraced  # whatever a method does in its layer's `attend`, it is not traced
def _attend(tag: Tag, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    return tag.layer.attend(call)
