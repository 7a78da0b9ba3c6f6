"""New clusters of many tokens, and their order on disk (DynaKV, algorithm 1, sections 5.1 and 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from ...fetch.storage import Storage
from ...history.records import RecordFormat, places_within
from ...kernels import clusters as kernels
from ...kernels.on_a_device import to_device, to_host
from ...stores.base import Store
from .arrivals import Arrivals
from .pages import ClusterPages, PageWriter, piece_bytes, pieces
from .partition import BATCH, FROM_EVEN, Partition

# Co-retrieved clusters, and an order in which they lie side by side (DynaKV, sections 5.1 and 5.2)

ORDERED = 512
"""Upper bound on the clusters that are ordered at a time: the counts are for all pairs."""


def co_retrieved(queries: np.ndarray, centroids: np.ndarray, counts: np.ndarray, wanted: int) -> np.ndarray:
    """Count, for each pair of clusters, the tokens that retrieve both: (C, C) float32, zeros on the diagonal. Equation
    (8) without its common divisor.

    A token has scaled `queries` (heads, n, D). It retrieves the clusters with the largest attention a key, summed over
    heads, as if each key were its centroid (C, D), until they contain `wanted` keys. `counts` (C,) are the clusters'
    keys.
    """
    products = (torch.from_numpy(queries) @ torch.from_numpy(centroids).T).numpy() + np.log(counts, dtype=np.float32)
    weights = np.exp(products - products.max(2, keepdims=True))
    shares = (weights / weights.sum(2, keepdims=True)).sum(0) / counts
    order = np.argsort(-shares, 1, kind="stable")
    keys = counts[order]
    retrieved = np.zeros(shares.shape, dtype=np.float32)
    np.put_along_axis(retrieved, order, (np.cumsum(keys, 1) - keys < wanted).astype(np.float32), 1)
    together: np.ndarray = (torch.from_numpy(retrieved).T @ torch.from_numpy(retrieved)).numpy()
    np.fill_diagonal(together, 0)
    return together


def chain(together: np.ndarray) -> np.ndarray:
    """Order C clusters greedily by `together` (C, C): (C,) int64. The first one is most often retrieved with others.
    Each next one is the remaining cluster that is most often retrieved with its predecessor."""
    totals = together.sum(1)
    remaining = together.copy()
    order = np.empty(len(totals), dtype=np.int64)
    for place in range(len(totals)):
        last = order[place - 1]
        chosen = remaining[last].argmax() if place and remaining[last].max() > 0 else totals.argmax()
        order[place] = chosen
        remaining[:, chosen], totals[chosen] = -1, -1
    return order


def pairs(together: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair C clusters greedily by `together` (C, C), whole numbers: pairs (n, 2), the most often co-retrieved pair
    first, and unpaired clusters (C - 2n,). Pairing ends when no remaining pair is ever co-retrieved."""
    count, rounds = len(together), [np.empty((0, 2), dtype=np.int64)]
    every = np.arange(count)
    remaining = together.astype(np.int32) * count**2 + np.minimum(every, every[:, None]) * count
    remaining += np.maximum(every, every[:, None], dtype=np.int32)  # makes equal counts distinct
    remaining[together == 0] = 0
    while remaining.any():
        best = remaining.argmax(1)
        mutual = every[(best[best] == every) & (every < best) & (remaining[every, best] > 0)]
        rounds.append(np.stack([mutual, best[mutual]], 1))
        remaining[rounds[-1]], remaining[:, rounds[-1]] = 0, 0
    all_pairs = np.concatenate(rounds)
    by_count = np.argsort(-together[all_pairs[:, 0], all_pairs[:, 1]], kind="stable")
    return all_pairs[by_count], np.setdiff1d(every, all_pairs)


def in_pools(together: np.ndarray, lead: int) -> np.ndarray:
    """Order C clusters for pools of two: (C,) int64 (sections 5.1 and 5.2). After the first `lead` clusters, each two
    are partners, which share a pool. Partners are often co-retrieved. So are neighbouring pairs, because a pool's
    second cluster and the next pool's first one are adjacent on disk."""
    paired, unpaired = pairs(together)
    while len(unpaired) < min(lead, len(together)):
        paired, unpaired = paired[:-1], np.concatenate([unpaired, paired[-1]])
    flat, count = paired.reshape(-1), len(paired)
    among = together[np.ix_(flat, flat)].reshape(count, 2, count, 2).sum((1, 3))
    np.fill_diagonal(among, 0)
    return np.concatenate([unpaired[:lead], paired[chain(among)].reshape(-1), unpaired[lead:]])


