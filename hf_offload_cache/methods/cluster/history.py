"""All tokens of one layer: stored in clusters, and the latest ones in the tail (DynaKV, sections 4.2 and 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch

from ...config import OffloadConfig
from ...errors import not_whole
from ...fetch.choice import DeviceChoice, Extents, Numbered
from ...fetch.storage import Storage
from ...history.base import Block, Sealed, equal_parts, frozen, joined
from ...history.position_history import check_captured
from ...history.records import RecordFormat, block_groups, leaving, places_within, sealed_groups, together, unpacking
from ...history.state import Number, State
from ...history.tail import RollingTail
from ...kernels.on_a_device import to_device, to_host_later
from ...memory.dry_run import DryRun
from ...stores.base import FreezableStore, Store
from .arrivals import AppendBuffer, Arrivals, clusters_there
from .config import ClusterForm
from .entries import ClusteredEntries, Readers, Settling, where
from .on_device import MOST_JOINING, DeviceClusters
from .pages import ClusterPages, in_order
from .partition import Moments, Partition, counted
from .plan import most_packing, ordering, parts_there, settling, streaming

# Reads of a crop

def read_for_crop(
    clustered: ClusteredEntries, keep: int, length: int
) -> tuple[torch.Tensor, list[tuple[Settling, Moments]]]:
    """Read what a crop needs, some pages at a time: the tokens that return to the tail, and the moments of clusters
    that lose members.

    Returns each row's entries (rows, length - keep, width) of tokens `keep` to `length` - 1. The pairs are clusters
    that lose members beyond the first `keep` tokens and have some before `length`, with the moments of the first
    `keep`. Changes nothing; raises `StoreError`.
    """
    partition, group, labels = clustered.partition, clustered.form.group_size, clustered.labels
    returned = clustered.buffer.entries.new_empty(partition.rows, length - keep, clustered.form.entry_width)
    remaining, before_length = (counted(labels[:, :stop], partition.clusters) for stop in (keep, length))
    rows, clusters = ((partition.counts > remaining) & (before_length > 0)).nonzero()
    stored, losing = np.minimum(clustered.stored, before_length), list[tuple[Settling, Moments]]()
    rewritten, buffered = np.ones(len(rows), dtype=bool), before_length - stored
    for piece in Settling.in_pieces(rows, clusters, rewritten, stored, buffered, group, clustered.most_settled):
        with clustered.holding(settling(clustered.form, piece.written_pages(group))):
            waiting = clustered.buffer.at(*piece.waits_at(clustered.buffer, labels[:, :length], partition.clusters))
            entries = piece.entries(clustered.read, waiting, group)
            owner = np.repeat(np.arange(len(piece.counts)), piece.counts)
            stays = places_within(piece.counts) < remaining[piece.rows, piece.clusters][owner]
            row, column = piece.members(labels[:, keep:length], partition.clusters)
            into, column = to_device(np.stack([row, column]), entries.device)
            returned[into, column] = entries[where(~stays, entries.device)]
            moments = Moments.of(
                clustered.points(entries[where(stays, entries.device)]), owner[stays], len(piece.counts)
            )
            losing.append((piece, moments))
    return returned, losing


# Tokens of the pages of clusters

def members(clustered: ClusteredEntries, rows: np.ndarray, clusters: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Find the token of each entry in pages of clusters of rows (n,): (n, group_size), -1: empty."""
    requested = np.zeros(clustered.stored.shape, dtype=bool)
    requested[rows, clusters] = True
    labels = clustered.labels
    unsorted = [mask[numbers].nonzero()[0] for mask, numbers in zip(requested, labels, strict=True)]
    tokens = [row[np.argsort(numbers[row], kind="stable")] for row, numbers in zip(unsorted, labels, strict=True)]
    counts = np.where(requested, clustered.partition.counts, 0)  # a cluster's buffered members are its last ones
    first = (np.cumsum(counts).reshape(counts.shape) - counts)[rows, clusters]
    index = (pages * clustered.form.group_size)[:, None] + np.arange(clustered.form.group_size)
    stored = index < clustered.stored[rows, clusters][:, None]
    return np.where(stored, np.concatenate(tokens)[np.where(stored, first[:, None] + index, 0)], -1)


