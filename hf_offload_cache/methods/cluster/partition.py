"""Clusters of keys that follow what comes: who belongs where, how far apart they are, and which are to be split
(DynaKV, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ...fetch.storage import Storage
from ...history.records import RecordFormat, places_within
from ...history.state import State, Table
from ...stores.base import Store
from ...stores.mapped import MappedTable
from .arrivals import Arrivals
from .pages import ClusterPages, PageWriter, pieces

# Keys to clusters: k-means of many at once, and one cluster made two

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

    Two-means, from the two sides of the mean in the direction in which keys vary most. If all are equal, the later
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


# Which clusters the same queries want, and an order in which those lie side by side (DynaKV, sections 5.1 and 5.2)

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


# Counts, means and variances of keys that belong together

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


FEWEST = 8
"""Clusters of a row of which a distribution of variances can be told."""
MOST_ROOM = 2.5
"""How many times what the keys take their clusters' places may take until these are split where they are full alone."""
_ROOM = 16
"""Clusters that tables grow by, and a quarter."""


class Partition:
    """The clusters of each of `rows` rows: numbers from 0 to `used` of the row. Host memory; keys are float32.

    Of each it knows how many keys it has, their mean, and their variance: the mean squared distance to that mean. All
    three are exact after every change but for rounding: means are kept in half precision, so that of a component what
    is less than a four-thousandth of it times the keys that there are is lost as one joins; a split makes them anew
    (`set`). Holds no keys. For the thread that runs the model.

    Args:
        size: keys that a cluster of many at once gets on average.
        capacity: the most that a cluster may have, and for how many it has places on the disk.
        threshold: how many times the mean variance of a row's clusters, as it was when many came last, a cluster's may
            be until it is to be split.
        most_room: how many times what the keys take, were there as many as there were at most, clusters' places may.
            While they take more, clusters are split where they are full alone, and new ones are larger.
        number: clusters that many at once are made into, instead of those of `size`; two keys for each, and room.
        mapped: puts means where it gives them a table; None: they are in memory. It may raise `StoreError`.
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
        self.used, self.held = np.zeros((2, rows), dtype=np.int64)  # clusters, and the most keys that there were
        self.limits = np.full(rows, np.inf, dtype=np.float32)
        """The variance beyond which a cluster of a row is to be split; infinite until `FEWEST` clusters were seen."""
        self._counts = np.zeros((rows, 0), dtype=np.int32)
        self._variances = np.zeros((rows, 0), dtype=np.float32)
        self._centroids = np.zeros((rows, 0, dim), dtype=np.float16)
        self._closed = np.zeros((rows, 0), dtype=bool)

    def rehearse(self, clusters: int) -> None:
        """Make the tables as large as `clusters` clusters a row may make them."""
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
        """Of the row that has most."""
        return int(self.used.max(initial=0))

    @property
    def counts(self) -> np.ndarray:
        """(rows, clusters) int32, a view as all of these, valid until the next change."""
        return self._counts[:, : self.clusters]

    @property
    def centroids(self) -> np.ndarray:
        """(rows, clusters, D) float16; zeros where there is none."""
        return self._centroids[:, : self.clusters]

    @property
    def variances(self) -> np.ndarray:
        """(rows, clusters) float32."""
        return self._variances[:, : self.clusters]

    @property
    def closed(self) -> np.ndarray:
        """(rows, clusters) bool: clusters that nothing may join, since others hold them too."""
        return self._closed[:, : self.clusters]

    @property
    def nbytes(self) -> int:
        means = 0 if self._table is not None else self._centroids.nbytes
        return sum(own.nbytes for own in (self._counts, self._variances, self._closed, self.used, self.limits)) + means

    def will_need(self) -> None:
        """Means are about to be asked for: where they are on the disk, the system may begin to read them."""
        if self._table is not None:
            self._table.will_need()

    def rest(self) -> None:
        """Means are not asked for for a while: those on the disk take no memory until they are."""
        if self._table is not None:
            self._table.rest()

    # --- what comes --------------------------------------------------------------------------------------------

    def nearest(self, keys: np.ndarray) -> np.ndarray:
        """The cluster of the row whose centroid each of keys (rows, n, D) is nearest to, of those that may be joined,
        (rows, n) int64; -1: there is none."""
        if not self.clusters:
            return np.full(keys.shape[:2], -1, dtype=np.int64)
        centroids = torch.from_numpy(self.centroids).float()
        apart = (centroids * centroids).sum(2)
        apart[torch.from_numpy(self.closed | (self.counts == 0))] = torch.inf
        distances = (apart[:, None] - 2 * (torch.from_numpy(keys) @ centroids.transpose(1, 2))).numpy()
        found = distances.argmin(2)
        found[np.isinf(np.take_along_axis(distances, found[..., None], 2)[..., 0])] = -1
        return found

    def join(self, keys: np.ndarray, clusters: np.ndarray) -> None:
        """Keys (rows, n, D) are in `clusters` (rows, n) from now on; -1: in none. Their counts, means and variances are
        merged with those of who was there (Chan, Golub and LeVeque, 1979)."""
        row, column = (clusters >= 0).nonzero()
        if not row.size:
            return
        width = self._counts.shape[1]
        place, which = np.unique(row * width + clusters[row, column], return_inverse=True)
        count, means, spread = Moments.of(keys[row, column], which, place.size)
        row, cluster = np.divmod(place, width)
        before = self._counts[row, cluster].astype(np.float32)
        old = self._centroids[row, cluster].astype(np.float32)
        apart, together = means - old, before + count
        spread = spread + self._variances[row, cluster] * before + squares(apart) * before * count / together
        self._counts[row, cluster] += count.astype(np.int32)
        self._centroids[row, cluster] = in_half(old + apart * (count / together)[:, None])
        self._variances[row, cluster] = spread / together
        self.held = np.maximum(self.held, self._counts.sum(1))

    def add(self, row: int, keys: np.ndarray, of: int | None = None) -> np.ndarray:
        """Make clusters of keys (n, D) in a row, beside those that are; which each is in, (n,) int64. None of them has
        more than `capacity`. `of`: how many keys come at once, these among them; None: these alone."""
        there = self._counts[row]
        self.held[row] = max(self.held[row], there.sum() + len(keys))
        room = max(1, self.most_room * self.held[row] / self.capacity - (there > 0).sum())
        size = max(self.size if self.number is None else (of or len(keys)) / self.number, len(keys) / room, 2)
        within = k_means(keys, min(size, self.capacity))
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

    def drop_last(self, row: int, used: int) -> None:
        """Undo the latest `add` to a row, which had `used` clusters before."""
        for table in (self._counts, self._variances, self._centroids, self._closed):
            table[row, used:] = 0
        self.used[row] = used

    def _set_limits(self, row: int | None = None) -> None:
        """Of this row, and of those that have none yet, as far as they have clusters enough."""
        asked = np.isinf(self.limits)
        if row is not None:
            asked[row] = True
        for each in (asked & (self.used >= FEWEST)).nonzero()[0]:
            counts, variances = self._counts[each], self._variances[each]
            if (mean := float((counts * variances).sum() / counts.sum())) > 0:
                self.limits[each] = self.threshold * mean

    @property
    def to_split(self) -> np.ndarray:
        """(rows, clusters) bool: those whose variance is beyond their row's limit, and those that have more than there
        is room for; of what may be joined alone."""
        counts = self.counts
        wide = (self.variances > self.limits[:, None]) & (counts > 1) & self.roomy(0)[:, None]
        return (wide | (counts > self.capacity)) & ~self.closed

    def roomy(self, more: np.ndarray | int) -> np.ndarray:
        """(rows,) bool: with so many `more` clusters (rows,) there is room for another that is not full."""
        return (self.used + more) * self.capacity < self.most_room * self.held

    def parts(self, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Into which parts clusters are to be split, of which these are all keys (n, D), `counts` (k,) of each, one
        cluster's after the other's: (n,) int64, 0 for those that stay. Changes nothing."""
        parts = halves(keys, counts).astype(np.int64)
        for members in np.split(np.arange(len(keys)), np.cumsum(counts)[:-1]):
            while (number := np.bincount(parts[members])).max() > self.capacity:
                many = members[parts[members] == number.argmax()]
                parts[many[halves(keys[many], number[[number.argmax()]])]] = number.size
        return parts

    def split(
        self, rows: np.ndarray, clusters: np.ndarray, keys: np.ndarray, counts: np.ndarray, parts: np.ndarray
    ) -> np.ndarray:
        """Do what `parts` says with these clusters of these rows, (k,) each. The number of each key's, (n,): that of
        the first part is the old one, those of others follow in this order."""
        which = np.repeat(np.arange(len(counts)), counts)
        width = int(parts.max(initial=0)) + 1
        each, own = np.unique(which * width + parts, return_inverse=True)
        of, part = np.divmod(each, width)
        numbers = clusters[of]
        numbers[part > 0] = self._open(rows[of[part > 0]])
        self.put(rows[of], numbers, Moments.of(keys, own, each.size))
        self._set_limits()
        return numbers[own]

    def put(self, rows: np.ndarray, clusters: np.ndarray, those: Moments) -> None:
        """The keys of these clusters of these rows, (k,) each, have these moments."""
        self._counts[rows, clusters], self._centroids[rows, clusters] = those.counts, in_half(those.means)
        self._variances[rows, clusters] = those.variances

    def close_up(self) -> np.ndarray:
        """Clusters without keys give up their numbers, and the others of their row close up. The new numbers of old
        ones, (rows, clusters), -1: none. What follows on nothing is told apart by its own variances."""
        there = self.counts > 0
        new, (rows, old) = np.where(there, np.cumsum(there, 1) - 1, -1), there.nonzero()
        if (there.sum(1) < self.used).any():
            for table in (self.counts, self.variances, self.centroids, self.closed):
                kept = table[rows, old]
                table[:] = 0
                table[rows, new[rows, old]] = kept
            self.used = there.sum(1)
            self.limits[self.used == 0], self.held[self.used == 0] = np.inf, 0
        return new

    def _open(self, rows: np.ndarray) -> np.ndarray:
        """A new cluster, which may be joined, in each of `rows` (n,), a row as often as it gets one. Their numbers,
        (n,)."""
        self.reserve(rows)
        order, count = np.argsort(rows, kind="stable"), np.bincount(rows, minlength=self.rows)
        numbers = np.empty_like(order)
        numbers[order] = self.used[rows[order]] + places_within(count)
        self.used += count
        self._closed[rows, numbers] = False
        return numbers

    def _need(self, clusters: int) -> None:
        """Have room for so many a row."""
        if clusters > self._counts.shape[1]:
            more = max(clusters, clusters * 5 // 4 + _ROOM) - self._counts.shape[1]
            self._keep_centroids(_wider(self._centroids, more))
            for name in ("_counts", "_variances", "_closed"):
                setattr(self, name, _wider(getattr(self, name), more))

    def reserve(self, rows: np.ndarray) -> None:
        """Have room for one more cluster in each of `rows` (n,), a row as often as it gets one. May raise
        `StoreError`."""
        self._need(int((self.used + np.bincount(rows, minlength=self.rows)).max(initial=0)))

    def _keep_centroids(self, centroids: np.ndarray) -> None:
        self._table = None if self._mapped is None else self._mapped(centroids)
        self._centroids = centroids if self._table is None else self._table.array

    # --- rows and contexts -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Others may hold all that there is: nothing joins it any more."""
        self._closed[:] = True

    def select_rows(self, rows: np.ndarray) -> None:
        """Make row i what row `rows[i]` is now. What several rows have in common is closed."""
        shared = np.bincount(rows, minlength=self.rows)[rows] > 1
        if len(rows) == self.rows:  # where they lie: a table on the disk is not made anew with each step of beams
            self._centroids[:] = self._centroids[rows]
        else:
            self._keep_centroids(np.ascontiguousarray(self._centroids[rows]))
        for name in ("used", "held", "limits", "_counts", "_variances", "_closed"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name)[rows]))
        self._closed[shared] = True

    def restore(self, tree: dict[str, torch.Tensor]) -> None:
        """Hold what `STATE` captured, all of it closed. Copies."""
        self.STATE.restore(self, tree)
        self._keep_centroids(self._centroids)
        self.held, self._closed = self._counts.sum(1), np.ones(self._counts.shape, dtype=bool)


