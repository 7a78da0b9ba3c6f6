"""All tokens of one layer: in the order of clusters, and the latest ones in the tail (DynaKV, sections 4.2 and 5)."""

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
from ...fetch.choice import Extents
from ...fetch.storage import Storage
from ...history.base import Block, Sealed, equal_parts, frozen, joined
from ...history.position_history import check_captured
from ...history.records import RecordFormat, leaving, places_within, sealed_groups, together
from ...history.state import Number, State
from ...history.tail import RollingTail
from ...memory.dry_run import DryRun
from ...stores.base import FreezableStore, Store
from .append_buffer import AppendBuffer
from .arrivals import Arrivals
from .config import ClusterForm
from .entries import ClusteredEntries, Settling
from .pages import in_order
from .partition import Moments, Partition, counted
from .plan import most_packing, settling, streaming
from .readers import Readers
from .state import check_clusters

# What a crop has to read of clusters

def read_for_crop(
    own: ClusteredEntries, keep: int, length: int
) -> tuple[torch.Tensor, list[tuple[Settling, Moments]]]:
    """Of the tokens of each row the entries (rows, length - keep, width) of those from `keep` to `length`; and of the
    clusters that would lose some, were there only the first `keep`, and have some before `length`, what the others have
    in common. Reads what of these clusters comes before `length`, some pages at a time. Changes nothing; raises
    `StoreError`."""
    partition, group, labels = own.partition, own.form.group_size, own.labels
    taken = own.buffer.entries.new_empty(partition.rows, length - keep, own.form.entry_width)
    stay, wanted = (counted(labels[:, :stop], partition.clusters) for stop in (keep, length))
    rows, clusters = ((partition.counts > stay) & (wanted > 0)).nonzero()
    there, left = np.minimum(own.stored, wanted), list[tuple[Settling, Moments]]()
    whole = np.ones(len(rows), dtype=bool)
    for some in Settling.in_pieces(rows, clusters, whole, there, wanted - there, group, own.most_settled):
        with own.holding(settling(own.form, some.written_pages(group))):
            waiting = own.buffer.at(*some.waits_at(own.buffer, labels[:, :length], partition.clusters))
            entries = some.entries(own.read, waiting, group)
            owner = np.repeat(np.arange(len(some.counts)), some.counts)
            stays = places_within(some.counts) < stay[some.rows, some.clusters][owner]
            row, place = some.members(labels[:, keep:length], partition.clusters)
            taken[torch.from_numpy(row), torch.from_numpy(place)] = entries[torch.from_numpy(~stays)]
            common = Moments.of(own.points(entries[torch.from_numpy(stays)]), owner[stays], len(some.counts))
            left.append((some, common))
    return taken, left


# Which tokens lie where in clusters

