"""Reads of records into areas that are borrowed for them, and from there to where they are wanted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import CacheClosedError, StalledError
from ..report.trace import NOTHING
from .areas import Areas, ByteRows, Staging, View
from .choice import Choice, Extents, Source
from .prefetcher import Ticket
from .replica_link import Link
from .storage import Storage
from .tier import Found, among, distinct, take_resident

# A read into a borrowed area

@dataclass
class AreaRead:
    """Under way: row i of what comes is `records[i]` (distinct, ascending), whole or as its replica.

    Those that come whole are the first in the area, in order, and replicas lie behind them.
    """

    records: np.ndarray
    area: Staging
    ahead: bool
    ticket: Ticket | None
    """Of those that come whole; None: none do."""
    replicas: Ticket | None = None
    """Of those that come as replicas; None: none do."""
    come: np.ndarray | None = None
    """(n,) bool: which come as replicas; None: none do."""
    lent: bool = True
    """The area is not given back yet."""

    @property
    def tickets(self) -> list[Ticket]:
        """In the order in which they are waited for."""
        return [ticket for ticket in (self.replicas, self.ticket) if ticket is not None]

    @property
    def stalled(self) -> bool:
        """The device is stuck, and may still write to the area."""
        return any(ticket.stalled for ticket in self.tickets)


# A read for a gather to come

@dataclass
class ReadAhead:
    """Under way, for what `choice` wants."""

    choice: Choice
    read: AreaRead


class AreaReads:
    """Of one layer. Areas are given back when what was read has been copied from them, or a read has failed.

    Args:
        link: which records travel as replicas; None: none do.
    """

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None, link: Link | None = None) -> None:
        self._storage, self._areas, self._layer_idx, self._link = storage, areas, layer_idx, link

    def read(
        self, history: Source, records: np.ndarray, area: Staging, *, ahead: bool = False,
        importance: np.ndarray | None = None,
    ) -> AreaRead:  # fmt: skip
        """Start to read distinct `records`, ascending, into a borrowed area, which is given back where that raises.
        `importance` (n,): how much each matters."""
        link, come = self._link, None
        try:
            timeline = self._storage.timeline
            with timeline.span("read", self._layer_idx) if timeline.on else NOTHING:
                if link is not None:
                    come = link.split(history, records, importance, area, ahead)
                if come is None:
                    rows = area.host_rows(records.size, history.form.record_bytes)
                    ticket = self._storage.prefetcher.read(history.store, records, rows, guess=ahead)
                    return AreaRead(records, area, ahead, ticket)
                assert link is not None
                return self._read_both(link, history, records, area, ahead, come)
        except StalledError:  # it may still write to the area
            raise
        except Exception:
            self._areas.give_back(area, ahead=ahead)
            raise

    def _begin(self, history: Source, records: np.ndarray, area: Staging, ahead: bool) -> Ticket:
        rows = area.host_rows(records.size, history.form.record_bytes)
        return self._storage.prefetcher.read(history.store, records, rows, guess=ahead)

    def _read_both(
        self, link: Link, history: Source, records: np.ndarray, area: Staging, ahead: bool, come: np.ndarray
    ) -> AreaRead:
        """Replicas first: what is unpacked while the rest comes costs nothing."""
        replicas, whole = link.replicas, records[~come]
        ids = replicas.locate(records[come])
        rows = area.host_rows(ids.size, replicas.record_bytes, whole.size * history.form.record_bytes)
        try:
            first = self._storage.prefetcher.read(replicas.store, ids, rows, guess=ahead)
        except StalledError:
            raise
        except OSError:  # they are lost: the records are there
            replicas.forget(records[come])
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
        return AreaRead(records, area, ahead, ticket, first, come)

    def finish(
        self, history: Source, read: AreaRead, into: ByteRows, target: np.ndarray, rows: np.ndarray | slice,
        *, keep: bool = False,
    ) -> None:  # fmt: skip
        """Wait for a read, and bring its record `rows[i]` to row `target[i]` of `into`. Its area is given back, unless
        it is to be kept and all went well, or the device is stalled and may write to it. After a signal's exception it
        is still under way. Raises what the read failed with."""
        if read.ahead and self._link is not None:
            self._link.hid(time.perf_counter() - read.tickets[0].started)
        try:
            if read.come is None:
                assert read.ticket is not None
                if self._storage.timeline.on:
                    self._storage.wait_for(read.ticket, self._layer_idx)
                else:
                    self._storage.counters.stall_seconds += read.ticket.wait()
                into.put(target, read.area.payloads(read.records.size, history.form), rows)
            else:
                self._finish_both(history, read, read.come, into, target, np.arange(read.records.size)[rows])
        except Exception:
            self.drop(read)
            raise
        if not keep and read.lent:
            read.lent = False
            self._areas.give_back(read.area, ahead=read.ahead)

    def finish_guess(
        self, history: Source, read: AreaRead, into: ByteRows, target: np.ndarray, rows: np.ndarray | slice,
        *, keep: bool = False,
    ) -> bool:  # fmt: skip
        """As `finish`; False: the read failed, and a guess that failed is no guess. Raises `StalledError`,
        `CacheClosedError`, `BudgetError`."""
        try:
            self.finish(history, read, into, target, rows, keep=keep)
        except OSError:
            if read.stalled:
                raise
            return False
        return True

    def _finish_both(
        self, history: Source, read: AreaRead, come: np.ndarray, into: ByteRows, target: np.ndarray, rows: np.ndarray
    ) -> None:
        link, form, area, replicas, lost = self._link, history.form, read.area, read.replicas, False
        assert link is not None and replicas is not None
        lies = np.where(come, come.cumsum(), (~come).cumsum()) - 1  # in which row of its part of the area
        whole, packed = int((~come).sum()), come[rows]
        to_packed, to_whole = lies[rows[packed]], lies[rows[~packed]]
        try:
            self._storage.wait_for(replicas, self._layer_idx)
        except OSError:
            if replicas.stalled:
                raise
            lost = True  # the records are there
        if to_packed.size and not lost:
            started = time.perf_counter()
            there = area.upload(come.size - whole, link.replicas.record_bytes, whole * form.record_bytes)
            link.replicas.unpack(there, to_packed, into, target[packed])
            self._storage.counters.unpack_seconds += time.perf_counter() - started
        if read.ticket is not None:
            self._storage.wait_for(read.ticket, self._layer_idx)
            into.put(target[~packed], area.payloads(whole, form), to_whole)
        if lost:
            again = read.records[come]
            link.replicas.forget(again)
            read.ticket = self._begin(history, again, area, read.ahead)
            self._storage.wait_for(read.ticket, self._layer_idx)
            into.put(target[packed], area.payloads(again.size, form), to_packed)

    def drop(self, read: AreaRead) -> None:
        """Nobody wants it: wait until it is done, and forget it, and its error if it has one. Its area is given back,
        unless the device is stalled."""
        for ticket in read.tickets:
            with contextlib.suppress(OSError, CacheClosedError):
                self._storage.wait_for(ticket, self._layer_idx)
        if not read.stalled:
            self._give_back(read)

    def _give_back(self, read: AreaRead) -> None:
        """Once, whatever comes in between."""
        if read.lent:
            read.lent = False
            self._areas.give_back(read.area, ahead=read.ahead)

    def fill(
        self, history: Source, into: ByteRows, target: np.ndarray, records: np.ndarray, which: np.ndarray | slice,
        first: AreaRead, importance: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Bring record `which[i]` of `records` to row `target[i]` of `into`, and give the area back. `first` reads the
        first of them; more than that, which a union of choices may be, come in parts as large, one after the other."""
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
                here = ((rows >= start) & (rows < start + room)).nonzero()[0]
                self.finish(history, read, into, target[here], rows[here] - start, keep=start + room < count)

    def look(
        self, history: Source, extents: Extents, room: int, early: EarlyLook | None = None, *, again: bool = False
    ) -> torch.Tensor:
        """As `Fetcher.look`, at most `room` records at a time; of what was begun `early`, if it is that."""
        form = history.form
        (rows, width), records = extents.records.shape, extents.records.reshape(-1)
        places = (records >= 0).nonzero()[0]
        out = torch.zeros(rows * width, form.payload_width, dtype=form.dtype, device=history.device)
        if places.size:
            wanted, which = distinct(records[places])
            each = np.arange(wanted.size) if which is None else which
            came = early is not None and early.come(history, wanted, ByteRows(out), places, each, again=again)
            if not (came and again):  # else the next look counts it, which reads nothing
                self._storage.counters.look_bytes += wanted.size * form.record_bytes
            if not came:
                area = self._areas.borrow(room * form.record_bytes, history.device)
                first = self.read(history, wanted[:room], area)
                self.fill(history, ByteRows(out), places, wanted, each, first)
        return out.view(rows, width, form.group_size, form.entry_width)


