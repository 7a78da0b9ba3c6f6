"""A choice in, entries out, for the records of one history: from tiers, from reads ahead, and from the store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import CacheClosedError, StalledError
from .areas import Areas
from .byte_rows import ByteRows
from .choice import Choice, Extents
from .fetched import Fetched, Source, valid_entries
from .placing import Found, among, distinct, keep, keep_in, take_resident
from .read_ahead import ReadAhead
from .staging import Staging
from .storage import Storage
from .ticket import Ticket
from .tier import Tier
from .view import View


class Fetcher:
    """Brings the records of one history to its device. Knows records alone: no layer, budget or padding.

    Tiers are asked in order, the nearest first; what none of them has is read, and kept in all of them. A gather that
    raises has changed nothing: no tier, nothing of the history. For the thread that runs the model.

    Args:
        tiers: nearest first; closed by the fetcher.
        most_units: units a row that a step wants at most: what areas are made for at once; a gather may want more.
        layer_idx: on which line of the timeline waits are shown; None: on none.
    """

    def __init__(
        self, storage: Storage, areas: Areas, tiers: Sequence[Tier], most_units: int, layer_idx: int | None = None
    ) -> None:
        self._storage, self._areas, self.tiers = storage, areas, list(tiers)
        self.most_units = most_units
        self._several = len(self.tiers) > 1
        self._layer_idx = layer_idx
        self._ahead: ReadAhead | None = None
        self.latest: Choice | None = None
        """What was gathered last; None after a change of the rows."""
        self.closed = self._at_work = False
        storage.account.spare(self)

    def _room(self, history: Source) -> int:
        """Records that areas are made for: no more than there will be soon."""
        soon = history.units * 9 // 8 + 8
        return history.rows * (soon if soon < self.most_units else self.most_units)

    # --- ahead -------------------------------------------------------------------------------------------------

    @property
    def guess(self) -> Choice | None:
        """The choice that is being read ahead, if one is."""
        return None if self._ahead is None else self._ahead.choice

    def ahead(self, history: Source, choice: Choice, others: Choice | None = None) -> None:
        """Start reading what of `choice` no tier holds, and of `others` as far as there is room.

        Does nothing where no area is free. What it raises has changed nothing; a read that fails is dropped when the
        gather comes to it. May outlive the step.
        """
        self.drop_ahead()
        room, records = self._room(history), self._absent(history, choice)
        if not records.size and others is None:
            return
        area = self._areas.borrow_ahead(room * history.form.record_bytes, history.device)
        if area is None:
            return
        records = records[:room]
        if others is not None and records.size < room:
            more = self._absent(history, others)
            if records.size:
                more = more[~among(more, records)[0]]
            records = np.concatenate([records, more[: room - records.size]])
            records.sort()
        ticket = self._read(history, records, area, ahead=True)
        self._ahead = ReadAhead(choice, records, ticket, area)

    def _absent(self, history: Source, choice: Choice) -> np.ndarray:
        """The records of a choice that no tier holds, ascending."""
        records = history.extents(choice.units).records.reshape(-1)
        absent = records >= 0
        for tier in self.tiers:
            absent &= tier.locate(records) < 0
        return distinct(records[absent])[0]

    def _read(self, history: Source, records: np.ndarray, area: Staging, *, ahead: bool = False) -> Ticket:
        """Start to read into a borrowed area, which is given back where that raises."""
        rows = area.host_rows(records.size, history.form.record_bytes)
        try:
            with self._storage.timeline.span("read", self._layer_idx):
                return self._storage.prefetcher.read(history.store, records, rows, guess=ahead)
        except StalledError:  # it may still write to the area
            raise
        except Exception:
            self._areas.give_back(area, ahead=ahead)
            raise

    def _wait(self, ticket: Ticket, area: Staging, *, ahead: bool = False) -> None:
        """Wait for a read. Where it failed, its area is given back, unless the device is stalled and may write to it.
        After a signal's exception it is still under way."""
        try:
            self._storage.wait_for(ticket, self._layer_idx)
        except (OSError, CacheClosedError):
            if not ticket.stalled:
                self._areas.give_back(area, ahead=ahead)
            raise

    def drop_ahead(self) -> None:
        """Nobody comes for what is read ahead: wait until it is done, and forget it, and its error if it had one."""
        if self._ahead is not None:
            with contextlib.suppress(OSError, CacheClosedError):
                self._areas.give_back(self._land().area, ahead=True)

    def _land(self) -> ReadAhead:
        """Wait for the read ahead, whose area is the caller's to give back then. Raises what it failed with."""
        ahead = self._ahead
        assert ahead is not None
        try:
            self._wait(ahead.ticket, ahead.area, ahead=True)
        except (OSError, CacheClosedError):
            self._ahead = None
            raise
        self._ahead = None  # but not after a signal's exception: then it is still under way
        return ahead

    # --- gather ------------------------------------------------------------------------------------------------

    def gather(self, history: Source, choice: Choice) -> Fetched:
        """The entries of `choice`, row by row and unit by unit, and behind them `history.recent`.

        Waits for what was read ahead, reads what is still missing, and keeps what was read. A choice that is gathered
        again is counted once. Raises `StoreError`, `BudgetError`; nothing has changed then.
        """
        self._at_work = True
        try:
            return self._gather(history, choice)
        finally:
            self._at_work = False

    def _gather(self, history: Source, choice: Choice) -> Fetched:
        form, extents, recent = history.form, history.extents(choice.units), history.recent
        rows, width = extents.records.shape
        records, latest = extents.records.reshape(-1), recent.shape[1]
        room, behind = self._room(history), -(-latest // form.group_size)
        view = self._areas.view(rows, width, behind, form, history.device, room + rows * behind)
        found = [(tier, tier.locate(records)) for tier in self.tiers]
        there = records >= 0
        wanted = there.nonzero()[0].size
        if wanted < records.size:
            view.payloads.tensor[torch.from_numpy(view.target[~there])] = 0
        absent = there
        for _, lies_in in found:
            absent = absent & (lies_in < 0)
        places, ready = absent.nonzero()[0], 0
        if places.size:
            ready = self._bring(history, found, records, places, view, room)
        else:
            if self._ahead is not None:
                self.drop_ahead()
            take_resident(found, view)
            if self._several:  # what came from a farther one is to be nearer
                keep(found, records, view)
        if choice is not self.latest:
            counters = self._storage.counters
            counters.units_selected += wanted
            counters.units_resident += wanted - places.size
            counters.units_ready += wanted - places.size + ready
        self.latest = choice
        chosen = width * form.group_size
        entries = view.entries[:, : chosen + latest]
        entries[:, chosen:] = recent
        plain = wanted == records.size and choice.keep is None and extents.count is None and extents.first is None
        valid = None if plain else valid_entries(choice, extents, form.group_size, wanted)
        return Fetched(entries, chosen, valid)

    def _bring(
        self, history: Source, found: Found, records: np.ndarray, places: np.ndarray, view: View, room: int
    ) -> int:
        """Fill the view where some `records`, those at `places`, are in no tier, and let the tiers keep them. Returns
        how many of the places were filled from a read ahead."""
        form, target = history.form, view.target[places]
        missing, which = distinct(records[places])
        each = slice(missing.size) if which is None else which  # the missing record of each place
        ahead = None if self._ahead is None else self._come()
        came, ready, row = 0, None, missing  # which of the missing records were read ahead, and where they lie
        if ahead is not None and ahead.records.size:
            ready, row = among(missing, ahead.records)
        rest = missing if ready is None else missing[~ready]
        if rest.size:
            try:
                area = self._areas.borrow(room * form.record_bytes, history.device)
                ticket = self._read(history, rest[:room], area)
            except Exception:
                if ahead is not None:
                    self._areas.give_back(ahead.area, ahead=True)
                raise
        take_resident(found, view)  # while the read runs
        if ahead is not None:
            if ready is not None:
                here = ready[each].nonzero()[0]
                came = here.size
                if came:
                    view.payloads.put(target[here], ahead.area.payloads(ahead.records.size, form), row[each][here])
            self._areas.give_back(ahead.area, ahead=True)
        if rest.size:
            if ready is not None:
                here = ~ready[each]
                target, each = target[here], (~ready).cumsum()[each][here] - 1
            self._fill(history, view.payloads, target, rest, each, ticket, area, room)
        if self._several:
            keep(found, records, view)
        else:
            for tier, lies_in in found:
                keep_in(tier, lies_in, places, missing, which, view)
        return came

    def _fill(
        self, history: Source, into: ByteRows, target: np.ndarray, records: np.ndarray, which: np.ndarray | slice,
        ticket: Ticket, area: Staging, room: int,
    ) -> None:  # fmt: skip
        """Bring record `which[i]` of `records` to row `target[i]` of `into`, and give the area back. `ticket` reads the
        first `room` records; more than that, which a union of choices may be, come in parts, one after the other."""
        count = records.size
        for start in range(0, count, room):
            part = records[start : start + room]
            if start:
                ticket = self._read(history, part, area)
            self._wait(ticket, area)
            payloads = area.payloads(part.size, history.form)
            if part.size == count:
                into.put(target, payloads, which)
            else:
                rows = np.arange(count)[which]
                here = ((rows >= start) & (rows < start + room)).nonzero()[0]
                into.put(target[here], payloads, rows[here] - start)
        self._areas.give_back(area)

    def _come(self) -> ReadAhead | None:
        """What was read ahead, whose area is the caller's to give back then. A guess that failed is no guess. Raises
        `StalledError`."""
        assert self._ahead is not None
        ticket = self._ahead.ticket
        try:
            return self._land()
        except OSError:
            if ticket.stalled:
                raise
            return None

    def look(self, history: Source, extents: Extents) -> torch.Tensor:
        """The entries (rows, E, entries a record, entry width) of the records of `extents`, for who decides by them:
        valid until the next call. -1: zeros. Raises as `gather`."""
        form = history.form
        (rows, width), records = extents.records.shape, extents.records.reshape(-1)
        places = (records >= 0).nonzero()[0]
        out = torch.zeros(rows * width, form.payload_width, dtype=form.dtype, device=history.device)
        if places.size:
            wanted, which = distinct(records[places])
            room, each = self._room(history), slice(wanted.size) if which is None else which
            area = self._areas.borrow(room * form.record_bytes, history.device)
            ticket = self._read(history, wanted[:room], area)
            self._fill(history, ByteRows(out), places, wanted, each, ticket, area, room)
        return out.view(rows, width, form.group_size, form.entry_width)

    # --- changes -----------------------------------------------------------------------------------------------

    def rows_changed(self) -> None:
        """Rows of the history are no longer what they were: what was chosen for them is void. Tiers stay valid."""
        self.latest = None
        self.drop_ahead()

    def forget(self, records: np.ndarray) -> None:
        """These records are free: nothing read of them is valid."""
        self.rows_changed()
        for tier in self.tiers:
            tier.forget(records)

    @property
    def tables_nbytes(self) -> int:
        return sum([tier.tables_nbytes for tier in self.tiers])

    def free_memory(self) -> None:
        """As `Spare.free_memory`: all that it has, unless it gathers or reads ahead; it is closed then."""
        if not self._at_work and self._ahead is None:
            self.close()

    def close(self) -> None:
        """Give the tiers back; what is read ahead is waited for. Idempotent."""
        self.closed = True
        self.rows_changed()
        for tier in self.tiers:
            tier.close()
        self.tiers = []
