"""Entries in clusters: stored in pages, or buffered in memory until their cluster is read (DynaKV, algorithm 1,
sections 4.2 and 5)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from ...fetch.storage import Storage
from ...history.records import RecordFormat, places_within
from ...history.state import State, Table
from ...kernels.on_a_device import to_device, to_host
from ...stores.base import Store
from .arrivals import AppendBuffer, Arrivals
from .config import ClusterForm
from .new_clusters import NewClusters
from .pages import Changes, ClusterPages, PageWriter, StoredCounts, pieces
from .partition import Moments, Partition, counted
from .plan import (
    Part,
    clustering,
    clustering_there,
    most_settled,
    ordering,
    parts_there,
    settling,
    writing,
    writing_there,
)


class Readers(Protocol):
    """Copies of records outside the history, which keeps them up to date. Called on the thread that runs the model."""

    def stale(self, records: np.ndarray) -> None:
        """Prepare for new contents of `records`: no read of them may be in flight. Earlier copies stay valid if the
        write fails."""

    def renewed(self, records: np.ndarray, payloads: torch.Tensor, gone: np.ndarray) -> None:
        """Replace copies: distinct `records` (n,) now contain `payloads` (n, payload width), a view, valid for the
        call. Records that are `gone` contain nothing."""


# Buffered entries, on their way into the pages of their clusters or of the parts of these (sections 4.2, 5.2)

PagesOf = Callable[[np.ndarray, np.ndarray, np.ndarray], torch.Tensor]
"""Reads pages: rows, clusters and page indices, (n,) each, give entries (n, group_size, width). Pages are as they were
before any change of the current `settle`."""


KeysOf = dict[tuple[int, int], np.ndarray]
"""All keys (n, D) float32 of a cluster, by its row and number."""


def fullest(waiting: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose each row's clusters with the most buffered entries, until at most `most` remain. Algorithm 1, buffer
    budget: the arg max of |Buf_j|.

    `waiting` (rows, clusters) counts buffered entries. Returns rows (n,) and clusters (n,).
    """
    order = np.argsort(-waiting, 1, kind="stable")
    descending = np.take_along_axis(waiting, order, 1)
    over = descending.sum(1, keepdims=True) - most
    rows, columns = ((np.cumsum(descending, 1) - descending < over) & (descending > 0)).nonzero()
    return rows, order[rows, columns]


def where(mask: np.ndarray, device: torch.device) -> torch.Tensor:
    """The places (n,) int64 where `mask` is True, on a device, which nothing waits for."""
    return to_device(mask.nonzero()[0], device)