# All stored entries, block by block, for attention over all tokens

def cluster_blocks(
    clustered: ClusteredEntries, storage: Storage, device: torch.device, stop: int, step: int
) -> Iterator[Block]:
    """Stream the stored entries before token `stop`, at most `step` pages a row at a time, in record order."""
    page_counts, form = clustered.page_counts, clustered.form
    if stop < clustered.sealed:  # a cluster's pages hold its first members, in sequence order
        before = counted(clustered.labels[:, :stop], clustered.partition.clusters)
        page_counts = -(-np.minimum(clustered.stored, before) // form.group_size)
    pages, rows = in_order(page_counts), len(page_counts)
    if not pages[0].size:
        return
    ids = clustered.pages.records(*pages)
    each = np.bincount(pages[0], minlength=rows)
    width, begins = int(each.max()), (np.cumsum(each) - each)[:, None]
    step = equal_parts(width, step)
    columns = np.arange(width)
    # a row with fewer pages than others repeats its last page, or the very first one, without entries
    which = np.lexsort((ids, pages[0]))[np.clip(begins + np.minimum(columns, each[:, None] - 1), 0, None)]
    parts = [which[:, at : at + step] for at in range(0, width, step)]
    flat = np.concatenate([ids[part.reshape(-1)] for part in parts])
    streamed = storage.stream(clustered.store, flat, step * rows, device)
    for at, part, records in zip(range(0, width, step), parts, streamed, strict=True):
        tokens = members(clustered, *(table[part.reshape(-1)] for table in pages)).reshape(*part.shape, -1)
        tokens[columns[at : at + step] >= each[:, None]] = -1
        tokens[tokens >= stop] = -1
        entries = form.unpacked(form.payload(records)).reshape(rows, -1, form.entry_width)
        entries, tokens = _filled(entries, tokens.reshape(rows, -1))
        if tokens.size:
            yield Block(*form.split(entries), tokens)


def _filled(entries: torch.Tensor, tokens: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Drop the empty entries, except where a row has fewer than others. A copy.

    `entries` are (rows, t, width) and `tokens` (rows, t), -1: empty. In pages of 16 a third is empty, and costs
    attention time.
    """
    valid = tokens >= 0
    order = np.argsort(~valid, axis=1, kind="stable")[:, : valid.sum(1).max()]
    places = (order + np.arange(len(order))[:, None] * entries.shape[1]).reshape(-1)
    index = to_device(places, entries.device) if entries.device.type == "cuda" else torch.from_numpy(places)
    filled = entries.flatten(0, 1).index_select(0, index)
    return filled.view(*order.shape, entries.shape[2]), np.take_along_axis(tokens, order, 1)


# Checks of captured clusters

_CLUSTERS = State(
    "clusters", **Partition.STATE.entries, **ClusterPages.STATE.entries, **ClusteredEntries.STATE.entries
)


def check_clusters(
    form: RecordFormat, tree: Any, rows: int, sealed: int, capacity: int, records: int, name: str
) -> None:
    """Raise `ContextError` unless the captured clusters of `sealed` tokens in each of `rows` rows are consistent.

    Every token is in one cluster. No cluster has more pages than `capacity` tokens need. Each page is one of `records`
    records, and no other cluster of its row has it.
    """
    _CLUSTERS.check(tree, name, rows=rows, sealed=sealed, width=form.key_width)
    wrong = _clusters_wrong(form, {key: table.cpu().numpy() for key, table in tree.items()}, capacity, records)
    if wrong:
        raise not_whole(name, f"its clusters: {wrong}")


def _clusters_wrong(form: RecordFormat, tables: dict[str, np.ndarray], capacity: int, records: int) -> str | None:
    counts, used, labels = tables["counts"], tables["used"], tables["labels"]
    if used.min(initial=0) < 0 or used.max(initial=0) > min(counts.shape[1], tables["first"].shape[1]):
        return f"rows use {used.tolist()} of {counts.shape[1]} clusters"
    for row, (row_labels, count, row_used) in enumerate(zip(labels, counts, used.tolist(), strict=True)):
        in_range = row_labels.max(initial=0) < max(1, row_used)  # else the table of members could be huge
        if not in_range or not np.array_equal(np.bincount(row_labels, minlength=counts.shape[1]), count):
            return f"the token counts of row {row} do not match its tokens"
    pages, most = -(-counts // form.group_size), -(-capacity // form.group_size)
    if pages.max(initial=0) > most:
        return f"one has {pages.max()} records, but {capacity} tokens need only {most}"
    rows, clusters, page = in_order(pages)
    ids = tables["first"][rows, clusters].astype(np.int64) + tables["step"][rows, clusters].astype(np.int64) * page
    if ids.size and not (ids.min() >= 0 and ids.max() < records):
        return f"they use records {ids.min()} to {ids.max()} of only {records}"
    if not np.isin(tables["step"][rows, clusters], (-1, 1)).all():
        return "one has records that are not adjacent"
    if len(np.unique(rows * max(1, records) + ids)) != ids.size:
        return "two of a row share a record"
    if not (np.isfinite(tables["centroids"]).all() and np.isfinite(tables["variances"]).all()):
        return "a centroid or variance is not a finite number"
    if np.isnan(tables["limits"]).any():
        return "a variance limit is not a number"
    return None


# The history

HELD_BACK = 256
"""Calls with fewer tokens join existing clusters. If at least so many tokens leave the tail at once, and fewer ever
join together, their new clusters are held back until `place` gets queries to order them by."""


class ClusterHistory:
    """A history of clusters of keys: unit c of a row is its cluster c, in pages of `group_size` entries, one record
    each, in sequence order. Each row has its own clusters and buffered entries: see `ClusteredEntries`.

    Buffered entries are the `extra_entries`, and every gather includes them. See `History` for its guarantees. A method
    with other clusters sets `partition_class`.
    """

    STATE: ClassVar[State] = State("history", length=Number())
    partition_class: ClassVar[type[Partition]] = Partition

    def __init__(
        self, storage: Storage, form: RecordFormat, rows: int, device: torch.device, config: OffloadConfig, name: str,
        clusters: ClusterForm, readers: Readers, store: Store | None = None,
    ) -> None:  # fmt: skip
        self.form, self.rows, self.device, self.length, self._clusters = form, rows, device, 0, clusters
        self._storage, self._name, self._num_recent = storage, name, config.num_recent
        self._limited = config.memory is not None
        self._blocks = partial(block_groups, form, config, device)
        self._step = self._blocks(rows)
        self.holds_back = False
        """If True, the clusters of a long `append` are written by `place`, which runs before the given tensors may
        change."""
        # see `unsealed`; and the change and number of tokens it is of
        self._seen: tuple[tuple[int, int], int, torch.Tensor | None] = (-1, 0), 0, None
        self._before: tuple[torch.Tensor, int] | None = None  # tail and length before the clusters that are held back
        self.left: tuple[torch.Tensor, int] | None = None
        """The tail (rows, t, width) before the latest `append`, and its first token: for attention to the tokens before
        this call, after which the layer drops it. None: they are in pages, or still in the tail."""
        self.store = storage.open_store(form.record_bytes, name) if store is None else store
        sizes = clusters.size, clusters.places(form.group_size), clusters.threshold
        mapped = partial(storage.open_table, f"centroids of {name}") if clusters.mapped else None
        partition = self.partition_class(rows, form.key_width, *sizes, number=clusters.number, mapped=mapped)
        self.together = together(form, config) * form.group_size
        self.tail = RollingTail(form, rows, config.num_recent + self.together, device, storage.account)
        waiting = clusters.append_buffer, clusters.together(form.group_size)
        buffer = AppendBuffer(form, rows, *waiting, device, storage.account)
        known = config.max_context and sealed_groups(form, config, config.max_context) * form.group_size
        self.clustered = ClusteredEntries(storage, self.store, form, partition, buffer, readers, clusters, known)

    def rehearse(self, run: DryRun, context: int) -> None:
        """As `History.rehearse`."""
        form, rows, clusters, queue = self.form, self.rows, self._clusters, self._storage.write_queue
        self.length = context
        tokens = max(0, context - self._num_recent) // form.group_size * form.group_size
        count = clusters.most_clusters(tokens, form.group_size)
        records = rows * clusters.most_places(tokens, form.group_size)
        run.stores(self.store, records)
        self.clustered.rehearse(tokens, count, records)
        self.tail.rehearse(run)
        if rows > 1:
            run.moves(self.clustered.buffer.entries.nbytes)
        pages, step = rows * (tokens // form.group_size + count), self._blocks(rows, records // rows)
        block, part = rows * step * form.group_size, None
        if clusters_there(run.device_type, form):  # a budget may have room for more
            part = parts_there(rows, queue)[-1 if self._limited else 0]
        # what streams in a step frees its areas first
        at_once, a_group = most_packing(form, clusters, tokens, queue, part)
        if run.device_type == "cuda":
            keys = min(MOST_JOINING, clusters.together(form.group_size))
            a_group = max(a_group, DeviceClusters.joining_bytes(rows, keys, form.key_width))
        attending = streaming(form, pages, block, tokens) + rows * (self._num_recent + self.together) * form.entry_bytes
        if not self._limited:  # the writer's thread orders clusters meanwhile
            attending += ordering(count)
        run.passes("packing", prefill=max(at_once, attending), decode=a_group)

    # An attrgetter makes no Python frame, unlike a function: steps read this often.
    units: int = property(attrgetter("clustered.partition.clusters"))  # type: ignore[assignment]
    records: int = property(attrgetter("clustered.most_pages"))  # type: ignore[assignment]
    recent: torch.Tensor = property(attrgetter("tail.entries"))  # type: ignore[assignment]
    version: int = property(attrgetter("clustered.rewritten.number"))  # type: ignore[assignment]

    @property
    def extra_entries(self) -> tuple[torch.Tensor, np.ndarray]:
        """Entries (rows, t, width) that are in no record, and their tokens (rows, t), -1: empty."""
        return self.clustered.buffer.entries, self.clustered.buffer.places

    @property
    def tables_nbytes(self) -> int:
        seen = self._seen[2]
        return self.clustered.tables_nbytes + self.store.tables_bytes + (0 if seen is None else seen.nbytes)

    # --- writes ------------------------------------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        """As `History.append`. Fewer than `HELD_BACK` tokens join existing clusters, at most `join_every` at a time. If
        such a part raises, the earlier ones are added, as `length` says, and `truncate` drops them."""
        if self._before is not None or self.clustered.late:
            self.place()
        partition, step = self.clustered.partition, self.clustered.buffer.joining
        first = self._num_recent + step - self.tail.length
        joins = self.together == step and 0 < first < keys.shape[2] < HELD_BACK and partition.clusters
        if not joins or not ((partition.counts > 0) & ~partition.closed).any(1).all():
            return self._append(keys, values)
        old, before, edges = self.tail.entries.clone(), self.clustered.sealed, range(first, keys.shape[2], step)
        for start, stop in pairwise([0, *edges, keys.shape[2]]):
            sealed = self._append(keys[:, :, start:stop], values[:, :, start:stop])
        parts = leaving(self.form, old, keys, values, sealed.tokens - before)
        return dataclasses.replace(sealed, parts=parts)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        held, group = self.tail.length, self.form.group_size
        total = held + keys.shape[2]
        count, parts = max(0, total - self._num_recent) // group * group, []
        if count < self.together:
            self.tail.append(keys, values)
            self.left = None
        else:
            old = self.tail.entries.clone()
            arrivals = Arrivals(self.form, old, keys, values, count)
            tail = arrivals.between(count, total)  # first what can fail
            hold_back = self.holds_back and count >= HELD_BACK > self.clustered.buffer.joining
            if arrivals.there and self.store.in_memory:
                hold_back = False  # no order is better than another
            first, clusters_only = self.clustered.sealed, count > self.clustered.buffer.joining
            self.clustered.add(arrivals, hold_back=hold_back)
            self._before = (old, self.length) if hold_back else None
            self.left = (old, first) if clusters_only else None
            self.tail.replace(tail)
            parts = leaving(self.form, old, keys, values, count)
        self.length += keys.shape[2]
        sealed = self.clustered.sealed
        return Sealed(self.units, sealed, parts, lambda: iter([self.whole(sealed)]))

    @property
    def room(self) -> int:
        """Tokens that may be added one by one before some leave the tail."""
        return self._num_recent + self.together - 1 - self.tail.length

    def advance(self) -> None:
        """Count a token whose entries a captured step has put behind the tail's. There is `room` for it."""
        self.tail.length += 1
        self.length += 1

    @property
    def held_back(self) -> bool:
        """True if new clusters wait for `place`."""
        return self._before is not None

    def order(self, queries: torch.Tensor, wanted: int) -> None:
        """Begin to order the clusters that `append` held back, if any (DynaKV, section 5.1), in the writer's thread, so
        that those which the same `queries` (rows, heads, n, D), scaled, retrieve, `wanted` tokens each, lie side by
        side. `queries` stay as they are. Within a budget, `place` them at once."""
        if self._before is not None:
            self.clustered.order(to_host_later(queries.float()), wanted)
            if self._limited:  # attention needs the memory
                self.place()

    def place(self, queries: torch.Tensor | None = None, wanted: int = 0) -> None:
        """Write the clusters that `append` held back; without any, do nothing. `queries`: `order` them first.

        Raises `StoreFullError`, or an earlier write's `StoreError`; `truncate` to the earlier length then drops them.
        Changes for which numbers came from a device are made too: see `ClusteredEntries.catch_up`.
        """
        if self.clustered.late:
            self.clustered.catch_up()
        if self._before is not None:
            if queries is not None:
                self.clustered.order(to_host_later(queries.float()), wanted)
            self.clustered.place()
            self._before = None

    # --- reads -------------------------------------------------------------------------------------------------

    def extents(self, units: np.ndarray) -> Extents:
        """As `History.extents`: one run for each page."""
        if self._before is not None or self.clustered.late:
            self.place()
        rows, page, column, at, width = self._laid_out(units)
        shape = len(units), width
        records, count = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        unit = np.full(shape, max(0, units.shape[1] - 1), dtype=np.int64)
        clusters, group = units[rows, column], self.form.group_size
        records[rows, at] = self.clustered.pages.records(rows, clusters, page)
        count[rows, at] = np.minimum(group, self.clustered.stored[rows, clusters] - page * group)
        unit[rows, at] = column
        return Extents(records, None, count, unit)

    @property
    def numbers(self) -> int:
        """As `Source.numbers`: page p of cluster c has the number c * largest + p, if clusters have at most so many."""
        return self.units * self.clustered.pages.largest

    def numbered(self, version: int) -> Numbered:
        """As `Source.numbered`: all places of pages of the clusters that have changed."""
        clustered, largest = self.clustered, self.clustered.pages.largest
        changed = clustered.rewritten.since(version)
        rows, clusters = clustered.page_counts.nonzero() if changed is None else changed
        row, cluster, page = np.repeat(rows, largest), np.repeat(clusters, largest), np.tile(range(largest), len(rows))
        records = clustered.pages.records(row, cluster, page)
        return Numbered(row, cluster.astype(np.int64) * largest + page, records, True)

    def all_on_device(self) -> DeviceChoice:
        clustered, group = self.clustered, self.form.group_size
        rows, clusters, page = in_order(clustered.page_counts)
        place = places_within(np.bincount(rows, minlength=self.rows))
        units = np.full((self.rows, self.records), -1, dtype=np.int32)
        units[rows, place] = clusters * clustered.pages.largest + page
        keep = np.zeros((*units.shape, group), dtype=bool)
        keep[rows, place] = page[:, None] * group + np.arange(group) < clustered.stored[rows, clusters][:, None]
        return DeviceChoice(to_device(units, self.device), to_device(keep, self.device))

    def unsealed(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        buffer, tail, now = self.clustered.buffer, self.tail, (self.clustered.changes.number, self.clustered.sealed)
        if self._seen[0] != now:
            used, mask = int((buffer.places >= 0).nonzero()[1].max(initial=-1)) + 1, None
            if used:
                seen = np.pad(buffer.places[:, :used] >= 0, ((0, 0), (0, tail.capacity)), constant_values=True)
                mask = to_device(seen, self.device)
            self._seen = now, used, mask
        _, used, mask = self._seen
        if mask is None:
            return tail.entries, None
        entries = torch.cat([buffer.entries[:, :used], tail.entries], 1)
        return entries, mask[:, : entries.shape[1]]

    def positions(self, units: np.ndarray) -> np.ndarray:
        self.place()
        rows, page, column, at, width = self._laid_out(units)
        tokens = np.full((len(units), width, self.form.group_size), -1, dtype=np.int64)
        tokens[rows, at] = members(self.clustered, rows, units[rows, column], page)
        return np.concatenate([tokens.reshape(len(units), -1), self.extra_entries[1]], 1)

    def _laid_out(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
        """List every page of units (rows, M), row by row: its row, its index in its cluster, its unit's column and its
        index in the row; and the pages of the row with the most."""
        counts = np.take_along_axis(self.clustered.page_counts, np.maximum(units, 0), 1) if self.units else units * 0
        rows, column, page = in_order(np.where(units >= 0, counts, 0))
        page_counts = np.bincount(rows, minlength=len(units))
        return rows, page, column, places_within(page_counts), int(page_counts.max(initial=0))

    def blocks(self, stop: int | None = None) -> Iterator[Block]:
        """As `History.blocks`: first in record order, then the buffered entries, then the tail. Tokens that are `left`
        are given from there, because their new pages may be on their way."""
        stop, clustered, left, paged = self.length if stop is None else stop, self.clustered, self.left, None
        if left is not None and left[1] <= stop <= left[1] + left[0].shape[1]:
            paged = left[1]
        else:
            self.place()
        if clustered.page_counts.any():
            step = self._step if self.device.type == "cpu" else self._blocks(self.rows, self.records)
            block = step * self.form.group_size * self.rows
            packing = streaming(self.form, int(clustered.page_counts.sum()), block, clustered.sealed)
            packing += 0 if left is None else left[0].nbytes
            unpacked = unpacking(self._storage.account, self.form, step * self.rows)
            with clustered.holding(packing), unpacked:
                yield from cluster_blocks(clustered, self._storage, self.device, stop if paged is None else paged, step)
        entries, tokens = self.extra_entries
        if (tokens >= 0).any():
            yield Block(*self.form.split(entries), np.where(tokens < stop, tokens, -1))
        if left is not None and paged is not None:
            latest = np.arange(paged, stop)
            if latest.size:
                yield Block(*self.form.split(left[0][:, : len(latest)]), np.tile(latest, (self.rows, 1)))
        elif clustered.sealed < stop:
            latest = np.arange(clustered.sealed, stop)
            yield Block(*self.form.split(self.recent[:, : len(latest)]), np.tile(latest, (self.rows, 1)))

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return joined(self, self.length if stop is None else stop)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> np.ndarray | None:
        """As `History.truncate`. Clusters that lose members are read. The tail then contains `num_recent` tokens again,
        or all that remain."""
        clustered, self.left = self.clustered, None
        if self._before is not None and length <= self._before[1]:
            clustered.drop_unplaced()
            self.tail.replace(self._before[0])
            self.length, self._before = self._before[1], None
        self.place()
        if length >= clustered.sealed:
            self.tail.drop_last(self.length - length)
            self.length = length
            return None
        keep = max(0, length - self._num_recent) // self.form.group_size * self.form.group_size
        returned, losing = read_for_crop(clustered, keep, length)
        clustered.cut(keep, losing)
        self.tail.replace(returned)
        self.length = length
        return clustered.pages.sweep()

    def sweep(self, always: bool = False) -> np.ndarray | None:
        pages = self.clustered.pages
        return pages.sweep() if always or pages.garbage else None

    def select_rows(self, rows: torch.Tensor) -> None:
        """As `History.select_rows`. Moves no stored data: rows share clusters, which no key joins from then on. The
        buffered entries of these are settled first. This may raise `StoreError`, as mapped centroids may, with nothing
        changed."""
        self.place()
        self.left = None
        self.clustered.settle_shared(rows)
        self.clustered.partition.select_rows(rows.cpu().numpy())
        try:
            self.clustered.select_rows(rows)
            self.tail.select_rows(rows)
        except BaseException:
            self._storage.torn = True  # some parts have the new rows, others the old ones
            raise
        self.rows = len(rows)

    def close(self) -> None:
        self._storage.close_store(self.store)
        self.clustered.late.clear()
        self.clustered.join_there = None  # its owner has these clusters: only a search for cycles would free them
        self.clustered.end_order()
        self.tail.close()
        self.clustered.buffer.close()

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        """As `History.freeze` and `frozen`. No key joins the present clusters from now on."""
        self.place()
        self.clustered.settle_all()
        self.clustered.close()  # first, because a later failure may leave some of it frozen
        return frozen(self._storage, self.store, self._name, self.named, self._move).parts

    def named(self, count: int) -> np.ndarray:
        """Mark the records that some row uses, of the store's first `count`: (count,) bool."""
        return self.clustered.pages.named(self.clustered.page_counts, count)

    def _move(self, store: Store) -> None:
        self.store = store
        self.clustered.move(store)

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        edges = np.cumsum([part.capacity for part in parts])
        return np.split(self.named(self.store.capacity), edges[:-1])

    def capture(self) -> dict[str, Any]:
        """As `History.capture`, after `freeze`: views, valid until the next change."""
        state = {**self.STATE.capture(self), **self.tail.STATE.capture(self.tail)}
        return {"form": dataclasses.asdict(self.form), **state, "clusters": self.clustered.capture()}

    @classmethod
    def restore(
        cls, storage: Storage, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device,
        config: OffloadConfig, name: str, clusters: ClusterForm, readers: Readers,
    ) -> ClusterHistory:  # fmt: skip
        """Make the history that `tree` was captured from, over the frozen `parts`, and own these. Reads nothing.

        Raises `ContextError` if the tree is inconsistent; the caller then keeps `parts`.
        """
        form, sizes = check_captured(cls.STATE, tree, parts, name, config)
        rows, sealed = sizes["rows"], tree["length"] - sizes["recent"]
        check_clusters(form, tree["clusters"], rows, sealed, clusters.capacity, sizes["records"], name)
        store = storage.layer_store(parts, form.record_bytes, name)
        history = cls(storage, form, rows, device, config, name, clusters, readers, store)
        history.clustered.restore(tree["clusters"])
        history.tail.restore(tree)
        history.length = tree["length"]
        return history
