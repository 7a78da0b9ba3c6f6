"""Places of clusters in the store: pools of pages, two clusters a pool, which grow towards each other (DynaKV, section
5.2, dual-head layout)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from ...fetch.storage import Storage
from ...history.records import PIECE_BYTES, RecordFormat, places_within
from ...history.state import State, Table
from ...kernels.on_a_device import to_device
from ...stores.base import Store, aligned_empty

# Entries on their way into pages

def piece_bytes(write_queue: int) -> int:
    """Bytes of pages that are handed to the writer at a time, next to a write queue of so many bytes."""
    return min(PIECE_BYTES, write_queue // 2)


class PageWriter:
    """Packs entries into records of `group_size` each, and hands these to the writer. Partial records end in zeros.

    Raises an earlier write's `StoreError`. Pages handed over before it are then written. There are none if all pages
    are handed over `at_once`, by `end`.
    """

    def __init__(self, storage: Storage, store: Store, form: RecordFormat, *, at_once: bool = False) -> None:
        self._storage, self._store, self._form = storage, store, form
        self._ids: list[np.ndarray] = []
        self._pages: list[torch.Tensor] = []
        self._bytes = 0
        self.piece = 1 << 62 if at_once else piece_bytes(storage.write_queue)
        """Bytes handed over at a time, or all of one cluster."""

    @property
    def packed(self) -> bool:
        """True if there are records for `end` to hand over."""
        return bool(self._ids)

    @property
    def ids(self) -> np.ndarray:
        """The records (n,) that `end` hands over."""
        return np.concatenate(self._ids) if self._ids else np.empty(0, dtype=np.int64)

    def put(self, entries: torch.Tensor, counts: np.ndarray, first: np.ndarray, step: np.ndarray) -> None:
        """Pack entries (n, width): the first `counts[0]` into the records `first[0]`, `first[0] + step[0]` and so on,
        the next `counts[1]` into those of the next cluster, and so on."""
        form, group = self._form, self._form.group_size
        each = -(-counts // group)
        which = np.repeat(np.arange(len(counts)), each)
        index = places_within(each)
        begins = np.repeat((np.cumsum(each) - each) * group - (np.cumsum(counts) - counts), counts)
        pages = torch.zeros(which.size, form.record_bytes, dtype=torch.uint8, device=entries.device)
        rows = entries.new_zeros(which.size * group, form.entry_width)
        rows[to_device(begins + np.arange(len(entries)), entries.device)] = entries
        form.pack(rows.view(which.size, group, form.entry_width), form.payload(pages))
        self._ids.append(first[which] + step[which] * index)
        self._pages.append(pages)
        self._bytes += pages.nbytes
        if self._bytes >= self.piece:
            self.end()

    def end(self) -> tuple[np.ndarray, torch.Tensor]:
        """Hand over the packed records, of which there must be some. They are sorted, so that adjacent ones are one
        write. Returns the records (n,) and their contents (n, payload width) on the entries' device: views."""
        order = np.argsort(self.ids)
        ids, device = self.ids[order], self._pages[0].device
        if device.type == "cuda":
            there = torch.cat(self._pages).index_select(0, to_device(order, device))
            self._ids, self._pages, self._bytes = [], [], 0
            self._storage.write_out(there, self._store, ids)
            return ids, self._form.payload(there)
        target = torch.from_numpy(np.argsort(order))
        records = aligned_empty(len(ids), self._form.record_bytes)
        for pages, targets in zip(self._pages, target.split([len(pages) for pages in self._pages]), strict=True):
            records.index_copy_(0, targets, pages)
        self._ids, self._pages, self._bytes = [], [], 0
        self._storage.prefetcher.write(self._store, ids, records)
        return ids, self._form.payload(records)


_ROOM = 16