# What a predictor will want to look at, read before it asks

class EarlyLook:
    """One read of one layer at a time, into areas of its own; for the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None) -> None:
        self._areas, self._reads = areas, AreaReads(storage, areas, layer_idx)
        self._begun: AreaRead | None = None

    def begin(self, history: Source, extents: Extents) -> None:
        """Start to read the records of `extents`. Does nothing where no area is free. What it raises has changed
        nothing."""
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
        """Bring record `which[i]` of `records` (distinct, ascending) to row `target[i]` of `into`, if these are what
        was begun; they can come `again`, without a read, if that is said. False: nothing of the sort was, or the read
        failed. Raises `StalledError`, `CacheClosedError`."""
        read = self._begun
        if read is None:
            return False
        if not np.array_equal(read.records, records):
            self.drop()
            return False
        try:
            came = self._reads.finish_guess(history, read, into, target, which, keep=again)
        except Exception:
            self._begun = None
            raise
        self._begun = read if came and again else None  # but not after a signal's exception: then it is still under way
        return came

    def drop(self) -> None:
        """Nobody comes for it: wait until it is done, and forget it, and its error if it had one."""
        if self._begun is not None:
            self._reads.drop(self._begun)
            self._begun = None


# Records that no tier holds: read ahead of a gather, and for it

Importance = np.ndarray | None
"""(n,) float32: how much each of so many records matters; None: nothing hangs on it."""


class Missing:
    """Of one layer; at most one read ahead at a time. For the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None, link: Link | None) -> None:
        self._areas, self._reads = areas, AreaReads(storage, areas, layer_idx, link)
        self.ahead: ReadAhead | None = None

    def begin_ahead(
        self, history: Source, choice: Choice, room: int, records: np.ndarray, importance: Importance,
        others: Callable[[], tuple[np.ndarray, Importance]] | None,
    ) -> None:  # fmt: skip
        """Start to read at most `room` distinct `records`, ascending, for a `choice`, and of `others` as far as there
        is room. Does nothing where no area is free. What it raises has changed nothing."""
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
        """Nobody comes for what is read ahead: wait until it is done, and forget it, and its error if it had one."""
        if self.ahead is not None:
            self._reads.drop(self.ahead.read)
            self.ahead = None

    def bring(
        self, history: Source, view: View, target: np.ndarray, records: np.ndarray, which: np.ndarray | None,
        importance: Importance, room: int, resident: Found,
    ) -> int:  # fmt: skip
        """Bring record `which[i]` (None: i) of `records`, distinct and ascending, to row `target[i]` of the view; what
        was not read ahead is read at most `room` at a time. What is `resident` is copied while reads run. Returns how
        many of the rows came of a read ahead."""
        ahead, ready, row = self.ahead, None, None
        if ahead is not None and ahead.read.records.size:
            ready, row = among(records, ahead.read.records)
        if ready is None or row is None or not ready.any():
            read = self._begin(history, records, importance, room)
            take_resident(resident, view)
            if self.ahead is not None:
                self.drop_ahead()
            each = slice(records.size) if which is None else which
            if records.size <= room:
                self._reads.finish(history, read, view.payloads, target, each)
            else:
                self._reads.fill(history, view.payloads, target, records, each, read, importance)
            return 0
        each = np.arange(records.size) if which is None else which
        here = ready[each]

        def fill(read: AreaRead, some: np.ndarray) -> None:
            places, matter = some[each], None if importance is None else importance[some]
            which = some.cumsum()[each[places]] - 1
            self._reads.fill(history, view.payloads, target[places], records[some], which, read, matter)

        read_now = None
        if not ready.all():
            read_now = self._begin(history, records[~ready], None if importance is None else importance[~ready], room)
        take_resident(resident, view)
        try:
            landed = self._land(history, view, target[here], row[each[here]])
        except Exception:
            if read_now is not None:
                self._reads.drop(read_now)
            raise
        if read_now is not None:
            fill(read_now, ~ready)
        if not landed:
            matter = None if importance is None else importance[ready]
            fill(self._begin(history, records[ready], matter, room), ready)
        return int(np.count_nonzero(here)) if landed else 0

    def _begin(self, history: Source, records: np.ndarray, importance: Importance, room: int) -> AreaRead:
        """Start to read the first `room` of `records`. What is read ahead is dropped where that raises."""
        importance = None if importance is None else importance[:room]
        try:
            area = self._areas.borrow(room * history.form.record_bytes, history.device)
            return self._reads.read(history, records[:room], area, importance=importance)
        except Exception:
            self.drop_ahead()
            raise

    def _land(self, history: Source, view: View, target: np.ndarray, rows: np.ndarray) -> bool:
        """Bring row `rows[i]` of what was read ahead to row `target[i]` of the view: see `AreaReads.finish_guess`."""
        assert self.ahead is not None
        try:
            landed = self._reads.finish_guess(history, self.ahead.read, view.payloads, target, rows)
        except Exception:
            self.ahead = None
            raise
        self.ahead = None  # but not after a signal's exception: then it is still under way
        return landed
