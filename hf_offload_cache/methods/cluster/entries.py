"""What has left the tail, in clusters: in pages of the store, and a few entries that wait for theirs (DynaKV, sections
4.2 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch

from ...fetch.storage import Storage
from ...history.records import RecordFormat, places_within
from ...history.state import State, Table
from ...stores.base import Store
from .append_buffer import AppendBuffer
from .arrivals import Arrivals
from .pages import ClusterPages, PageWriter, in_order, pieces
from .partition import Moments, NewClusters, Partition, counted
from .plan import clustering, most_settled, settling, writing
from .readers import Readers

# What waits for clusters, on its way to the ends of their pages, or to their parts' (DynaKV, sections 4.2, 5.2)

PagesOf = Callable[[np.ndarray, np.ndarray, np.ndarray], torch.Tensor]
"""Of rows, clusters and numbers of their pages, (n,) each, what lies there: (n, group_size, width), even if others
were changed since."""


def fullest(waiting: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n,) and numbers (n,) of the fullest clusters of each row, of which so much waits (rows, clusters), without
    which no more than `most` does."""
    order = np.argsort(-waiting, 1, kind="stable")
    falling = np.take_along_axis(waiting, order, 1)
    over = falling.sum(1, keepdims=True) - most
    rows, places = ((np.cumsum(falling, 1) - falling < over) & (falling > 0)).nonzero()
    return rows, order[rows, places]


