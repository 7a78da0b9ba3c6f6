"""Counts, means and variances of keys that belong together."""

from __future__ import annotations

import numpy as np
import torch

Moments = tuple[int, np.ndarray, float]
"""How many keys, their mean (D,), and their variance."""


def moments(keys: np.ndarray) -> Moments:
    """Of keys (n, D)."""
    if not (count := len(keys)):
        return 0, np.zeros(keys.shape[1], dtype=np.float32), 0.0
    mean = np.add.reduce(keys, 0) / count
    apart = keys - mean
    return count, mean, float(np.einsum("nd,nd->", apart, apart)) / count


def squares(apart: np.ndarray) -> np.ndarray:
    """Squared lengths of (n, D), (n,)."""
    return np.einsum("nd,nd->n", apart, apart)


def sums(values: np.ndarray, which: np.ndarray, count: int) -> np.ndarray:
    """The sum of those of `values` (n, D) that belong together, (count, D): `which` (n,) says to what."""
    found = torch.zeros(count, values.shape[1])
    return found.index_add_(0, torch.from_numpy(which), torch.from_numpy(values)).numpy()
