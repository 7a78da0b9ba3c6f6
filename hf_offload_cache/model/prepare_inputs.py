"""Methods around a forward of `generate`: they make its positions, the pieces of a prompt, and the inputs, at which
point a model may drop the given cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..errors import CacheUnusedError, ConfigError
from .attachable import cache_among, unwrapped
from .method_on_model import MethodOnModel
from .rotary import reason_against_pieces


class PreparePositions(MethodOnModel):
    """Replaces the method that makes a generation's positions from the state that the model stored in the cache's
    earlier turns."""

    name = "_prepare_position_ids_for_generation"

    def __call__(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        cache = cache_among((), model_kwargs)
        if cache is None:
            self.turn_to_others()
            return self.method()(inputs_tensor, model_kwargs)
        with cache.conversing(begins=True):
            return self.method()(inputs_tensor, model_kwargs)


class Prefill(MethodOnModel):
    """Replaces the method that runs a prompt, in pieces if the generation has a `prefill_chunk_size`."""

    name = "_prefill"

    def __call__(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache, chunk = cache_among((), model_kwargs), getattr(generation_config, "prefill_chunk_size", None)
        if cache is not None and chunk is not None:
            held, positions = cache.held(), model_kwargs.get("position_ids")
            first, total = held + chunk, input_ids.shape[1]
            if isinstance(positions, torch.Tensor):
                first, total = int(positions[..., :first].max()) + 1, int(positions.max()) + 1
            if (reason := reason_against_pieces(self.model, first, total)) is not None:
                raise ConfigError(
                    f"prefill_chunk_size={chunk:,} is not possible with {type(self.model).__name__}: {reason}; leave "
                    "it out of generate and the generation_config, and the prompt goes through the model in one forward"
                )
        return self.method()(input_ids, generation_config, model_kwargs, *args, **kwargs)


class PrepareInputs(MethodOnModel):
    """Replaces a model's `prepare_inputs_for_generation`: checks the prompt before `generate` drops the part that the
    cache should already hold."""

    name = "prepare_inputs_for_generation"

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        cache = cache_among((), kwargs)
        if cache is None:
            self.turn_to_others()
        else:
            first, some = bool(kwargs.get("is_first_iteration")), kwargs.get("next_sequence_length") is not None
            if first and some:
                cache.check_prompt(input_ids, kwargs.get("inputs_embeds"))
            cache.prepare_step(first=first or not some)  # transformers 5.17 does not call a prompt's pieces first
        with nullcontext() if cache is None else cache.conversing():
            prepared: dict[str, Any] = self.method()(input_ids, **kwargs)
        if cache is not None:
            name = next(name for name, value in kwargs.items() if unwrapped(value) is cache)
            theirs = prepared.get(name)
            if theirs is None:  # Phi-3 beyond the positions of its short factors: all keys are made anew
                cache.start_over(prepared.get("input_ids"), prepared.get("inputs_embeds"))
                prepared[name] = kwargs[name]
            elif unwrapped(theirs) is not cache:
                raise CacheUnusedError(
                    f"{type(self.model).__name__} prepares its inputs with another cache, {type(theirs).__name__}, "
                    "instead of the one that it was given: run this model without this cache"
                )
        return prepared
