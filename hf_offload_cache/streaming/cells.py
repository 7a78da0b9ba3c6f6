"""Who brings which cell: one table, which computing and streaming claim from (SparKV, section IV-D)."""

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
"""Times the silence that ends waiting, what trickles in is waited for, where nothing may migrate."""


class State(IntEnum):
    FREE = 0
    STREAMING = 1
    RECEIVED = 2
    COMPUTED = 3
    LOST = 4
    """It cannot be streamed: it was not published, is gone, or is another than the manifest says."""


@dataclass
class Counts:
    """Cells, but those of the first layer, which are always computed."""

    computed: int = 0
    streamed: int = 0
    cancelled: int = 0
    """Computing overtook them while they were on their way, or nobody wanted them any more."""
    overtaken: int = 0
    """They had come, and were computed all the same: what lies above them had not."""
    lost: int = 0
    unavailable: int = 0
    """Of those lost: the store refused or failed, so that they may be there."""
    stolen: int = 0
    """On their way for too long, and computed."""


class Cells:
    """Of (chunks, layers). Streaming claims from the end, the top layer of the last chunk first, computing what comes
    next from the front: where they meet is where both are ready. Any thread.

    Args:
        published: (chunks, layers) bool: which can be streamed at all.
        migrations: transfers that may be given up for computing within `stage` seconds; None: any number.
    """

    def __init__(self, published: np.ndarray, *, migrations: int | None = None, stage: float = 1.0) -> None:
        self._states = np.where(published, State.FREE, State.LOST).astype(np.int8)
        self._states[:, 0] = State.LOST
        self._changed = threading.Condition()
        self.cancel: Callable[[Cell], object] = lambda cell: None
        """Told of a cell whose transfer nobody wants any more, in the thread that computes."""
        self._preferred = np.ones(self._states.shape, dtype=bool)
        self.from_the_front = False
        """Streaming claims the first chunk's lowest cell first: nothing is worth computing."""
        self._migrations, self._stage = migrations, stage
        self._migrated = deque[float]()
        self._stopped = False
        self.counts = Counts()
        self.heard = time.monotonic()
        """When the network last brought something."""

    @property
    def chunks(self) -> int:
        return int(self._states.shape[0])

    @property
    def layers(self) -> int:
        return int(self._states.shape[1])

    def of_state(self) -> Counter[State]:
        """How many cells are in which state, those of the first layer left out."""
        with self._changed:
            return Counter(State(int(one)) for one in self._states[:, 1:].reshape(-1))

    @property
    def open(self) -> bool:
        """Something is on its way, or may be asked for."""
        with self._changed:
            waiting = (self._states == State.FREE) | (self._states == State.STREAMING)
            return not self._stopped and bool(waiting.any())

    # --- streaming ---------------------------------------------------------------------------------------------

    def prefer(self, first: int, depths: np.ndarray) -> None:
        """Of chunks from `first` on, what lies above so many layers is streamed before all else."""
        with self._changed:
            self._preferred[first:] = np.arange(self.layers) >= depths[:, None]

    def claim(self) -> Cell | None:
        """The next cell to stream: the latest chunk's top one that is free, of those that are preferred if there are
        any. None: there is none now."""
        with self._changed:
            free = self._states == State.FREE
            if self._stopped or not free.any():
                return None
            cell = self.next_of(free & self._preferred if (free & self._preferred).any() else free)
            self._states[cell] = State.STREAMING
            return cell

    def next_of(self, free: np.ndarray) -> Cell:
        """The one to stream of those that are free, (chunks, layers) bool, some of them."""
        if self.from_the_front:
            first, lowest = np.argwhere(free)[0]
            return int(first), int(lowest)
        chunk = int(np.nonzero(free.any(axis=1))[0][-1])
        return chunk, int(np.nonzero(free[chunk])[0][-1])

    def received(self, cell: Cell) -> bool:
        """A claimed cell has come; whether it is still wanted."""
        with self._changed:
            wanted = bool(self._states[cell] == State.STREAMING)
            if wanted:
                self._states[cell] = State.RECEIVED
                self.counts.streamed += 1
            self.heard = time.monotonic()
            self._changed.notify_all()
            return wanted

    def lose(self, cell: Cell, *, again: bool = False, unavailable: bool = False) -> None:
        """Note that a claimed cell does not arrive; `again`: it may be requested once more; `unavailable`: it may exist
        nevertheless."""
        with self._changed:
            if self._states[cell] == State.STREAMING:
                self._states[cell] = State.FREE if again else State.LOST
                self.counts.lost += not again
                self.counts.unavailable += unavailable
            self._changed.notify_all()

    def spoil(self, cell: Cell) -> None:
        """What has come of a cell is of no use."""
        with self._changed:
            self._states[cell] = State.LOST
            self.counts.streamed -= 1
            self.counts.lost += 1

    def distrust(self) -> None:
        """Nothing that has come is of use, nor what would."""
        with self._changed:
            come = self._states == State.RECEIVED
            self.counts.streamed -= int(come.sum())
            self.counts.lost += int(come.sum())
            self._states[come] = State.LOST
        self.stop()

    def stop(self) -> None:
        """Nothing is claimed for streaming from now on, and what is on its way does not come."""
        with self._changed:
            self._stopped = True
            self._states[(self._states == State.STREAMING) | (self._states == State.FREE)] = State.LOST
            self._changed.notify_all()

    # --- computing ---------------------------------------------------------------------------------------------

    def goes_on(self, first: int, stop: int, layer: int) -> bool:
        """Keys and values of chunks `first` to `stop` are computed in `layer`: whether what lies above has to be, too,
        since some of it does not come."""
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
        """So many transfers are given up now; False: too many were within the last stage. More than a stage may have go
        together, and nothing beside them."""
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
        """Nothing of chunks `first` to `stop` is held: what was computed of them has to be once more."""
        with self._changed:
            own = self._states[first:stop]
            again = own == State.COMPUTED
            self.counts.computed -= int(again[:, 1:].sum())
            own[again] = State.LOST

    def comes(self, chunk: int) -> bool:
        """All of a chunk but its first layer is on its way, or here."""
        with self._changed:
            row = self._states[chunk, 1:]
            return bool(((row == State.STREAMING) | (row == State.RECEIVED)).all())

    def coming(self, first: int, stop: int, above: int) -> list[Cell]:
        """What of these chunks is on its way above a layer."""
        with self._changed:
            chunks, layers = np.nonzero(self._states[first:stop, above + 1 :] == State.STREAMING)
            return [(int(chunk) + first, int(layer) + above + 1) for chunk, layer in zip(chunks, layers, strict=True)]

    def may_come(self, first: int) -> np.ndarray:
        """(chunks from `first` on, layers) bool: what is on its way, may be asked for, or has come."""
        with self._changed:
            own = self._states[first:]
            return (own == State.FREE) | (own == State.STREAMING) | (own == State.RECEIVED)

    def rest_may_come(self, first: int, stop: int, above: int) -> bool:
        """All of chunks `first` to `stop` that lies above a layer is on its way, may be asked for, or has come."""
        return bool(self.may_come(first)[: stop - first, above + 1 :].all())

    def received_from(self, first: int) -> np.ndarray:
        """(chunks from `first` on, layers) bool: what has come."""
        with self._changed:
            return np.array(self._states[first:] == State.RECEIVED)

    def has(self, cell: Cell) -> bool:
        """It has come."""
        with self._changed:
            return bool(self._states[cell] == State.RECEIVED)

    def here(self, chunk: int, above: int = 0) -> bool:
        """All of a chunk that lies above a layer has come."""
        with self._changed:
            return bool((self._states[chunk, above + 1 :] == State.RECEIVED).all())

    def wait(
        self, chunk: int, above: int, patience: float, silence: float, *, asked: bool = True, below: int | None = None
    ) -> bool:
        """Until all of a chunk that lies above a layer (and below another) has come; False: it does not, or not within
        `patience` seconds, or nothing has come at all for `silence` seconds. What is still on its way then is the
        computing lane's, as far as migrations are left; until they are it is waited for. `asked`: what is free will not
        come, either."""
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
