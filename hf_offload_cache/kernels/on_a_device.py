"""Where kernels run: on which devices, and on that of what they are given."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MOST_CHANNELS = 256
"""Of a head that kernels hold in registers."""


@functools.cache
def _triton() -> bool:
    """Torch for CUDA brings it along; not on every system."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device, *dims: int) -> bool:
    """Whether kernels of Triton run on `device`, over heads of so many channels."""
    return device.type == "cuda" and max(dims, default=0) <= MOST_CHANNELS and _triton()


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with the device of the first tensor it is given as the current one: a kernel is launched there, and a
    model may lie on several."""

    @functools.wraps(function)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        where: Any = next(given for given in args if isinstance(given, torch.Tensor))
        with torch.cuda.device_of(where):
            return function(*args, **kwargs)

    return launched
