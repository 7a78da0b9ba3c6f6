"""What `torch.compile` must not trace, at the price of one check where nothing is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """`function`, which a graph that is being traced breaks at and calls as it stands.

    `torch.compiler.disable` does the same, and costs ten calls at each of its own even where nothing is compiled; it
    also brings the compiler in when a module is imported.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _outside(function, *args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


def _outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch.compiler.disable(function)(*args, **kwargs)
