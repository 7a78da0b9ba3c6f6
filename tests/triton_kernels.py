"""Where kernels are tested: in Triton's interpreter (`make test-kernels`), and on a GPU (`make test-gpu`)."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICES = [pytest.param("cpu", marks=pytest.mark.kernels), pytest.param("cuda", marks=pytest.mark.gpu)]


def kernels(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of that name; on a CPU its kernels are interpreted."""
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # which Triton looks at when a kernel is defined
    return importlib.import_module(f"hf_offload_cache.kernels.{name}")


def move(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """`tensor` on `device`, with the strides that it has."""
    every = torch.tensor((), dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return every.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def fill_what_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors begin as NaN, or as a number that is no index, so that an element that nobody writes is seen."""
    empty: Any = torch.empty

    def filled(*shape: Any, **options: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*shape, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 77 if made.itemsize == 1 else -7777)

    monkeypatch.setattr(torch, "empty", filled)


class Launches(TorchDispatchMode):
    """Counts a module's kernels as they are launched, without running them, and names what else would run."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count, self.others = 0, list[str]()
        for name, value in list(vars(module).items()):
            if hasattr(value, "run") and name.startswith("_"):
                monkeypatch.setattr(module, name, self)

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.count += 1

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket is not torch.ops.aten.empty:
            self.others.append(str(func))
        return func(*args, **(kwargs or {}))
