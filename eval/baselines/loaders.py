"""What `stream_context` is compared with: streaming alone, a fixed split, and meeting at whole chunks."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import numpy as np

from hf_offload_cache.streaming import Cell, Cells, Loader

EVER = 1e6


class SplitLoader(Loader):
    """The first `split` chunks are computed, in one forward, and the others waited for; 0: streaming alone."""

    split: ClassVar[int] = 0

    def stop_of_column(self, first: int) -> int:
        if first < self.split:
            return self.split
        while not self.cells.comes(first) and self.cells.open:
            time.sleep(0.002)
        self.cells.wait(first, 0, EVER, EVER)
        stop = first + 1  # chunks that have come meanwhile go through the first layer together
        while stop < self.cells.chunks and self.cells.here(stop):
            stop += 1
        return stop

    def patience(self, chunk: int) -> float:
        return EVER


class FromTheFront(Cells):
    """Streaming brings chunk after chunk, so that each can be taken in while the next one comes; but for the first
    `split`."""

    split: ClassVar[int] = 0

    def __init__(self, published: np.ndarray, **options: Any) -> None:
        super().__init__(published & (np.arange(len(published)) >= self.split)[:, None], **options)

    def next_of(self, free: np.ndarray) -> Cell:
        chunk = int(free.any(1).argmax())
        return chunk, int(free[chunk].argmax())


class WholeChunks(Cells):
    """Streaming claims a chunk whole, and computing ends none that it has begun."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._whole = threading.Lock()
        self._claimed: list[Cell] = []
        self._computed = set[int]()

    def claim(self) -> Cell | None:
        with self._whole:
            while not self._claimed:
                cell = super().claim()
                if cell is not None and cell[0] in self._computed:
                    self.lose(cell)
                    self.counts.lost -= 1  # it is computed, as planned
                    continue
                while cell is not None:
                    self._claimed.append(cell)
                    cell = super().claim() if cell[1] > 1 else None
                if not self._claimed:
                    return None
            return self._claimed.pop(0)

    def goes_on(self, first: int, stop: int, layer: int) -> bool:
        chunks = range(first, stop)
        with self._whole:
            if layer == 0:
                self._computed.update(chunk for chunk in chunks if not self.comes(chunk))
            return super().goes_on(first, stop, layer) or any(chunk in self._computed for chunk in chunks)