def _wider(table: np.ndarray, more: int) -> np.ndarray:
    """With `more` columns of zeros."""
    return np.concatenate([table, np.zeros((table.shape[0], more, *table.shape[2:]), dtype=table.dtype)], 1)


# Clusters of tokens that have just come, on their way to the store

FEWEST_TO_ORDER = 4
"""Of fewer clusters of a row all are neighbours anyhow."""


class NewClusters:
    """What is `coming` in some `rows`, made into clusters, which are in the partition from now on and lie nowhere until
    `write` has put them into the store. Their numbers are set in `labels` (rows of the history, count). Holds no copy
    of what is coming. Raises with nothing changed."""

    def __init__(self, partition: Partition, rows: np.ndarray, coming: Arrivals, labels: np.ndarray) -> None:
        self.coming, self._partition, self._rows, self._labels = coming, partition, rows, labels
        self._used, self._limits, self._held = partition.used.copy(), partition.limits.copy(), partition.held.copy()
        try:
            edges = np.linspace(0, coming.count, -(-coming.count // BATCH) + 1).astype(int).tolist()
            for row in rows.tolist():
                for start, stop in pairwise(edges):
                    labels[row, start:stop] = partition.add(row, coming.points(row, start, stop), coming.count)
        except BaseException:
            self.undo()
            raise

    @property
    def most(self) -> int:
        """Clusters of the row that has most."""
        return int((self._partition.used - self._used).max())

    def undo(self) -> None:
        """The partition is what it was before."""
        for row in self._rows.tolist():
            self._partition.drop_last(row, int(self._used[row]))
        self._partition.limits, self._partition.held = self._limits, self._held

    def write(
        self, storage: Storage, store: Store, form: RecordFormat, pages: ClusterPages,
        queries: np.ndarray | None = None, wanted: int = 0,
    ) -> None:  # fmt: skip
        """Hand them to the writer, in places of their own; those that the same queries (rows, heads, n, D) want, each
        `wanted` keys, lie side by side, as far as there are queries. Raises `StoreFullError`, or an earlier write's
        `StoreError`, with no cluster placed."""
        orders = {row: self._order(row, pages.half_empty(row), queries, wanted) for row in self._rows.tolist()}
        rows = np.repeat(self._rows, [len(order) for order in orders.values()])
        places = pages.reserve(rows)
        try:
            writer, left = PageWriter(storage, store, form), iter(places)
            for row, order in orders.items():
                rank = np.empty(len(order), dtype=np.int64)
                rank[order - self._used[row]] = np.arange(len(order))
                ranked = rank[self._labels[row] - self._used[row]]
                tokens, counts = np.argsort(ranked, kind="stable"), np.bincount(ranked)
                start = 0
                for some in pieces(counts, writer.piece // form.record_bytes, form.group_size):
                    count = int(counts[some].sum())
                    entries = self.coming.entries(row, tokens[start : start + count])
                    writer.put(entries, counts[some], *np.array([next(left) for _ in counts[some]]).T)
                    start += count
            if writer.packed:
                writer.end()
        except Exception:
            pages.give(rows, places)
            raise
        pages.take(rows, np.concatenate(list(orders.values())), places)

    def _order(self, row: int, half_empty: int, queries: np.ndarray | None, wanted: int) -> np.ndarray:
        """The numbers of a row's new clusters, in the order that they are to lie in: as partners of others, as far as
        there are pools that are `half_empty`, and in new ones."""
        new = np.arange(self._used[row], self._partition.used[row])
        if queries is None or len(new) < FEWEST_TO_ORDER:
            return new
        parts = [new[start : start + ORDERED] for start in range(0, len(new), ORDERED)]
        leads = [half_empty + 1, *((start - half_empty + 1) % 2 for start in range(ORDERED, len(new), ORDERED))]
        ordered = (
            part[self._in_pools(row, part, lead, queries[row], wanted)] for part, lead in zip(parts, leads, strict=True)
        )
        return np.concatenate(list(ordered))

    def _in_pools(self, row: int, some: np.ndarray, lead: int, queries: np.ndarray, wanted: int) -> np.ndarray:
        """In which order some clusters of a row are to lie. Of what is wanted they have their part."""
        counts = self._partition.counts[row, some]
        new = int(self._partition.counts[row, self._used[row] : self._partition.used[row]].sum())
        centroids = self._partition.centroids[row, some].astype(np.float32)
        return in_pools(co_retrieved(queries, centroids, counts, max(1, wanted * int(counts.sum()) // new)), lead)
