"""Counts, means and variances of keys that belong together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

PIECE = 1024
"""Keys of which what is only looked at once is made."""


class Moments(NamedTuple):
    """Of some clusters, (k,)."""

    counts: np.ndarray
    """Keys of each, float32."""
    means: np.ndarray
    """(k, D)."""
    spreads: np.ndarray
    """The sums of their squared distances to their mean, (k,)."""

    @classmethod
    def of(cls, keys: np.ndarray, which: np.ndarray, clusters: int) -> Moments:
        """Of `clusters` clusters of keys (n, D) float32, each in one of them, `which` (n,). One without has zeros."""
        counts = np.bincount(which, minlength=clusters).astype(np.float32)
        means = sums(keys, which, clusters) / np.maximum(counts, 1)[:, None]
        parts = [slice(start, start + PIECE) for start in range(0, len(keys), PIECE)]
        apart = np.concatenate([squares(keys[part] - means[which[part]]) for part in parts or [slice(0)]])
        return cls(counts, means, sums(apart[:, None], which, clusters)[:, 0])

    @property
    def variances(self) -> np.ndarray:
        """The mean squared distances, (k,)."""
        return self.spreads / np.maximum(self.counts, 1)


def in_half(means: np.ndarray) -> np.ndarray:
    """Means as they are kept: components beyond what half precision has are the largest that it has."""
    most = np.finfo(np.float16).max
    return means.clip(-most, most).astype(np.float16)


def counted(labels: np.ndarray, clusters: int) -> np.ndarray:
    """How often each of `clusters` numbers is among those of its row, (rows, n): (rows, clusters)."""
    return np.stack([np.bincount(own, minlength=clusters) for own in labels])


def squares(apart: np.ndarray) -> np.ndarray:
    """Squared lengths of (n, D), (n,)."""
    return np.einsum("nd,nd->n", apart, apart)


def sums(values: np.ndarray, which: np.ndarray, count: int) -> np.ndarray:
    """The sum of those of `values` (n, D) that belong together, (count, D): `which` (n,) says to what."""
    found = torch.zeros(count, values.shape[1], dtype=torch.float32, device="cpu")
    return found.index_add_(0, torch.from_numpy(which), torch.from_numpy(values)).numpy()