@dataclass(frozen=True)
class Settling:
    """Some clusters of which something is written anew: the page that is not full, or, of those that are to be split,
    all of them. Of each, (n,)."""

    rows: np.ndarray
    clusters: np.ndarray
    wide: np.ndarray
    """It is to be split."""
    kept: np.ndarray
    """Its pages that stay as they are: those that are full, none of what is to be split."""
    read: np.ndarray
    """How many entries are in the pages behind these, which are read and written anew."""
    waiting: np.ndarray
    """Entries that wait."""

    @classmethod
    def in_pieces(
        cls, rows: np.ndarray, clusters: np.ndarray, wide: np.ndarray, stored: np.ndarray, waiting: np.ndarray,
        group: int, most: int,
    ) -> Iterator[Settling]:  # fmt: skip
        """These clusters of these rows, of which some are `wide`, as many at a time as write `most` pages; of all there
        are so many entries `stored` and `waiting`, (rows, clusters)."""
        kept = np.where(wide, 0, stored[rows, clusters] // group)
        read = stored[rows, clusters] - kept * group
        waits = waiting[rows, clusters]
        for some in pieces(read + waits, most, group):
            yield cls(rows[some], clusters[some], wide[some], kept[some], read[some], waits[some])

    @property
    def counts(self) -> np.ndarray:
        """Entries that are written of each."""
        return self.read + self.waiting

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each its row, its number, and which page is written first."""
        return self.rows, self.clusters, self.kept

    def written_pages(self, group: int) -> int:
        """How many are written, but for those that parts do not fill."""
        return int((-(-self.counts // group)).sum())

    def pages(self, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, clusters and numbers of the pages that are read."""
        each = -(-self.read // group)
        number = np.repeat(self.kept, each) + places_within(each)
        return np.repeat(self.rows, each), np.repeat(self.clusters, each), number

    def waits_at(self, buffer: AppendBuffer, labels: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns of the buffer where these wait, (w,) each: one cluster's after the other's, in the order
        of the sequence. `labels`: of all tokens, or the first ones, (rows, tokens), numbers below `clusters`."""
        rows, columns = ((buffer.places >= 0) & (buffer.places < labels.shape[1])).nonzero()
        return self._sorted(rows, columns, labels, buffer.places[rows, columns], clusters)

    def members(self, labels: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows and tokens (n,) of those tokens whose `labels` (rows, tokens), numbers below `clusters`, name these:
        one cluster's after the other's, in the order of the sequence."""
        rows, tokens = np.indices(labels.shape).reshape(2, -1)
        return self._sorted(rows, tokens, labels, tokens, clusters)

    def _sorted(
        self, rows: np.ndarray, columns: np.ndarray, labels: np.ndarray, tokens: np.ndarray, clusters: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of rows and columns (n,), at which there are these tokens, those that are members, as they have it."""
        number = np.full((len(labels), clusters), -1)
        number[self.rows, self.clusters] = np.arange(len(self.rows))
        whose = number[rows, labels[rows, tokens]]
        order = np.lexsort((tokens, whose))[(whose < 0).sum() :]
        return rows[order], columns[order]

    def entries(self, pages: PagesOf, waiting: torch.Tensor, group: int) -> torch.Tensor:
        """What is written of one cluster after the other, each in the order of the sequence, (sum of counts, width),
        new; `waiting`: what waits, (w, width), as `waits_at` has it."""
        out, counts = waiting.new_empty(int(self.counts.sum()), waiting.shape[1]), self.counts
        there = places_within(counts) < np.repeat(self.read, counts)
        if there.any():
            each = -(-self.read // group)
            held = places_within(each)[:, None] * group + np.arange(group) < np.repeat(self.read, each)[:, None]
            out[torch.from_numpy(there)] = pages(*self.pages(group))[torch.from_numpy(held)]
        out[torch.from_numpy(~there)] = waiting
        return out


# How much of each cluster lies in its pages

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
        self.most_pages = int(self.pages.sum(1).max(initial=0))
        self.sizes: np.ndarray | None = None
        """By record, see `make_sizes`; None: they were not asked for since the last change."""

    def rehearse(self, pages: np.ndarray, records: int) -> None:
        """Be of so many pages (rows, clusters), in a store of `records`."""
        self.entries, self.pages, self.sizes = np.empty_like(pages), pages, np.empty(records, dtype=np.uint16)
        self.most_pages = int(pages.sum(1).max(initial=0))

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.pages.nbytes + (0 if self.sizes is None else self.sizes.nbytes)

    def make_sizes(self, places: ClusterPages) -> np.ndarray:
        """How many pages the cluster has that each record belongs to, (records,) uint16. `places`: where the pages are,
        until the next change."""
        pages = in_order(self.pages)
        ids = places.records(*pages)
        self.sizes = np.ones(int(ids.max(initial=0)) + 1, dtype=np.uint16)
        self.sizes[ids] = self.pages[pages[0], pages[1]]
        return self.sizes


class ClusteredEntries:
    """The tokens 0 to `sealed` - 1 of each row, each a member of one cluster of `partition`.

    A cluster's first members, in the order of the sequence, lie in its pages, of `group_size` entries each; what has
    joined since waits in the `buffer` until the cluster is at hand and `settle` is told what lies there: then a page
    that was not full is written anew, and a cluster that has become too wide is split. For the model's thread.

    Args:
        readers: told which records are written anew.
        most_tokens: a row will have no more.
    """

    STATE: ClassVar[State] = State(
        "clusters", "", {"sealed": "sealed"}, labels=Table("rows sealed", torch.uint16, torch.uint32, at="_labels")
    )

    def __init__(
        self, storage: Storage, store: Store, form: RecordFormat, partition: Partition, buffer: AppendBuffer,
        readers: Readers, most_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._most_tokens = 1 << 62 if most_tokens is None else most_tokens
        self.form, self.store, self.partition, self.buffer = form, store, partition, buffer
        self.pages = ClusterPages(store, partition.rows, partition.capacity // form.group_size)
        self.sealed = 0
        self._labels = np.zeros((partition.rows, 0), dtype=np.uint16)
        self._unplaced: NewClusters | None = None
        self._count_stored()
        self._storage, self._readers = storage, readers

    @property
    def labels(self) -> np.ndarray:
        """The cluster of each token, (rows, sealed), unsigned: a view, valid until the next change."""
        return self._labels[:, : self.sealed]

    stored: np.ndarray = property(attrgetter("_counts.entries"))  # type: ignore[assignment]
    """How many members of each cluster lie in its pages, (rows, clusters) int32: a view, until the next change."""

    @property
    def waiting(self) -> np.ndarray:
        """How many members of each cluster wait, (rows, clusters)."""
        return self.partition.counts - self._counts.entries

    def _count_stored(self) -> None:
        """Know what lies in pages, as partition and buffer are now."""
        self._counts = StoredCounts(self.partition.counts, self._labels, self.buffer.places, self.form.group_size)

    page_counts: np.ndarray = property(attrgetter("_counts.pages"))  # type: ignore[assignment]
    """Pages of each cluster that hold something, (rows, clusters) int32: a view, valid until the next change."""
    most_pages: int = property(attrgetter("_counts.most_pages"))  # type: ignore[assignment]
    """Pages of the row that has most."""

    def sizes(self, records: np.ndarray) -> np.ndarray:
        """How many pages the cluster has that each of `records` (n,) belongs to, (n,) uint16; of others, anything."""
        counts = self._counts
        sizes = counts.sizes
        if sizes is None:
            sizes = counts.make_sizes(self.pages)
        return sizes[np.minimum(records, sizes.size - 1)]

    @property
    def tables_nbytes(self) -> int:
        return sum(one.nbytes for one in (self._labels, self._counts, self.buffer.places, self.partition, self.pages))

    def rehearse(self, tokens: int, clusters: int, records: int) -> None:
        """Make the tables as large as `tokens` tokens a row in `clusters` clusters, with places for `records`, may make
        them. Pages are as many as these tokens fill, and of each cluster one that is not full."""
        rows, group = self.partition.rows, self.form.group_size
        self.partition.rehearse(clusters)
        self.pages.rehearse(clusters)
        room = tokens if self._most_tokens < 1 << 62 else tokens * 5 // 4 + 64
        self._labels = np.empty((rows, room), dtype=np.uint16 if clusters < 1 << 16 else np.uint32)
        pages = np.zeros((rows, clusters), dtype=np.int32)
        pages[:, :1] = tokens // group + clusters
        self._counts.rehearse(pages, records)

    @property
    def most_settled(self) -> int:
        """Pages that are read, put together and written at a time."""
        return most_settled(self.form, self.buffer.joining, self._storage.write_queue)

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """So much is held for a while, in the account as "packing"."""
        return self._storage.account.holding("packing", nbytes)

    # --- in ----------------------------------------------------------------------------------------------------

    def add(self, coming: Arrivals, *, hold_back: bool = False) -> None:
        """The next tokens. As many as the buffer has room for, or fewer, join the nearest clusters, where some may be
        joined, and wait; more make clusters of their own, in the store, or, to `hold_back`, in none until `place`.
        Raises `StoreFullError`, or an earlier write's `StoreError`, with nothing changed but where entries lie."""
        labels = np.full((coming.rows, coming.count), -1, dtype=np.int64)
        self._label(self.sealed + coming.count)  # what can fail comes first
        if coming.count <= self.buffer.joining:
            self.settle(self.read, *fullest(self.waiting, self.buffer.most))
            points = np.stack([coming.points(row) for row in range(coming.rows)])
            labels = self.partition.nearest(points)
        joins = np.logical_and.reduce(labels >= 0, axis=1)
        if not joins.all():
            with self.holding(clustering(self.form, coming.count)):
                self._unplaced = NewClusters(self.partition, (~joins).nonzero()[0], coming, labels)
            if not hold_back:
                try:
                    self.place()
                except BaseException:
                    self._unplaced.undo()
                    self._unplaced = None
                    raise
        if joins.any():
            self.partition.join(points, np.where(joins[:, None], labels, -1))
            for row in joins.nonzero()[0].tolist():
                self.buffer.add(row, coming.entries(row, np.arange(coming.count)), self.sealed)
        self._widen_labels()
        first, self.sealed = self.sealed, self.sealed + labels.shape[1]
        self._labels[:, first : self.sealed] = labels
        self._count_stored()

    def _label(self, tokens: int) -> None:
        """Have room for labels of so many tokens."""
        if tokens > self._labels.shape[1]:
            more = max(tokens, min(self._labels.shape[1] * 5 // 4 + 64, self._most_tokens)) - self._labels.shape[1]
            self._labels = np.pad(self._labels, ((0, 0), (0, more)))

    def _widen_labels(self) -> None:
        """Have labels for the largest number of a cluster."""
        if self.partition.clusters > 1 << 16 and self._labels.itemsize == 2:
            self._labels = self._labels.astype(np.uint32)

    def points(self, entries: torch.Tensor) -> np.ndarray:
        """What is clustered of entries (n, width): their keys (n, key width), float32, on the host."""
        return entries[:, : self.form.key_width].float().cpu().numpy()

    def place(self, queries: np.ndarray | None = None, wanted: int = 0) -> None:
        """Write the clusters that were held back, if there are any: see `NewClusters.write`, and what it raises."""
        if (new := self._unplaced) is not None:
            with self.holding(writing(self.form, new.coming.count, new.most, self._storage.write_queue)):
                new.write(self._storage, self.store, self.form, self.pages, queries, wanted)
            self._unplaced = None

    def drop_unplaced(self) -> None:
        """The clusters that were held back, and their tokens, are gone."""
        if self._unplaced is not None:
            self._unplaced.undo()
            self.sealed -= self._unplaced.coming.count
            self._unplaced = None
            self._count_stored()

    # --- what waits --------------------------------------------------------------------------------------------

    def settle_all(self) -> None:
        """Let nothing wait any more."""
        self.settle(self.read, *self.waiting.nonzero())

    def read(self, rows: np.ndarray, clusters: np.ndarray, numbers: np.ndarray) -> torch.Tensor:
        """What lies in pages of clusters of rows, (n,) each: (n, group_size, width), a copy."""
        ids, form = self.pages.records(rows, clusters, numbers), self.form
        found = self.buffer.entries.new_empty(len(ids), form.group_size, form.entry_width)
        with self._storage.audited():
            streamed = self._storage.stream(self.store, ids, self.pages.largest, found.device)
            for part, records in zip(found.split(self.pages.largest), streamed, strict=False):
                part.copy_(form.payload(records).view_as(part))
        return found

    def settle(self, pages: PagesOf, rows: np.ndarray, clusters: np.ndarray) -> None:
        """What waits for these distinct clusters of these rows, (n,) each, lies in their pages from now on, and those
        that are to be split are so. Raises with nothing changed of those that are not settled."""
        form, wide = self.form, self.partition.to_split[rows, clusters]
        there = self.stored, self.waiting, form.group_size, self.most_settled
        for some in Settling.in_pieces(rows, clusters, wide, *there):
            with self.holding(settling(form, some.written_pages(form.group_size))):
                self._settle(pages, some)

    def _settle(self, pages: PagesOf, some: Settling) -> None:
        """In one write."""
        own, group = self.partition, self.form.group_size
        waits = some.waits_at(self.buffer, self._labels, own.clusters)
        entries = some.entries(pages, self.buffer.at(*waits), group)
        owner = np.repeat(np.arange(len(some.counts)), some.counts)
        wide, parts = some.wide[owner], np.zeros(len(owner), dtype=np.int64)
        if wide.any():
            keys = self.points(entries[torch.from_numpy(wide)])
            parts[wide] = self._parts(some, keys)
        both = np.stack([owner, parts])  # of each part, one cluster after the other:
        (of, part), at, counts = np.unique(both, axis=1, return_index=True, return_counts=True)
        first, step = self.pages.records(*some.ends)[of], self.pages.steps(some.rows, some.clusters)[of]
        fresh = some.rows[of[part > 0]]
        own.reserve(fresh)
        places = self.pages.reserve(fresh)
        before = self.pages.records(*some.pages(group))
        writer = PageWriter(self._storage, self.store, self.form, at_once=True)
        try:
            if places:
                first[part > 0], step[part > 0] = np.array(places).T
            order = torch.from_numpy(np.lexsort((parts, owner))).to(entries.device)
            writer.put(entries[order], counts, first, step)
            self._readers.stale(np.concatenate([before, writer.ids]))
            written = writer.end()
        except Exception:
            self.pages.give(fresh, places)
            raise
        numbers = some.clusters[owner]
        if wide.any():
            numbers[wide] = self._split(some, keys, parts[wide])
        self.pages.take(fresh, numbers[at[part > 0]], places)
        try:
            self.buffer.free(*waits)
        finally:
            self._count_stored()
            self._readers.renewed(*written, before[~np.isin(before, written[0])])

    def _parts(self, some: Settling, keys: np.ndarray) -> np.ndarray:
        """The part of its cluster that each of what is to be split goes to, (n,), all its keys (n, D): 0 where it
        stays, as all of a cluster does for which others, wider ones of its row, have taken the room."""
        own, new = self.partition, np.zeros(self.partition.rows, dtype=np.int64)
        parts, rows = own.parts(keys, counts := some.counts[some.wide]), some.rows[some.wide]
        each = np.split(parts, np.cumsum(counts)[:-1])
        for one in np.argsort(-own.variances[rows, some.clusters[some.wide]], kind="stable").tolist():
            row, part = rows[one], each[one]
            if len(part) <= own.capacity and not own.roomy(new)[row]:
                part[:] = 0
            new[row] += part.max()
        return parts

    def _split(self, some: Settling, keys: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """What is to be split goes to these parts, (n,), all its keys (n, D). The cluster of each, (n,)."""
        rows, clusters, counts = some.rows[some.wide], some.clusters[some.wide], some.counts[some.wide]
        numbers = self.partition.split(rows, clusters, keys, counts, parts)
        self._widen_labels()
        for row, cluster, own in zip(rows, clusters, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
            labels = self._labels[row, : self.sealed]
            labels[labels == cluster] = own
        return numbers

    # --- changes -----------------------------------------------------------------------------------------------

    def cut(self, keep: int, left: list[tuple[Settling, Moments]]) -> None:
        """Only the first `keep` tokens stay. `left`: clusters that lose others, and what their own that stay have in
        common; of clusters that lose some and are not among these none stays."""
        own, stay = self.partition, counted(self.labels[:, :keep], self.partition.clusters)
        rows, clusters = (own.counts > stay).nonzero()
        none = np.zeros((0, own.dim), dtype=np.float32), np.zeros(0, dtype=np.int64)
        own.put(rows, clusters, Moments.of(*none, len(rows)))
        for some, moments in left:
            own.put(some.rows, some.clusters, moments)
        empty = stay[rows, clusters] == 0
        self.pages.leave(rows[empty], clusters[empty])
        new = own.close_up()
        self.pages.renumber(new)
        self._labels[:, :keep] = np.take_along_axis(new, self.labels[:, :keep].astype(np.int64), 1)
        self.buffer.truncate(keep)
        self.sealed = keep
        self._count_stored()

    def settle_shared(self, rows: torch.Tensor) -> None:
        """Let nothing wait for clusters that several of `rows`, which are about to be selected, have in common. Raises
        with nothing lost."""
        shared = np.bincount(rows.cpu().numpy(), minlength=self.partition.rows) > 1
        self.settle(self.read, *(self.waiting * shared[:, None]).nonzero())

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now, as the partition's are: clusters that rows share are closed there. See
        `settle_shared`."""
        chosen = rows.cpu().numpy()
        self.buffer.select_rows(rows)
        self.pages.select_rows(chosen)
        self._labels = np.ascontiguousarray(self._labels[chosen])
        self._count_stored()

    def close(self) -> None:
        """Others may hold all that there is: new entries get clusters of their own."""
        self.partition.close()
        self.pages.close()

    def move(self, store: Store) -> None:
        """The same records are found in `store` from now on, by the same ids."""
        self.store = store
        self.pages.move(store)

    def capture(self) -> dict[str, Any]:
        """All that is held beside the records, where nothing waits: views, valid until the next change."""
        tables = {**self.partition.STATE.capture(self.partition), **self.pages.STATE.capture(self.pages)}
        return {**tables, **self.STATE.capture(self)}

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured, all of it closed; pools are others' too. Copies."""
        self.partition.restore(tree)
        self.pages.STATE.restore(self.pages, tree)
        self.STATE.restore(self, tree)
        self.sealed = self._labels.shape[1]
        self._count_stored()
