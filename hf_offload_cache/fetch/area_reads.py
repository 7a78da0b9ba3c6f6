"""Reads of records into areas that are borrowed for them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ..errors import CacheClosedError, StalledError
from .areas import Areas
from .byte_rows import ByteRows
from .choice import Extents
from .fetched import Source
from .placing import distinct
from .staging import Staging
from .storage import Storage
from .ticket import Ticket


class Early(Protocol):
    """Reads that were begun for a look: see `EarlyLook`."""

    def come(self, records: np.ndarray) -> Staging | None: ...

    def give_back(self, area: Staging) -> None: ...


class AreaReads:
    """Of one layer. Areas are given back when what was read has been copied from them, or a read has failed."""

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None) -> None:
        self._storage, self._areas, self._layer_idx = storage, areas, layer_idx

    def read(self, history: Source, records: np.ndarray, area: Staging, *, ahead: bool = False) -> Ticket:
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

    def wait(self, ticket: Ticket, area: Staging, *, ahead: bool = False) -> None:
        """Wait for a read. Where it failed, its area is given back, unless the device is stalled and may write to it.
        After a signal's exception it is still under way."""
        try:
            self._storage.wait_for(ticket, self._layer_idx)
        except (OSError, CacheClosedError):
            if not ticket.stalled:
                self._areas.give_back(area, ahead=ahead)
            raise

    def fill(
        self, history: Source, into: ByteRows, target: np.ndarray, records: np.ndarray, which: np.ndarray | slice,
        ticket: Ticket, area: Staging, room: int,
    ) -> None:  # fmt: skip
        """Bring record `which[i]` of `records` to row `target[i]` of `into`, and give the area back. `ticket` reads the
        first `room` records; more than that, which a union of choices may be, come in parts, one after the other."""
        count = records.size
        for start in range(0, count, room):
            part = records[start : start + room]
            if start:
                ticket = self.read(history, part, area)
            self.wait(ticket, area)
            payloads = area.payloads(part.size, history.form)
            if part.size == count:
                into.put(target, payloads, which)
            else:
                rows = np.arange(count)[which]
                here = ((rows >= start) & (rows < start + room)).nonzero()[0]
                into.put(target[here], payloads, rows[here] - start)
        self._areas.give_back(area)

    def look(self, history: Source, extents: Extents, room: int, early: Early | None = None) -> torch.Tensor:
        """As `Fetcher.look`, at most `room` records at a time; of what was begun `early`, if it is that."""
        form = history.form
        (rows, width), records = extents.records.shape, extents.records.reshape(-1)
        places = (records >= 0).nonzero()[0]
        out = torch.zeros(rows * width, form.payload_width, dtype=form.dtype, device=history.device)
        if places.size:
            wanted, which = distinct(records[places])
            each = slice(wanted.size) if which is None else which
            came = None if early is None else early.come(wanted)
            if early is not None and came is not None:
                ByteRows(out).put(places, came.payloads(wanted.size, form), each)
                early.give_back(came)
                return out.view(rows, width, form.group_size, form.entry_width)
            area = self._areas.borrow(room * form.record_bytes, history.device)
            ticket = self.read(history, wanted[:room], area)
            self.fill(history, ByteRows(out), places, wanted, each, ticket, area, room)
        return out.view(rows, width, form.group_size, form.entry_width)
