"""Keys to clusters: k-means of many at once, and one cluster made two."""

from __future__ import annotations

import numpy as np

BATCH = 16 * 1024
"""Keys that are clustered together, at most: more are in batches, so that time grows with their number. In batches of
4K clusters of 8K keys vary 1.001 times as much, in half the time, and hold as much attention mass; but of 14 facts in
7K tokens 11 are found, and 14 where all, or 2K at a time, are clustered together (SmolLM2-135M)."""
_ITERATIONS = 5
"""At most, of two-means."""
_POWERS = 6
"""Of the power method. From the sides of this direction clusters vary .99 times as much in the end as from two keys far
apart (SmolLM2-135M, 4K tokens decoded)."""
_FROM_EVEN = 3
"""Of k-means from keys at even distances in the sequence: on text these reach .99 times the variance that
five from random keys do (SmolLM2-135M, 8K tokens at once, 32 a cluster), in .6 times as long."""


def k_means(keys: np.ndarray, size: float) -> np.ndarray:
    """Clusters of about `size` of keys (n, D) float32 each, n at most `BATCH`: which one each key is in, (n,) int64,
    from 0 on. By faiss, which uses all threads and fills empty clusters; the same keys get the same clusters."""
    count = min(max(1, round(len(keys) / size)), len(keys))
    if count == 1:
        return np.zeros(len(keys), dtype=np.int64)
    import faiss  # extra [cluster]: a cache that needs it says so before it is used

    keys = np.ascontiguousarray(keys, dtype=np.float32)
    all_of_them = {"min_points_per_centroid": 1, "max_points_per_centroid": len(keys)}
    clusters = faiss.Kmeans(keys.shape[1], count, niter=_FROM_EVEN, **all_of_them)
    clusters.train(keys, init_centroids=keys[np.linspace(0, len(keys) - 1, count).astype(np.int64)])
    return clusters.index.search(keys, 1)[1][:, 0]


def halves(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which of keys (n, D) are in the second of the two clusters that theirs is made, (n,) bool. `counts` (k,): keys of
    each cluster, at least 2, one cluster's after the other's. None is empty.

    Two-means, from the two sides of the mean in the direction in which keys vary most. Where all are alike, the later
    half.
    """
    if (large := counts > 2 * counts.mean()).any():  # so that padding to the largest takes no more than keys do
        own, found = np.repeat(large, counts), np.empty(len(keys), dtype=bool)
        found[own], found[~own] = halves(keys[own], counts[large]), halves(keys[~own], counts[~large])
        return found
    place, count = np.arange(counts.max()), counts[:, None].astype(np.float32)
    there = place < counts[:, None]
    apart = np.zeros((*there.shape, keys.shape[1]), dtype=np.float32)
    apart[there] = keys
    apart -= apart.sum(1, keepdims=True) / count[..., None]
    apart[~there] = 0
    most = apart[np.arange(len(counts)), np.einsum("knd,knd->kn", apart, apart).argmax(1)][..., None]
    for _ in range(_POWERS):
        most = most / np.maximum(np.sqrt((most * most).sum(1, keepdims=True)), np.finfo(np.float32).tiny)
        most = apart.transpose(0, 2, 1) @ (apart @ most)
    found = (apart @ most)[..., 0] > 0
    for _ in range(_ITERATIONS):
        second = np.maximum(found.sum(1, keepdims=True), 1)
        far = (found[:, None] @ apart)[:, 0] / second
        near = ((there & ~found)[:, None] @ apart)[:, 0] / np.maximum(count - second, 1)
        middle = ((far * far).sum(1) - (near * near).sum(1)) / 2
        after = ((apart @ (far - near)[..., None])[..., 0] > middle[:, None]) & there
        number = after.sum(1)
        moved = (after != found).any(1) & (number > 0) & (number < counts)
        if not moved.any():
            break
        found[moved] = after[moved]
    alike = (found.sum(1) % counts) == 0  # but for rounding
    found[alike] = place >= counts[alike, None] // 2
    return found[there]
