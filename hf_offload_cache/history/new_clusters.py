"""Clusters of tokens that have just come, on their way to the store."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..fetch.storage import Storage
from ..stores.base import Store
from .arrivals import Arrivals
from .cluster_pages import ClusterPages, pieces
from .clustering import BATCH
from .co_retrieval import ORDERED, co_retrieved, in_pools
from .page_writer import PageWriter
from .partition import Partition
from .record_format import RecordFormat

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