def members(own: ClusteredEntries, rows: np.ndarray, clusters: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Which token each entry of pages of clusters of rows (n,) is, (n, group_size), -1: none."""
    asked = np.zeros(own.stored.shape, dtype=bool)
    asked[rows, clusters] = True
    found = [some[labels].nonzero()[0] for some, labels in zip(asked, own.labels, strict=True)]
    tokens = [some[np.argsort(labels[some], kind="stable")] for some, labels in zip(found, own.labels, strict=True)]
    counts = np.where(asked, own.partition.counts, 0)  # what waits of a cluster is behind what lies there
    first = (np.cumsum(counts).reshape(counts.shape) - counts)[rows, clusters]
    place = (pages * own.form.group_size)[:, None] + np.arange(own.form.group_size)
    there = place < own.stored[rows, clusters][:, None]
    return np.where(there, np.concatenate(tokens)[np.where(there, first[:, None] + place, 0)], -1)


# All that lies in clusters, block by block, for attention over everything

def cluster_blocks(
    own: ClusteredEntries, storage: Storage, device: torch.device, stop: int, step: int
) -> Iterator[Block]:
    """What lies in pages and comes before token `stop`, at most `step` pages a row at a time, in the order of the
    records."""
    pages, form, rows = in_order(own.page_counts), own.form, len(own.page_counts)
    ids = own.pages.records(*pages)
    each = np.bincount(pages[0], minlength=rows)
    width, begins = int(each.max()), (np.cumsum(each) - each)[:, None]
    step = equal_parts(width, step)
    columns = np.arange(width)
    # of a row with fewer pages than others its last one again, or the first of all, as if there were no entries
    which = np.lexsort((ids, pages[0]))[np.clip(begins + np.minimum(columns, each[:, None] - 1), 0, None)]
    parts = [which[:, at : at + step] for at in range(0, width, step)]
    flat = np.concatenate([ids[some.reshape(-1)] for some in parts])
    streamed = storage.stream(own.store, flat, step * rows, device)
    for at, some, records in zip(range(0, width, step), parts, streamed, strict=True):
        places = members(own, *(table[some.reshape(-1)] for table in pages)).reshape(*some.shape, -1)
        places[columns[at : at + step] >= each[:, None]] = -1
        places[places >= stop] = -1
        entries, found = _filled(form.payload(records).reshape(rows, -1, form.entry_width), places.reshape(rows, -1))
        if found.size:
            yield Block(*form.split(entries), found)


def _filled(entries: torch.Tensor, places: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Entries (rows, t, width) and which token each is, (rows, t), -1: none, without those that are none, but for rows
    that have fewer than others. A copy. A third of what lies in pages of 16 is none, and attention takes its time."""
    there = places >= 0
    order = np.argsort(~there, axis=1, kind="stable")[:, : there.sum(1).max()]
    index = torch.from_numpy(order).to(entries.device).unsqueeze(-1)
    return torch.take_along_dim(entries, index, 1), np.take_along_axis(places, order, 1)


HELD_BACK = 256
"""A call of fewer tokens joins the clusters that there are. Where so many leave the tail at once, and not as many ever
join together, their clusters wait for queries to be placed by."""


class ClusterHistory:
    """A history of clusters of keys: unit c of a row is its cluster c, in pages of `group_size` entries of one record
    each, in the order of the sequence. Rows have clusters, and entries that wait, of their own: see `ClusteredEntries`.

    What waits is `beside` the records of units, and comes with every gather. See `History` for what is promised. A
    method that clusters otherwise has a `partition_class` of its own.
    """

    STATE: ClassVar[State] = State("history", length=Number())
    partition_class: ClassVar[type[Partition]] = Partition

    def __init__(
        self, storage: Storage, form: RecordFormat, rows: int, device: torch.device, config: OffloadConfig, name: str,
        clusters: ClusterForm, readers: Readers, store: Store | None = None,
    ) -> None:  # fmt: skip
        self.form, self.rows, self.device, self.length, self._clusters = form, rows, device, 0, clusters
        self._storage, self._name, self._num_recent = storage, name, config.num_recent
        self._step = max(1, config.block_tokens // form.group_size)
        self.holds_back = False
        """The clusters of a long `append` are written by `place`, which is called before what was given may change."""
        self._before: tuple[torch.Tensor, int] | None = None  # tail and length before clusters that are held back
        self.store = storage.open_store(form.record_bytes, name) if store is None else store
        sizes = clusters.size, clusters.places(form.group_size), clusters.threshold
        mapped = partial(storage.open_table, f"centroids of {name}") if clusters.mapped else None
        partition = self.partition_class(rows, form.key_width, *sizes, number=clusters.number, mapped=mapped)
        self.together = together(form, config) * form.group_size
        self.tail = RollingTail(form, rows, config.num_recent + self.together, device, storage.account)
        waiting = clusters.append_buffer, clusters.together(form.group_size)
        buffer = AppendBuffer(form, rows, *waiting, device, storage.account)
        known = config.max_context and sealed_groups(form, config, config.max_context) * form.group_size
        self.clustered = ClusteredEntries(storage, self.store, form, partition, buffer, readers, known)

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
        pages, block = rows * (tokens // form.group_size + count), rows * self._step * form.group_size
        streamed = streaming(form, pages, block, tokens)
        at_once, a_group = (max(packing, streamed) for packing in most_packing(form, clusters, tokens, queue))
        run.passes("packing", prefill=at_once, decode=a_group)

    units: int = property(attrgetter("clustered.partition.clusters"))  # type: ignore[assignment]
    records: int = property(attrgetter("clustered.most_pages"))  # type: ignore[assignment]
    recent: torch.Tensor = property(attrgetter("tail.entries"))  # type: ignore[assignment]

    @property
    def beside(self) -> tuple[torch.Tensor, np.ndarray]:
        """Entries (rows, t, width) that are in no record, and which token each is, (rows, t), -1: none."""
        return self.clustered.buffer.entries, self.clustered.buffer.places

    @property
    def tables_nbytes(self) -> int:
        return self.clustered.tables_nbytes + self.store.tables_bytes

    # --- in ----------------------------------------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        """As `History.append`. Fewer than `HELD_BACK` tokens join the clusters that there are, as many at a time as
        may: where one such part raises, those before it have come, as `length` says, and `truncate` drops them."""
        if self._before is not None:
            self.place()
        own, step = self.clustered.partition, self.clustered.buffer.joining
        first = self._num_recent + step - self.tail.length
        joins = self.together == step and 0 < first < keys.shape[2] < HELD_BACK and own.clusters
        if not joins or not ((own.counts > 0) & ~own.closed).any(1).all():
            return self._append(keys, values)
        old, before, edges = self.tail.entries.clone(), self.clustered.sealed, range(first, keys.shape[2], step)
        for start, stop in pairwise([0, *edges, keys.shape[2]]):
            sealed = self._append(keys[:, :, start:stop], values[:, :, start:stop])
        told = leaving(self.form, old, keys, values, sealed.tokens - before)
        return dataclasses.replace(sealed, parts=told)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        held, group = self.tail.length, self.form.group_size
        total = held + keys.shape[2]
        count, told = max(0, total - self._num_recent) // group * group, []
        if count < self.together:
            self.tail.append(keys, values)
        else:
            old = self.tail.entries.clone()
            coming = Arrivals(self.form, old, keys, values, count)
            rest = count + np.arange(total - count)
            tail = torch.stack([coming.entries(row, rest) for row in range(self.rows)])  # what can fail comes first
            hold_back = self.holds_back and count >= HELD_BACK > self.clustered.buffer.joining
            self.clustered.add(coming, hold_back=hold_back)
            self._before = (old, self.length) if hold_back else None
            self.tail.replace(tail)
            told = leaving(self.form, old, keys, values, count)
        self.length += keys.shape[2]
        sealed = self.clustered.sealed
        return Sealed(self.units, sealed, told, lambda: iter([self.whole(sealed)[0]]))

    @property
    def held_back(self) -> bool:
        """Clusters wait for `place`."""
        return self._before is not None

    def place(self, queries: torch.Tensor | None = None, wanted: int = 0) -> None:
        """Write the clusters that `append` has held back: those that the same of these queries (rows, heads, n, D),
        scaled, want, each `wanted` tokens, side by side (DynaKV, section 5.1). Nothing where none are. Raises
        `StoreFullError`, or an earlier write's `StoreError`: `truncate` to the length before drops them then."""
        if self._before is not None:
            self.clustered.place(None if queries is None else queries.float().cpu().numpy(), wanted)
            self._before = None

    # --- out ---------------------------------------------------------------------------------------------------

    def extents(self, units: np.ndarray) -> Extents:
        """As `History.extents`: a run for each page."""
        if self._before is not None:
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

    def positions(self, units: np.ndarray) -> np.ndarray:
        rows, page, column, at, width = self._laid_out(units)
        places = np.full((len(units), width, self.form.group_size), -1, dtype=np.int64)
        places[rows, at] = members(self.clustered, rows, units[rows, column], page)
        return np.concatenate([places.reshape(len(units), -1), self.beside[1]], 1)

    def _laid_out(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
        """Every page of units (rows, M), row by row: its row, its number in its cluster, the column of its unit, and
        its place in the row; and how many the row has that has most."""
        counts = np.take_along_axis(self.clustered.page_counts, np.maximum(units, 0), 1) if self.units else units * 0
        rows, column, page = in_order(np.where(units >= 0, counts, 0))
        each = np.bincount(rows, minlength=len(units))
        return rows, page, column, places_within(each), int(each.max(initial=0))

    def blocks(self, stop: int | None = None) -> Iterator[Block]:
        """As `History.blocks`: in the order of the records, then what waits, then the tail."""
        self.place()
        stop, own = self.length if stop is None else stop, self.clustered
        if own.page_counts.any():
            block = self._step * self.form.group_size * self.rows
            with own.holding(streaming(self.form, int(own.page_counts.sum()), block, own.sealed)):
                yield from cluster_blocks(own, self._storage, self.device, stop, self._step)
        entries, places = self.beside
        if (places >= 0).any():
            yield Block(*self.form.split(entries), np.where(places < stop, places, -1))
        if own.sealed < stop:
            last = np.arange(own.sealed, stop)
            yield Block(*self.form.split(self.recent[:, : len(last)]), np.tile(last, (self.rows, 1)))

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return joined(self, self.length if stop is None else stop)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> np.ndarray | None:
        """As `History.truncate`. Where clusters lose members they are read, and the tail holds `num_recent` tokens
        again, or all that remain."""
        own = self.clustered
        if self._before is not None and length <= self._before[1]:
            own.drop_unplaced()
            self.tail.replace(self._before[0])
            self.length, self._before = self._before[1], None
        self.place()
        if length >= own.sealed:
            self.tail.drop_last(self.length - length)
            self.length = length
            return None
        keep = max(0, length - self._num_recent) // self.form.group_size * self.form.group_size
        taken, left = read_for_crop(own, keep, length)
        own.cut(keep, left)
        self.tail.replace(taken)
        self.length = length
        return own.pages.sweep()

    def sweep(self, always: bool = False) -> np.ndarray | None:
        pages = self.clustered.pages
        return pages.sweep() if always or pages.garbage else None

    def select_rows(self, rows: torch.Tensor) -> None:
        """As `History.select_rows`. Moves nothing that is stored: rows share clusters, which nothing joins from then
        on. What waits for those is settled first, which may raise `StoreError`, as mapped means may, with no change."""
        self.place()
        self.clustered.settle_shared(rows)
        self.clustered.partition.select_rows(rows.cpu().numpy())
        try:
            self.clustered.select_rows(rows)
            self.tail.select_rows(rows)
        except BaseException:
            self._storage.torn = True  # some of it has other rows than the rest
            raise
        self.rows = len(rows)

    def close(self) -> None:
        self._storage.close_store(self.store)
        self.tail.close()
        self.clustered.buffer.close()

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        """As `History.freeze`, and `frozen`. Nothing joins the clusters that there are from now on."""
        self.place()
        self.clustered.settle_all()
        self.clustered.close()  # first: where the rest fails, some of it may be frozen
        return frozen(self._storage, self.store, self._name, self.named, self._move).parts

    def named(self, count: int) -> np.ndarray:
        """Which of the first `count` records of the store hold something of some row: (count,), bool."""
        return self.clustered.pages.named(self.clustered.page_counts, count)

    def _move(self, store: Store) -> None:
        self.store = store
        self.clustered.move(store)

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        edges = np.cumsum([part.capacity for part in parts])
        return np.split(self.named(self.store.capacity), edges[:-1])

    def capture(self) -> dict[str, Any]:
        """As `History.capture`, after `freeze`: views, valid until the next change."""
        own = {**self.STATE.capture(self), **self.tail.STATE.capture(self.tail)}
        return {"form": dataclasses.asdict(self.form), **own, "clusters": self.clustered.capture()}

    @classmethod
    def restore(
        cls, storage: Storage, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device,
        config: OffloadConfig, name: str, clusters: ClusterForm, readers: Readers,
    ) -> ClusterHistory:  # fmt: skip
        """The history that `tree` was captured of, over the frozen `parts`, which it owns then. Reads nothing.

        Raises `ContextError` where the tree does not hold together; `parts` are the caller's then."""
        form, sizes = check_captured(cls.STATE, tree, parts, name, config.group_size)
        rows, sealed = sizes["rows"], tree["length"] - sizes["recent"]
        check_clusters(form, tree["clusters"], rows, sealed, clusters.capacity, sizes["records"], name)
        store = storage.layer_store(parts, form.record_bytes, name)
        history = cls(storage, form, rows, device, config, name, clusters, readers, store)
        history.clustered.restore(tree["clusters"])
        history.tail.restore(tree)
        history.length = tree["length"]
        return history
