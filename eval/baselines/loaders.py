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
    """Streaming claims a chunk whole, and computing ends none that it has begun."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._claimed: list[Cell] = []

    def claim(self) -> Cell | None:
        with self._changed:
            while True:
                free = self._states == State.FREE
                if not self._claimed and not self._stopped and free.any():
                    chunk = int(free.any(1).nonzero()[0][-1])
                    self._claimed = [(chunk, int(layer)) for layer in free[chunk].nonzero()[0][::-1]]
                    self._states[chunk][free[chunk]] = State.STREAMING
                if self._stopped or not self._claimed:
                    return None
                cell = self._claimed.pop(0)
                if self._states[cell] == State.STREAMING:
                    return cell

    def goes_on(self, first: int, stop: int, layer: int) -> bool:
        with self._changed:
            begun = self._states[first:stop]
            begun[begun == State.FREE] = State.LOST
        return super().goes_on(first, stop, layer)
