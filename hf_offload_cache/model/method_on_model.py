"""A method of one model that is replaced for a while."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _nothing() -> None:
    pass


class MethodOnModel:
    """In the place of a model's method `name`, which it calls: the class's, or one that the user had put on this model.
    Holds the model weakly: a copy or a pickle of the model holds that copy."""

    name: ClassVar[str]

    def __init__(self, model: PreTrainedModel, given: Callable[..., Any] | None) -> None:
        self._model = weakref.ref(model)
        self.given = given
        """What the user had put on the model itself."""
        self.turn_to_others: Callable[[], None] = _nothing
        """Called where the method is called without a cache of ours; a copy has none."""

    def __reduce__(self) -> Any:
        return type(self), (self._model(), self.given)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodOnModel:
        model = self.model
        return type(self)(memo.get(id(model), model), copy.deepcopy(self.given, memo))

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's own: transformers looks there for what the model takes."""
        return inspect.signature(self.method())

    def method(self) -> Callable[..., Any]:
        """What is called in the end."""
        if self.given is not None:
            return self.given
        model = self.model
        return functools.partial(getattr(type(model), self.name), model)

    @property
    def model(self) -> PreTrainedModel:
        """Raises `RuntimeError` where it is gone."""
        model = self._model()
        if model is None:
            raise RuntimeError(f"the model of this {self.name} is gone: call it on a live one")
        return model

    @classmethod
    def put_on(cls, model: PreTrainedModel, turn_to_others: Callable[[], None]) -> None:
        """Put ours in the place of the method of `model`, if it has one."""
        if hasattr(model, cls.name):
            ours = model.__dict__[cls.name] = cls(model, model.__dict__.get(cls.name))
            ours.turn_to_others = turn_to_others

    @classmethod
    def take_off(cls, model: PreTrainedModel) -> None:
        """Put back what was there before; nothing where ours is not there any more."""
        ours = model.__dict__.get(cls.name)
        if isinstance(ours, cls):
            if ours.given is None:
                del model.__dict__[cls.name]
            else:
                model.__dict__[cls.name] = ours.given