# K-means of all rows at once, on a device

def clusters_of_rows(points: torch.Tensor, wanted: np.ndarray, capacity: int) -> tuple[torch.Tensor, ...]:
    """The paper's NewCluster on a device: clusters of each row's points (R, n, D), about `wanted` (R,) of them, none of
    more than `capacity` keys. Nothing waits for the device.

    As `k_means`, but an empty cluster stays where it was, and a cluster that is too large becomes equal runs of its
    keys in the order of the sequence. Returns labels (R, n) int32, from 0 without gaps; and of each label counts (R, k)
    int32, means (R, k, D) float16 and variances (R, k) float32. On text the keys' distance to their means is that of
    `Partition.add`, or, of clusters that may be no larger than their average, 1.05 times that (SmolLM2-135M, 2K
    tokens).
    """
    if points.stride(2) != 1:  # which kernels rely on
        points = points.contiguous()
    (rows, count, dim), most = points.shape, int(wanted.max())
    first = np.zeros((rows, most), dtype=np.int64)
    for number in np.unique(wanted):
        first[wanted == number, :number] = np.linspace(0, count - 1, number).astype(np.int64)
    first += np.arange(rows)[:, None] * count
    closed = None
    if (wanted < most).any():
        closed = to_device(np.arange(most) >= wanted[:, None], points.device)
    means = points.flatten(0, 1).index_select(0, to_device(first.reshape(-1), points.device))
    means = means.view(rows, most, dim).float()
    for _ in range(FROM_EVEN):
        means, _ = kernels.means(points, kernels.assign(points, means, closed), means)
    labels = kernels.parted(kernels.assign(points, means, closed), most, capacity)
    nothing = means.new_zeros(rows, most_labels(most, count, capacity), dim)
    means, counts = kernels.means(points, labels, nothing)
    distances = kernels.apart(points, labels, means)[..., None]
    variances, _ = kernels.means(distances, labels, nothing.new_zeros(*nothing.shape[:2], 1))
    largest = torch.finfo(torch.float16).max
    return labels, counts, means.clamp_(-largest, largest).half(), variances[..., 0]


def most_labels(wanted: int, keys: int, capacity: int) -> int:
    """Upper bound on the clusters that `clusters_of_rows` makes of so many keys a row."""
    return wanted + keys // capacity


# New clusters, on their way to the store

FEWEST_TO_ORDER = 4
"""Rows with fewer new clusters are not ordered: all of them are neighbours."""


