"""Prompts as contexts keep them, and what a model lets a context do with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import ConfigError

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


def placeholders(model: Any) -> list[int]:
    """Ids of tokens that stand for something else than text."""
    fields = vars(model.config).items()
    ends = ("_token_id", "_token_index")
    return [value for name, value in fields if name.startswith(_KINDS) and name.endswith(ends) and type(value) is int]


def prompt_of(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, least: int, model: Any
) -> tuple[np.ndarray, int]:
    """A prompt (T,) or (B, T) as contexts keep it, and how many of its tokens may match. Raises `ConfigError`."""
    ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    mask = attention_mask[None] if attention_mask is not None and attention_mask.ndim == 1 else attention_mask
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise ConfigError(f"input_ids must be token ids (T,) or (B, T), got {tuple(input_ids.shape)} {input_ids.dtype}")
    if mask is not None and mask.shape != ids.shape:
        raise ConfigError(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise ConfigError(f"least must be a whole number of at least 1, got {least!r}")
    wanted = encode(ids, mask)
    stands_for = np.isin(wanted, placeholders(model)).any(0)
    return wanted, min(wanted.shape[1] - 1, int(stands_for.argmax()) if stands_for.any() else wanted.shape[1])
