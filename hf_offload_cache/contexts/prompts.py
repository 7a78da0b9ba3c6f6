"""Prompts as contexts keep them, and what a model lets a context do with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

_KINDS = ("image", "video", "audio", "vision", "boi", "boa")


def encode(ids: torch.Tensor, mask: torch.Tensor | None) -> np.ndarray:
    """Ids (B, T) with those of padding apart from all tokens, as `TokenLog` keeps them: int64 (B, T)."""
    ids = ids.detach().to("cpu", torch.int64)
    return ids.numpy() if mask is None else torch.where(mask.to("cpu") != 0, ids, -3 - ids).numpy()


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Leading columns in which two (B, ·) are equal in all rows."""
    length = min(one.shape[1], other.shape[1])
    differ = (one[:, :length] != other[:, :length]).any(0)
    return int(differ.argmax()) if differ.any() else length


def may_crop(model: Any) -> bool:
    """Whether all layers can take tokens back."""
    layers = DynamicCache(config=model.config).layers
    return not any(getattr(x, "is_sliding", False) or isinstance(x, LinearAttentionCacheLayerMixin) for x in layers)


def placeholders(model: Any) -> list[int]:
    """Ids of tokens that stand for something else than text."""
    fields = vars(model.config).items()
    ends = ("_token_id", "_token_index")
    return [value for name, value in fields if name.startswith(_KINDS) and name.endswith(ends) and type(value) is int]
