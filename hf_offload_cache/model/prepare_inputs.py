"""The look at a prompt before `generate` drops what the cache should hold of it already, and at what the model makes of
it: the cache goes on where the model gives it up."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CacheUnusedError
from .attachable import cache_among, unwrapped
from .method_on_model import MethodOnModel


class PrepareInputs(MethodOnModel):
    """In the place of a model's `prepare_inputs_for_generation`."""

    name = "prepare_inputs_for_generation"

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        cache = cache_among((), kwargs)
        if cache is not None:
            first, some = bool(kwargs.get("is_first_iteration")), kwargs.get("next_sequence_length") is not None
            if first and some:
                cache.check_prompt(input_ids, kwargs.get("inputs_embeds"))
            cache.prepare_step(first=first or not some)  # transformers 5.17 does not call a prompt's pieces first
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
