"""What a gather puts together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .byte_rows import ByteRows


class View:
    """Memory in which each of `rows` rows has room for `width` payloads, and for `behind` more after them.

    Attributes:
        payloads: all of them, (rows * (width + behind), payload width).
        entries: the same memory, row by row: (rows, N, entry width).
        target: (rows * width) int64, which of `payloads` the first `width` of each row are.
    """

    def __init__(self, memory: torch.Tensor, rows: int, width: int, behind: int, form: Any) -> None:
        stride = width + behind
        with torch.inference_mode(False):  # it is written to in any mode
            payloads = memory[: rows * stride * form.payload_width].view(rows * stride, form.payload_width)
            self.entries = payloads.view(rows, stride * form.group_size, form.entry_width)
            self.payloads = ByteRows(payloads)
        self.target = (np.arange(rows)[:, None] * stride + np.arange(width)).reshape(-1)


@dataclass(frozen=True)
class Filled:
    """A view that holds the records (rows, width) that someone wanted to look at, until the view is asked for anew."""

    by: object
    records: np.ndarray
    view: View
    resident: int
    """How many were in a tier before, and how many more had been read ahead."""
    ready: int