class ClusterPages:
    """The places of clusters (rows, clusters): records `first`, `first + step`, `first + 2 step` and so on.

    A pool is as many adjacent records as two of the largest clusters need. One cluster begins at its first record and
    grows upwards. The other begins at its last record and grows downwards. So either can grow in place. The next new
    cluster of the row becomes the partner of a single one. `sweep` frees a pool that no row uses.
    """

    STATE: ClassVar[State] = State(
        "clusters",
        first=Table("rows numbers", torch.int32, at="_first"),
        step=Table("rows numbers", torch.int8, at="_step"),
    )

    def __init__(self, store: Store, rows: int, largest: int) -> None:
        self._store, self.largest = store, largest
        self._first = np.full((rows, 0), -1, dtype=np.int32)
        self._step = np.zeros((rows, 0), dtype=np.int8)
        self._single: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
        self._owned, self._left = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self._look_from = 0
        self.moved = False
        """True if rows were selected since the last `sweep`."""

    def rehearse(self, clusters: int) -> None:
        """Make the tables as large as for `clusters` clusters a row, in a dry run."""
        rows = len(self._single)
        self._first, self._step = (np.empty((rows, clusters * 5 // 4 + _ROOM), dtype) for dtype in (np.int32, np.int8))
        self._owned = np.empty(rows * (2 * clusters + 1), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return self._first.nbytes + self._step.nbytes + self._owned.nbytes

    @property
    def pool(self) -> int:
        """Records of a pool."""
        return 2 * self.largest

    def records(self, rows: np.ndarray, clusters: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Record ids, int64, of pages of clusters of rows; all of one shape."""
        return self._first[rows, clusters].astype(np.int64) + self._step[rows, clusters].astype(np.int64) * pages

    def steps(self, rows: np.ndarray, clusters: np.ndarray) -> np.ndarray:
        """Differences, 1 or -1, int64, between the ids of successive pages of clusters of rows, (n,) each."""
        return self._step[rows, clusters].astype(np.int64)

    # --- places ------------------------------------------------------------------------------------------------

    def half_empty(self, row: int) -> int:
        """Pools with a single cluster of a row; its next clusters become their partners."""
        return len(self._single[row])

    def reserve(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """Reserve places (first record, step) for one new cluster in each of `rows` (n,); a row may occur more than
        once. `take` uses them, `give` returns them. Raises `StoreFullError` with nothing changed."""
        wanted = np.bincount(rows, minlength=len(self._single))
        missing = [max(0, int(count) - len(single)) for count, single in zip(wanted, self._single, strict=True)]
        pools = self._store.allocate(self.pool * sum(-(-count // 2) for count in missing)).reshape(-1, self.pool)
        self._owned = np.concatenate([self._owned, pools[:, 0]])
        new_pools = iter(pools.tolist())
        for single, count in zip(self._single, missing, strict=True):
            for _ in range(-(-count // 2)):
                ids = next(new_pools)
                assert ids[-1] - ids[0] == self.pool - 1, "pools are allocated and freed as a whole"
                single[:0] = [(ids[-1], -1), (ids[0], 1)]
        return [self._single[row].pop() for row in rows.tolist()]

    def give(self, rows: np.ndarray, places: list[tuple[int, int]]) -> None:
        """Return unused places that were reserved for `rows`."""
        for row, place in zip(rows.tolist()[::-1], places[::-1], strict=True):
            self._single[row].append(place)

    def take(self, rows: np.ndarray, clusters: np.ndarray, places: list[tuple[int, int]]) -> None:
        """Assign reserved places to these clusters of these rows."""
        if not len(rows):
            return
        if (need := int(clusters.max()) + 1) > self._first.shape[1]:
            more = max(need, need * 5 // 4 + _ROOM) - self._first.shape[1]
            self._first = np.pad(self._first, ((0, 0), (0, more)), constant_values=-1)
            self._step = np.pad(self._step, ((0, 0), (0, more)))
        self._first[rows, clusters], self._step[rows, clusters] = np.array(places).T

    def leave(self, rows: np.ndarray, clusters: np.ndarray) -> None:
        """Release the places of empty clusters of rows, (n,) each. Later clusters of a row get them unless another row
        uses them. The next `sweep` returns their records, and frees a pool that no row uses."""
        places = list(zip(self._first[rows, clusters].tolist(), self._step[rows, clusters].tolist(), strict=True))
        self._first[rows, clusters] = -1
        named, owned = set(self._first[self._first >= 0].tolist()), set(self._owned.tolist())
        for row, (first, step) in zip(rows.tolist(), places, strict=True):
            if first not in named and first - (self.pool - 1 if step < 0 else 0) in owned:
                named.add(first)  # one of the rows that released it may have it
                self._single[row].append((first, step))
                self._left = np.concatenate([self._left, first + step * np.arange(self.largest)])

    def renumber(self, new: np.ndarray) -> None:
        """Renumber clusters: `new` (rows, clusters) has the new number of each old one; -1: dropped."""
        rows, old = (new >= 0).nonzero()
        for table, nothing in ((self._first, -1), (self._step, 0)):
            kept = table[rows, old]
            table[:] = nothing
            table[rows, new[rows, old]] = kept

    def close(self) -> None:
        """Stop reusing pools, because others may share or free them: new clusters get new pools."""
        self._single, self._owned = [[] for _ in self._single], self._owned[:0].copy()

    # --- changes -----------------------------------------------------------------------------------------------

    @property
    def pools(self) -> np.ndarray:
        """The first records of the pools in use, ascending."""
        used = self._first >= 0
        return np.unique(self._first[used].astype(np.int64) - np.where(self._step[used] < 0, self.pool - 1, 0))

    def named(self, pages: np.ndarray, count: int) -> np.ndarray:
        """Mark the records in use, of the store's first `count`, for clusters with so many `pages` (rows, clusters):
        (count,) bool."""
        named = np.zeros(count, dtype=bool)
        named[self.records(*in_order(pages))] = True
        return named

    @property
    def garbage(self) -> bool:
        """True if rows were selected and half as many new pools were allocated as the last `sweep` left."""
        return self.moved and len(self._owned) > self._look_from

    def select_rows(self, rows: np.ndarray) -> None:
        """Make row i the current row `rows[i]`. Rows that share pools get new ones for new clusters."""
        shared = np.bincount(rows, minlength=len(self._first))[rows] > 1
        self._first, self._step = self._first[rows], self._step[rows]
        self._single = [[] if both else self._single[row] for row, both in zip(rows.tolist(), shared, strict=True)]
        self.moved = True

    def sweep(self) -> np.ndarray:
        """Free the pools that no row uses. Returns their records and those that `leave` released: copies of these are
        void."""
        live = self.pools
        dead = np.setdiff1d(self._owned, live, assume_unique=True)
        self._owned = np.intersect1d(self._owned, live, assume_unique=True)
        self._look_from = 3 * len(self._owned) // 2
        records = (dead[:, None] + np.arange(self.pool)).reshape(-1)
        if dead.size:
            self._store.free(records)
            freed = set(records.tolist())
            self._single = [[place for place in single if place[0] not in freed] for single in self._single]
        self.moved = False
        left, self._left = self._left, self._left[:0].copy()
        return np.union1d(records, left)

    def move(self, store: Store) -> None:
        """Use `store` from now on: it has the same records under the same ids."""
        self._store = store


def in_order(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List every page, row by row and cluster by cluster: its row, its cluster and its index in the cluster. `pages`
    (rows, clusters) are the pages of each cluster."""
    rows, clusters = pages.nonzero()
    counts = pages[rows, clusters]
    which = np.repeat(np.arange(counts.size), counts)
    return rows[which], clusters[which], places_within(counts)


def pieces(counts: np.ndarray, most: int, group_size: int) -> Iterator[slice]:
    """Group clusters of `counts` entries: as many at a time as fit in `most` pages, or one."""
    pages, start = np.cumsum(-(-counts // group_size)), 0
    while start < len(counts):
        stop = int(np.searchsorted(pages, (pages[start - 1] if start else 0) + most, "right"))
        yield slice(start, max(stop, start + 1))
        start = max(stop, start + 1)


# Entries and pages of each cluster in the store

class StoredCounts:
    """Entries and pages of each cluster in the store, computed once.

    They are `counts` (rows, clusters) members less the buffered ones. `waiting` (rows, n) are buffered tokens, -1:
    none; `labels` (rows, tokens) are the tokens' clusters.
    """

    def __init__(self, counts: np.ndarray, labels: np.ndarray, waiting: np.ndarray, group: int) -> None:
        rows, columns = (waiting >= 0).nonzero()
        self.entries = counts.copy()
        """(rows, clusters) int32: members in pages."""
        np.subtract.at(self.entries, (rows, labels[rows, waiting[rows, columns]]), 1)
        self.pages = -(-self.entries // group)
        """(rows, clusters) int32: pages of `group` entries that are not empty."""
        self.most_pages = int(self.pages.sum(1).max(initial=0))
        self.sizes: np.ndarray | None = None
        """By record, see `make_sizes`; None: not computed since the last change."""

    def rehearse(self, pages: np.ndarray, records: int) -> None:
        """Take the size of `pages` (rows, clusters) in a store of `records`, in a dry run."""
        self.entries, self.pages, self.sizes = np.empty_like(pages), pages, np.empty(records, dtype=np.uint16)
        self.most_pages = int(pages.sum(1).max(initial=0))

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.pages.nbytes + (0 if self.sizes is None else self.sizes.nbytes)

    def make_sizes(self, places: ClusterPages) -> np.ndarray:
        """Compute the pages of the cluster that each record belongs to, (records,) uint16. `places`: where the pages
        are; valid until the next change."""
        pages = in_order(self.pages)
        ids = places.records(*pages)
        self.sizes = np.ones(int(ids.max(initial=0)) + 1, dtype=np.uint16)
        self.sizes[ids] = self.pages[pages[0], pages[1]]
        return self.sizes


class Changes:
    """Counts changes, and remembers which clusters the latest ones changed, if copies on a device follow them."""

    def __init__(self, device: torch.device) -> None:
        self.number = 0
        self._latest: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=4 if device.type == "cuda" else 0)

    def note(self, rows: np.ndarray, clusters: np.ndarray) -> None:
        """These clusters of rows (n,) have changed."""
        self.number += 1
        self._latest.append((rows, clusters))

    def note_all(self) -> None:
        """Any cluster may have changed."""
        self.number += 1
        self._latest.clear()

    def since(self, number: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows and clusters, (n,) each, that changed after so many changes; None: maybe all."""
        missed = self.number - number
        if number < 0 or missed > len(self._latest):
            return None
        rows, clusters = zip(*list(self._latest)[len(self._latest) - missed :], strict=True)
        return np.concatenate(rows), np.concatenate(clusters)
