"""Which clusters the same queries want, and an order in which those lie side by side (DynaKV, sections 5.1 and 5.2)."""

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


def pairs(together: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of C clusters (n, 2): of all the one that is wanted together most often, of the others again, and so on, as
    long as there are any; and those that are in none, (C - 2n,). `together`: (C, C), whole numbers."""
    count, found = len(together), [np.empty((0, 2), dtype=np.int64)]
    every = np.arange(count)
    left = together.astype(np.int32) * count**2 + np.minimum(every, every[:, None]) * count
    left += np.maximum(every, every[:, None], dtype=np.int32)  # of equal ones each is another number
    left[together == 0] = 0
    while left.any():
        best = left.argmax(1)
        mutual = every[(best[best] == every) & (every < best) & (left[every, best] > 0)]
        found.append(np.stack([mutual, best[mutual]], 1))
        left[found[-1]], left[:, found[-1]] = 0, 0
    all_pairs = np.concatenate(found)
    often = np.argsort(-together[all_pairs[:, 0], all_pairs[:, 1]], kind="stable")
    return all_pairs[often], np.setdiff1d(every, all_pairs)


def in_pools(together: np.ndarray, lead: int) -> np.ndarray:
    """An order of C clusters, (C,) int64, that lie in pools for two, where the second one's pages and those of the next
    pool's first one are adjacent: after `lead` clusters pairs; and those are partners that are wanted together too."""
    two, alone = pairs(together)
    while len(alone) < min(lead, len(together)):
        two, alone = two[:-1], np.concatenate([alone, two[-1]])
    flat, count = two.reshape(-1), len(two)
    among = together[np.ix_(flat, flat)].reshape(count, 2, count, 2).sum((1, 3))
    np.fill_diagonal(among, 0)
    return np.concatenate([alone[:lead], two[chain(among)].reshape(-1), alone[lead:]])
