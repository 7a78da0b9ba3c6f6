"""What `torch.compile` must not trace, at the price of one check where nothing is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_UNTRACED: list[Any] = []  # what was decorated, in the order of the modules: nothing else changes it


def untraced(function: Function) -> Function:
    """`function`, which a graph that is being traced breaks at and calls as it stands, once `ready` was called.

    `torch.compiler.disable` alone costs ten calls at each of its own even where nothing is compiled, and brings the
    compiler in when a module is imported.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return own.outside(*args, **kwargs)
        return function(*args, **kwargs)

    # The compiler counts what it compiled by code object: one for all would reach its limit with any model.
    plain: Any = call
    code = plain.__code__.replace(co_name=function.__name__)
    own: Any = functools.wraps(function)(FunctionType(code, globals(), None, None, plain.__closure__))
    own.outside = function
    _UNTRACED.append(own)
    return own


def ready() -> None:
    """A model may be compiled from now on. Idempotent; any thread."""
    for call in _UNTRACED:
        if call.outside is call.__wrapped__:
            call.outside = torch.compiler.disable(call.__wrapped__)
