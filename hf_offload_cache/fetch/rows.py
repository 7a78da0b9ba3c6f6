"""Copies of rows by index."""

from __future__ import annotations

import numpy as np
import torch


def copy_rows(out: torch.Tensor, target: np.ndarray, source: torch.Tensor, rows: np.ndarray) -> None:
    """out[target] = source[rows], of tensors (n, width) of one type, contiguous in the last dimension.

    On a CPU by numpy: a copy this small is done before torch's threads are awake.
    """
    if not len(rows):
        return
    if out.device.type == "cpu" and source.device.type == "cpu":
        out.view(torch.uint8).numpy()[target] = source.view(torch.uint8).numpy()[rows]
        return
    into = torch.from_numpy(np.ascontiguousarray(target, dtype=np.int64)).to(out.device)
    of = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(source.device)
    out.index_copy_(0, into, source.index_select(0, of).to(out.device))
