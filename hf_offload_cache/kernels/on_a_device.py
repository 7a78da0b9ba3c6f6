"""The devices that kernels run on."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")

MOST_CHANNELS = 256
"""Channels of a head that kernels can hold in registers."""


LEAST_CAPABILITY = (8, 0)
"""Compute capability of the oldest CUDA devices that kernels run on."""


@functools.cache
def _triton() -> bool:
    """Whether Triton is installed; torch for CUDA includes it on some systems."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_recent(device: torch.device | None) -> bool:
    """Whether Triton compiles for a CUDA device (None: the current one): earlier ones have no bfloat16. ROCm's count
    in another way."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


TWINS: dict[str, tuple[Callable[..., Any], int]] = {}
"""The functions `with_kernel`, "module.name", each with the number of its launches: for tests."""


def with_kernel(launches: int = 1) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function in plain torch, the twin of a kernel. On a CUDA device the kernel computes it: the function of the
    same name and arguments in the module "<this module>_triton", in so many launches. Elsewhere the twin runs, and on
    a device without kernels.

    Arguments are tensors of one device, the first of them not None, and what is no tensor."""

    def paired(twin: Callable[P, R]) -> Callable[P, R]:
        module = twin.__module__
        TWINS[f"{module.rpartition('.')[2]}.{twin.__name__}"] = twin, launches

        @functools.wraps(twin)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = next(given for given in args if isinstance(given, torch.Tensor))
            return (_kernel(twin) if first.device.type == "cuda" else twin)(*args, **kwargs)

        return run

    return paired


@functools.cache
def _kernel(twin: Callable[P, R]) -> Callable[P, R]:
    """The kernel of a twin, launched on its arguments' device; the twin itself on devices without kernels."""
    if not _has_marked():
        return twin
    return on_its_device(getattr(importlib.import_module(f"{twin.__module__}_triton"), twin.__name__))


def has_step(device: torch.device, *dims: int) -> bool:
    """Whether the functions `with_kernel` of a decoding step run on `device`, over heads of so many channels."""
    return device.type == "cuda" and max(dims, default=0) <= MOST_CHANNELS and _has_marked()


def plans_step(device_type: str, *dims: int) -> bool:
    """As `has_step`, for a plan. On a machine without CUDA, a plan is for a machine elsewhere that has the kernels."""
    there = device_type == "cuda" and max(dims, default=0) <= MOST_CHANNELS
    return there and (not torch.cuda.is_available() or _has_marked())


def _has_marked() -> bool:
    """Whether functions `with_kernel` find their kernels, and the current device runs them."""
    return _triton() and _is_recent(None)


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """`tensors` in host memory: themselves, or copies of a CUDA device's, which are waited for once, together."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is None:
        return [tensor.cpu() for tensor in tensors]
    copies = _copies(tensors)
    torch.cuda.current_stream(device).synchronize()
    return copies


class Arriving:
    """Copies of a CUDA device's `tensors` in pinned host memory, on their way there. They follow the device's current
    stream, and nothing waits for them until somebody asks."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copies, self._arrived = _copies(tensors), torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """The copies. Blocks only if the device has not come that far."""
        if not self._arrived.query():
            self._arrived.synchronize()
        return self._copies


def _copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Pinned copies, which the current stream makes."""
    copies = []
    for tensor in tensors:
        copies.append(_pinned(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")))
        copies[-1].copy_(tensor, non_blocking=True)
    return copies


def to_host_later(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """As `to_host`, of a tensor that stays as it is: a function that waits for the copy, in any thread. Its own call
    waits for nothing, unless the system pins no more memory."""
    if tensor.device.type != "cuda":
        return lambda: tensor.cpu()
    arriving = Arriving(tensor)
    return lambda: arriving.wait()[0]


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`array`, in host memory, on `device`, which may be the host. To a CUDA device nothing waits; the copy follows its
    current stream."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return _pinned(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def fill(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Copy `array` to a `tensor` of a CUDA device. Nothing waits; the copy follows the device's current stream."""
    tensor.copy_(_pinned(torch.from_numpy(array)), non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy of a small tensor in host memory; itself if the system pins no more, so that its copy waits."""
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` with the device of its first tensor as the current one: a kernel is launched there, and a model
    may span several."""

    @functools.wraps(function)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        where: Any = next(given for given in args if isinstance(given, torch.Tensor))
        with torch.cuda.device_of(where):
            return function(*args, **kwargs)

    return launched
