"""Reads of records into borrowed areas, and copies from there to their target."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import CacheClosedError, StalledError
from ..report.trace import NOTHING
from .areas import Areas, ByteRows, Staging, View
from .choice import Choice, Extents, Source
from .prefetcher import Ticket
from .replica_link import Link
from .storage import Storage
from .tier import among, distinct

Kept = Callable[[np.ndarray, Staging, Any], None]
"""Takes distinct records (n,), the area whose first n records they are, as the format says."""

# A read into a borrowed area

@dataclass
class AreaRead:
    """A read in flight: row i of the result is `records[i]` (distinct, ascending), the full record or its replica.

    Full records come first in the area, in order, followed by replicas.
    """

    records: np.ndarray
    area: Staging
    ahead: bool
    ticket: Ticket | None
    """The read of full records; None: there are none."""
    replicas: Ticket | None = None
    """The read of replicas; None: there are none."""
    replicated: np.ndarray | None = None
    """(n,) bool: which records are read as replicas; None: none are."""
    borrowed: bool = True
    """The area has not been given back yet."""

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets in the order in which they are waited for."""
        return [ticket for ticket in (self.replicas, self.ticket) if ticket is not None]

    @property
    def stalled(self) -> bool:
        """Whether the device is stalled and may still write to the area."""
        return any(ticket.stalled for ticket in self.tickets)


# A read for a future gather

@dataclass
class ReadAhead:
    """A prefetch in flight, for the gather of `choice`."""

    choice: Choice
    read: AreaRead


