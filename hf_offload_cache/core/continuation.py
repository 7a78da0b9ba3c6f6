"""Whether what a model is given continues what its cache holds: checked before anything is taken in."""

from __future__ import annotations

from typing import Any

import torch

from ..config import OffloadConfig
from ..errors import BudgetError, PromptError
from ..model.own_model import OwnModel, name_of
from .token_log import TokenLog


def check_prompt(tokens: TokenLog, held: int, input_ids: torch.Tensor) -> None:
    """`generate` is about to drop the first `held` of ids (B, P). Raises `PromptError` unless those are held."""
    if not held:
        return
    if input_ids.shape[1] <= held:
        raise PromptError(
            f"the prompt has {input_ids.shape[1]} tokens and the cache already holds {held}: pass the whole "
            "conversation with at least one new token, or reset() the cache for a new one"
        )
    position = tokens.first_difference(input_ids[:, :held])
    if position is not None:
        raise PromptError(
            f"the prompt differs from what the cache holds at token {position} of {held}: "
            "it does not continue this cache; reset() it, or use a new one for an unrelated prompt"
        )


def check_positions(positions: Any, mask: Any, held: int) -> None:
    """Raises `PromptError` for a step over `held` tokens whose positions begin at 0, but after padding."""
    if positions is None or positions.ndim != 2 or bool((positions[:, 0] != 0).any()):
        return
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool(mask[:, :held].any()):
        return  # only padding so far
    raise PromptError(
        f"the step starts at position 0 and the cache already holds {held} tokens: transformers would append "
        "the prompt to them; reset() the cache for a new prompt, or pass only the tokens that are new"
    )


def padding_of(tokens: TokenLog, mask: Any, held: int, length: int, *, compare: bool) -> torch.Tensor | None:
    """Where the step's own tokens, [held, length), are padding: bool (B, t) in host memory, or None.

    With `compare`, raises `PromptError` for a mask (B, length) that shows padding which is held; a mask that is missing
    where there is some is always refused. To hide tokens that are held is right, and so is, for us, a mask of another
    kind.
    """
    if mask is None:
        if held and tokens.padded and tokens.length == held:
            raise PromptError(
                "attention_mask is missing, and what the cache holds has padding: pass the mask of the whole "
                "conversation, as `cache.attention_mask` begins it"
            )
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape[1:] != (length,):
        return None
    if compare and held and tokens.length == held:
        shown = ((mask[:, :held].to("cpu") != 0) & ~tokens.visible).nonzero()
        if len(shown):
            row, position = shown[0].tolist()
            raise PromptError(
                f"attention_mask shows token {position} of sequence {row}, which is padding in what the cache holds: "
                "pass the mask of the whole conversation, as `cache.attention_mask` begins it"
            )
    return mask[:, held:].detach().to("cpu") == 0


def check_model(own: OwnModel, other: torch.nn.Module | None) -> None:
    """Raises `PromptError` for a forward of `other`, unless that is the cache's own model, or one within the other."""
    if other is not None and not own.includes(other):
        mine = own()
        raise PromptError(
            f"this cache was made for {'a model that is gone' if mine is None else name_of(mine)} and was given to "
            f"{name_of(other)}: what it holds means nothing there; make a cache with that model"
        )


def check_planned(config: OffloadConfig, batch: int, length: int) -> None:
    """Raises `BudgetError` where `batch` sequences or `length` tokens a sequence are beyond what was planned."""
    for name, asked, most in (("max_batch", batch, config.max_batch), ("max_context", length, config.max_context)):
        if most is not None and asked > most:
            unit = "sequences" if name == "max_batch" else "tokens a sequence"
            raise BudgetError(
                f"{name} is {most:,} and this step would make it {asked:,} {unit}; nothing was taken in: make the "
                f"cache with {name}={asked} or more, or reset() it for a new context"
            )
