"""Keys to clusters: k-means of many at once, and one cluster made two."""

from __future__ import annotations

import numpy as np

BATCH = 16 * 1024
"""Keys that are clustered together: more are clustered a batch at a time, so that time grows with their number."""
PIECE = 1024
"""Keys of which what is only looked at once is made."""
_ITERATIONS = 5
"""At most, of two-means."""
_POWERS = 6
"""Of the power method. From the sides of this direction clusters vary .99 times as much in the end as from two keys far
apart (SmolLM2-135M, 4K tokens decoded)."""
_FROM_EVEN = 3
"""Of k-means from keys at even distances in the sequence: on text these reach .99 times the variance that
five from random keys do (SmolLM2-135M, 8K tokens, 32 a cluster), in .6 times as long."""


def k_means(keys: np.ndarray, size: float) -> np.ndarray:
    """Clusters of about `size` of keys (n, D) float32 each, n at most `BATCH`: which one each key is in, (n,) int64,
    from 0 on. By faiss, which uses all threads and fills empty clusters; the same keys get the same clusters."""
    count = max(1, round(len(keys) / size))
    if count == 1:
        return np.zeros(len(keys), dtype=np.int64)
    import faiss  # extra [cluster]: a cache that needs it says so before it is used

    keys = np.ascontiguousarray(keys, dtype=np.float32)
    all_of_them = {"min_points_per_centroid": 1, "max_points_per_centroid": len(keys)}
    clusters = faiss.Kmeans(keys.shape[1], count, niter=_FROM_EVEN, **all_of_them)
    clusters.train(keys, init_centroids=keys[np.linspace(0, len(keys) - 1, count).astype(np.int64)])
    return clusters.index.search(keys, 1)[1][:, 0]


def halves(keys: np.ndarray) -> np.ndarray:
    """Which of keys (n, D), n at least 2, are in the second of two clusters, (n,) bool; neither is empty.

    Two-means, from the two sides of the mean in the direction in which keys vary most. Where all are alike, the later
    half.
    """
    apart = keys - keys.mean(0)
    most = apart[np.einsum("nd,nd->n", apart, apart).argmax()]
    for _ in range(_POWERS):
        most = (apart @ most) @ apart
        most /= np.sqrt(most @ most) or 1.0
    found = apart @ most > 0
    for _ in range(_ITERATIONS):
        if found.all() or not found.any():
            return np.arange(len(keys)) >= len(keys) // 2
        first, second = keys[~found].mean(0), keys[found].mean(0)
        before, found = found, keys @ (second - first) > (second @ second - first @ first) / 2
        if np.array_equal(before, found):
            break
    return before