@dataclass(frozen=True)
class Settling:
    """Clusters whose pages are rewritten, as arrays (n,). A cluster to be split is rewritten completely, others from
    their partial page on."""

    rows: np.ndarray
    clusters: np.ndarray
    wide: np.ndarray
    """bool: split this cluster."""
    kept: np.ndarray
    """Pages that stay as they are: the full ones, or none of a cluster to be split."""
    read: np.ndarray
    """Stored entries behind the kept pages, which are read and rewritten."""
    waiting: np.ndarray
    """Buffered entries."""

    @classmethod
    def in_pieces(
        cls, rows: np.ndarray, clusters: np.ndarray, wide: np.ndarray, stored: np.ndarray, waiting: np.ndarray,
        group: int, most: int,
    ) -> Iterator[Settling]:  # fmt: skip
        """Group clusters of rows, some of them `wide`, so that each piece writes at most `most` pages. `stored` and
        `waiting` (rows, clusters) count all clusters' entries in pages and in the buffer."""
        kept = np.where(wide, 0, stored[rows, clusters] // group)
        read = stored[rows, clusters] - kept * group
        waits = waiting[rows, clusters]
        for piece in pieces(read + waits, most, group):
            yield cls(rows[piece], clusters[piece], wide[piece], kept[piece], read[piece], waits[piece])

    @property
    def counts(self) -> np.ndarray:
        """Entries written for each cluster, (n,)."""
        return self.read + self.waiting

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, cluster and index of the first written page of each cluster."""
        return self.rows, self.clusters, self.kept

    def written_pages(self, group: int) -> int:
        """Pages written, without the partial pages that a split adds."""
        return int((-(-self.counts // group)).sum())

    def pages(self, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, clusters and page indices of the pages that are read."""
        each = -(-self.read // group)
        number = np.repeat(self.kept, each) + places_within(each)
        return np.repeat(self.rows, each), np.repeat(self.clusters, each), number

    def waits_at(self, buffer: AppendBuffer, labels: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """Find these clusters' buffered entries: rows and columns of the buffer, (w,) each, cluster by cluster, in
        sequence order.

        `labels` (rows, tokens) are the clusters of all tokens, or of the first ones; they are below `clusters`.
        """
        rows, columns = ((buffer.places >= 0) & (buffer.places < labels.shape[1])).nonzero()
        return self._sorted(rows, columns, labels, buffer.places[rows, columns], clusters)

    def members(self, labels: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """Find these clusters' tokens: rows (n,) and tokens (n,), cluster by cluster, in sequence order. `labels`
        (rows, tokens) are the clusters of the tokens; they are below `clusters`."""
        rows, tokens = np.indices(labels.shape).reshape(2, -1)
        return self._sorted(rows, tokens, labels, tokens, clusters)

    def _sorted(
        self, rows: np.ndarray, columns: np.ndarray, labels: np.ndarray, tokens: np.ndarray, clusters: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keep the rows and columns (n,) whose `tokens` (n,) belong to these clusters, and sort them as `members`
        does."""
        index = np.full((len(labels), clusters), -1)
        index[self.rows, self.clusters] = np.arange(len(self.rows))
        owners = index[rows, labels[rows, tokens]]
        order = np.lexsort((tokens, owners))[(owners < 0).sum() :]
        return rows[order], columns[order]

    def places(self, some: np.ndarray) -> list[tuple[int, int]]:
        """Row and cluster of each of `some` (n,) bool of the clusters."""
        return list(zip(self.rows[some].tolist(), self.clusters[some].tolist(), strict=True))

    def keys(self, keys: np.ndarray) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Row and cluster, and its part of `keys` (sum of counts, D), of each cluster, all of which are `wide`."""
        return zip(self.places(self.wide), np.split(keys, np.cumsum(self.counts)[:-1]), strict=True)

    def entries(self, pages: PagesOf, waiting: torch.Tensor, group: int) -> torch.Tensor:
        """Collect the entries to write: (sum of counts, width), new, cluster by cluster, in sequence order. `waiting`
        (w, width) are the buffered ones, in the order of `waits_at`."""
        out, counts = waiting.new_empty(int(self.counts.sum()), waiting.shape[1]), self.counts
        stored = places_within(counts) < np.repeat(self.read, counts)
        if stored.any():
            each = -(-self.read // group)
            filled = places_within(each)[:, None] * group + np.arange(group) < np.repeat(self.read, each)[:, None]
            of_pages = pages(*self.pages(group)).flatten(0, 1)
            out[where(stored, out.device)] = of_pages.index_select(0, where(filled.reshape(-1), out.device))
        out[where(~stored, out.device)] = waiting
        return out


# Entries of all clusters

class ClusteredEntries:
    """The tokens 0 to `sealed` - 1 of each row, each a member of one cluster of `partition` (DynaKV, algorithm 1).

    A cluster's first members, in sequence order, are in its pages of `group_size` entries. Later members are in the
    `buffer` until `settle` gets the cluster's pages. It then rewrites the partial page, or splits a cluster that has
    become too wide. For the thread that runs the model.

    Args:
        readers: told which records are rewritten.
        clusters: sizes of new clusters.
        most_tokens: upper bound on a row's tokens.
    """

    STATE: ClassVar[State] = State(
        "clusters", "", {"sealed": "sealed"}, labels=Table("rows sealed", torch.uint16, torch.uint32, at="_labels")
    )

    def __init__(
        self, storage: Storage, store: Store, form: RecordFormat, partition: Partition, buffer: AppendBuffer,
        readers: Readers, clusters: ClusterForm, most_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._clusters = clusters
        self._most_tokens = 1 << 62 if most_tokens is None else most_tokens
        self.form, self.store, self.partition, self.buffer = form, store, partition, buffer
        self.pages = ClusterPages(store, partition.rows, partition.capacity // form.group_size)
        self.sealed = 0
        self._labels = np.zeros((partition.rows, 0), dtype=np.uint16)
        self._unplaced: NewClusters | None = None
        self._ordering = 0  # bytes booked while they are ordered
        self.changes, self.rewritten = Changes(buffer.entries.device), Changes(buffer.entries.device)
        """Of counts, centroids or labels; and of pages."""
        self._count_stored()
        self._storage, self._readers = storage, readers
        self.join_there: Callable[[Arrivals], bool] | None = None
        """`DeviceClusters.join`; set by the owner of these."""
        self.late: list[Callable[[], None]] = []
        """Changes for which numbers are on their way from a device, oldest first: see `catch_up`."""

    @property
    def labels(self) -> np.ndarray:
        """The cluster of each token, (rows, sealed), unsigned: a view, valid until the next change."""
        return self._labels[:, : self.sealed]

    # An attrgetter makes no Python frame, unlike a function: steps read this often.
    stored: np.ndarray = property(attrgetter("_counts.entries"))  # type: ignore[assignment]
    """(rows, clusters) int32: members of each cluster in its pages; a view, valid until the next change."""

    page_counts: np.ndarray = property(attrgetter("_counts.pages"))  # type: ignore[assignment]
    """(rows, clusters) int32: pages of each cluster that are not empty; a view, valid until the next change."""
    most_pages: int = property(attrgetter("_counts.most_pages"))  # type: ignore[assignment]
    """Pages of the row with the most."""

    @property
    def waiting(self) -> np.ndarray:
        """(rows, clusters): buffered members of each cluster."""
        return self.partition.counts - self._counts.entries

    def _count_stored(self, changed: tuple[np.ndarray, np.ndarray] | None = None, *, joined: bool = False) -> None:
        """Recount the entries in pages, after a change of partition or buffer. `changed`: rows and clusters, (n,) each,
        that have changed; None: maybe all. Their pages have, too, unless keys only `joined` them."""
        for changes in (self.changes,) if joined else (self.changes, self.rewritten):
            changes.note_all() if changed is None else changes.note(*changed)
        self._counts = StoredCounts(self.partition.counts, self._labels, self.buffer.places, self.form.group_size)

    def sizes(self, records: np.ndarray) -> np.ndarray:
        """Pages of the cluster that each of `records` (n,) belongs to, (n,) uint16; undefined for other records."""
        counts = self._counts
        sizes = counts.sizes
        if sizes is None:
            sizes = counts.make_sizes(self.pages)
        return sizes[np.minimum(records, sizes.size - 1)]

    @property
    def tables_nbytes(self) -> int:
        tables = self._labels, self._counts, self.buffer.places, self.partition, self.pages
        return sum(table.nbytes for table in tables)

    def rehearse(self, tokens: int, clusters: int, records: int) -> None:
        """Make the tables as large as for `tokens` tokens a row in `clusters` clusters and `records` records, in a dry
        run. These tokens fill their pages, and each cluster has one partial page more."""
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
        """Pages that are read, assembled and written at a time."""
        return most_settled(self.form, self.buffer.joining, self._storage.write_queue)

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Book temporary memory of so many bytes in the account, as "packing"."""
        return self._storage.account.holding("packing", nbytes)

    # --- new tokens --------------------------------------------------------------------------------------------

    def add(self, coming: Arrivals, *, hold_back: bool = False) -> None:
        """Add the next tokens. Algorithm 1: NewCluster for many tokens; the assignment, UpdateVar and UpdateStats for
        few.

        Tokens join their nearest clusters if the buffer has room for them and their row has open clusters. They are
        buffered then, whether or not their cluster is to be split. Otherwise they form new clusters in the store. To
        `hold_back` leaves these unwritten until `place`.

        Raises `StoreFullError`, or an earlier write's `StoreError`, with nothing changed but the entries' places.
        """
        if self.late:
            self.catch_up()
        labels = np.full((coming.rows, coming.count), -1, dtype=np.int64)
        self._label(self.sealed + coming.count)  # first what can fail
        if coming.count <= self.buffer.joining:  # few enough to join clusters; first make room in the buffer
            self.settle(self.read, *fullest(self.waiting, self.buffer.most))
            if self.join_there is not None and self.join_there(coming):
                return
            points = to_host(coming.points_of(np.arange(coming.rows), 0, coming.count).float())[0].numpy()
            labels = self.partition.nearest(points)
        joins = np.logical_and.reduce(labels >= 0, axis=1)
        if not joins.all():  # the other rows make new clusters
            rows = (~joins).nonzero()[0]
            part, nbytes = self._part(coming, partial(clustering_there, self.form, self._clusters, coming.count))
            with self.holding(clustering(self.form, coming.count) if nbytes is None else nbytes):
                self._unplaced = NewClusters(self.partition, rows, coming, labels, part[0])
            if not hold_back:
                try:
                    self.place()
                except BaseException:
                    self._unplaced.undo()
                    self._unplaced = None
                    raise
        if joins.any():
            self.partition.join(points, np.where(joins[:, None], labels, -1))
            entries, rows = coming.between(0, coming.count), joins.nonzero()[0]
            some = entries if len(rows) == len(entries) else entries.index_select(0, to_device(rows, entries.device))
            self.buffer.add(rows, some, self.sealed)
        self._widen_labels()
        first, self.sealed = self.sealed, self.sealed + labels.shape[1]
        self._labels[:, first : self.sealed] = labels
        few = labels.shape[1] <= self.buffer.joining
        changed = np.repeat(np.arange(len(labels)), labels.shape[1]), labels.reshape(-1)
        self._count_stored(changed if few else None, joined=few and bool(joins.all()))

    def buffer_all(self, coming: Arrivals) -> int:
        """Buffer the next tokens of all rows, whose clusters `joined` will say. Returns the first one's number."""
        first = self.sealed
        self.buffer.add(np.arange(coming.rows), coming.between(0, coming.count), first)
        self.sealed += coming.count
        self._labels[:, first : self.sealed] = 0
        return first

    def joined(self, keys: np.ndarray, labels: np.ndarray, first: int) -> None:
        """Let keys (rows, n, D) of the buffered tokens from `first` on join the clusters `labels` (rows, n) int64."""
        self.partition.join(keys, labels)
        self._labels[:, first : first + labels.shape[1]] = labels
        self._count_stored((np.repeat(np.arange(len(labels)), labels.shape[1]), labels.reshape(-1)), joined=True)

    def catch_up(self) -> None:
        """Make the `late` changes, in order. Blocks for a device only if it has not come to where they began. Raises as
        `settle` does; what is left is still `late` then, without the change that raised."""
        while self.late:
            self.late.pop(0)()

    def _label(self, tokens: int) -> None:
        """Make room for the labels of so many tokens."""
        if tokens > self._labels.shape[1]:
            more = max(tokens, min(self._labels.shape[1] * 5 // 4 + 64, self._most_tokens)) - self._labels.shape[1]
            self._labels = np.pad(self._labels, ((0, 0), (0, more)))

    def _widen_labels(self) -> None:
        """Widen the labels' type if the largest cluster number needs it."""
        if self.partition.clusters > 1 << 16 and self._labels.itemsize == 2:
            self._labels = self._labels.astype(np.uint32)

    def points(self, entries: torch.Tensor) -> np.ndarray:
        """The vectors that are clustered: the keys of entries (n, width), as (n, key width) float32 on the host."""
        return to_host(entries[:, : self.form.key_width].float())[0].numpy()

    def order(self, queries: Callable[[], torch.Tensor], wanted: int) -> None:
        """Begin to order the clusters that were held back, if any, in the writer's thread: see `NewClusters.order`. The
        account has what this takes until `place`. Raises `BudgetError`."""
        if (new := self._unplaced) is not None and not new.ordering:
            nbytes = ordering(new.most)
            self._storage.account.hold("packing", nbytes)
            self._ordering = nbytes
            new.order(self._storage, self.pages, queries, wanted)

    def _orders(self, new: NewClusters) -> list[np.ndarray]:
        """`NewClusters.orders`, after which nothing is booked for them."""
        try:
            return new.orders()
        finally:
            self.end_order()

    def end_order(self) -> None:
        """Book nothing for an order any more."""
        self._storage.account.release("packing", self._ordering)
        self._ordering = 0

    def place(self) -> None:
        """Write the clusters that were held back, if any: see `NewClusters.write`, also for the errors."""
        if (new := self._unplaced) is not None:
            orders = self._orders(new)
            part, nbytes = self._part(new.coming, partial(writing_there, self.form, new.coming.count, new.most))
            if nbytes is None:
                nbytes = writing(self.form, new.coming.count, new.most, self._storage.write_queue)
            with self.holding(nbytes):
                new.write(self._storage, self.store, self.form, self.pages, orders, part)
            self._unplaced = None

    def _part(self, coming: Arrivals, nbytes: Callable[[Part], int]) -> tuple[Part, int | None]:
        """The best part in which a device makes new clusters that there is room for, next to a full write queue, and
        its `nbytes`; None: a processor makes them."""
        queue, has_room = self._storage.write_queue, self._storage.account.has_room
        parts = parts_there(coming.rows, queue)
        if not coming.there:
            return parts[-1], None
        part = next((part for part in parts if has_room(nbytes(part) + queue)), parts[-1])
        return part, nbytes(part)

    def drop_unplaced(self) -> None:
        """Drop the clusters that were held back, and their tokens."""
        if self._unplaced is not None:
            with contextlib.suppress(OSError):  # nobody needs the order any more, but it reads the partition
                self._orders(self._unplaced)
            self._unplaced.undo()
            self.sealed -= self._unplaced.coming.count
            self._unplaced = None
            self._count_stored()

    # --- buffered entries --------------------------------------------------------------------------------------

    def settle_all(self) -> None:
        """Settle all clusters with buffered entries."""
        self.settle(self.read, *self.waiting.nonzero())

    def read(self, rows: np.ndarray, clusters: np.ndarray, numbers: np.ndarray) -> torch.Tensor:
        """Read pages of clusters of rows, (n,) each: entries (n, group_size, width), a copy."""
        ids, form, device = self.pages.records(rows, clusters, numbers), self.form, self.buffer.entries.device
        if device.type == "cuda":
            fits = self._storage.account.has_room(len(ids) * form.record_bytes)  # as a rule
            edges = range(0, len(ids), len(ids) if fits else self.pages.largest)
            parts = [self._storage.read_to(self.store, some, device) for some in np.split(ids, edges[1:])]
            return form.unpacked(form.payload(torch.cat(parts)))
        out = self.buffer.entries.new_empty(len(ids), form.group_size, form.entry_width)
        with self._storage.audited():
            streamed = self._storage.stream(self.store, ids, self.pages.largest, out.device)
            for piece, records in zip(out.split(self.pages.largest), streamed, strict=False):
                piece.copy_(form.unpacked(form.payload(records)))
        return out

    def assembled(self, rows: np.ndarray, clusters: np.ndarray) -> Iterator[tuple[Settling, torch.Tensor]]:
        """All entries (n, width) of clusters (k,) of rows (k,), in the order of the sequence, some clusters at a time.
        Changes nothing."""
        sizes = self.stored, self.waiting, self.form.group_size, self.most_settled
        for piece in Settling.in_pieces(rows, clusters, np.ones(len(rows), dtype=bool), *sizes):
            with self.holding(settling(self.form, piece.written_pages(self.form.group_size))):
                waits = piece.waits_at(self.buffer, self._labels, self.partition.clusters)
                yield piece, piece.entries(self.read, self.buffer.at(*waits), self.form.group_size)

    def settle(
        self, pages: PagesOf, rows: np.ndarray, clusters: np.ndarray, *, known: KeysOf | None = None
    ) -> None:
        """Move these clusters' buffered entries into their pages, and split those that are too wide. Algorithm 1:
        AddEntry, the delayed SplitCluster, and the reset of Buf_j and f_j.

        `rows` and `clusters` (n,) are distinct pairs; `pages` reads their pages; some clusters' keys may be `known`.
        Raises with the unsettled ones unchanged.
        """
        form, wide = self.form, self.partition.to_split[rows, clusters]
        sizes = self.stored, self.waiting, form.group_size, self.most_settled
        for piece in Settling.in_pieces(rows, clusters, wide, *sizes):
            with self.holding(settling(form, piece.written_pages(form.group_size))):
                self._settle(pages, piece, known or {})

    def _settle(self, pages: PagesOf, batch: Settling, known: KeysOf) -> None:
        """Settle some clusters in one write."""
        partition, group = self.partition, self.form.group_size
        waits = batch.waits_at(self.buffer, self._labels, partition.clusters)
        entries = batch.entries(pages, self.buffer.at(*waits), group)
        # to which part of its cluster each entry goes: 0, or another one if the cluster is split
        owner = np.repeat(np.arange(len(batch.counts)), batch.counts)
        wide, parts = batch.wide[owner], np.zeros(len(owner), dtype=np.int64)
        if wide.any():
            of_wide = [known[place] for place in batch.places(batch.wide) if place in known]
            if len(of_wide) == batch.wide.sum():
                keys = np.concatenate(of_wide)
            else:
                keys = self.points(entries[where(wide, entries.device)])
            parts[wide] = self._parts(batch, keys)
        both = np.stack([owner, parts])  # the parts, cluster by cluster
        (of, part), at, counts = np.unique(both, axis=1, return_index=True, return_counts=True)
        # where each part is written: the first from its cluster's kept pages on, others at new places
        first, step = self.pages.records(*batch.ends)[of], self.pages.steps(batch.rows, batch.clusters)[of]
        fresh = batch.rows[of[part > 0]]
        partition.reserve(fresh)
        places = self.pages.reserve(fresh)
        before = self.pages.records(*batch.pages(group))
        writer = PageWriter(self._storage, self.store, self.form, at_once=True)
        try:
            if places:
                first[part > 0], step[part > 0] = np.array(places).T
            order = to_device(np.lexsort((parts, owner)), entries.device)
            writer.put(entries[order], counts, first, step)
            self._readers.stale(np.concatenate([before, writer.ids]))
            written = writer.end()
        except Exception:
            self.pages.give(fresh, places)
            raise
        # the pages are handed over: update the clusters, their places and the buffer, and last the copies of the pages
        numbers = batch.clusters[owner]
        if wide.any():
            numbers[wide] = self._split(batch, keys, parts[wide])
        self.pages.take(fresh, numbers[at[part > 0]], places)
        try:
            self.buffer.free(*waits)
        finally:
            self._count_stored((batch.rows[of], numbers[at]))
            self._readers.renewed(*written, before[~np.isin(before, written[0])])

    def _parts(self, batch: Settling, keys: np.ndarray) -> np.ndarray:
        """Plan the split of the `wide` clusters: the part (n,) of each of their keys (n, D). A cluster stays in part 0
        if wider clusters of its row have used up the room."""
        partition, new = self.partition, np.zeros(self.partition.rows, dtype=np.int64)
        parts, rows = partition.parts(keys, counts := batch.counts[batch.wide]), batch.rows[batch.wide]
        each = np.split(parts, np.cumsum(counts)[:-1])
        for index in np.argsort(-partition.variances[rows, batch.clusters[batch.wide]], kind="stable").tolist():
            row, part = rows[index], each[index]
            if len(part) <= partition.capacity and not partition.roomy(new)[row]:
                part[:] = 0
            new[row] += part.max()
        return parts

    def _split(self, batch: Settling, keys: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Split the `wide` clusters into the planned `parts` (n,) of their keys (n, D). Returns each key's cluster,
        (n,)."""
        rows, clusters, counts = batch.rows[batch.wide], batch.clusters[batch.wide], batch.counts[batch.wide]
        numbers = self.partition.split(rows, clusters, keys, counts, parts)
        self._widen_labels()
        for row, cluster, assigned in zip(rows, clusters, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
            labels = self._labels[row, : self.sealed]
            labels[labels == cluster] = assigned
        return numbers

    # --- changes -----------------------------------------------------------------------------------------------

    def cut(self, keep: int, left: list[tuple[Settling, Moments]]) -> None:
        """Keep only the first `keep` tokens.

        `left` has the moments of the remaining members of clusters that lose some. A cluster that loses members and is
        not in `left` becomes empty.
        """
        partition, remaining = self.partition, counted(self.labels[:, :keep], self.partition.clusters)
        rows, clusters = (partition.counts > remaining).nonzero()
        no_keys = np.zeros((0, partition.dim), dtype=np.float32), np.zeros(0, dtype=np.int64)
        partition.put(rows, clusters, Moments.of(*no_keys, len(rows)))
        for settled, moments in left:
            partition.put(settled.rows, settled.clusters, moments)
        empty = remaining[rows, clusters] == 0
        self.pages.leave(rows[empty], clusters[empty])
        new = partition.close_up()
        self.pages.renumber(new)
        self._labels[:, :keep] = np.take_along_axis(new, self.labels[:, :keep].astype(np.int64), 1)
        self.buffer.truncate(keep)
        self.sealed = keep
        self._count_stored()

    def settle_shared(self, rows: torch.Tensor) -> None:
        """Settle the clusters that several of the new `rows` will share, before `select_rows`. Raises with nothing
        lost."""
        shared = np.bincount(rows.cpu().numpy(), minlength=self.partition.rows) > 1
        self.settle(self.read, *(self.waiting * shared[:, None]).nonzero())

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i the current row `rows[i]`, after the partition did. Shared clusters are closed there, and
        `settle_shared` has settled them."""
        chosen = rows.cpu().numpy()
        self.buffer.select_rows(rows)
        self.pages.select_rows(chosen)
        self._labels = np.ascontiguousarray(self._labels[chosen])
        self._count_stored()

    def close(self) -> None:
        """Close all clusters, because others may share them: later entries form new clusters."""
        self.partition.close()
        self.pages.close()

    def move(self, store: Store) -> None:
        """Use `store` from now on: it has the same records under the same ids."""
        self.store = store
        self.pages.move(store)

    def capture(self) -> dict[str, Any]:
        """All state besides the records, with an empty buffer: views, valid until the next change."""
        tables = {**self.partition.STATE.capture(self.partition), **self.pages.STATE.capture(self.pages)}
        return {**tables, **self.STATE.capture(self)}

    def restore(self, tree: dict[str, Any]) -> None:
        """Load the captured state, with all clusters closed and their pools shared. Copies."""
        self.partition.restore(tree)
        self.pages.STATE.restore(self.pages, tree)
        self.STATE.restore(self, tree)
        self.sealed = self._labels.shape[1]
        self._count_stored()
