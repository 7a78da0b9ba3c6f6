"""What `stream_context` is compared with: streaming alone, a fixed split, and meeting at whole chunks."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from hf_offload_cache.streaming.cells import Cells, State
from hf_offload_cache.streaming.loader import Loader
from hf_offload_cache.streaming.plan import Cell

_EVER = 1e6


class SplitLoader(Loader):
    """The first `split` chunks are computed, in one forward, and the others waited for; 0: streaming alone."""

    split: ClassVar[int] = 0

    def _stop_of_column(self, first: int) -> int:
        if first < self.split:
            return self.split
        while not self._cells.comes(first) and self._cells.open:
            time.sleep(0.002)
        self._cells.wait(first, 0, _EVER, _EVER)
        stop = first + 1
        while stop < self._cells.chunks and self._cells.here(stop):
            stop += 1
        return stop

    def _patience(self, chunk: int) -> float:
        return _EVER


class WholeChunks(Cells):
    """Streaming begins no chunk that computing has begun, and computing ends none early."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._begun = 0

    def claim(self) -> Cell | None:
        with self._changed:
            begun = self._states[: self._begun]
            free = begun == State.FREE
            begun[free] = State.LOST
            cell = super().claim()
            begun[free] = State.FREE
            return cell

    def goes_on(self, first: int, stop: int, layer: int) -> bool:
        self._begun = max(self._begun, stop)
        more = super().goes_on(first, stop, layer)
        return more or not all(self.here(chunk) for chunk in range(first, stop))
