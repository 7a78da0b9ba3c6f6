"""A guess of the next token that a model is given beside each token; whoever calls the model does not see it (SpeCache,
section 3.3)."""

from __future__ import annotations

from typing import Any

import torch

from ..model.rotary import length_dependent, rotary_kinds
from .layers import has_linear_state
from .offload_layer import OffloadLayer

_OF_TOKENS = ("position_ids", "cache_position")
"""Arguments that have something for each token that comes, on their last axis."""
_ALIKE = ("token_type_ids", "mm_token_type_ids")
"""The same; a guess is of the kind of the token before it."""
_KNOWN = {"input_ids", "attention_mask", *_OF_TOKENS, *_ALIKE}
_OF_ALL_TOKENS = ("output_attentions", "output_router_logits")
"""Asked for by an argument or the model's config: what tells of all tokens of a forward, a guess among them."""


def reason_against_guesses(model: Any, layers: list[Any]) -> str | None:
    """Why a model cannot be given a guess beside its token; None: it can."""
    if not getattr(model, "can_generate", lambda: False)():
        return "what it gives is no text"
    keep = 0
    for layer in layers:
        known = type(layer).__module__ == "transformers.cache_utils" or isinstance(layer, OffloadLayer)
        keep += has_linear_state(layer) or not known
    if keep:
        return f"{keep} of its layers cannot run two tokens and keep one"
    return length_dependent(model)


def most_positions(model: Any) -> int | None:
    """How many positions a model has; None: rotary embeddings, which go on beyond those it was trained with."""
    if rotary_kinds(model):
        return None
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def most_ids(model: Any) -> int | None:
    """How many ids a model has embeddings of; None: that is not known."""
    try:
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        known = None
    return getattr(model.config.get_text_config(), "vocab_size", None) if known is None else known


def is_a_guess(guess: Any, sequences: int, model: Any) -> bool:
    """Whether `guess` is a tensor of ids (sequences, 1) for which the model has embeddings."""
    if not isinstance(guess, torch.Tensor) or guess.dtype != torch.int64 or guess.shape != (sequences, 1):
        return False
    known = most_ids(model)
    return bool((guess >= 0).all()) and (known is None or bool((guess < known).all()))


def record_past(layers: list[Any]) -> list[Any]:
    """Let layers of transformers' own keep what a guess pushes out of their windows; those that did not already."""
    found = [layer for layer in layers if getattr(layer, "record_past", True) is False]
    for layer in found:
        layer.activate_past_recording()
    return found


def may_guess(call: dict[str, Any], config: Any) -> bool:
    """Whether a model of `config` may be given one token more than this call of one token a sequence has: its arguments
    are known to allow it, and what it returns is known."""
    ids, mask, keep = (call.get(name) for name in ("input_ids", "attention_mask", "logits_to_keep"))
    if ids is None or ids.ndim != 2 or ids.shape[1] != 1 or call.get("return_dict") is False:
        return False
    if isinstance(keep, torch.Tensor) or (mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2)):
        return False
    for name in _OF_ALL_TOKENS:
        asked = call.get(name)
        if getattr(config, name, False) if asked is None else asked:
            return False
    others = (value for name, value in call.items() if name not in _KNOWN)
    return not any(isinstance(value, torch.Tensor) for value in others)


def with_guess(call: dict[str, Any], guess: torch.Tensor) -> dict[str, Any]:
    """The call with `guess`, ids (B, 1), behind its token."""
    ids, mask, keep = call["input_ids"], call.get("attention_mask"), call.get("logits_to_keep")
    changed = {**call, "input_ids": torch.cat([ids, guess.to(ids.device)], 1)}
    if mask is not None:
        changed["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, -1:])], 1)
    for name in _OF_TOKENS:
        if (places := call.get(name)) is not None:
            changed[name] = torch.cat([places, places[..., -1:] + 1], -1)
    for name in _ALIKE:
        if (kinds := call.get(name)) is not None:
            changed[name] = torch.cat([kinds, kinds[..., -1:]], -1)
    if keep:
        changed["logits_to_keep"] = keep + 1
    return changed


def guess_of(output: Any, known: int | None) -> torch.Tensor | None:
    """The likeliest token (B, 1) after the last one of a model's output; None where it has no logits, or those of more
    than the `known` ids: of codes, which no id of text stands for."""
    logits = getattr(output, "logits", None)
    if logits is None or (known is not None and logits.shape[-1] > known):
        return None
    return logits[:, -1].argmax(-1, keepdim=True)


def without_guess(output: Any) -> Any:
    """The output of a model, in place, as if it had been given no guess."""
    output.logits = output.logits[:, :-1]
    if (states := getattr(output, "hidden_states", None)) is not None:
        output.hidden_states = tuple(one[..., :-1, :] for one in states)
    return output
