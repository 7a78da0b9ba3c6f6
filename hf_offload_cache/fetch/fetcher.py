"""A choice in, entries out, for the records of one history: from tiers, from reads ahead, and from the store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import CacheClosedError
from ..stores.base import Store
from .areas import Areas
from .choice import Choice, Extents
from .rows import copy_rows
from .slot_table import ABSENT
from .staging import Staging
from .storage import Storage
from .ticket import Ticket
from .tier import Tier


class Source(Protocol):
    """What a fetcher needs of a history: where units lie, and how entries lie in a record."""

    store: Store
    form: Any
    device: torch.device
    rows: int

    @property
    def units(self) -> int: ...

    def extents(self, units: np.ndarray) -> Extents: ...

    @property
    def recent(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Fetched:
    """Entries of a choice, and behind them the latest ones. Valid until the next gather of any fetcher of the cache."""

    entries: torch.Tensor
    """(rows, N + t, entry width) on the history's device, as the store has them."""
    chosen: int
    """N: entries a row that come of the choice; each unit takes as many as a record holds, or its `count`."""
    valid: np.ndarray | None
    """(rows, N) bool: entries to attend to; None: all. The others are undefined, and finite where they were stored."""


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
        self._most_units = most_units
        self._layer_idx = layer_idx
        self._ahead: _Ahead | None = None
        self.latest: Choice | None = None
        """What was gathered last; None after a change of the rows."""

    def _room(self, history: Source) -> int:
        """Records that areas are made for: no more than there will be soon."""
        return history.rows * min(self._most_units, history.units * 9 // 8 + 8)

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
        try:
            area.wait_uploaded()
            records = self._absent(history, choice)[:room]
            if others is not None and len(records) < room:
                more = np.setdiff1d(self._absent(history, others), records, assume_unique=True)
                records = np.sort(np.concatenate([records, more[: room - len(records)]]))
            ticket = self._read(history, records, area, guess=True)
        except BaseException:
            self._areas.give_back(area, ahead=True)
            raise
        self._ahead = _Ahead(choice, records, ticket, area)

    def _absent(self, history: Source, choice: Choice) -> np.ndarray:
        """The records of a choice that no tier holds, ascending."""
        records = np.unique(history.extents(choice.units).records)
        records = records[records >= 0]
        for tier in self.tiers:
            records = records[tier.locate(records) == ABSENT]
        return records

    def _read(self, history: Source, records: np.ndarray, area: Staging, *, guess: bool = False) -> Ticket:
        rows = area.host_rows(len(records), history.form.record_bytes)
        return self._storage.prefetcher.read(history.store, records, rows, guess=guess)

    def drop_ahead(self) -> None:
        """Nobody comes for what is read ahead: wait until it is done, and forget it, and its error if it had one."""
        if self._ahead is not None:
            with contextlib.suppress(OSError, CacheClosedError):
                self._areas.give_back(self._land().area, ahead=True)

    def _land(self) -> _Ahead:
        """Wait for the read ahead, whose area is the caller's to give back then. Raises what it failed with, with the
        area given back."""
        ahead = self._ahead
        assert ahead is not None
        try:
            self._storage.wait_for(ahead.ticket, self._layer_idx)
        except (OSError, CacheClosedError):  # closing the storage has cancelled what was under way
            self._ahead = None
            self._areas.give_back(ahead.area, ahead=True)
            raise
        self._ahead = None  # but not after a signal's exception: then it is still under way
        return ahead

    # --- gather ------------------------------------------------------------------------------------------------

    def gather(self, history: Source, choice: Choice) -> Fetched:
        """The entries of `choice`, row by row and unit by unit, and behind them `history.recent`.

        Waits for what was read ahead, reads what is still missing, and keeps what was read. Raises `StoreError`,
        `BudgetError`; nothing has changed then.
        """
        form, counters = history.form, self._storage.counters
        extents = history.extents(choice.units)
        rows, width = extents.records.shape
        records = extents.records.reshape(-1)
        recent = history.recent
        spare = -(-recent.shape[1] // form.group_size)
        room = (self._room(history) + rows * spare) * form.payload_width
        view = self._areas.view(rows * (width + spare), form.payload_width, form.dtype, history.device, room)
        target = np.arange(rows * width) if rows == 1 else (
            (np.arange(rows)[:, None] * (width + spare) + np.arange(width)).reshape(-1)
        )  # fmt: skip

        if choice.ragged:
            view.view(rows, width + spare, -1)[:, :width][torch.from_numpy(extents.records < 0)] = 0
        found = [(tier, tier.locate(records)) for tier in self.tiers]
        absent = records >= 0
        wanted = int(np.count_nonzero(absent))
        for _, lies_in in found:
            absent &= lies_in == ABSENT
        places = np.flatnonzero(absent)
        missing, which = _distinct(records[places])
        ahead, ready = self._ready(missing)
        rest = missing if ready is None else missing[~ready]
        if len(rest):
            room = self._room(history)
            area = self._areas.borrow(max(room, len(rest)) * form.record_bytes, history.device)
            area.wait_uploaded()
            ticket = self._read(history, rest, area)
        self._take(found, records, view, target)  # while the read runs
        if ahead is not None and ready is not None:
            payload = form.payload(ahead.area.upload(len(ahead.records), form.record_bytes))
            row = np.where(ready, np.searchsorted(ahead.records, missing), ABSENT)
            self._put(payload, row if which is None else row[which], view, target[places])
        if ahead is not None:
            self._areas.give_back(ahead.area, ahead=True)
        if len(rest):
            try:
                self._storage.wait_for(ticket, self._layer_idx)
            except OSError:  # it has ended; after a signal's exception it is still under way
                self._areas.give_back(area)
                raise
            payload = form.payload(area.upload(len(rest), form.record_bytes))
            row = np.arange(len(rest))
            if ready is not None:
                row = np.full(len(missing), ABSENT)
                row[~ready] = np.arange(len(rest))
            self._put(payload, row if which is None else row[which], view, target[places])
            self._areas.give_back(area)
        self._keep(found, records, view, target)
        counters.units_selected += wanted
        counters.units_resident += wanted - len(places)
        counters.units_ready += wanted - len(places)
        if ready is not None:
            counters.units_ready += int(np.count_nonzero(ready if which is None else ready[which]))
        self.latest = choice
        entries = view.view(rows, -1, form.entry_width)[:, : width * form.group_size + recent.shape[1]]
        entries[:, width * form.group_size :] = recent
        return Fetched(entries, width * form.group_size, self._valid(choice, extents, form.group_size))

    def _ready(self, missing: np.ndarray) -> tuple[_Ahead | None, np.ndarray | None]:
        """What was read ahead, and which of the records `missing` (ascending) are in it. A guess that failed is no
        guess."""
        if self._ahead is None:
            return None, None
        try:
            ahead = self._land()
        except OSError:
            return None, None
        if not len(ahead.records) or not len(missing):
            return ahead, None
        row = np.searchsorted(ahead.records, missing).clip(max=len(ahead.records) - 1)
        ready = ahead.records[row] == missing
        return ahead, ready if ready.any() else None

    @staticmethod
    def _take(
        found: list[tuple[Tier, np.ndarray]], records: np.ndarray, view: torch.Tensor, target: np.ndarray
    ) -> None:
        """Copy what is resident, each from the nearest tier that has it."""
        taken: np.ndarray | None = None
        for tier, lies_in in found:
            here = lies_in != ABSENT if taken is None else (lies_in != ABSENT) & ~taken
            held = np.flatnonzero(here)
            if len(held):
                tier.take(lies_in[held], view, target[held])
            if len(found) > 1:
                taken = here if taken is None else taken | here

    @staticmethod
    def _put(payload: torch.Tensor, row: np.ndarray, view: torch.Tensor, target: np.ndarray) -> None:
        """Copy to `target` what was read: its rows in `payload`, -1 for what is not in there."""
        here = np.flatnonzero(row != ABSENT)
        if len(here) == len(row):
            copy_rows(view, target, payload, row)
        else:
            copy_rows(view, target[here], payload, row[here])

    @staticmethod
    def _keep(
        found: list[tuple[Tier, np.ndarray]], records: np.ndarray, view: torch.Tensor, target: np.ndarray
    ) -> None:
        """Let each tier keep what it did not have. Nothing in here can fail."""
        for tier, lies_in in found:
            places = np.flatnonzero((lies_in == ABSENT) & (records >= 0))
            if not len(places):
                continue
            fresh, which = _distinct(records[places])
            taken, into = tier.keep(fresh, lies_in[lies_in != ABSENT])
            first = places if which is None else places[np.unique(which, return_index=True)[1]]
            tier.fill(into, view, target[first[taken]])

    def look(self, history: Source, extents: Extents) -> torch.Tensor:
        """The entries (rows, E, entries a record, entry width) of the records of `extents`, for who decides by them:
        valid until the next call. -1: zeros. Raises as `gather`."""
        form = history.form
        rows, width = extents.records.shape
        records = extents.records.reshape(-1)
        places = np.flatnonzero(records >= 0)
        wanted, which = _distinct(records[places])
        out = torch.zeros(rows * width, form.payload_width, dtype=form.dtype, device=history.device)
        if len(wanted):
            area = self._areas.borrow(max(self._room(history), len(wanted)) * form.record_bytes, history.device)
            area.wait_uploaded()
            ticket = self._read(history, wanted, area)
            try:
                self._storage.wait_for(ticket, self._layer_idx)
            except OSError:
                self._areas.give_back(area)
                raise
            payload = form.payload(area.upload(len(wanted), form.record_bytes))
            copy_rows(out, places, payload, np.arange(len(wanted)) if which is None else which)
            self._areas.give_back(area)
        return out.view(rows, width, form.group_size, form.entry_width)

    @staticmethod
    def _valid(choice: Choice, extents: Extents, group_size: int) -> np.ndarray | None:
        """Which entries of the units are there, and are to be attended."""
        rows, width = extents.records.shape
        valid: np.ndarray | None = None
        if choice.ragged or extents.count is not None or extents.first is not None:
            offset = np.arange(group_size)
            first = np.zeros_like(extents.records) if extents.first is None else extents.first
            count = np.full_like(extents.records, group_size) if extents.count is None else extents.count
            valid = (offset >= first[..., None]) & (offset < (first + count)[..., None])
            valid &= extents.records[..., None] >= 0
        if choice.keep is not None:
            keep = choice.keep if extents.unit is None else np.take_along_axis(choice.keep, extents.unit[..., None], 1)
            valid = keep if valid is None else valid & keep
        return None if valid is None else valid.reshape(rows, -1)

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


def _distinct(records: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The distinct records, ascending, and for each that was given which of them it is; None: these are they."""
    if len(records) < 2 or (records[1:] > records[:-1]).all():
        return records, None
    return np.unique(records, return_inverse=True)
