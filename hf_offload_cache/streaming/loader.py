"""Two lanes that fill a cache: the model computes from the front, the network brings what lies at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..core.filling import Filling
from ..memory.account import MemoryAccount
from ..report.trace import Timeline
from .cells import Cells
from .computing_speed import PLACE, ComputingSpeed, CostNetwork, LayerCells
from .plan import Cell, Costs, meet, staircase
from .stream_manifest import ACTIVE, StreamManifest
from .streaming_lane import Decoder, Spool, StreamingLane, UselessError
from .teacher import Teacher

# What is known, while a context is loaded, of what the rest of it will take

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
        """All that is still to come is here by the time that the parts of these chunks that are here are added."""
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


LEAST_TOKENS = 1024
"""Tokens of a forward, at least: in a trial 2,048 tokens in forwards of 256 took 1.95 times as long as in one."""
MOST_TOKENS = 8192
"""Of a forward that is not the whole rest."""
_LOOK, _LOOKS = 0.03, (0.15, 1.0)
"""Share of computing all that a first forward waits until it is known what the network is worth, where computing is
known; and how many seconds that may be."""
_SAVED = 0.1
"""Share of the time to compute what is left that streaming has to save: else it is computed in one forward."""
_TELLS = 2
"""The layer by which the first forward tells what one takes."""
_USELESS = 3
"""Cells that are of no use, after which it is the context that is not."""
_GAINED = 0.15
"""Share of the time to stream what is left that computing has to save: else nothing is computed."""
_AT_FIRST = 30.0
"""Seconds that a cell may take before it is known what computing takes."""


class _LateError(Exception):
    """Something does not come, or not in time."""


class Loader:
    """Runs in the thread that runs the model; see `stream_context`.

    Args:
        silence: seconds without a byte after which nothing is waited for.
    """

    def __init__(
        self, manifest: StreamManifest, filling: Filling, ids: torch.Tensor, cells: Cells, lane: StreamingLane,
        spool: Spool, key: bytes | None, silence: float, on_progress: Callable[[Cells], object],
        account: MemoryAccount, timeline: Timeline, teacher: Teacher,
    ) -> None:  # fmt: skip
        self._manifest, self._filling, self._ids = manifest, filling, ids
        self.cells, self._lane = cells, lane
        self._silence, self._on_progress = silence, on_progress
        self._account, self._timeline, self._teacher = account, timeline, teacher
        self._speed = ComputingSpeed.of(filling.model)
        self._decoder = Decoder(manifest, spool, key, sparing=account.limit is not None)
        self._forecast = Forecast(manifest, cells, lane, self._decoder, teacher, self._speed)
        self._patient = True
        self._awaits = False  # what this column ends for may still be free
        self._useless = 0
        self.recomputed_tokens = 0
        self.computing_seconds = 0.0

    def run(self) -> None:
        """Fill the cache with all chunks. What it raises leaves the cache to be reset."""
        account = self._account
        try:
            account.hold("streaming", self._moving)
            chunk, begun, whole = 0, time.perf_counter(), self._forecast.computing(0, self.cells.chunks)
            look = 0.0 if whole is None else min(max(_LOOKS[0], _LOOK * whole), _LOOKS[1])
            if ACTIVE in self._teacher.wanted:
                self._speed.layers.fit()
            while self._lane.bandwidth is None and time.perf_counter() - begun < look:
                time.sleep(0.005)
            while chunk < self.cells.chunks:
                self._teacher.look(self._lane)
                stop = self.stop_of_column(chunk)
                self._filling.postpone(stop < self.cells.chunks and self._teacher.expects(self._lane))
                if self._column(chunk, stop):
                    chunk = stop
            if self.cells.counts.streamed > self.cells.counts.overtaken:  # else layers have seen queries themselves
                self._teacher.look(self._lane)
            self._filling.postpone(False)
            self._filling.learn_rest()
        finally:
            self._filling.postpone(False)
            self._decoder.close()
            account.observe("streaming", 0)

    @property
    def attended(self) -> float:
        """Share of the blocks of keys before them that computed tokens attended to."""
        return 1.0 if self._teacher.sparse is None else self._teacher.sparse.share

    @property
    def _moving(self) -> int:
        """Bytes of what is on its way, and of what comes beside the cells, packed and unpacked."""
        largest = max((one.bytes for row in self._manifest.cells for one in row if one is not None), default=0)
        beside = sum(one.bytes for one in self._teacher.wanted.values())
        return (self._lane.together + 1) * largest + 2 * beside

    # --- columns -----------------------------------------------------------------------------------------------

    def stop_of_column(self, first: int) -> int:
        """The chunks from `first` on that go through the model together: those that have come whole, of which the first
        layer is computed; or those that are to be computed."""
        cells, stop = self.cells, first + 1
        if cells.comes(first) and cells.wait(first, 0, self.patience(first), self._silence):
            while stop < cells.chunks and cells.here(stop) and self._forecast.tokens(first, stop + 1) <= MOST_TOKENS:
                stop += 1
            return stop
        tokens = max(LEAST_TOKENS, self._plan(first))
        if cells.from_the_front:
            if cells.wait(first, 0, self.patience(first), self._silence, asked=False):
                return stop
            self._patient = cells.from_the_front = False  # it was promised, and did not come
        while stop < cells.chunks and self._forecast.tokens(first, stop) < tokens and not cells.comes(stop):
            stop += 1
        return stop

    def _plan(self, first: int) -> int:
        """Plan the chunks from `first` on by what is known now (`meet`): which cells are asked for first, and whether
        any are computed. Returns the tokens that one forward may have: of the chunks that computing comes to before the
        network does those that are computed whole; of many three in four, so that what is known better by then decides
        on the rest. 0: nothing is known yet."""
        costs = self._forecast.costs(first)
        if costs is None:
            return 0
        layers = costs.layers
        plan = (meet if self._teacher.sparse is None else staircase)(costs)
        seconds, streaming = max(plan.lanes(costs)), float(costs.rest[:, 0].sum())
        if seconds > (1 - _SAVED) * float(costs.computed.sum()):
            return self._forecast.tokens(first, self.cells.chunks)
        depths = np.array(plan.depths)
        self.cells.from_the_front = self._patient and seconds > (1 - _GAINED) * streaming
        self.cells.prefer(first, np.ones_like(depths) if self.cells.from_the_front else depths)
        whole = int((depths == layers).cumprod().sum())
        if whole == costs.chunks:
            return self._forecast.tokens(first, self.cells.chunks)
        return min(self._forecast.tokens(first, first + (whole if whole < 3 else -(-whole * 3 // 4))), MOST_TOKENS)

    def patience(self, chunk: int) -> float:
        """Seconds that a chunk may still take to come: as long as it takes to compute."""
        seconds = self._forecast.computing(chunk, chunk + 1)
        return _AT_FIRST if seconds is None else seconds

    def _column(self, first: int, stop: int) -> bool:
        """Let all layers hold chunks `first` to `stop`; False: some of it did not come, and nothing of them is held."""
        held, last = self._forecast.begin(first), self._forecast.begin(stop)
        ids, begun, unknown = self._ids[:, held:last], time.perf_counter(), not self._speed.known
        attended, told = float(np.mean(self._forecast.attended(first, stop))), list[float]()
        self._awaits = False

        def goes_on(layer: int) -> bool:
            told.append(time.perf_counter())
            more = self._told(first, stop, layer)
            if unknown and layer == _TELLS:
                took = (time.perf_counter() - begun) / (layer + 1) * self.cells.layers
                self._speed.guess(ids.shape[1], attended, took)
                self._plan(first)
            if more and self.cells.rest_may_come(first, stop, layer):
                self._awaits = self.cells.from_the_front or self._forecast.comes_meanwhile(first, stop, layer)
            return more and not self._awaits

        self._forecast.look_around()
        depth = self._filling.compute(ids, goes_on, self._teacher.sparse)
        seconds = time.perf_counter() - begun
        self._timeline.add("computing", f"chunks {first} to {stop - 1}, {depth} layers", begun, begun + seconds)
        self.computing_seconds += seconds
        if depth == self.cells.layers:
            self._speed.note(ids.shape[1], attended, seconds)
        if self._teacher.sparse is not None and depth > 1:
            self._forecast.look_around(torch.get_num_threads())
            self._speed.layers.note(self._forecast.layer_cells(first, stop, depth - 1), np.diff(told))
        if not self._take_above(first, stop, depth):
            self._filling.take_back(held)
            self.cells.taken_back(first, stop)
            self.recomputed_tokens += ids.shape[1]
            return False
        self._filling.note(ids)
        self._on_progress(self.cells)
        return True

    def _told(self, first: int, stop: int, layer: int) -> bool:
        more = self.cells.goes_on(first, stop, layer) or self._forecast.sooner_computed(first, stop, layer)
        self._on_progress(self.cells)
        return more

    # --- what was streamed -------------------------------------------------------------------------------------

    def _take_above(self, first: int, stop: int, depth: int) -> bool:
        """Take in what was streamed above `depth` layers; False: some of it does not come, or is of no use."""
        if depth == self.cells.layers:
            return True
        self._teacher.look(self._lane)
        try:
            with self._account.holding("streaming", self._decoder.nbytes):
                for (_, layer), (keys, values) in self._decoder.decoded(self._as_they_come(first, stop, depth)):
                    begun = time.perf_counter()
                    self._filling.take(layer, keys[None], values[None])
                    self._speed.note_taking(keys.shape[1], time.perf_counter() - begun)
        except _LateError:
            self._patient = self.cells.from_the_front = False
            return False
        except UselessError as error:
            self.cells.spoil(error.cell)
            self._lane.trouble.append(str(error.__cause__))
            self._useless += 1
            if self._useless == _USELESS:  # each costs a forward
                self.cells.distrust()
                self._lane.trouble.append(f"{_USELESS} cells were of no use: no others are asked for")
            return False
        return True

    def _as_they_come(self, first: int, stop: int, depth: int) -> Iterator[Cell | None]:
        """What lies above `depth` layers, from the top: the network brings it so. None: the next one is waited for, if
        one is asked for. Raises `_LateError`."""
        begun, patience = time.perf_counter(), sum(map(self.patience, range(first, stop)))
        for layer in range(self.cells.layers - 1, depth - 1, -1):
            for chunk in range(first, stop):
                if not self.cells.has((chunk, layer)):
                    yield None
                left = max(0.0, begun + patience - time.perf_counter())
                asked = not self._awaits
                if not self.cells.wait(chunk, layer - 1, left, self._silence, asked=asked, below=layer + 1):
                    raise _LateError
                yield chunk, layer