class AreaReads:
    """One layer's reads. Areas are given back after the records were copied from them, or after a failed read.

    Args:
        link: the link that reads some records as replicas; None: none are.
    """

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None, link: Link | None = None) -> None:
        self._storage, self._areas, self._layer_idx, self._link = storage, areas, layer_idx, link
        self.kept: Kept | None = None
        """Called after each read for a gather; None: nothing is."""

    def read(
        self, history: Source, records: np.ndarray, area: Staging, *, ahead: bool = False,
        importance: np.ndarray | None = None,
    ) -> AreaRead:  # fmt: skip
        """Start reading distinct `records`, ascending, into a borrowed area; gives the area back if it raises.
        `importance` (n,): that of each record."""
        link, replicated = self._link, None
        try:
            timeline = self._storage.timeline
            with timeline.span("read", self._layer_idx) if timeline.on else NOTHING:
                if link is not None:
                    replicated = link.split(history, records, importance, area, ahead)
                if replicated is None:
                    rows = area.host_rows(records.size, history.form.record_bytes)
                    ticket = self._storage.prefetcher.read(history.store, records, rows, guess=ahead)
                    return AreaRead(records, area, ahead, ticket)
                assert link is not None
                return self._read_both(link, history, records, area, ahead, replicated)
        except StalledError:  # it may still write to the area
            raise
        except Exception:
            self._areas.give_back(area, ahead=ahead)
            raise

    def _begin(self, history: Source, records: np.ndarray, area: Staging, ahead: bool) -> Ticket:
        rows = area.host_rows(records.size, history.form.record_bytes)
        return self._storage.prefetcher.read(history.store, records, rows, guess=ahead)

    def _read_both(
        self, link: Link, history: Source, records: np.ndarray, area: Staging, ahead: bool, replicated: np.ndarray
    ) -> AreaRead:
        """Read replicas first, so that they are unpacked while full records are still being read."""
        replicas, whole = link.replicas, records[~replicated]
        ids = replicas.locate(records[replicated])
        rows = area.host_rows(ids.size, replicas.record_bytes, whole.size * history.form.record_bytes)
        try:
            first = self._storage.prefetcher.read(replicas.store, ids, rows, guess=ahead)
        except StalledError:
            raise
        except OSError:  # the replicas are lost, but the records exist
            replicas.forget(records[replicated])
            return AreaRead(records, area, ahead, self._begin(history, records, area, ahead))
        try:
            ticket = self._begin(history, whole, area, ahead) if whole.size else None
        except Exception:
            first.drop()
            try:
                first.wait()
            except StalledError:
                raise
            except (OSError, CacheClosedError):
                pass
            raise
        return AreaRead(records, area, ahead, ticket, first, replicated)

    def finish(
        self, history: Source, read: AreaRead, into: ByteRows, target: np.ndarray, rows: np.ndarray | slice,
        *, keep: bool = False,
    ) -> None:  # fmt: skip
        """Wait for a read, and copy its record `rows[i]` to row `target[i]` of `into`. Raises the read's error.

        The area is given back, unless `keep` is set and the read succeeded, or a stalled device may still write to it.
        After a signal's exception the read is still in flight."""
        if read.ahead and self._link is not None:
            self._link.hid(time.perf_counter() - read.tickets[0].started)
        try:
            if read.replicated is None:
                assert read.ticket is not None
                if self._storage.timeline.on:
                    self._storage.wait_for(read.ticket, self._layer_idx)
                else:
                    self._storage.counters.stall_seconds += read.ticket.wait()
                into.put(target, read.area.payloads(read.records.size, history.form), rows)
                if self.kept is not None:
                    self.kept(read.records, read.area, history.form)
            else:
                self._finish_both(history, read, read.replicated, into, target, np.arange(read.records.size)[rows])
        except Exception:
            self.drop(read)
            raise
        if not keep and read.borrowed:
            read.borrowed = False
            self._areas.give_back(read.area, ahead=read.ahead)

    def finish_guess(
        self, history: Source, read: AreaRead, into: ByteRows, target: np.ndarray, rows: np.ndarray | slice,
        *, keep: bool = False,
    ) -> bool:  # fmt: skip
        """As `finish` for a guess; False: the read failed, which is as if there had been no guess. Raises
        `StalledError`, `CacheClosedError`, `BudgetError`."""
        try:
            self.finish(history, read, into, target, rows, keep=keep)
        except OSError:
            if read.stalled:
                raise
            return False
        return True

    def _finish_both(
        self, history: Source, read: AreaRead, replicated: np.ndarray, into: ByteRows, target: np.ndarray,
        rows: np.ndarray,
    ) -> None:  # fmt: skip
        link, form, area, replicas, lost = self._link, history.form, read.area, read.replicas, False
        assert link is not None and replicas is not None
        lies = np.where(replicated, replicated.cumsum(), (~replicated).cumsum()) - 1  # row within its part of the area
        whole, packed = int((~replicated).sum()), replicated[rows]
        to_packed, to_whole = lies[rows[packed]], lies[rows[~packed]]
        try:
            self._storage.wait_for(replicas, self._layer_idx)
        except OSError:
            if replicas.stalled:
                raise
            lost = True  # the records exist
        if to_packed.size and not lost:
            started = time.perf_counter()
            wire = area.upload(replicated.size - whole, link.replicas.record_bytes, whole * form.record_bytes)
            link.replicas.unpack(wire, to_packed, into, target[packed])
            self._storage.counters.unpack_seconds += time.perf_counter() - started
        if read.ticket is not None:
            self._storage.wait_for(read.ticket, self._layer_idx)
            into.put(target[~packed], area.payloads(whole, form), to_whole)
            if self.kept is not None:
                self.kept(read.records[~replicated], area, form)
        if lost:
            again = read.records[replicated]
            link.replicas.forget(again)
            read.ticket = self._begin(history, again, area, read.ahead)
            self._storage.wait_for(read.ticket, self._layer_idx)
            into.put(target[packed], area.payloads(again.size, form), to_packed)

    def drop(self, read: AreaRead) -> None:
        """Wait for an unwanted read and drop it, with its error if it failed. Its area is given back, unless the device
        is stalled."""
        for ticket in read.tickets:
            with contextlib.suppress(OSError, CacheClosedError):
                self._storage.wait_for(ticket, self._layer_idx)
        if not read.stalled:
            self._give_back(read)

    def _give_back(self, read: AreaRead) -> None:
        """Give the area back, once."""
        if read.borrowed:
            read.borrowed = False
            self._areas.give_back(read.area, ahead=read.ahead)

    def fill(
        self, history: Source, into: ByteRows, target: np.ndarray, records: np.ndarray, which: np.ndarray | slice,
        first: AreaRead, importance: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Copy record `which[i]` of `records` to row `target[i]` of `into`, and give the area back. `first` reads the
        first of them. If there are more, as in a union of choices, they are read in parts of the same size."""
        count, room, read = records.size, first.records.size, first
        rows = np.arange(count)[which] if room < count else np.empty(0)
        for start in range(0, count, room):
            part = slice(start, start + room)
            if start:
                matter = None if importance is None else importance[part]
                read = self.read(history, records[part], first.area, importance=matter)
            if room >= count:
                self.finish(history, read, into, target, which)
            else:
                in_part = ((rows >= start) & (rows < start + room)).nonzero()[0]
                self.finish(history, read, into, target[in_part], rows[in_part] - start, keep=start + room < count)

    def look(
        self, history: Source, extents: Extents, room: int, early: EarlyLook | None = None, *, again: bool = False
    ) -> torch.Tensor:
        """As `Fetcher.look`, at most `room` records at a time; uses the `early` look if it has these records."""
        form = history.form
        (rows, width), records = extents.records.shape, extents.records.reshape(-1)
        places = (records >= 0).nonzero()[0]
        out = torch.zeros(rows * width, form.payload_width, dtype=form.payload_dtype, device=history.device)
        if places.size:
            wanted, which = distinct(records[places])
            each = np.arange(wanted.size) if which is None else which
            early_hit = early is not None and early.come(history, wanted, ByteRows(out), places, each, again=again)
            if not (early_hit and again):  # otherwise the next look counts them, without a read
                self._storage.counters.look_bytes += wanted.size * form.record_bytes
            if not early_hit:
                area = self._areas.borrow(room * form.record_bytes, history.device)
                first = self.read(history, wanted[:room], area)
                self.fill(history, ByteRows(out), places, wanted, each, first)
        return out.view(rows, width, form.payload_width)


# A predictor's probable look, read before it asks

class EarlyLook:
    """One layer's early looks, one read at a time, into its own areas; for the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None) -> None:
        self._areas, self._reads = areas, AreaReads(storage, areas, layer_idx)
        self._begun: AreaRead | None = None

    def begin(self, history: Source, extents: Extents) -> None:
        """Start reading the records of `extents`. Does nothing if no area is free. If it raises, nothing has changed.
        """
        self.drop()
        records = distinct(extents.records[extents.records >= 0])[0]
        if not records.size:
            return
        area = self._areas.borrow_ahead(records.size * history.form.record_bytes, history.device)
        if area is not None:
            self._begun = self._reads.read(history, records, area, ahead=True)

    def come(
        self, history: Source, records: np.ndarray, into: ByteRows, target: np.ndarray, which: np.ndarray,
        *, again: bool,
    ) -> bool:  # fmt: skip
        """Copy record `which[i]` of `records` (distinct, ascending) to row `target[i]` of `into`, if `begin` read them.

        With `again`, the next call can copy them once more without a read. False: other records or none were begun, or
        the read failed. Raises `StalledError`, `CacheClosedError`."""
        read = self._begun
        if read is None:
            return False
        if not np.array_equal(read.records, records):
            self.drop()
            return False
        try:
            landed = self._reads.finish_guess(history, read, into, target, which, keep=again)
        except Exception:
            self._begun = None
            raise
        self._begun = read if landed and again else None  # after a signal's exception it is still in flight
        return landed

    def drop(self) -> None:
        """Wait for the unwanted read and drop it, with its error if it failed."""
        if self._begun is not None:
            self._reads.drop(self._begun)
            self._begun = None


# Records that no tier has: prefetched, and read for a gather

Importance = np.ndarray | None
"""(n,) float32: importance of each record; None: not used."""


class Missing:
    """One layer's records that no tier has; at most one prefetch at a time. For the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None, link: Link | None) -> None:
        self._areas, self._reads = areas, AreaReads(storage, areas, layer_idx, link)
        self.ahead: ReadAhead | None = None

    def keep_reads(self, kept: Kept) -> None:
        """Call `kept` after each read for a gather."""
        self._reads.kept = kept

    def begin_ahead(
        self, history: Source, choice: Choice, room: int, records: np.ndarray, importance: Importance,
        others: Callable[[], tuple[np.ndarray, Importance]] | None,
    ) -> None:  # fmt: skip
        """Prefetch at most `room` distinct `records`, ascending, for a `choice`, and `others` while there is room. Does
        nothing if no area is free. If it raises, nothing has changed."""
        if not records.size and others is None:
            return
        area = self._areas.borrow_ahead(room * history.form.record_bytes, history.device)
        if area is None:
            return
        records, importance = records[:room], None if importance is None else importance[:room]
        if others is not None and records.size < room:
            more = others()[0]
            if records.size:
                more = more[~among(more, records)[0]]
            records = np.concatenate([records, more[: room - records.size]])
            if importance is not None:
                least = np.full(records.size - importance.size, -np.inf, dtype=np.float32)
                importance = np.concatenate([importance, least])[records.argsort()]
            records.sort()
        self.ahead = ReadAhead(choice, self._reads.read(history, records, area, ahead=True, importance=importance))

    def drop_ahead(self) -> None:
        """Wait for the unwanted prefetch and drop it, with its error if it failed."""
        if self.ahead is not None:
            self._reads.drop(self.ahead.read)
            self.ahead = None

    def bring(
        self, history: Source, view: View, target: np.ndarray, records: np.ndarray, which: np.ndarray | None,
        importance: Importance, room: int, meanwhile: Callable[[], None],
    ) -> int:  # fmt: skip
        """Copy record `which[i]` (None: i) of `records`, distinct and ascending, to row `target[i]` of the view.

        Reads what was not prefetched, at most `room` records at a time, and calls `meanwhile` once. Returns the number
        of rows that were prefetched."""
        ahead, ready, row = self.ahead, None, None
        if ahead is not None and ahead.read.records.size:
            ready, row = among(records, ahead.read.records)
        if ready is None or row is None or not ready.any():
            read = self._begin(history, records, importance, room)
            try:
                meanwhile()
            except Exception:
                self._reads.drop(read)
                raise
            if self.ahead is not None:
                self.drop_ahead()
            each = slice(records.size) if which is None else which
            if records.size <= room:
                self._reads.finish(history, read, view.payloads, target, each)
            else:
                self._reads.fill(history, view.payloads, target, records, each, read, importance)
            return 0
        each = np.arange(records.size) if which is None else which
        prefetched = ready[each]

        def fill(read: AreaRead, mask: np.ndarray) -> None:
            places, matter = mask[each], None if importance is None else importance[mask]
            which = mask.cumsum()[each[places]] - 1
            self._reads.fill(history, view.payloads, target[places], records[mask], which, read, matter)

        read_now = None
        if not ready.all():
            read_now = self._begin(history, records[~ready], None if importance is None else importance[~ready], room)
        try:
            meanwhile()
            landed = self._land(history, view, target[prefetched], row[each[prefetched]])
        except Exception:
            if read_now is not None:
                self._reads.drop(read_now)
            raise
        if read_now is not None:
            fill(read_now, ~ready)
        if not landed:
            matter = None if importance is None else importance[ready]
            fill(self._begin(history, records[ready], matter, room), ready)
        return int(np.count_nonzero(prefetched)) if landed else 0

    def _begin(self, history: Source, records: np.ndarray, importance: Importance, room: int) -> AreaRead:
        """Start reading the first `room` of `records`. If it raises, the prefetch is dropped."""
        importance = None if importance is None else importance[:room]
        try:
            area = self._areas.borrow(room * history.form.record_bytes, history.device)
            return self._reads.read(history, records[:room], area, importance=importance)
        except Exception:
            self.drop_ahead()
            raise

    def _land(self, history: Source, view: View, target: np.ndarray, rows: np.ndarray) -> bool:
        """Copy row `rows[i]` of the prefetch to row `target[i]` of the view: see `AreaReads.finish_guess`."""
        assert self.ahead is not None
        try:
            landed = self._reads.finish_guess(history, self.ahead.read, view.payloads, target, rows)
        except Exception:
            self.ahead = None
            raise
        self.ahead = None  # after a signal's exception it is still in flight
        return landed
