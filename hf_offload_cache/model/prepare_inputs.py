"""The look at a prompt before `generate` drops what the cache should hold of it already."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .attachable import cache_among

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "prepare_inputs_for_generation"


def put_on(model: PreTrainedModel) -> None:
    """Put ours in the place of the method of `model`."""
    model.__dict__[_NAME] = PrepareInputs(model, model.__dict__.get(_NAME))


def take_off(model: PreTrainedModel) -> None:
    """Put back what was there before; nothing where ours is not there any more."""
    ours = model.__dict__.get(_NAME)
    if isinstance(ours, PrepareInputs):
        if ours.given is None:
            del model.__dict__[_NAME]
        else:
            model.__dict__[_NAME] = ours.given


class PrepareInputs:
    """In the place of a model's `prepare_inputs_for_generation`, which it calls: the class's, or one that the user had
    put on this model. Holds the model weakly: a copy or a pickle of the model holds that copy."""

    def __init__(self, model: PreTrainedModel, given: Callable[..., Any] | None) -> None:
        self._model = weakref.ref(model)
        self.given = given
        """What the user had put on the model itself."""

    def __reduce__(self) -> Any:
        return type(self), (self._model(), self.given)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrepareInputs:
        model = self._held_model()
        return type(self)(memo.get(id(model), model), copy.deepcopy(self.given, memo))

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's own: `generate` looks there for what the model takes."""
        return inspect.signature(self._method())

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        cache = cache_among((), kwargs)
        if cache is not None:
            first, some = bool(kwargs.get("is_first_iteration")), kwargs.get("next_sequence_length") is not None
            if first and some:
                cache.check_prompt(input_ids, kwargs.get("inputs_embeds"))
            cache.prepare_step(first=first or not some)  # transformers 5.17 does not call a prompt's pieces first
        return self._method()(input_ids, **kwargs)

    def _method(self) -> Callable[..., Any]:
        if self.given is not None:
            return self.given
        model = self._held_model()
        return functools.partial(getattr(type(model), _NAME), model)

    def _held_model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise RuntimeError(f"the model of this {_NAME} is gone: call it on a live one")
        return model
