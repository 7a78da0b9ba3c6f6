"""Where kernels are tested: in Triton's interpreter (`make test-kernels`), and on a GPU (`make test-gpu`)."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

DEVICES = [pytest.param("cpu", marks=pytest.mark.kernels), pytest.param("cuda", marks=pytest.mark.gpu)]


def kernels(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of that name; on a CPU its kernels are interpreted."""
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # which Triton looks at when a kernel is defined
    return importlib.import_module(f"hf_offload_cache.kernels.{name}")
