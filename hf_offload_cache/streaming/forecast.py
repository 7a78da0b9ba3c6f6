"""What is known, while a context is loaded, of what the rest of it will take."""

from __future__ import annotations

import time

import numpy as np

from .cells import Cells
from .computing_speed import ComputingSpeed
from .cost_network import PLACE, CostNetwork, LayerCells
from .costs import Costs
from .decoder import Decoder
from .plan import Cell
from .stream_manifest import StreamManifest
from .streaming_lane import StreamingLane
from .teacher import Teacher


class Forecast:
    """Changes with each forward and with what comes; for the thread that computes. `speed` is told by who computes."""

    def __init__(
        self, manifest: StreamManifest, cells: Cells, lane: StreamingLane, decoder: Decoder, teacher: Teacher,
        speed: ComputingSpeed,
    ) -> None:  # fmt: skip
        self._manifest, self._cells, self._lane = manifest, cells, lane
        self._decoder, self._teacher, self.speed = decoder, teacher, speed
        self._begins = [0]
        for chunk in range(cells.chunks):
            self._begins.append(self._begins[-1] + manifest.tokens_of(chunk))
        self._clock, self._processor = time.perf_counter(), time.process_time()
        self._load = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second; None: that is not known."""
        found = self._lane.bandwidth
        return None if found is None else max(found, 1.0)

    def begin(self, chunk: int) -> int:
        """Tokens before a chunk."""
        return self._begins[chunk]

    def tokens(self, first: int, stop: int) -> int:
        """Of chunks `first` to `stop`."""
        return self._begins[stop] - self._begins[first]

    def attended(self, first: int, stop: int) -> list[float]:
        """By layer, tokens that a query of these chunks attends to in the mean."""
        start, end = self._begins[first], self._begins[stop]
        layers, sparse = range(self._cells.layers), self._teacher.sparse
        return [(start + end) / 2 if sparse is None else sparse.attended(layer, start, end) for layer in layers]

    def computing(self, first: int, stop: int) -> float | None:
        """Seconds of a forward of these chunks; None: that is not known."""
        line, layers = self.speed.line, self._cells.layers
        if line is None:
            return None
        if (network := self._network) is not None:
            return float(network.seconds(self.layer_cells(first, stop, layers)).sum())
        tokens, attended = np.array(float(self.tokens(first, stop))), np.array(np.mean(self.attended(first, stop)))
        return float(line.seconds(tokens, attended))

    @property
    def _network(self) -> CostNetwork | None:
        return None if self._teacher.sparse is None else self.speed.layers.network

    def nbytes(self, cell: Cell) -> int:
        """0: it was not published."""
        found = self._manifest.cells[cell[0]][cell[1]]
        return 0 if found is None else found.bytes

    def costs(self, first: int) -> Costs | None:
        """Of the chunks from `first` on; None: it is not known what computing or the network is worth."""
        bandwidth, line = self.bandwidth, self.speed.line
        if line is None or bandwidth is None:
            return None
        chunks, layers = range(first, self._cells.chunks), self._cells.layers
        attended = np.array([self.attended(chunk, chunk + 1) for chunk in chunks])
        nbytes = np.array([[self.nbytes((chunk, layer)) for layer in range(layers)] for chunk in chunks])
        tokens = [self._manifest.tokens_of(chunk) for chunk in chunks]
        decoded = float(np.mean(self._decoder.seconds)) if self._decoder.seconds else 0.0
        costs = Costs.of_line(line, tokens, attended, nbytes, bandwidth, decoded=decoded)
        if (network := self._network) is not None:
            each = [network.seconds(self.layer_cells(chunk, chunk + 1, layers)) for chunk in chunks]
            costs = Costs(np.array(each), 0.1 * np.array(each), costs.streamed)
        costs.streamed[~self._cells.may_come(first)] = np.inf
        costs.streamed[self._cells.received_from(first)] = 0
        costs.streamed[-1, -1] += self._beside / bandwidth  # it comes before all cells
        return costs

    @property
    def _beside(self) -> int:
        """Bytes that are still to come beside the cells."""
        return sum(found.bytes for name, found in self._teacher.wanted.items() if name in self._lane.beside)

    def sooner_computed(self, first: int, stop: int, layer: int) -> bool:
        """What is on its way above a layer takes longer to come, half of it being there, than to compute up to it."""
        computing, bandwidth = self.computing(first, stop), self.bandwidth
        coming = self._cells.coming(first, stop, layer)
        if computing is None or bandwidth is None or not coming:
            return False
        arrives = sum(map(self.nbytes, coming)) / bandwidth / 2
        return computing / self._cells.layers * (max(at for _, at in coming) - layer) < arrives

    def comes_meanwhile(self, first: int, stop: int, layer: int) -> bool:
        """All that is still to come is here by the time that what has come of these chunks was taken in."""
        bandwidth, taking = self.bandwidth, self.speed.taking * self.tokens(first, stop) / (stop - first)
        if bandwidth is None or not taking:
            return False
        here = self._cells.received_from(first)
        coming = self._cells.may_come(first) & ~here
        coming[: stop - first, : layer + 1] = False
        cells = ((first + int(chunk), int(at)) for chunk, at in np.argwhere(coming))
        nbytes = self._beside + sum(map(self.nbytes, cells))
        return nbytes / bandwidth < taking * int(here[: stop - first, layer + 1 :].sum())

    # --- layer by layer, where attention is sparse -------------------------------------------------------------

    def layer_cells(self, first: int, stop: int, layers: int) -> LayerCells:
        """Of the first `layers` layers of these chunks, as they go through the model together."""
        attended, sparse = np.array(self.attended(first, stop)[:layers]), self._teacher.sparse
        block = 1 if sparse is None else sparse.block
        middle = (self._begins[first] + self._begins[stop]) / 2
        of_all = (float(self.tokens(first, stop)), middle / PLACE, self._load)
        tokens, place, load = (np.full(layers, one) for one in of_all)
        return LayerCells(tokens, attended, place, attended / block, load)

    def look_around(self, threads: int = 0) -> None:
        """Before a forward, and with its `threads` behind it: of the processor time that these could have had meanwhile
        others took the rest. That is the load of what is noted and asked from now on."""
        clock, processor = time.perf_counter(), time.process_time()
        if threads:
            share = (processor - self._processor) / max(1e-3, clock - self._clock) / threads
            self._load = min(1.0, max(0.0, 1 - share))
        self._clock, self._processor = clock, processor
