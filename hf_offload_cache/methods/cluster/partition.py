"""Clusters of one layer's keys: membership, centroids, variances and splits (DynaKV, algorithm 1 and section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ...history.records import places_within
from ...history.state import State, Table
from ...stores.mapped import MappedTable

# K-means of many keys, and the split of one cluster in two

BATCH = 16 * 1024
"""Upper bound on the keys of one k-means run. Larger inputs are clustered in batches, so that time grows linearly.
Batches of 4K instead of one run over 8K keys: the variance is 1.001 times as large and clustering takes half the time.
Attention mass is equal, but retrieval finds 11 of 14 needles in 7K tokens. One run, or batches of 2K, finds all 14
(SmolLM2-135M)."""
_ITERATIONS = 5
"""Upper bound on the iterations of two-means."""
_POWERS = 6
"""Power iterations. Starting two-means from the two sides of this direction gives .99 times the final variance of
starting from two distant keys (SmolLM2-135M, 4K tokens decoded)."""
FROM_EVEN = 3
"""Iterations of k-means that starts from keys at even distances in the sequence. On text they give .99 times the
variance of five iterations from random keys, in .6 times the time (SmolLM2-135M, 8K tokens at once, 32 a cluster)."""


def k_means(keys: np.ndarray, size: float) -> np.ndarray:
    """The paper's NewCluster: labels (n,) int64, from 0, of clusters of about `size` of keys (n, D) float32, n at most
    `BATCH`. faiss uses all threads and fills empty clusters. Equal keys give equal labels."""
    count = min(max(1, round(len(keys) / size)), len(keys))
    if count == 1:
        return np.zeros(len(keys), dtype=np.int64)
    import faiss  # extra [cluster]: a cache that needs it says so before it is used

    keys = np.ascontiguousarray(keys, dtype=np.float32)
    all_of_them = {"min_points_per_centroid": 1, "max_points_per_centroid": len(keys)}
    clusters = faiss.Kmeans(keys.shape[1], count, niter=FROM_EVEN, **all_of_them)
    clusters.train(keys, init_centroids=keys[np.linspace(0, len(keys) - 1, count).astype(np.int64)])
    return clusters.index.search(keys, 1)[1][:, 0]


def halves(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The paper's SplitCluster: split each cluster in two, (n,) bool, True for keys (n, D) of the second part.

    `counts` (k,) are the clusters' keys, at least 2 each; `keys` are laid end to end, cluster by cluster. No part is
    empty. Two-means starts from the two sides of the mean along the direction of largest variance. If all keys of a
    cluster are equal, its later half is the second part.
    """
    if (large := counts > 2 * counts.mean()).any():  # padding to the largest cluster then takes no more than the keys
        of_large, second_half = np.repeat(large, counts), np.empty(len(keys), dtype=bool)
        second_half[of_large] = halves(keys[of_large], counts[large])
        second_half[~of_large] = halves(keys[~of_large], counts[~large])
        return second_half
    index, count = np.arange(counts.max()), counts[:, None].astype(np.float32)
    valid = index < counts[:, None]
    centred = np.zeros((*valid.shape, keys.shape[1]), dtype=np.float32)
    centred[valid] = keys
    centred -= centred.sum(1, keepdims=True) / count[..., None]
    centred[~valid] = 0
    direction = centred[np.arange(len(counts)), np.einsum("knd,knd->kn", centred, centred).argmax(1)][..., None]
    for _ in range(_POWERS):
        norms = np.sqrt((direction * direction).sum(1, keepdims=True))
        direction = direction / np.maximum(norms, np.finfo(np.float32).tiny)
        direction = centred.transpose(0, 2, 1) @ (centred @ direction)
    second_half = (centred @ direction)[..., 0] > 0
    for _ in range(_ITERATIONS):
        in_second = np.maximum(second_half.sum(1, keepdims=True), 1)
        second_mean = (second_half[:, None] @ centred)[:, 0] / in_second
        first_mean = ((valid & ~second_half)[:, None] @ centred)[:, 0] / np.maximum(count - in_second, 1)
        midpoint = ((second_mean * second_mean).sum(1) - (first_mean * first_mean).sum(1)) / 2
        assigned = ((centred @ (second_mean - first_mean)[..., None])[..., 0] > midpoint[:, None]) & valid
        assigned_counts = assigned.sum(1)
        moved = (assigned != second_half).any(1) & (assigned_counts > 0) & (assigned_counts < counts)
        if not moved.any():
            break
        second_half[moved] = assigned[moved]
    unsplit = (second_half.sum(1) % counts) == 0  # because of rounding
    second_half[unsplit] = index >= counts[unsplit, None] // 2
    return second_half[valid]


