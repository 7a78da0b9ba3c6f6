"""How much of each cluster lies in its pages."""

from __future__ import annotations

import numpy as np

from .cluster_pages import ClusterPages, in_order


class StoredCounts:
    """Of clusters that have `counts` (rows, clusters) members, but for those that wait: tokens `waiting` (rows, n), -1:
    none, each a member of the cluster that `labels` (rows, tokens) say. Counted once."""

    def __init__(self, counts: np.ndarray, labels: np.ndarray, waiting: np.ndarray, group: int) -> None:
        rows, columns = (waiting >= 0).nonzero()
        self.entries = counts.copy()
        """(rows, clusters) int32: members that lie in pages."""
        np.subtract.at(self.entries, (rows, labels[rows, waiting[rows, columns]]), 1)
        self.pages = -(-self.entries // group)
        """(rows, clusters) int32: pages, of `group` each, that hold something."""
        self._sizes: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.pages.nbytes + (0 if self._sizes is None else self._sizes.nbytes)

    def sizes(self, records: np.ndarray, places: ClusterPages) -> np.ndarray:
        """How many pages the cluster has that each of `records` (n,) belongs to, (n,) uint16; of others, anything.
        `places`: where the pages are, until the next change."""
        if self._sizes is None:
            pages = in_order(self.pages)
            ids = places.records(*pages)
            self._sizes = np.ones(int(ids.max(initial=0)) + 1, dtype=np.uint16)
            self._sizes[ids] = self.pages[pages[0], pages[1]]
        return self._sizes[np.minimum(records, self._sizes.size - 1)]
