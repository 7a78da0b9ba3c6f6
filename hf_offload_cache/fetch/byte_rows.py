"""Copies of rows by index."""

from __future__ import annotations

import numpy as np
import torch


class ByteRows:
    """The rows of a tensor (n, width), contiguous in the last dimension, in the tensor's memory.

    On a CPU they are copied by numpy: a copy this small is done before torch's threads are awake.
    """

    __slots__ = ("_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._bytes = tensor.view(torch.uint8).numpy() if tensor.device.type == "cpu" else None

    def put(self, target: np.ndarray, source: ByteRows, rows: np.ndarray | slice) -> None:
        """self[target] = source[rows], of one type and width."""
        if self._bytes is not None and source._bytes is not None:
            self._bytes[target] = source._bytes[rows]
            return
        into, taken = self.tensor, source.tensor
        taken = taken[rows] if isinstance(rows, slice) else taken.index_select(0, _index(rows, taken.device))
        into.index_copy_(0, _index(target, into.device), taken.to(into.device))


def _index(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(device)
