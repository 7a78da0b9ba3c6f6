"""Replaces a method of one model for a while."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Plain = Callable[..., Any]


@contextmanager
def replaced_method(owner: type, name: str, wrap: Callable[[Plain], Plain]) -> Iterator[None]:
    """Within the `with`, `owner.name` is the result of `wrap`. At its end it is removed, also from under another
    replacement of this library; under a replacement by other code it stays, inert."""
    inherited = getattr(vars(owner).get(name), "inherited", name not in vars(owner))
    under = [getattr(owner, name)]
    wrapped, on = wrap(lambda *args, **kwargs: under[0](*args, **kwargs)), True

    @functools.wraps(under[0])
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs) if on else under[0](*args, **kwargs)

    method.__dict__.update(under=under, inherited=inherited)
    setattr(owner, name, method)
    try:
        yield
    finally:
        on = False
        above, latest = None, vars(owner).get(name)
        while latest is not None and latest is not method:
            above = getattr(latest, "under", None)
            latest = None if above is None else above[0]
        if latest is not None and above is not None:
            above[0] = under[0]
        elif latest is not None and inherited:
            delattr(owner, name)
        elif latest is not None:
            setattr(owner, name, under[0])


def _nothing() -> None:
    pass


class MethodOnModel:
    """Replaces a method `name` of a model, or of a module in it: the class's, or one that the user had put there. Holds
    the model weakly: a copy or a pickle of the model holds that copy."""

    name: ClassVar[str]

    def __init__(self, model: PreTrainedModel, given: Callable[..., Any] | None) -> None:
        self._model = weakref.ref(model)
        self.given = given
        """The user's own method on the model."""
        self.turn_to_others: Callable[[], None] = _nothing
        """Called if the method is called without a cache of ours; a copy has none."""

    def __reduce__(self) -> Any:
        return type(self), (self._model(), self.given)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodOnModel:
        model = self.model
        return type(self)(memo.get(id(model), model), copy.deepcopy(self.given, memo))

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's own: transformers reads the model's parameters from it."""
        return inspect.signature(self.method())

    def method(self) -> Callable[..., Any]:
        """The method that is finally called."""
        if self.given is not None:
            return self.given
        model = self.model
        return functools.partial(getattr(type(model), self.name), model)

    @property
    def model(self) -> PreTrainedModel:
        """Raises `RuntimeError` if the model is gone."""
        model = self._model()
        if model is None:
            raise RuntimeError(f"the model of this {self.name} is gone: call it on a live one")
        return model

    @classmethod
    def put_on(cls, model: Any, turn_to_others: Callable[[], None] = _nothing) -> None:
        """Replace the method of `model`, if it has one."""
        if hasattr(model, cls.name):
            ours = model.__dict__[cls.name] = cls(model, model.__dict__.get(cls.name))
            ours.turn_to_others = turn_to_others

    @classmethod
    def take_off(cls, model: Any) -> None:
        """Restore the previous method; does nothing if ours is no longer there."""
        cls.unlink(model, lambda method: isinstance(method, cls))

    @classmethod
    def unlink(cls, model: Any, wanted: Callable[[MethodOnModel], bool]) -> None:
        """Remove the latest `wanted` replacement, also from under others of this library."""
        above: MethodOnModel | None = None
        method = model.__dict__.get(cls.name)
        while isinstance(method, MethodOnModel) and not wanted(method):
            above, method = method, method.given
        if not isinstance(method, MethodOnModel):
            return
        if above is not None:
            above.given = method.given
        elif method.given is None:
            del model.__dict__[cls.name]
        else:
            model.__dict__[cls.name] = method.given
