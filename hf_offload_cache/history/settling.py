"""One cluster that is at hand, on its way back to its pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Settling:
    """A cluster of a row with all its members, those that have waited included."""

    row: int
    cluster: int
    tokens: np.ndarray
    """(n,) int64, ascending: which tokens they are."""
    entries: torch.Tensor
    """(n, width): of its own."""
    parts: np.ndarray
    """(n,) int64: into which cluster each goes, 0 for this one."""
    kept: int
    """Of its pages so many stay as they are, from the first on."""
    rewrites: np.ndarray
    """The records of its pages that are written anew, as far as something may ever have been read of them."""
