"""Scores of every token, by compact keys. No tests in here."""

from __future__ import annotations

import numpy as np
import torch

from hf_offload_cache.methods.disk_swap import CompactKeys


def scores_of(
    keys: CompactKeys, low: np.ndarray, row: int, units: np.ndarray, unit_size: int, visible: torch.Tensor | None = None
) -> np.ndarray:
    """(h, n, unit_size) float32: the scores of all tokens of `units` (n,) of `row`, for low-rank queries (h, ·)."""
    scored = keys.scored(low, row, units, unit_size, visible)
    return scored.by_unit(scored.scores()).swapaxes(1, 2)