class NewClusters:
    """Algorithm 1, NewCluster: the `coming` tokens of some `rows` in new clusters. They are in the partition at once,
    and in the store after `write`. Their numbers are set in `labels` (rows of the history, count). Copies no entries.
    Raises with nothing changed.

    A device clusters `at_once` rows, which costs one wait."""

    def __init__(
        self, partition: Partition, rows: np.ndarray, coming: Arrivals, labels: np.ndarray, at_once: int = 1
    ) -> None:
        self.coming, self._partition, self._rows, self._labels = coming, partition, rows, labels
        self._ordered: Callable[[], list[np.ndarray]] | None = None
        self._used, self._limits, self._held = partition.used.copy(), partition.limits.copy(), partition.held.copy()
        try:
            edges = np.linspace(0, coming.count, -(-coming.count // BATCH) + 1).astype(int).tolist()
            if coming.there:
                for start, stop in pairwise(edges):
                    for some in in_groups(rows, at_once):
                        self._cluster(some, start, stop)
                return
            for row in rows.tolist():
                for start, stop in pairwise(edges):
                    labels[row, start:stop] = partition.add(row, coming.points(row, start, stop), coming.count)
        except BaseException:
            self.undo()
            raise

    def _cluster(self, rows: np.ndarray, start: int, stop: int) -> None:
        """Cluster some tokens of `rows` on the device."""
        wanted = self._partition.wanted(rows, stop - start, self.coming.count)
        made = clusters_of_rows(self.coming.points_of(rows, start, stop), wanted, self._partition.capacity)
        self._labels[rows, start:stop] = self._partition.put_new(rows, *(part.numpy() for part in to_host(*made)))

    @property
    def most(self) -> int:
        """New clusters of the row with the most."""
        return int((self._partition.used - self._used).max())

    def order(
        self, storage: Storage, pages: ClusterPages, queries: Callable[[], torch.Tensor], wanted: int
    ) -> None:
        """Begin to order the new clusters for `write`, in the writer's thread: clusters that the same of the latest
        `queries` (rows, heads, n, D), scaled, retrieve, `wanted` keys each, lie side by side (sections 5.1 and 5.2)."""
        half_empty = [pages.half_empty(row) for row in self._rows.tolist()]

        def ordered() -> list[np.ndarray]:
            states = queries().numpy()
            rows = zip(self._rows.tolist(), half_empty, strict=True)
            return [self._order(row, halves, states[row], wanted) for row, halves in rows]

        self._ordered = storage.prefetcher.run_behind_writes(ordered)

    @property
    def ordering(self) -> bool:
        """Whether `order` has begun, and `orders` has not been called since."""
        return self._ordered is not None

    def orders(self) -> list[np.ndarray]:
        """The numbers (n,) of each row's new clusters in their order, after what `order` began; without it, as they
        are. Raises `StalledError` if earlier writes do not end, and what `order` met; then they stay as they are."""
        if self._ordered is None:
            return [np.arange(self._used[row], self._partition.used[row]) for row in self._rows.tolist()]
        ordered, self._ordered = self._ordered, None
        return ordered()

    def undo(self) -> None:
        """Restore the partition's earlier state."""
        for row in self._rows.tolist():
            self._partition.drop_last(row, int(self._used[row]))
        self._partition.limits, self._partition.held = self._limits, self._held

    def write(
        self, storage: Storage, store: Store, form: RecordFormat, pages: ClusterPages, orders: list[np.ndarray],
        part: tuple[int, int] = (1, 0),
    ) -> None:  # fmt: skip
        """Write the new clusters to reserved places, each row's in the order that `orders` gave. `part`: rows and bytes
        of pages that a device packs at a time. Raises `StoreFullError`, or an earlier write's `StoreError`, with no
        cluster placed."""
        rows, numbers = np.repeat(self._rows, [len(order) for order in orders]), np.concatenate(orders)
        places = pages.reserve(rows)
        try:
            if self.coming.there:
                at_once, nbytes = part
                for some in in_groups(self._rows, at_once, adjacent=True):
                    of_some = slice(*np.searchsorted(rows, (some[0], some[-1] + 1)).tolist())
                    lying = rows[of_some], numbers[of_some], np.array(places[of_some])
                    self._pack(storage, store, form, some, *lying, nbytes)
            else:
                self._write(storage, store, form, orders, places)
        except Exception:
            pages.give(rows, places)
            raise
        pages.take(rows, numbers, places)

    def _write(
        self, storage: Storage, store: Store, form: RecordFormat, orders: list[np.ndarray],
        places: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Write the clusters, row by row in these orders, to their places."""
        writer, left = PageWriter(storage, store, form), iter(places)
        for row, order in zip(self._rows.tolist(), orders, strict=True):
            rank = np.empty(len(order), dtype=np.int64)
            rank[order - self._used[row]] = np.arange(len(order))
            ranked = rank[self._labels[row] - self._used[row]]
            tokens, counts = np.argsort(ranked, kind="stable"), np.bincount(ranked)
            start = 0
            for piece in pieces(counts, writer.piece // form.record_bytes, form.group_size):
                count = int(counts[piece].sum())
                entries = self.coming.entries(row, tokens[start : start + count])
                writer.put(entries, counts[piece], *np.array([next(left) for _ in counts[piece]]).T)
                start += count
        if writer.packed:
            writer.end()

    def _pack(
        self, storage: Storage, store: Store, form: RecordFormat, some: np.ndarray, rows: np.ndarray,
        clusters: np.ndarray, places: np.ndarray, nbytes: int,
    ) -> None:  # fmt: skip
        """Write the clusters (n,) of `rows` (n,), which are those of `some` rows, to `places` (n, 2). The device packs
        pages of `nbytes` at a time, or of one cluster, and copies them out; nothing waits for it."""
        group, counts = form.group_size, self._partition.counts[rows, clusters].astype(np.int64)
        each, (first, step) = -(-counts // group), places.T
        lowest = np.where(step < 0, first - (each - 1), first)
        begin, packed, ids = np.empty_like(each), 0, []
        for part in pieces(counts, nbytes // form.record_bytes, group):
            order = np.argsort(lowest[part])  # pages are sorted, so that adjacent ones are one write
            sizes = each[part][order]
            begin[part][order] = packed + np.cumsum(sizes) - sizes
            ids.append(np.repeat(lowest[part][order], sizes) + places_within(sizes))
            packed += len(ids[-1])
        new = clusters - self._used[rows]
        table = np.zeros((2, len(some), int(new.max()) + 1), dtype=np.int32)
        table[:, rows - some[0], new] = np.where(step < 0, begin + each - 1, begin), step
        own = (self._labels[some] - self._used[some][:, None]).astype(np.int32)
        labels, table_there = (to_device(array, self.coming.device) for array in (own, table))
        targets, first_page = kernels.placed(labels, table_there, group), 0
        for written in ids:
            records = self._records(form, slice(some[0], some[-1] + 1), targets, first_page, len(written))
            piece, first_page = max(1, piece_bytes(storage.write_queue) // form.record_bytes), first_page + len(written)
            for start in range(0, len(written), piece):
                host, arrived = storage.copied_out(records[start : start + piece], store)
                storage.prefetcher.write(store, written[start : start + piece], host, arrived)

    def _records(
        self, form: RecordFormat, rows: slice, targets: torch.Tensor, first: int, pages: int
    ) -> torch.Tensor:
        """Records (pages, record bytes) of the pages from `first` on, with the entries of adjacent `rows` whose places
        `targets` (rows, count) are in them."""
        records = torch.zeros(pages, form.record_bytes, dtype=torch.uint8, device=targets.device)
        fills = form.fills
        shape = pages * form.group_size, form.entry_width
        entries = (
            records.view(form.dtype).view(shape) if fills
            else torch.zeros(shape, dtype=form.dtype, device=targets.device)
        )  # fmt: skip
        self.coming.put(rows, targets, first * form.group_size, entries)
        if not fills:
            form.pack(entries.view(pages, form.group_size, -1), form.payload(records))
        return records

    def _order(self, row: int, half_empty: int, queries: np.ndarray, wanted: int) -> np.ndarray:
        """Order a row's new clusters on disk, (n,) numbers: the first ones fill pools that are `half_empty`, the others
        new pools. `queries` (heads, n, D) are the row's."""
        new = np.arange(self._used[row], self._partition.used[row])
        if len(new) < FEWEST_TO_ORDER:
            return new
        parts = [new[start : start + ORDERED] for start in range(0, len(new), ORDERED)]
        leads = [half_empty + 1, *((start - half_empty + 1) % 2 for start in range(ORDERED, len(new), ORDERED))]
        ordered = (
            part[self._in_pools(row, part, lead, queries, wanted)] for part, lead in zip(parts, leads, strict=True)
        )
        return np.concatenate(list(ordered))

    def _in_pools(self, row: int, clusters: np.ndarray, lead: int, queries: np.ndarray, wanted: int) -> np.ndarray:
        """Order some of a row's new clusters. They count for their share of the `wanted` keys."""
        counts = self._partition.counts[row, clusters]
        arrived = int(self._partition.counts[row, self._used[row] : self._partition.used[row]].sum())
        centroids = self._partition.centroids[row, clusters].astype(np.float32)
        return in_pools(co_retrieved(queries, centroids, counts, max(1, wanted * int(counts.sum()) // arrived)), lead)


def in_groups(rows: np.ndarray, at_once: int, *, adjacent: bool = False) -> list[np.ndarray]:
    """Split `rows` (n,), ascending, into groups of at most `at_once`; with `adjacent`, of rows that follow each
    other."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if adjacent else [rows]
    return [part[start : start + at_once] for part in parts for start in range(0, len(part), at_once)]
