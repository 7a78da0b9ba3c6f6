"""The devices that kernels run on."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MOST_CHANNELS = 256
"""Channels of a head that kernels can hold in registers."""


@functools.cache
def _triton() -> bool:
    """Whether Triton is installed; torch for CUDA includes it on some systems."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device, *dims: int) -> bool:
    """Whether Triton's kernels run on `device`, over heads of so many channels."""
    return device.type == "cuda" and max(dims, default=0) <= MOST_CHANNELS and _triton()


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` with the device of its first tensor as the current one: a kernel is launched there, and a model
    may span several."""

    @functools.wraps(function)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        where: Any = next(given for given in args if isinstance(given, torch.Tensor))
        with torch.cuda.device_of(where):
            return function(*args, **kwargs)

    return launched
