"""Running a prompt through a model, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    chunk: int = 1024,
    on_progress: Callable[[int], object] | None = None,
) -> None:
    """Runs `input_ids` (1, T) through the model in chunks; the cache holds T tokens more.

    `on_progress` gets the number of tokens done after each chunk, in this thread.
    """
    import torch

    if chunk < 1:
        raise ConfigError(f"prefill chunk must be at least 1 token, got {chunk}: use 1024")
    with torch.no_grad():  # as `generate` does; tensors of inference mode could not be written to afterwards
        done, every = 0, input_ids.shape[1]
        while done < every:
            end = min(every, done + chunk)
            if every - end == 1 and chunk > 2:
                end -= 1  # a last piece of one token would be a step, which a cache selects for
            model(input_ids=input_ids[:, done:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
            done = end
            if on_progress is not None:
                on_progress(done)
