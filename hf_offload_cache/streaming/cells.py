"""The table of cells that computing and streaming claim from (SparKV, section IV-D)."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .plan import Cell

_SILENCES = 6
"""If no transfer may be given up, a cell that trickles in is waited for this many times `silence`."""


class State(IntEnum):
    FREE = 0
    STREAMING = 1
    RECEIVED = 2
    COMPUTED = 3
    LOST = 4
    """It cannot be streamed: not published, gone, or not the object in the manifest."""


@dataclass
class Counts:
    """Numbers of cells, without those of the first layer, which are always computed."""

    computed: int = 0
    streamed: int = 0
    cancelled: int = 0
    """Computed, or no longer needed, while they were on their way."""
    overtaken: int = 0
    """Received and computed nevertheless, because cells above them had not arrived."""
    lost: int = 0
    unavailable: int = 0
    """Lost cells that may exist: the store refused or failed."""
    stolen: int = 0
    """Computed, because they were on their way for too long."""


class Cells:
    """The state of each cell (chunk, layer). Streaming claims from the end, the last chunk's top layer first; computing
    goes on from the front. Both are done where they meet. Any thread.

    Args:
        published: (chunks, layers) bool: the cells that can be streamed.
        migrations: number of transfers that may be given up for computing within `stage` seconds; None: any number.

    Attributes:
        cancel: called with each cell whose transfer is no longer needed, in the computing thread.
        from_the_front: streaming claims the first chunk's lowest cell first, because nothing is worth computing.
        heard: when the network last delivered something, by `time.monotonic`.
    """

    def __init__(self, published: np.ndarray, *, migrations: int | None = None, stage: float = 1.0) -> None:
        self._states = np.where(published, State.FREE, State.LOST).astype(np.int8)
        self._states[:, 0] = State.LOST
        self._changed = threading.Condition()
        self._preferred = np.ones(self._states.shape, dtype=bool)
        self._migrations, self._stage = migrations, stage
        self._migrated = deque[float]()
        self._stopped = False
        self.cancel: Callable[[Cell], object] = lambda cell: None
        self.from_the_front = False
        self.counts = Counts()
        self.heard = time.monotonic()

    @property
    def chunks(self) -> int:
        return int(self._states.shape[0])

    @property
    def layers(self) -> int:
        return int(self._states.shape[1])

    def of_state(self) -> Counter[State]:
        """Number of cells in each state, without the first layer."""
        with self._changed:
            return Counter(State(int(state)) for state in self._states[:, 1:].reshape(-1))

    @property
    def open(self) -> bool:
        """Whether a cell is on its way, or may be requested."""
        with self._changed:
            waiting = (self._states == State.FREE) | (self._states == State.STREAMING)
            return not self._stopped and bool(waiting.any())

    # --- streaming ---------------------------------------------------------------------------------------------

    def prefer(self, first: int, depths: np.ndarray) -> None:
        """Stream the cells above these depths, of the chunks from `first` on, before all others."""
        with self._changed:
            self._preferred[first:] = np.arange(self.layers) >= depths[:, None]

    def claim(self) -> Cell | None:
        """The next cell to stream: a preferred one if there is any, from the last chunk, top layer first. None: no cell
        is free now."""
        with self._changed:
            free = self._states == State.FREE
            if self._stopped or not free.any():
                return None
            cell = self.next_of(free & self._preferred if (free & self._preferred).any() else free)
            self._states[cell] = State.STREAMING
            return cell

    def next_of(self, free: np.ndarray) -> Cell:
        """The cell to stream among those that are `free`, (chunks, layers) bool, at least one."""
        if self.from_the_front:
            first, lowest = np.argwhere(free)[0]
            return int(first), int(lowest)
        chunk = int(np.nonzero(free.any(axis=1))[0][-1])
        return chunk, int(np.nonzero(free[chunk])[0][-1])

    def received(self, cell: Cell) -> bool:
        """Note that a claimed cell has arrived. Returns whether it is still needed."""
        with self._changed:
            wanted = bool(self._states[cell] == State.STREAMING)
            if wanted:
                self._states[cell] = State.RECEIVED
                self.counts.streamed += 1
            self.heard = time.monotonic()
            self._changed.notify_all()
            return wanted

    def lose(self, cell: Cell, *, again: bool = False, unavailable: bool = False) -> None:
        """Note that a claimed cell does not arrive. `again`: it may be requested once more; `unavailable`: it may exist
        nevertheless."""
        with self._changed:
            if self._states[cell] == State.STREAMING:
                self._states[cell] = State.FREE if again else State.LOST
                self.counts.lost += not again
                self.counts.unavailable += unavailable
            self._changed.notify_all()

    def spoil(self, cell: Cell) -> None:
        """Note that a received cell cannot be used."""
        with self._changed:
            self._states[cell] = State.LOST
            self.counts.streamed -= 1
            self.counts.lost += 1

    def distrust(self) -> None:
        """Give up everything received, and all streaming."""
        with self._changed:
            received = self._states == State.RECEIVED
            self.counts.streamed -= int(received.sum())
            self.counts.lost += int(received.sum())
            self._states[received] = State.LOST
        self.stop()

    def stop(self) -> None:
        """End all streaming: nothing more can be claimed or arrive."""
        with self._changed:
            self._stopped = True
            self._states[(self._states == State.STREAMING) | (self._states == State.FREE)] = State.LOST
            self._changed.notify_all()

    # --- computing ---------------------------------------------------------------------------------------------

    def goes_on(self, first: int, stop: int, layer: int) -> bool:
        """Note that chunks `first` to `stop` are computed in `layer`. Returns whether computing has to continue above,
        because some cell there is not on its way."""
        cancelled = []
        with self._changed:
            for chunk in range(first, stop):
                cell = chunk, layer
                if layer and self._states[cell] != State.COMPUTED:
                    self.counts.computed += 1
                    self.counts.overtaken += int(self._states[cell] == State.RECEIVED)
                    if self._states[cell] == State.STREAMING and self._migrate(1):
                        self.counts.cancelled += 1
                        cancelled.append(cell)
                self._states[cell] = State.COMPUTED
            above = self._states[first:stop, layer + 1 :]
            more = bool(((above == State.FREE) | (above == State.LOST)).any())
        for cell in cancelled:
            self.cancel(cell)
        return more

    def _migrate(self, count: int) -> bool:
        """Give up `count` transfers now; False: too many were given up within the last stage. More than a stage allows
        may go together, and then no others."""
        if self._migrations is None:
            return True
        now = time.monotonic()
        while self._migrated and self._migrated[0] <= now - self._stage:
            self._migrated.popleft()
        most = min(count, self._migrations)
        if not most or len(self._migrated) + most > self._migrations:
            return False
        self._migrated.extend([now] * most)
        return True

    def taken_back(self, first: int, stop: int) -> None:
        """Note that chunks `first` to `stop` are stored nowhere: their computed cells must be computed again."""
        with self._changed:
            states = self._states[first:stop]
            again = states == State.COMPUTED
            self.counts.computed -= int(again[:, 1:].sum())
            states[again] = State.LOST

    def comes(self, chunk: int) -> bool:
        """Whether all layers of a chunk but the first are on their way, or received."""
        with self._changed:
            row = self._states[chunk, 1:]
            return bool(((row == State.STREAMING) | (row == State.RECEIVED)).all())

    def coming(self, first: int, stop: int, above: int) -> list[Cell]:
        """The cells of these chunks that are on their way above a layer."""
        with self._changed:
            chunks, layers = np.nonzero(self._states[first:stop, above + 1 :] == State.STREAMING)
            return [(int(chunk) + first, int(layer) + above + 1) for chunk, layer in zip(chunks, layers, strict=True)]

    def may_come(self, first: int) -> np.ndarray:
        """(chunks from `first` on, layers) bool: the cells that may be requested, are on their way, or are received."""
        with self._changed:
            return np.isin(self._states[first:], (State.FREE, State.STREAMING, State.RECEIVED))

    def received_from(self, first: int) -> np.ndarray:
        """(chunks from `first` on, layers) bool: the received cells."""
        with self._changed:
            return np.array(self._states[first:] == State.RECEIVED)

    def has(self, cell: Cell) -> bool:
        """Whether a cell is received."""
        with self._changed:
            return bool(self._states[cell] == State.RECEIVED)

    def here(self, chunk: int, above: int = 0) -> bool:
        """Whether all layers of a chunk above `above` are received."""
        with self._changed:
            return bool((self._states[chunk, above + 1 :] == State.RECEIVED).all())

    def wait(
        self, chunk: int, above: int, patience: float, silence: float, *, asked: bool = True, below: int | None = None
    ) -> bool:
        """Wait until all layers of a chunk above `above` (and below `below`) are received. False: some do not arrive,
        or not within `patience` seconds, or nothing at all has arrived for `silence` seconds. Then the cells still on
        their way are given up for computing; while no migrations are left for that, waiting continues. `asked`: free
        cells will not arrive, either."""
        waits_for = (State.STREAMING, State.RECEIVED, *(() if asked else (State.FREE,)))
        begun = time.monotonic()
        with self._changed:
            while True:
                row = self._states[chunk, above + 1 : below]
                if (row == State.RECEIVED).all():
                    return True
                now = time.monotonic()
                late = [(chunk, int(layer) + above + 1) for layer in (row == State.STREAMING).nonzero()[0]]
                silent = min(max(self.heard, begun) + silence, begun + patience + _SILENCES * silence) - now
                if not np.isin(row, waits_for).all():
                    late = late if late and self._migrate(len(late)) else []
                    break
                left = min(begun + patience - now, silent)
                if left <= 0 and (silent <= 0 or not late or self._migrate(len(late))):
                    break
                self._changed.wait(left if left > 0 else min(silent, self._stage))
            for cell in late:
                self._states[cell] = State.LOST
            self.counts.stolen += len(late)
        for cell in late:
            self.cancel(cell)
        return False
