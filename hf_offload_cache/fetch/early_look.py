"""What a predictor will want to look at, read before it asks."""

from __future__ import annotations

import numpy as np

from .area_read import AreaRead
from .area_reads import AreaReads
from .areas import Areas
from .byte_rows import ByteRows
from .choice import Extents
from .fetched import Source
from .placing import distinct
from .storage import Storage


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
