"""Copies of rows: numpy's way and torch's, which other devices take, give the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload_cache.fetch import ByteRows


@pytest.mark.parametrize("rows", [slice(3), np.array([4, 0, 4]), np.array([2, 1, 0], dtype=np.int32)])
@pytest.mark.parametrize("elsewhere", ["neither", "source", "target", "both"])
def test_every_way_to_copy(rows: np.ndarray | slice, elsewhere: str) -> None:
    source = ByteRows(torch.arange(40.0, dtype=torch.bfloat16).view(5, 8)[:, :6])
    out = ByteRows(torch.full((7, 6), -1.0, dtype=torch.bfloat16))
    for side, one in (("source", source), ("target", out)):
        if elsewhere in (side, "both"):
            one._bytes = None  # as on another device
    target = np.array([6, 1, 3])
    out.put(target, source, rows)
    assert torch.equal(out.tensor[target.tolist()], source.tensor[rows if isinstance(rows, slice) else rows.tolist()])
    assert (out.tensor[[0, 2, 4, 5]] == -1).all()
    out.put(target[:0], source, slice(0))
    out.put(target[:0], source, np.empty(0, dtype=np.int64))
    assert (out.tensor[[0, 2, 4, 5]] == -1).all()
