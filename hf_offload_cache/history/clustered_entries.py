"""What has left the tail, in clusters: in pages of the store, and a few entries that wait for theirs (DynaKV, sections
4.2 and 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..fetch.storage import Storage
from ..stores.base import Store
from .append_buffer import AppendBuffer
from .arrivals import Arrivals
from .cluster_pages import ClusterPages, in_order, pieces
from .clustering import BATCH
from .page_writer import PageWriter, piece_bytes
from .partition import Partition
from .record_format import RecordFormat
from .settling import Settling

_READ_AT_ONCE = 64
"""Pages that are read at a time, of clusters that something waits for."""


class ClusteredEntries:
    """The tokens 0 to `sealed` - 1 of each row, each a member of one cluster of `partition`.

    A cluster's first members, in the order of the sequence, lie in its pages, of `group_size` entries each; what has
    joined since waits in the `buffer` until the cluster is at hand and `settle` is told what lies there: then a page
    that was not full is written anew, and a cluster that has become too wide is split. For the thread that runs the
    model.

    Args:
        rewritten: told the records that are about to be written anew, in which who reads finds something else then.
    """

    def __init__(
        self, storage: Storage, store: Store, form: RecordFormat, partition: Partition, buffer: AppendBuffer,
        rewritten: Callable[[np.ndarray], None],
    ) -> None:  # fmt: skip
        self.form, self.store, self.partition, self.buffer = form, store, partition, buffer
        self.pages = ClusterPages(store, partition.rows, -(-partition.capacity // form.group_size))
        self.sealed = 0
        self._stored = np.zeros((partition.rows, 0), dtype=np.int32)
        self._labels = np.zeros((partition.rows, 0), dtype=np.uint16)
        self._count_stored()
        self._storage, self._rewritten = storage, rewritten

    @staticmethod
    def packing(form: RecordFormat, tokens: int, write_queue: int) -> int:
        """What is held while clusters are made of so many tokens of a row: their keys in 32 bits, once more as they are
        clustered, and pages with what goes into them."""
        pages = min(piece_bytes(write_queue), tokens * form.record_bytes)
        return 2 * 4 * form.key_width * min(tokens, BATCH) + 4 * pages

    @staticmethod
    def planned(clusters: int, tokens: int, form: RecordFormat, rows: int) -> int:
        """The most bytes that the books of so many clusters and tokens a row take."""
        tables = Partition.planned(clusters, form.key_width, rows) + ClusterPages.planned(clusters, rows)
        return tables + rows * ((2 if clusters < 1 << 16 else 4) * (tokens * 5 // 4 + 64) + 8 * clusters)

    @property
    def labels(self) -> np.ndarray:
        """The cluster of each token, (rows, sealed), unsigned: a view, valid until the next change."""
        return self._labels[:, : self.sealed]

    @property
    def stored(self) -> np.ndarray:
        """How many members of each cluster lie in its pages, (rows, clusters) int32: a view, valid until the next
        change."""
        return self._stored

    @property
    def waiting(self) -> np.ndarray:
        """How many members of each cluster wait, (rows, clusters)."""
        return self.partition.counts - self._stored

    def _count_stored(self) -> None:
        """Have `stored` as partition and buffer are now."""
        rows, columns = (self.buffer.places >= 0).nonzero()
        stored = self.partition.counts.copy()
        np.subtract.at(stored, (rows, self._labels[rows, self.buffer.places[rows, columns]]), 1)
        self._stored, self._page_counts = stored, -(-stored // self.form.group_size)

    @property
    def page_counts(self) -> np.ndarray:
        """Pages of each cluster that hold something, (rows, clusters) int32: a view, valid until the next change."""
        return self._page_counts

    @property
    def tables_nbytes(self) -> int:
        own = self._labels.nbytes + self._stored.nbytes + self._page_counts.nbytes
        return own + self.buffer.places.nbytes + self.partition.nbytes + self.pages.nbytes

    # --- in ----------------------------------------------------------------------------------------------------

    def add(self, coming: Arrivals) -> None:
        """The next tokens. At most a group of them joins the nearest clusters, where there are some that may be joined,
        and waits; more make clusters of their own, in the store. Raises `StoreFullError`, or an earlier write's
        `StoreError`, with nothing changed but where entries lie."""
        labels = np.full((coming.rows, coming.count), -1, dtype=np.int64)
        if coming.count <= self.form.group_size:
            self._make_room()
            points = np.stack([coming.points(row) for row in range(coming.rows)])
            labels = self.partition.nearest(points)
        joins = np.logical_and.reduce(labels >= 0, axis=1)
        if not joins.all():
            packing = self.packing(self.form, coming.count, self._storage.write_queue)
            with self._storage.account.holding("packing", packing):
                self._make_clusters((~joins).nonzero()[0], coming, labels)
        if joins.any():
            self.partition.join(points, np.where(joins[:, None], labels, -1))
            for row in joins.nonzero()[0].tolist():
                self.buffer.add(row, coming.entries(row, np.arange(coming.count)), self.sealed)
        stop = self.sealed + labels.shape[1]
        if stop > self._labels.shape[1]:
            more = max(stop, self._labels.shape[1] * 5 // 4 + 64) - self._labels.shape[1]
            self._labels = np.pad(self._labels, ((0, 0), (0, more)))
        self._widen_labels()
        self._labels[:, self.sealed : stop] = labels
        self.sealed = stop
        self._count_stored()

    def _widen_labels(self) -> None:
        """Have labels for the largest number of a cluster."""
        if self.partition.clusters > 1 << 16 and self._labels.itemsize == 2:
            self._labels = self._labels.astype(np.uint32)

    def points(self, entries: torch.Tensor) -> np.ndarray:
        """What is clustered of entries (n, width): their keys (n, key width), float32, on the host."""
        return entries[:, : self.form.key_width].float().cpu().numpy()

    def _make_clusters(self, rows: np.ndarray, coming: Arrivals, labels: np.ndarray) -> None:
        """Write clusters of what is `coming` in some rows, whose `labels` are set. Raises with nothing changed."""
        used, limits = self.partition.used.copy(), self.partition.limits.copy()
        made, places = np.empty((2, 0), dtype=np.int64), list[tuple[int, int]]()
        try:
            for row in rows.tolist():
                labels[row] = self.partition.add(row, coming.points(row))
            new = [(row, cluster) for row in rows.tolist() for cluster in range(used[row], self.partition.used[row])]
            made = np.array(new).T
            places = self.pages.reserve(made[0])
            writer, left = PageWriter(self._storage, self.store, self.form), iter(places)
            for row in rows.tolist():
                order, counts = np.argsort(labels[row], kind="stable"), np.bincount(labels[row] - used[row])
                start = 0
                for some in pieces(counts, writer.piece // self.form.record_bytes, self.form.group_size):
                    tokens = order[start : start + counts[some].sum()]
                    start += tokens.size
                    writer.put(coming.entries(row, tokens), counts[some], [next(left) for _ in counts[some]])
            writer.end()
        except Exception:
            if places:
                self.pages.give(made[0], places)
            for row in rows.tolist():
                self.partition.drop_last(row, used[row])
            self.partition.limits = limits
            raise
        self.pages.take(made[0], made[1], places)

    # --- what waits --------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Let no row have more that waits than the buffer is for: its fullest clusters are read and settled."""
        while (crowded := (self.buffer.counts > self.buffer.most).nonzero()[0]).size:
            self.load(crowded, self.waiting[crowded].argmax(1))

    def settle_all(self) -> None:
        """Let nothing wait any more."""
        self.load(*self.waiting.nonzero())

    def load(self, rows: np.ndarray, clusters: np.ndarray) -> None:
        """Read these clusters of these rows, and `settle` them."""
        self.settle(rows, clusters, self.read(rows, clusters))

    def read(self, rows: np.ndarray, clusters: np.ndarray) -> list[torch.Tensor]:
        """The entries (n, width) of each of these clusters that lie in its pages: copies."""
        group, counts = self.form.group_size, self.stored[rows, clusters]
        which, _, page = in_order(-(-counts[:, None] // group))
        ids = self.pages.records(rows[which], clusters[which], page)
        parts = [
            self.form.payload(records).reshape(-1, self.form.entry_width).clone()
            for records in self._storage.stream(self.store, ids, _READ_AT_ONCE, self.buffer.entries.device)
        ]
        pages = torch.cat(parts) if parts else self.buffer.entries[0, :0]
        starts = group * np.cumsum(np.concatenate([[0], -(-counts // group)]))
        return [pages[start : start + count] for start, count in zip(starts, counts.tolist(), strict=False)]

    def settle(self, rows: np.ndarray, clusters: np.ndarray, stored: list[torch.Tensor]) -> None:
        """What waits for these clusters of these rows lies in their pages from now on, and those that are to be split
        are so. `stored`: the entries (n, width) of each that lie in its pages. Raises with nothing changed."""
        to_split = self.partition.to_split
        jobs = [
            self._settling(row, cluster, there, bool(to_split[row, cluster]))
            for row, cluster, there in zip(rows.tolist(), clusters.tolist(), stored, strict=True)
        ]
        if not jobs:
            return
        self._rewritten(np.concatenate([job.rewrites for job in jobs]))
        split = np.array([job.row for job in jobs for _ in range(job.parts.max())], dtype=np.int64)
        places = self.pages.reserve(split)
        try:
            writer, left = PageWriter(self._storage, self.store, self.form, at_once=True), iter(places)
            for job in jobs:
                place = self.pages.place(job.row, job.cluster)
                for part in range(job.parts.max() + 1):
                    members = torch.from_numpy((job.parts == part).nonzero()[0]).to(job.entries.device)
                    own = np.array([members.numel() - job.kept * self.form.group_size])
                    to = next(left) if part else (place[0] + place[1] * job.kept, place[1])
                    writer.put(job.entries[members[job.kept * self.form.group_size :]], own, [to])
            writer.end()
        except Exception:
            self.pages.give(split, places)
            raise
        left = iter(places)
        for job in jobs:
            self.buffer.drop(job.row, job.tokens)
            points = self.points(job.entries)
            if not job.parts.any():
                self.partition.set(job.row, job.cluster, points)
                continue
            numbers = self.partition.split(job.row, job.cluster, points, job.parts)
            self._widen_labels()
            self._labels[job.row, job.tokens] = numbers[job.parts]
            self.pages.take(np.full(len(numbers) - 1, job.row), numbers[1:], [next(left) for _ in numbers[1:]])
        self._count_stored()

    def _settling(self, row: int, cluster: int, there: torch.Tensor, split: bool) -> Settling:
        tokens = (self.labels[row] == cluster).nonzero()[0]
        entries = torch.cat([there, self.buffer.of(row, tokens[len(there) :])])
        parts = self.partition.parts(row, cluster, self.points(entries)) if split else np.zeros(len(tokens), dtype=int)
        kept = 0 if split else len(there) // self.form.group_size
        pages = np.arange(kept, -(-len(tokens) // self.form.group_size))  # what was cut there before may still be known
        rewrites = self.pages.records(np.array(row), np.array(cluster), pages)
        return Settling(row, cluster, tokens, entries, parts, kept, rewrites)

    # --- changes -----------------------------------------------------------------------------------------------

    def cut(self, keep: int, length: int) -> torch.Tensor:
        """Only the first `keep` tokens stay. Returns the entries (rows, length - keep, width) of those from there to
        `length`. Raises `StoreError` with nothing changed."""
        lost = [np.unique(own) for own in self.labels[:, keep:]]
        rows, clusters = np.repeat(np.arange(len(lost)), [own.size for own in lost]), np.concatenate(lost)
        stored = self.read(rows, clusters)
        jobs = [self._settling(*one, False) for one in zip(rows.tolist(), clusters.tolist(), stored, strict=True)]
        taken = self.buffer.entries.new_empty(len(lost), length - keep, self.form.entry_width)
        for job in jobs:
            there = ((job.tokens >= keep) & (job.tokens < length)).nonzero()[0]
            taken[job.row, torch.from_numpy(job.tokens[there] - keep)] = job.entries[torch.from_numpy(there)]
        for job in jobs:
            left = int(np.searchsorted(job.tokens, keep))
            self.partition.set(job.row, job.cluster, self.points(job.entries[:left]))
            if not left:
                self.pages.leave(job.row, job.cluster)
        self.buffer.truncate(keep)
        self.sealed = keep
        self._count_stored()
        return taken

    def settle_shared(self, rows: torch.Tensor) -> None:
        """Let nothing wait for clusters that several of `rows`, which are about to be selected, have in common. Raises
        with nothing lost."""
        shared = np.bincount(rows.cpu().numpy(), minlength=self.partition.rows) > 1
        waits, clusters = self.waiting.nonzero()
        self.load(waits[shared[waits]], clusters[shared[waits]])

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now. Clusters that rows share are closed: see `settle_shared`."""
        chosen = rows.cpu().numpy()
        self.buffer.select_rows(rows)
        self.partition.select_rows(chosen)
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
        tables = {**self.partition.capture(), **self.pages.capture(), "labels": self.labels}
        return {name: torch.from_numpy(table) for name, table in tables.items()}

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured, all of it closed. Copies."""
        tables = {name: table.cpu().numpy() for name, table in tree.items()}
        self.partition.restore(tables)
        self.pages.restore(tables)
        self._labels = tables["labels"].copy()
        self.sealed = self._labels.shape[1]
        self._count_stored()
