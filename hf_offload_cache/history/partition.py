"""Clusters of keys that follow what comes: who belongs where, how far apart they are, and which are to be split
(DynaKV, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..stores.mapped_table import MappedTable
from .clustering import halves, k_means
from .moments import Moments, in_half, squares
from .packing import places_within

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
        number: clusters that many at once are made into, in the place of those of `size`; two keys for each, and room.
        mapped: puts means where it gives them a table; None: they are in memory. It may raise `StoreError`.
    """

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

    @staticmethod
    def planned(clusters: int, dim: int, rows: int) -> tuple[int, int]:
        """The most bytes that tables of `clusters` clusters a row take, and that their means do."""
        room = rows * (clusters * 5 // 4 + _ROOM)
        return room * 9, room * 2 * dim

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

    def capture(self) -> dict[str, Any]:
        """All that is held, as a tree of arrays: views, valid until the next change."""
        return {name: getattr(self, name) for name in ("counts", "variances", "centroids", "used", "limits")}

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured, all of it closed. Copies."""
        self._need(tree["counts"].shape[1])
        for name in ("counts", "variances", "centroids"):
            getattr(self, f"_{name}")[:, : tree[name].shape[1]] = tree[name]
        self.used, self.limits = tree["used"].copy(), tree["limits"].copy()
        self.held = tree["counts"].sum(1)
        self.close()


def _wider(table: np.ndarray, more: int) -> np.ndarray:
    """With `more` columns of zeros."""
    return np.concatenate([table, np.zeros((table.shape[0], more, *table.shape[2:]), dtype=table.dtype)], 1)
