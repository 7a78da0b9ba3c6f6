"""Which clusters the same queries want, and an order in which those lie side by side (DynaKV, section 5.1)."""

from __future__ import annotations

import numpy as np
import torch

ORDERED = 512
"""Clusters that are put in an order at a time: what is counted is of all pairs."""


def co_retrieved(queries: np.ndarray, centroids: np.ndarray, counts: np.ndarray, wanted: int) -> np.ndarray:
    """How many of n tokens want both of two clusters, (C, C) float32, zeros on the diagonal: equation (8), but for what
    all pairs are divided by.

    Each of these tokens, with scaled `queries` (heads, n, D), wants the clusters that have most of the attention of its
    heads, a key, if keys were their centroids (C, D), until there are `wanted` keys: `counts` (C,) have so many.
    """
    products = (torch.from_numpy(queries) @ torch.from_numpy(centroids).T).numpy() + np.log(counts, dtype=np.float32)
    held = np.exp(products - products.max(2, keepdims=True))
    shares = (held / held.sum(2, keepdims=True)).sum(0) / counts
    order = np.argsort(-shares, 1, kind="stable")
    keys = counts[order]
    wants = np.zeros(shares.shape, dtype=np.float32)
    np.put_along_axis(wants, order, (np.cumsum(keys, 1) - keys < wanted).astype(np.float32), 1)
    together: np.ndarray = (torch.from_numpy(wants).T @ torch.from_numpy(wants)).numpy()
    np.fill_diagonal(together, 0)
    return together


def chain(together: np.ndarray) -> np.ndarray:
    """An order of C clusters, (C,) int64: the one that is wanted most often together with others comes first, and next
    to each the one, of those that are left, that is wanted most often together with it. `together`: (C, C)."""
    often = together.sum(1)
    left = together.copy()
    order = np.empty(len(often), dtype=np.int64)
    for place in range(len(often)):
        last = order[place - 1]
        chosen = left[last].argmax() if place and left[last].max() > 0 else often.argmax()
        order[place] = chosen
        left[:, chosen], often[chosen] = -1, -1
    return order
