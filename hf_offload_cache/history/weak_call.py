"""A method without its object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch


def weak_call(method: Callable[[], Iterator[torch.Tensor]]) -> Callable[[], Iterator[torch.Tensor]]:
    """Calls a method of an object that it does not keep: one that the object itself holds makes no cycle."""
    held = weakref.WeakMethod(method)

    def call() -> Iterator[torch.Tensor]:
        found = held()
        assert found is not None, "the history is gone"
        return found()

    return call
