"""Allocation of what outlives a step."""

from __future__ import annotations

import torch


def lasting_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised tensor that may be written to in any mode.

    One made under `torch.inference_mode` may not be written to after it.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)
