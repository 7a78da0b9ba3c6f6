"""Records that no tier holds: read ahead of a gather, and for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .area_read import AreaRead
from .area_reads import AreaReads
from .areas import Areas
from .choice import Choice
from .fetched import Source
from .link import Link
from .placing import among
from .read_ahead import ReadAhead
from .storage import Storage
from .view import View

Importance = np.ndarray | None
"""(n,) float32: how much each of so many records matters; None: nothing hangs on it."""


class Missing:
    """Of one layer; at most one read ahead at a time. For the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas, layer_idx: int | None, link: Link | None) -> None:
        self._areas, self._reads = areas, AreaReads(storage, areas, layer_idx, link)
        self.ahead: ReadAhead | None = None

    def begin_ahead(
        self, history: Source, choice: Choice, room: int, records: np.ndarray, importance: Importance,
        others: Callable[[], np.ndarray] | None,
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
            more = others()
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
        importance: Importance, room: int, meanwhile: Callable[[], None],
    ) -> int:  # fmt: skip
        """Bring record `which[i]` (None: i) of `records`, distinct and ascending, to row `target[i]` of the view; what
        was not read ahead is read at most `room` at a time. `meanwhile` is called while reads run. Returns how many of
        the rows came of a read ahead."""
        ahead, ready, row = self.ahead, None, None
        if ahead is not None and ahead.read.records.size:
            ready, row = among(records, ahead.read.records)
        if ready is None or row is None or not ready.any():
            read = self._begin(history, records, importance, room)
            meanwhile()
            self.drop_ahead()
            each = slice(records.size) if which is None else which
            self._reads.fill(history, view.payloads, target, records, each, read, importance)
            return 0
        each = np.arange(records.size) if which is None else which
        here = ready[each]

        def part(some: np.ndarray) -> tuple[np.ndarray, Importance]:
            return records[some], None if importance is None else importance[some]

        def fill(read: AreaRead, some: np.ndarray) -> None:
            places, (wanted, matter) = some[each], part(some)
            self._reads.fill(
                history, view.payloads, target[places], wanted, some.cumsum()[each[places]] - 1, read, matter
            )

        read_now = None if ready.all() else self._begin(history, *part(~ready), room)
        meanwhile()
        try:
            landed = self._land(history, view, target[here], row[each[here]])
        except Exception:
            if read_now is not None:
                self._reads.drop(read_now)
            raise
        if read_now is not None:
            fill(read_now, ~ready)
        if not landed:
            fill(self._begin(history, *part(ready), room), ready)
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