# Counts, means and variances of clusters

PIECE = 1024
"""Keys whose differences to their means are computed at a time."""


class Moments(NamedTuple):
    """Counts, means and spreads of k clusters."""

    counts: np.ndarray
    """(k,) float32, keys of each cluster."""
    means: np.ndarray
    """(k, D) float32."""
    spreads: np.ndarray
    """(k,) float32, sums of the keys' squared distances to their mean."""

    @classmethod
    def of(cls, keys: np.ndarray, which: np.ndarray, clusters: int) -> Moments:
        """Compute the moments of `clusters` clusters of keys (n, D) float32, with labels `which` (n,). An empty cluster
        has zeros."""
        counts = np.bincount(which, minlength=clusters).astype(np.float32)
        means = sums(keys, which, clusters) / np.maximum(counts, 1)[:, None]
        parts = [slice(start, start + PIECE) for start in range(0, len(keys), PIECE)]
        distances = np.concatenate([squares(keys[part] - means[which[part]]) for part in parts or [slice(0)]])
        return cls(counts, means, sums(distances[:, None], which, clusters)[:, 0])

    @property
    def variances(self) -> np.ndarray:
        """(k,), mean squared distances to the mean."""
        return self.spreads / np.maximum(self.counts, 1)


def in_half(means: np.ndarray) -> np.ndarray:
    """Convert means to float16, as they are stored. Components beyond its range are clipped to its largest number."""
    most = np.finfo(np.float16).max
    return means.clip(-most, most).astype(np.float16)


def counted(labels: np.ndarray, clusters: int) -> np.ndarray:
    """Count the labels (rows, n) of each row: (rows, clusters)."""
    return np.stack([np.bincount(row, minlength=clusters) for row in labels])


def squares(apart: np.ndarray) -> np.ndarray:
    """Squared lengths (n,) of vectors (n, D)."""
    return np.einsum("nd,nd->n", apart, apart)


def sums(values: np.ndarray, which: np.ndarray, count: int) -> np.ndarray:
    """Sum `values` (n, D) by their labels `which` (n,): (count, D)."""
    out = torch.zeros(count, values.shape[1], dtype=torch.float32, device="cpu")
    return out.index_add_(0, torch.from_numpy(which), torch.from_numpy(values)).numpy()


FEWEST = 8
"""Clusters a row needs before the mean of its variances sets its limit."""
MOST_ROOM = 2.5
"""Disk reserved for clusters, at most this multiple of the peak key bytes. Beyond it only full clusters are split."""
_ROOM = 16
"""Least number of clusters that tables grow by; they grow by a quarter otherwise."""


