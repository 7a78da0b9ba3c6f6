"""Two lanes that fill a cache: the model computes from the front, the network brings what lies at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..core.filling import Filling
from ..memory.account import MemoryAccount
from ..report.timeline import Timeline
from .cells import Cells
from .computing_speed import ComputingSpeed
from .costs import Costs, Line
from .decoder import Decoder, UselessError
from .plan import Cell, meet, staircase
from .spool import Spool
from .stream_manifest import StreamManifest
from .streaming_lane import StreamingLane
from .teacher import Teacher

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
        self._begins = [0]
        for chunk in range(cells.chunks):
            self._begins.append(self._begins[-1] + manifest.tokens_of(chunk))
        self._speed = ComputingSpeed.of(filling.model)
        self._decoder = Decoder(manifest, spool, key, sparing=account.limit is not None)
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
            chunk, begun, line = 0, time.perf_counter(), self._speed.line
            whole = 0.0 if line is None else self._seconds(line, 0, self.cells.chunks)
            look = 0.0 if line is None else min(max(_LOOKS[0], _LOOK * whole), _LOOKS[1])
            while self._lane.bandwidth is None and time.perf_counter() - begun < look:
                time.sleep(0.005)
            while chunk < self.cells.chunks:
                self._teacher.look(self._lane)
                stop = self.stop_of_column(chunk)
                self._filling.postpone(stop < self.cells.chunks and self._teacher.expects(self._lane))
                if self._column(chunk, stop):
                    chunk = stop
            if self.cells.counts.streamed > self.cells.counts.overtaken:  # else layers have seen all queries themselves
                self._teacher.look(self._lane)
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
            while stop < cells.chunks and cells.here(stop) and self._tokens(first, stop + 1) <= MOST_TOKENS:
                stop += 1
            return stop
        tokens = max(LEAST_TOKENS, self._plan(first))
        if cells.from_the_front:
            if cells.wait(first, 0, self.patience(first), self._silence, asked=False):
                return stop
            self._patient = cells.from_the_front = False  # it was promised, and did not come
        while stop < cells.chunks and self._tokens(first, stop) < tokens and not cells.comes(stop):
            stop += 1
        return stop

    def _tokens(self, first: int, stop: int) -> int:
        return self._begins[stop] - self._begins[first]

    def _plan(self, first: int) -> int:
        """Plan the chunks from `first` on by what is known now (`meet`): which cells are asked for first, and whether
        any are computed. Returns the tokens that one forward may have: of the chunks that computing comes to before the
        network does those that are computed whole; of many three in four, so that what is known better by then decides
        on the rest. 0: nothing is known yet."""
        bandwidth, line = self._lane.bandwidth, self._speed.line
        if line is None or bandwidth is None:
            return 0
        chunks, layers = range(first, self.cells.chunks), self.cells.layers
        attended = np.array([self._attended(chunk, chunk + 1) for chunk in chunks])
        nbytes = np.array([[self._bytes_of((chunk, layer)) for layer in range(layers)] for chunk in chunks])
        tokens = [self._manifest.tokens_of(chunk) for chunk in chunks]
        decoded = float(np.mean(self._decoder.seconds)) if self._decoder.seconds else 0.0
        costs = Costs.of_line(line, tokens, attended, nbytes, max(bandwidth, 1.0), decoded=decoded)
        costs.streamed[~self.cells.may_come(first)] = np.inf
        costs.streamed[self.cells.received_from(first)] = 0
        plan = (meet if self._teacher.sparse is None else staircase)(costs)
        seconds, streaming = max(plan.lanes(costs)), float(costs.rest[:, 0].sum())
        if seconds > (1 - _SAVED) * self._seconds(line, first, self.cells.chunks):
            return self._tokens(first, self.cells.chunks)
        depths = np.array(plan.depths)
        self.cells.from_the_front = self._patient and seconds > (1 - _GAINED) * streaming
        self.cells.prefer(first, np.ones_like(depths) if self.cells.from_the_front else depths)
        whole = int((depths == layers).cumprod().sum())
        if whole == len(chunks):
            return self._tokens(first, self.cells.chunks)
        return min(self._tokens(first, first + (whole if whole < 3 else -(-whole * 3 // 4))), MOST_TOKENS)

    def _attended(self, first: int, stop: int) -> list[float]:
        """By layer, tokens that a query of these chunks attends to in the mean."""
        start, end = self._begins[first], self._begins[stop]
        layers, sparse = range(self.cells.layers), self._teacher.sparse
        return [(start + end) / 2 if sparse is None else sparse.attended(layer, start, end) for layer in layers]

    def _seconds(self, line: Line, first: int, stop: int) -> float:
        tokens, attended = np.array(float(self._tokens(first, stop))), np.array(np.mean(self._attended(first, stop)))
        return float(line.seconds(tokens, attended))

    def patience(self, chunk: int) -> float:
        """Seconds that a chunk may still take to come: as long as it takes to compute."""
        line = self._speed.line
        return _AT_FIRST if line is None else self._seconds(line, chunk, chunk + 1)

    def _column(self, first: int, stop: int) -> bool:
        """Let all layers hold chunks `first` to `stop`; False: some of it did not come, and nothing of them is held."""
        held, ids = self._begins[first], self._ids[:, self._begins[first] : self._begins[stop]]
        begun, unknown = time.perf_counter(), not self._speed.known
        attended = float(np.mean(self._attended(first, stop)))
        self._awaits = False

        def goes_on(layer: int) -> bool:
            more = self._told(first, stop, layer)
            if unknown and layer == _TELLS:
                took = (time.perf_counter() - begun) / (layer + 1) * self.cells.layers
                self._speed.guess(ids.shape[1], attended, took)
                self._plan(first)
            if more and self.cells.rest_may_come(first, stop, layer):
                self._awaits = self.cells.from_the_front or self._comes_meanwhile(first, stop, layer)
            return more and not self._awaits

        depth = self._filling.compute(ids, goes_on, self._teacher.sparse)
        seconds = time.perf_counter() - begun
        self._timeline.add("computing", f"chunks {first} to {stop - 1}, {depth} layers", begun, begun + seconds)
        self.computing_seconds += seconds
        if depth == self.cells.layers:
            self._speed.note(ids.shape[1], attended, seconds)
        if not self._take_above(first, stop, depth):
            self._filling.take_back(held)
            self.cells.taken_back(first, stop)
            self.recomputed_tokens += ids.shape[1]
            return False
        self._filling.note(ids)
        self._on_progress(self.cells)
        return True

    def _told(self, first: int, stop: int, layer: int) -> bool:
        more = self.cells.goes_on(first, stop, layer) or self._sooner_computed(first, stop, layer)
        self._on_progress(self.cells)
        return more

    def _sooner_computed(self, first: int, stop: int, layer: int) -> bool:
        """What is on its way above a layer takes longer to come, half of it being there, than to compute up to it."""
        line, bandwidth, coming = self._speed.line, self._lane.bandwidth, self.cells.coming(first, stop, layer)
        if line is None or bandwidth is None or not coming:
            return False
        arrives = sum(map(self._bytes_of, coming)) / max(bandwidth, 1.0) / 2
        layers = max(at for _, at in coming) - layer
        return self._seconds(line, first, stop) / self.cells.layers * layers < arrives

    def _comes_meanwhile(self, first: int, stop: int, layer: int) -> bool:
        """All that is still to come is here by the time that what has come of these chunks was taken in."""
        bandwidth, taking = self._lane.bandwidth, self._speed.taking
        if bandwidth is None or not taking:
            return False
        here = self.cells.received_from(first)
        coming = self.cells.may_come(first) & ~here
        coming[: stop - first, : layer + 1] = False
        nbytes = sum(self._bytes_of((first + int(chunk), int(at))) for chunk, at in np.argwhere(coming))
        return nbytes / max(bandwidth, 1.0) < taking * int(here[: stop - first, layer + 1 :].sum())

    def _bytes_of(self, cell: Cell) -> int:
        found = self._manifest.cells[cell[0]][cell[1]]
        return 0 if found is None else found.bytes

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
                    self._speed.note_taking(time.perf_counter() - begun)
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

    def _as_they_come(self, first: int, stop: int, depth: int) -> Iterator[Cell]:
        """What lies above `depth` layers, from the top: the network brings it so. Raises `_LateError`."""
        begun, patience = time.perf_counter(), sum(map(self.patience, range(first, stop)))
        for layer in range(self.cells.layers - 1, depth - 1, -1):
            for chunk in range(first, stop):
                left = max(0.0, begun + patience - time.perf_counter())
                asked = not self._awaits
                if not self.cells.wait(chunk, layer - 1, left, self._silence, asked=asked, below=layer + 1):
                    raise _LateError
                yield chunk, layer
