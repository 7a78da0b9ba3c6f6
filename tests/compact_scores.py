"""Scores of every token, by compact keys. No tests in here."""

from __future__ import annotations

import numpy as np
import torch

from hf_offload_cache.methods.disk_swap import HIDDEN, CompactKeys


def scores_of(
    keys: CompactKeys, low: np.ndarray, row: int, units: np.ndarray, unit_size: int, visible: torch.Tensor | None = None
) -> np.ndarray:
    """(h, n, unit_size) float32: the scores of all tokens of `units` (n,) of `row`, for low-rank queries (h, ·)."""
    some, asked = keys._rows.of_units(row, units, unit_size), keys._asked(low, False)
    scores: np.ndarray = keys._products(asked, some).float().numpy(force=True) * asked.factor
    scores += asked.constant
    if visible is not None:
        seen = keys._in_order(keys._seen(visible, row, units, unit_size))
        scores = np.where(seen.numpy(force=True), scores, HIDDEN)
    if keys._rows.each == 1:
        return scores.reshape(len(low), -1, unit_size)
    return scores.reshape(len(low), unit_size, -1).swapaxes(1, 2)