class Partition:
    """The clusters of each of `rows` rows, numbered from 0 to the row's `used` - 1 (DynaKV, algorithm 1). Keys are
    float32.

    It stores each cluster's count n, centroid r and variance: the mean squared distance to the centroid. It stores no
    keys. All three are exact after every change but for rounding. Centroids are in half precision: a joining key
    changes a component only if it differs by more than n four-thousandths of it. A split recomputes centroids
    (`put`). Tables are in host memory. For the thread that runs the model.

    Args:
        size: average keys a cluster when many keys are clustered at once.
        capacity: largest number of keys a cluster, and its room on disk.
        threshold: the paper's tau: split a cluster whose variance exceeds this multiple of its row's mean cluster
            variance at the last bulk clustering.
        most_room: upper bound on the disk reserved for clusters, as a multiple of the peak key bytes. Beyond it, only
            full clusters are split, and new ones are larger.
        number: clusters made from each call of many keys, instead of clusters of `size`; at least two keys for each,
            and no more than there is room for.
        mapped: puts centroids into a mapped file and returns its table; None: they are in memory. May raise
            `StoreError`.
    """

    STATE: ClassVar[State] = State(
        "clusters",
        "",
        {"clusters": "clusters"},
        counts=Table("rows clusters", torch.int32, at="_counts"),
        variances=Table("rows clusters", torch.float32, at="_variances"),
        centroids=Table("rows clusters width", torch.float16, at="_centroids"),
        used=Table("rows", torch.int64),
        limits=Table("rows", torch.float32),
    )

    def __init__(
        self, rows: int, dim: int, size: int, capacity: int, threshold: float, most_room: float = MOST_ROOM,
        number: int | None = None, mapped: Callable[[np.ndarray], MappedTable] | None = None,
    ) -> None:  # fmt: skip
        self.size, self.capacity, self.threshold, self.most_room = size, capacity, threshold, most_room
        self.number, self._mapped = number, mapped
        self._table: MappedTable | None = None
        self.used, self.held = np.zeros((2, rows), dtype=np.int64)  # clusters, and the peak number of keys
        self.limits = np.full(rows, np.inf, dtype=np.float32)
        """(rows,) float32: split a cluster whose variance exceeds its row's limit (the paper's tau_h). Infinite until
        the row has had `FEWEST` clusters."""
        self._counts = np.zeros((rows, 0), dtype=np.int32)
        self._variances = np.zeros((rows, 0), dtype=np.float32)
        self._centroids = np.zeros((rows, 0, dim), dtype=np.float16)
        self._closed = np.zeros((rows, 0), dtype=bool)

    def rehearse(self, clusters: int) -> None:
        """Make the tables as large as for `clusters` clusters a row, in a dry run."""
        shape = self.rows, clusters * 5 // 4 + _ROOM
        self._counts, self._variances = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32)
        self._closed, self._centroids = np.empty(shape, dtype=bool), np.empty((*shape, self.dim), dtype=np.float16)
        if self._mapped is not None:
            self._table = self._mapped(self._centroids)
        self.used[:] = clusters

    @property
    def rows(self) -> int:
        return len(self.used)

    @property
    def dim(self) -> int:
        return self._centroids.shape[2]

    @property
    def clusters(self) -> int:
        """Clusters of the row with the most."""
        return int(self.used.max(initial=0))

    @property
    def counts(self) -> np.ndarray:
        """(rows, clusters) int32. This and the next three are views, valid until the next change."""
        return self._counts[:, : self.clusters]

    @property
    def centroids(self) -> np.ndarray:
        """(rows, clusters, D) float16; zeros for a number without a cluster."""
        return self._centroids[:, : self.clusters]

    @property
    def variances(self) -> np.ndarray:
        """(rows, clusters) float32."""
        return self._variances[:, : self.clusters]

    @property
    def closed(self) -> np.ndarray:
        """(rows, clusters) bool: shared clusters, which no key may join."""
        return self._closed[:, : self.clusters]

    @property
    def nbytes(self) -> int:
        means = 0 if self._table is not None else self._centroids.nbytes
        tables = self._counts, self._variances, self._closed, self.used, self.limits
        return sum(table.nbytes for table in tables) + means

    def will_need(self) -> None:
        """Announce a use of the centroids: the system may begin to read those on disk (section 6.1)."""
        if self._table is not None:
            self._table.will_need()

    def rest(self) -> None:
        """End a use of the centroids: those on disk take no memory until the next one."""
        if self._table is not None:
            self._table.rest()

    # --- new keys ----------------------------------------------------------------------------------------------

    def nearest(self, keys: np.ndarray) -> np.ndarray:
        """Algorithm 1, assign to the nearest cluster: numbers (rows, n) int64 for keys (rows, n, D), of open clusters
        of their row; -1: there are none. A distance that is not a number is never the smallest; a key without another
        one gets its row's first open cluster."""
        if not self.clusters:
            return np.full(keys.shape[:2], -1, dtype=np.int64)
        centroids = torch.from_numpy(self.centroids).float()
        norms = (centroids * centroids).sum(2)
        norms[torch.from_numpy(self.closed | (self.counts == 0))] = torch.inf
        distances = (norms[:, None] - 2 * (torch.from_numpy(keys) @ centroids.transpose(1, 2))).numpy()
        labels = distances.argmin(2)
        if not np.isfinite(np.take_along_axis(distances, labels[..., None], 2)).all():
            distances[np.isnan(distances)] = np.inf
            labels, opened = distances.argmin(2), (self.counts > 0) & ~self.closed
            first = np.where(opened.any(1), opened.argmax(1), -1)[:, None]
            labels = np.where(np.isposinf(distances.min(2)), first, labels)
        return labels

    def join(self, keys: np.ndarray, clusters: np.ndarray) -> None:
        """Algorithm 1, UpdateVar and UpdateStats: add keys (rows, n, D) to `clusters` (rows, n); -1: to none. Merges
        counts, means and variances with the clusters' own (Chan, Golub and LeVeque, 1979)."""
        row, column = (clusters >= 0).nonzero()
        if not row.size:
            return
        width = self._counts.shape[1]
        targets, which = np.unique(row * width + clusters[row, column], return_inverse=True)
        count, means, spread = Moments.of(keys[row, column], which, targets.size)
        row, cluster = np.divmod(targets, width)
        before = self._counts[row, cluster].astype(np.float32)
        old = self._centroids[row, cluster].astype(np.float32)
        shift, total = means - old, before + count
        spread = spread + self._variances[row, cluster] * before + squares(shift) * before * count / total
        self._counts[row, cluster] += count.astype(np.int32)
        self._centroids[row, cluster] = in_half(old + shift * (count / total)[:, None])
        self._variances[row, cluster] = spread / total
        self.held = np.maximum(self.held, self._counts.sum(1))

    def add(self, row: int, keys: np.ndarray, of: int | None = None) -> np.ndarray:
        """Algorithm 1, NewCluster and the initial n, r and variance: cluster keys (n, D) into new clusters of a row,
        numbers (n,) int64. None has more than `capacity` keys. `of`: keys of the complete call, these included; None:
        these are all."""
        within = k_means(keys, float(self._sizes(np.array([row]), len(keys), of)[0]))
        while (counts := np.bincount(within)).max() > self.capacity:
            for cluster in (counts > self.capacity).nonzero()[0]:
                members = (within == cluster).nonzero()[0]
                within[members[halves(keys[members], counts[[cluster]])]] = within.max() + 1
        present, within = np.unique(within, return_inverse=True)
        rows = np.full(present.size, row)
        new = self._open(rows)
        self.put(rows, new, Moments.of(keys, within, new.size))
        self._set_limits(row if new.size >= FEWEST else None)
        return new[within]

    def _sizes(self, rows: np.ndarray, keys: int, of: int | None) -> np.ndarray:
        """Average keys, (n,), of the new clusters of `rows` (n,) for `keys` new keys each; `of`: as in `add`."""
        counts_before = self._counts[rows]
        self.held[rows] = np.maximum(self.held[rows], counts_before.sum(1) + keys)
        room = np.maximum(1, self.most_room * self.held[rows] / self.capacity - (counts_before > 0).sum(1))
        size = self.size if self.number is None else (of or keys) / self.number
        return np.minimum(np.maximum(max(size, 2), keys / room), self.capacity)

    def wanted(self, rows: np.ndarray, keys: int, of: int) -> np.ndarray:
        """New clusters, (n,) int64, that `rows` (n,) make of `keys` new keys each. As `add` does; for `put_new`."""
        return np.clip(np.rint(keys / self._sizes(rows, keys, of)), 1, keys).astype(np.int64)

    def put_new(
        self, rows: np.ndarray, labels: np.ndarray, counts: np.ndarray, centroids: np.ndarray, variances: np.ndarray
    ) -> np.ndarray:
        """Add clusters that were made elsewhere to `rows` (r,), ascending: `labels` (r, n) of their new keys, from 0
        without gaps, and of each label the keys, (r, k), 0 from the last one on, their mean, (r, k, D) float16, and the
        variance, (r, k). Returns the numbers of the keys' clusters, (r, n)."""
        first, (row, label) = self.used[rows].copy(), (counts > 0).nonzero()
        numbers = self._open(rows[row])
        for table, own in ((self._counts, counts), (self._centroids, centroids), (self._variances, variances)):
            table[rows[row], numbers] = own[row, label]
        for each in rows[(counts > 0).sum(1) >= FEWEST].tolist():
            self._set_limits(each)
        self._set_limits()
        return labels + first[:, None]

    def drop_last(self, row: int, used: int) -> None:
        """Undo the latest `add` to a row, which had `used` clusters before."""
        for table in (self._counts, self._variances, self._centroids, self._closed):
            table[row, used:] = 0
        self.used[row] = used

    def _set_limits(self, row: int | None = None) -> None:
        """Set the limits tau_h of this row, and of rows without one, where they have `FEWEST` clusters."""
        asked = np.isinf(self.limits)
        if row is not None:
            asked[row] = True
        for each in (asked & (self.used >= FEWEST)).nonzero()[0]:
            counts, variances = self._counts[each], self._variances[each]
            if (mean := float((counts * variances).sum() / counts.sum())) > 0:
                self.limits[each] = self.threshold * mean

    @property
    def to_split(self) -> np.ndarray:
        """(rows, clusters) bool, algorithm 1's flag f = Split: open clusters whose variance exceeds their row's limit,
        or which are over capacity."""
        counts = self.counts
        wide = (self.variances > self.limits[:, None]) & (counts > 1) & self.roomy(0)[:, None]
        return (wide | (counts > self.capacity)) & ~self.closed

    def roomy(self, more: np.ndarray | int) -> np.ndarray:
        """(rows,) bool: after `more` new clusters (rows,), the row has room for another one that is not full."""
        return (self.used + more) * self.capacity < self.most_room * self.held

    def parts(self, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Algorithm 1, plan SplitCluster: the part of each key, (n,) int64; part 0 keeps the cluster's number. Changes
        nothing. `keys` (n, D) are all keys of the clusters, laid end to end, and `counts` (k,) those of each. There are
        more than two parts if one would be over capacity."""
        parts = halves(keys, counts).astype(np.int64)
        for members in np.split(np.arange(len(keys)), np.cumsum(counts)[:-1]):
            while (number := np.bincount(parts[members])).max() > self.capacity:
                many = members[parts[members] == number.argmax()]
                parts[many[halves(keys[many], number[[number.argmax()]])]] = number.size
        return parts

    def split(
        self, rows: np.ndarray, clusters: np.ndarray, keys: np.ndarray, counts: np.ndarray, parts: np.ndarray
    ) -> np.ndarray:
        """Algorithm 1, SplitCluster and UpdateStats: split clusters (k,) of rows (k,) into `parts` (n,), as `parts`
        planned them. Returns each key's cluster number, (n,): part 0 keeps its number, other parts get new ones in this
        order."""
        which = np.repeat(np.arange(len(counts)), counts)
        width = int(parts.max(initial=0)) + 1
        each, labels = np.unique(which * width + parts, return_inverse=True)
        of, part = np.divmod(each, width)
        numbers = clusters[of]
        numbers[part > 0] = self._open(rows[of[part > 0]])
        self.put(rows[of], numbers, Moments.of(keys, labels, each.size))
        self._set_limits()
        return numbers[labels]

    def put(self, rows: np.ndarray, clusters: np.ndarray, those: Moments) -> None:
        """Set the moments of clusters (k,) of rows (k,)."""
        self._counts[rows, clusters], self._centroids[rows, clusters] = those.counts, in_half(those.means)
        self._variances[rows, clusters] = those.variances

    def close_up(self) -> np.ndarray:
        """Drop empty clusters and renumber the others of their row. Returns the new number of each old one, (rows,
        clusters); -1: dropped. A row without clusters gets a new limit from its next ones."""
        filled = self.counts > 0
        new, (rows, old) = np.where(filled, np.cumsum(filled, 1) - 1, -1), filled.nonzero()
        if (filled.sum(1) < self.used).any():
            for table in (self.counts, self.variances, self.centroids, self.closed):
                kept = table[rows, old]
                table[:] = 0
                table[rows, new[rows, old]] = kept
            self.used = filled.sum(1)
            self.limits[self.used == 0], self.held[self.used == 0] = np.inf, 0
        return new

    def _open(self, rows: np.ndarray) -> np.ndarray:
        """Open a new cluster in each of `rows` (n,); a row may occur more than once. Returns their numbers, (n,)."""
        self.reserve(rows)
        order, count = np.argsort(rows, kind="stable"), np.bincount(rows, minlength=self.rows)
        numbers = np.empty_like(order)
        numbers[order] = self.used[rows[order]] + places_within(count)
        self.used += count
        self._closed[rows, numbers] = False
        return numbers

    def _need(self, clusters: int) -> None:
        """Make room for so many clusters a row."""
        if clusters > self._counts.shape[1]:
            more = max(clusters, clusters * 5 // 4 + _ROOM) - self._counts.shape[1]
            self._keep_centroids(_wider(self._centroids, more))
            for name in ("_counts", "_variances", "_closed"):
                setattr(self, name, _wider(getattr(self, name), more))

    def reserve(self, rows: np.ndarray) -> None:
        """Make room for one more cluster in each of `rows` (n,); a row may occur more than once. May raise
        `StoreError`."""
        self._need(int((self.used + np.bincount(rows, minlength=self.rows)).max(initial=0)))

    def _keep_centroids(self, centroids: np.ndarray) -> None:
        self._table = None if self._mapped is None else self._mapped(centroids)
        self._centroids = centroids if self._table is None else self._table.array

    # --- rows and contexts -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all clusters, because others may share them: no key joins them from now on."""
        self._closed[:] = True

    def select_rows(self, rows: np.ndarray) -> None:
        """Make row i the current row `rows[i]`. Clusters that several new rows share are closed."""
        shared = np.bincount(rows, minlength=self.rows)[rows] > 1
        if len(rows) == self.rows:  # in place: beam search would otherwise make a new mapped table each step
            self._centroids[:] = self._centroids[rows]
        else:
            self._keep_centroids(np.ascontiguousarray(self._centroids[rows]))
        for name in ("used", "held", "limits", "_counts", "_variances", "_closed"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name)[rows]))
        self._closed[shared] = True

    def restore(self, tree: dict[str, torch.Tensor]) -> None:
        """Load what `STATE` captured, with all clusters closed. Copies."""
        self.STATE.restore(self, tree)
        self._keep_centroids(self._centroids)
        self.held, self._closed = self._counts.sum(1), np.ones(self._counts.shape, dtype=bool)


def _wider(table: np.ndarray, more: int) -> np.ndarray:
    """Append `more` columns of zeros."""
    return np.concatenate([table, np.zeros((table.shape[0], more, *table.shape[2:]), dtype=table.dtype)], 1)
