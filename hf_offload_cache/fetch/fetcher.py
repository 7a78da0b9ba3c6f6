"""A choice in, entries out, for the records of one history: from tiers, from reads ahead, and from the store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import CacheClosedError, StalledError
from .areas import Areas
from .choice import Choice, Extents
from .fetched import Fetched, Source, valid_entries
from .placing import Found, distinct, keep, put, take_resident
from .rows import copy_rows
from .slot_table import ABSENT
from .staging import Staging
from .storage import Storage
from .ticket import Ticket
from .tier import Tier


@dataclass
class _Ahead:
    """A read under way: row i of the area gets `records[i]` (ascending)."""

    choice: Choice
    records: np.ndarray
    ticket: Ticket
    area: Staging


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
        self._layer_idx = layer_idx
        self._ahead: _Ahead | None = None
        self.latest: Choice | None = None
        """What was gathered last; None after a change of the rows."""

    def _room(self, history: Source) -> int:
        """Records that areas are made for: no more than there will be soon."""
        return history.rows * min(self.most_units, history.units * 9 // 8 + 8)

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
        room = self._room(history)
        area = self._areas.borrow_ahead(room * history.form.record_bytes, history.device)
        if area is None:
            return
        records = self._absent(history, choice)[:room]
        if others is not None and len(records) < room:
            more = np.setdiff1d(self._absent(history, others), records, assume_unique=True)
            records = np.sort(np.concatenate([records, more[: room - len(records)]]))
        ticket = self._read(history, records, area, ahead=True)
        self._ahead = _Ahead(choice, records, ticket, area)

    def _absent(self, history: Source, choice: Choice) -> np.ndarray:
        """The records of a choice that no tier holds, ascending."""
        records = np.unique(history.extents(choice.units).records)
        records = records[records >= 0]
        for tier in self.tiers:
            records = records[tier.locate(records) == ABSENT]
        return records

    def _read(self, history: Source, records: np.ndarray, area: Staging, *, ahead: bool = False) -> Ticket:
        """Start to read into a borrowed area, which is given back where that raises."""
        area.wait_uploaded()
        rows = area.host_rows(len(records), history.form.record_bytes)
        try:
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

    def _land(self) -> _Ahead:
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

        Waits for what was read ahead, reads what is still missing, and keeps what was read. Raises `StoreError`,
        `BudgetError`; nothing has changed then.
        """
        form, extents = history.form, history.extents(choice.units)
        rows, width = extents.records.shape
        records, recent = extents.records.reshape(-1), history.recent
        stride = width - (-recent.shape[1] // form.group_size)  # units a row, those of the latest entries included
        room = (self._room(history) + rows * (stride - width)) * form.payload_width
        view = self._areas.view(rows * stride, form.payload_width, form.dtype, history.device, room)
        target = np.arange(rows * width)
        if rows > 1:
            target += np.repeat(np.arange(rows) * (stride - width), width)

        found = [(tier, tier.locate(records)) for tier in self.tiers]
        absent = records >= 0
        wanted = int(np.count_nonzero(absent))
        if wanted < len(records):
            view.view(rows, stride, -1)[:, :width][torch.from_numpy(extents.records < 0)] = 0
        for _, lies_in in found:
            absent &= lies_in < 0
        places, ready = absent.nonzero()[0], 0
        if len(places):
            ready = self._bring(history, found, records, places, view, target)
        else:
            self.drop_ahead()
            take_resident(found, records, view, target)
            if len(found) > 1:
                keep(found, records, view, target)
        counters = self._storage.counters
        counters.units_selected += wanted
        counters.units_resident += wanted - len(places)
        counters.units_ready += wanted - len(places) + ready
        self.latest = choice
        entries = view.view(rows, -1, form.entry_width)[:, : width * form.group_size + recent.shape[1]]
        entries[:, width * form.group_size :] = recent
        plain = wanted == len(records) and choice.keep is None and extents.count is None and extents.first is None
        valid = None if plain else valid_entries(choice, extents, form.group_size, wanted)
        return Fetched(entries, width * form.group_size, valid)

    def _bring(
        self,
        history: Source,
        found: Found,
        records: np.ndarray,
        places: np.ndarray,
        view: torch.Tensor,
        target: np.ndarray,
    ) -> int:
        """Fill the view where some `records`, those at `places`, are in no tier, and let the tiers keep them. Returns
        how many of the places were filled from a read ahead."""
        form = history.form
        missing, which = distinct(records[places])
        ahead, ready = self._ready(missing)
        rest = missing if ready is None else missing[~ready]
        if len(rest):
            try:
                area, ticket = self._begin(history, rest)
            except Exception:
                if ahead is not None:
                    self._areas.give_back(ahead.area, ahead=True)
                raise
        take_resident(found, records, view, target)  # while the read runs
        if ahead is not None and ready is not None:
            payload = form.payload(ahead.area.upload(len(ahead.records), form.record_bytes))
            row = np.where(ready, np.searchsorted(ahead.records, missing), ABSENT)
            put(payload, row if which is None else row[which], view, target[places])
        if ahead is not None:
            self._areas.give_back(ahead.area, ahead=True)
        if len(rest):
            self._wait(ticket, area)
            payload = form.payload(area.upload(len(rest), form.record_bytes))
            row = np.arange(len(rest))
            if ready is not None:
                row = np.full(len(missing), ABSENT)
                row[~ready] = np.arange(len(rest))
            put(payload, row if which is None else row[which], view, target[places])
            self._areas.give_back(area)
        keep(found, records, view, target)
        return 0 if ready is None else int(np.count_nonzero(ready if which is None else ready[which]))

    def _begin(self, history: Source, records: np.ndarray) -> tuple[Staging, Ticket]:
        """Start to read into an area of its own."""
        room = max(self._room(history), len(records))
        area = self._areas.borrow(room * history.form.record_bytes, history.device)
        return area, self._read(history, records, area)

    def _ready(self, missing: np.ndarray) -> tuple[_Ahead | None, np.ndarray | None]:
        """What was read ahead, and which of the records `missing` (ascending) are in it. A guess that failed is no
        guess. Raises `StalledError`."""
        if self._ahead is None:
            return None, None
        ticket = self._ahead.ticket
        try:
            ahead = self._land()
        except OSError:
            if ticket.stalled:
                raise
            return None, None
        if not len(ahead.records) or not len(missing):
            return ahead, None
        row = np.searchsorted(ahead.records, missing).clip(max=len(ahead.records) - 1)
        ready = ahead.records[row] == missing
        return ahead, ready if ready.any() else None

    def look(self, history: Source, extents: Extents) -> torch.Tensor:
        """The entries (rows, E, entries a record, entry width) of the records of `extents`, for who decides by them:
        valid until the next call. -1: zeros. Raises as `gather`."""
        form = history.form
        rows, width = extents.records.shape
        records = extents.records.reshape(-1)
        places = (records >= 0).nonzero()[0]
        wanted, which = distinct(records[places])
        out = torch.zeros(rows * width, form.payload_width, dtype=form.dtype, device=history.device)
        if len(wanted):
            area, ticket = self._begin(history, wanted)
            self._wait(ticket, area)
            payload = form.payload(area.upload(len(wanted), form.record_bytes))
            copy_rows(out, places, payload, np.arange(len(wanted)) if which is None else which)
            self._areas.give_back(area)
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
        return sum(tier.tables_nbytes for tier in self.tiers)

    def close(self) -> None:
        """Give the tiers back; what is read ahead is waited for. Idempotent."""
        self.rows_changed()
        for tier in self.tiers:
            tier.close()
        self.tiers = []
