"""What a predictor will want to look at, read before it asks."""

from __future__ import annotations

import contextlib

import numpy as np

from ..errors import CacheClosedError
from .area_reads import AreaReads
from .areas import Areas
from .choice import Extents
from .fetched import Source
from .placing import distinct
from .staging import Staging
from .storage import Storage
from .ticket import Ticket


class EarlyLook:
    """One read of one layer at a time, into areas of its own; for the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None) -> None:
        self._areas, self._reads = areas, AreaReads(storage, areas, layer_idx)
        self._begun: tuple[np.ndarray, Ticket, Staging] | None = None

    def begin(self, history: Source, extents: Extents) -> None:
        """Start to read the records of `extents`. Does nothing where no area is free. What it raises has changed
        nothing."""
        self.drop()
        records = distinct(extents.records[extents.records >= 0])[0]
        if not records.size:
            return
        area = self._areas.borrow_ahead(records.size * history.form.record_bytes, history.device)
        if area is not None:
            self._begun = records, self._reads.read(history, records, area, ahead=True), area

    def come(self, records: np.ndarray) -> Staging | None:
        """Wait for what was begun, if it is these records (distinct, ascending): their area, to be given back, with the
        i-th in its row i. None: nothing of the sort was, or the read failed. Raises `StalledError`, `CacheClosedError`.
        """
        if self._begun is None:
            return None
        begun, ticket, area = self._begun
        if not np.array_equal(begun, records):
            self.drop()
            return None
        try:
            self._reads.wait(ticket, area, ahead=True)
        except OSError:
            self._begun = None
            if ticket.stalled:
                raise
            return None
        except CacheClosedError:
            self._begun = None
            raise
        self._begun = None  # but not after a signal's exception: then it is still under way
        return area

    def give_back(self, area: Staging) -> None:
        """What came was copied."""
        self._areas.give_back(area, ahead=True)

    def drop(self) -> None:
        """Nobody comes for it: wait until it is done, and forget it, and its error if it had one."""
        if self._begun is not None:
            _, ticket, area = self._begun
            with contextlib.suppress(OSError, CacheClosedError):
                self._reads.wait(ticket, area, ahead=True)
                self._areas.give_back(area, ahead=True)
            self._begun = None
