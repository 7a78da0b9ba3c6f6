"""Prefill of a prompt, in pieces if the model allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..model.look_ahead import reason_against_pieces

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

PIECE = 1024
"""Tokens of a piece, where nobody says another number."""


def piece_size(
    model: PreTrainedModel, held: int, total: int, chunk: int | None = None, *, until: int | None = None,
    usual: int = PIECE,
) -> int | None:  # fmt: skip
    """Number of tokens per forward for a prompt that ends after `total` tokens, of which `held` were added in earlier
    turns: `chunk`, or `usual` if that is None. None: the prompt goes through the model in one forward. `until`: the
    last position at which the final forward may begin; None: no limit.

    Raises `ConfigError` for a `chunk` below 1, or one with which the prompt would have other keys than in one forward.
    """
    if chunk is not None and chunk < 1:
        raise ConfigError(f"prefill chunk must be at least 1 token, got {chunk}: use {PIECE}")
    size = usual if chunk is None else chunk
    first = held + size if until is None else min(held + size, until)
    reason = None if first <= held else reason_against_pieces(model, first, total)
    if reason is None:
        return size
    if chunk is not None and held + chunk < total:
        raise ConfigError(
            f"a prefill chunk of {chunk:,} tokens is not possible with {type(model).__name__}: {reason}; leave the "
            "prefill chunk out, and the prompt goes through the model in one forward"
        )
    return None


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    chunk: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> None:
    """Run `input_ids` (1, T), a complete prompt or a turn, through the model; the cache then holds T more tokens.

    `chunk`: tokens per forward; None: 1,024, or all of them if the model's keys depend on a forward's length.
    `on_progress` gets the number of finished tokens after each forward, in this thread. Raises `ConfigError`.
    """
    import torch

    every = input_ids.shape[1]
    held = cache.get_seq_length()
    size = piece_size(model, held, held + every, chunk) or every
    with torch.no_grad():  # as `generate` does; tensors of inference mode could not be written to afterwards
        done = 0
        while done < every:
            end = min(every, done + size)
            if every - end == 1 and size > 2:
                end -= 1  # a last piece of one token would be a step, which a cache selects for
            model(input_ids=input_ids[:, done:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
            done = end
            if on_progress is not None:
                on_progress(done)
