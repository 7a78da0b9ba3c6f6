"""Two lanes fill a cache: the model computes from the front, and the network delivers from the end."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..core.cache import OffloadCache
from ..core.filling import Filling
from .cells import Cells
from .extras import Extras
from .plan import Cell, Costs, Line, meet, staircase
from .stream_manifest import StreamManifest
from .streaming_lane import Decoder, StreamingLane, UselessError

_FORWARDS, _CELLS = 4, 32
"""Latest forwards, and latest cells, that predict the next one: the machine may soon be busier or idle."""


class ComputingSpeed:
    """Seconds that one model's forwards take on this machine, for the thread that runs it. Before a forward has passed
    all layers, the first layers of one are extrapolated."""

    def __init__(self) -> None:
        self._took: deque[tuple[int, float, float]] = deque(maxlen=_FORWARDS)
        self._guessed = False
        self._taking: deque[float] = deque(maxlen=_CELLS)

    @classmethod
    def of(cls, model: torch.nn.Module) -> ComputingSpeed:
        """The model's, shared by all contexts that this process loads into it."""
        return _SPEEDS.setdefault(model, cls())

    @property
    def line(self) -> Line | None:
        """None: nothing is known."""
        return Line.fitted(*zip(*self._took, strict=True)) if self._took else None

    @property
    def taking(self) -> float:
        """Seconds per token to add a layer's streamed chunk; 0.0: unknown."""
        return statistics.median(self._taking) if self._taking else 0.0

    def note_taking(self, tokens: int, seconds: float) -> None:
        """Seconds that adding `tokens` streamed tokens of a layer took."""
        self._taking.append(seconds / tokens)

    def guess(self, tokens: int, attended: float, seconds: float) -> None:
        """As `note`, extrapolated from the first layers: used until a complete forward is noted."""
        if not self._took:
            self._took.append((tokens, attended, seconds))
            self._guessed = True

    def note(self, tokens: int, attended: float, seconds: float) -> None:
        """Seconds of a forward through all layers, of `tokens` tokens that attended to `attended` on average."""
        if self._guessed:
            self._took.clear()
            self._guessed = False
        self._took.append((tokens, attended, seconds))


# Kept by the process, as hooks on a model are; stored on the model it would be copied with it.
_SPEEDS: WeakKeyDictionary[torch.nn.Module, ComputingSpeed] = WeakKeyDictionary()


class Forecast:
    """Predicted seconds and bytes of the rest of a context, from the forwards and transfers so far. For the thread that
    runs the model. `tokens`: tokens to load, from the context's first one on."""

    def __init__(
        self, manifest: StreamManifest, cells: Cells, lane: StreamingLane, decoder: Decoder, extras: Extras,
        speed: ComputingSpeed, tokens: int,
    ) -> None:  # fmt: skip
        self._manifest, self._cells, self._lane = manifest, cells, lane
        self._decoder, self._extras, self._speed = decoder, extras, speed
        self._lengths = [manifest.tokens_of(chunk, tokens) for chunk in range(cells.chunks)]
        self._begins = [0, *np.cumsum(self._lengths, dtype=int).tolist()]
        self._nbytes = np.array([[0 if cell is None else cell.bytes for cell in row] for row in manifest.cells])

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second; None: unknown."""
        measured = self._lane.bandwidth
        return None if measured is None else max(measured, 1.0)

    def begin(self, chunk: int) -> int:
        """Number of tokens before a chunk."""
        return self._begins[chunk]

    def tokens(self, first: int, stop: int) -> int:
        """Number of tokens in chunks `first` to `stop`."""
        return self._begins[stop] - self._begins[first]

    def attended(self, first: int, stop: int) -> list[float]:
        """For each layer, the mean number of tokens that a query of these chunks attends to."""
        start, end, sparse = self._begins[first], self._begins[stop], self._extras.sparse
        layers = range(self._cells.layers)
        return [(start + end) / 2 if sparse is None else sparse.attended(layer, start, end) for layer in layers]

    def computing(self, first: int, stop: int) -> float | None:
        """Seconds of a forward of these chunks; None: unknown."""
        if (line := self._speed.line) is None:
            return None
        return float(line.seconds(np.array(self.tokens(first, stop)), np.array(np.mean(self.attended(first, stop)))))

    def costs(self, first: int) -> Costs | None:
        """Costs of the chunks from `first` on; None: the speed of computing or of the network is unknown."""
        bandwidth, line = self.bandwidth, self._speed.line
        if line is None or bandwidth is None:
            return None
        attended = np.array([self.attended(chunk, chunk + 1) for chunk in range(first, self._cells.chunks)])
        nbytes = self._nbytes[first : self._cells.chunks]
        decoded = float(np.mean(self._decoder.seconds)) if self._decoder.seconds else 0.0
        costs = Costs.of_line(line, self._lengths[first:], attended, nbytes, bandwidth, decoded=decoded)
        costs.streamed[~self._cells.may_come(first)] = np.inf
        costs.streamed[self._cells.received_from(first)] = 0
        costs.streamed[-1, -1] += self._extra_bytes / bandwidth  # they arrive before all cells
        return costs

    @property
    def _extra_bytes(self) -> int:
        """Bytes of the other objects that have yet to arrive."""
        return sum(item.bytes for name, item in self._extras.wanted.items() if name in self._lane.pending_objects)

    def sooner_computed(self, first: int, stop: int, layer: int) -> bool:
        """Whether the model reaches the cells on their way above a layer before they arrive, if half of their bytes are
        here already."""
        computing, bandwidth = self.computing(first, stop), self.bandwidth
        coming = self._cells.coming(first, stop, layer)
        if computing is None or bandwidth is None or not coming:
            return False
        arrives = sum(int(self._nbytes[cell]) for cell in coming) / bandwidth / 2
        return computing / self._cells.layers * (max(at for _, at in coming) - layer) < arrives

    def comes_meanwhile(self, first: int, stop: int, layer: int) -> bool:
        """Whether everything missing arrives while the received cells of these chunks are being added."""
        bandwidth, taking = self.bandwidth, self._speed.taking * self.tokens(first, stop) / (stop - first)
        if bandwidth is None or not taking:
            return False
        here = self._cells.received_from(first)
        coming = self._cells.may_come(first) & ~here
        coming[: stop - first, : layer + 1] = False
        nbytes = self._extra_bytes + int(self._nbytes[first : self._cells.chunks][coming].sum())
        return nbytes / bandwidth < taking * int(here[: stop - first, layer + 1 :].sum())


LEAST_TOKENS = 1024
"""Least tokens of a forward: in a trial, 2,048 tokens in forwards of 256 took 1.95 times as long as in one."""
MOST_TOKENS = 8192
"""Most tokens of a forward that is not the complete rest."""
_LOOK, _LOOKS = 0.03, (0.15, 1.0)
"""Share of the seconds to compute everything that the first forward waits for a measured bandwidth, and its limits in
seconds."""
_SAVED = 0.1
"""Share of the computing time that streaming has to save, or else all is computed in one forward."""
_GAINED = 0.15
"""Share of the streaming time that computing has to save, or else nothing is computed."""
_TELLS = 2
"""Layer at which the first forward's duration is extrapolated."""
_USELESS = 3
"""Useless cells after which the complete publication is given up: each costs a forward."""
_AT_FIRST = 30.0
"""Seconds that a chunk may take to arrive while the speed of computing is unknown."""


class _LateError(Exception):
    """A cell does not arrive, or too late."""


class Loader:
    """Fills a cache with chunks, in the thread that runs the model; see `stream_context`.

    Args:
        ids: (1, T), the prompt's beginning, as in the context: complete chunks, of which the last may lack a token.
        silence: seconds without a byte after which nothing is waited for.
    """

    def __init__(
        self, manifest: StreamManifest, cache: OffloadCache, filling: Filling, ids: torch.Tensor, cells: Cells,
        lane: StreamingLane, extras: Extras, silence: float, on_progress: Callable[[Cells], object],
    ) -> None:  # fmt: skip
        self._manifest, self._filling, self._ids = manifest, filling, ids
        self.cells, self._lane, self._extras = cells, lane, extras
        self._silence, self._on_progress = silence, on_progress
        self._account, self._timeline = cache.storage.account, cache.timeline
        self._speed = ComputingSpeed.of(filling.model)
        tokens, sparing = ids.shape[1], self._account.limit is not None
        self._decoder = Decoder(manifest, lane.spool, extras.key, tokens, sparing=sparing)
        self._forecast = Forecast(manifest, cells, lane, self._decoder, extras, self._speed, tokens)
        self._patient = True
        self._awaits = False  # this column ends for cells that may still be free
        self._useless = 0
        self.recomputed_tokens = 0
        self.computing_seconds = 0.0

    def run(self) -> None:
        """Fill the cache with all chunks. After an exception the cache has to be reset."""
        account = self._account
        try:
            account.hold("streaming", self._moving)
            chunk, begun, complete = 0, time.perf_counter(), self._forecast.computing(0, self.cells.chunks)
            look = 0.0 if complete is None else min(max(_LOOKS[0], _LOOK * complete), _LOOKS[1])
            while self._lane.bandwidth is None and time.perf_counter() - begun < look:
                time.sleep(0.005)
            while chunk < self.cells.chunks:
                self._extras.look(self._lane)
                stop = self.stop_of_column(chunk)
                self._filling.postpone(stop < self.cells.chunks and self._extras.expects(self._lane))
                if self._column(chunk, stop):
                    chunk = stop
            if self.cells.counts.streamed > self.cells.counts.overtaken:  # else layers have seen queries themselves
                self._extras.look(self._lane)
            self._filling.postpone(False)
            self._filling.learn_rest()
        finally:
            self._filling.postpone(False)
            self._decoder.close()
            account.observe("streaming", 0)

    @property
    def attended(self) -> float:
        """Share of the visible blocks of keys that computed tokens attended to."""
        return 1.0 if self._extras.sparse is None else self._extras.sparse.share

    @property
    def _moving(self) -> int:
        """Bytes of cells on their way, and of the other objects, packed and unpacked."""
        largest = max((cell.bytes for row in self._manifest.cells for cell in row if cell is not None), default=0)
        return (self._lane.together + 1) * largest + 2 * sum(item.bytes for item in self._extras.wanted.values())

    # --- columns -----------------------------------------------------------------------------------------------

    def stop_of_column(self, first: int) -> int:
        """End of the chunks from `first` on that go through the model together: complete chunks that were received, for
        their first layer; or chunks to compute."""
        cells, stop = self.cells, first + 1
        if cells.comes(first) and cells.wait(first, 0, self.patience(first), self._silence):
            while stop < cells.chunks and cells.here(stop) and self._forecast.tokens(first, stop + 1) <= MOST_TOKENS:
                stop += 1
            return stop
        tokens = max(LEAST_TOKENS, self._plan(first))
        if cells.from_the_front:
            if cells.wait(first, 0, self.patience(first), self._silence, asked=False):
                return stop
            self._patient = cells.from_the_front = False  # it was predicted to arrive, and did not
        while stop < cells.chunks and self._forecast.tokens(first, stop) < tokens and not cells.comes(stop):
            stop += 1
        return stop

    def _plan(self, first: int) -> int:
        """Plan the chunks from `first` on with what is known now: which cells are requested first, and whether any are
        computed. Returns the tokens of the next forward, 0 if nothing is known yet. Of three or more chunks to compute
        it has three quarters, so that later measurements decide about the rest."""
        costs = self._forecast.costs(first)
        if costs is None:
            return 0
        everything = self._forecast.tokens(first, self.cells.chunks)
        plan = (meet if self._extras.sparse is None else staircase)(costs)
        seconds, streaming = max(plan.lanes(costs)), float(costs.rest[:, 0].sum())
        if seconds > (1 - _SAVED) * float(costs.computed.sum()):
            return everything
        depths = np.array(plan.depths)
        self.cells.from_the_front = self._patient and seconds > (1 - _GAINED) * streaming
        self.cells.prefer(first, np.ones_like(depths) if self.cells.from_the_front else depths)
        complete = int((depths == costs.layers).cumprod().sum())
        if complete == costs.chunks:
            return everything
        chunks = complete if complete < 3 else -(-complete * 3 // 4)
        return min(self._forecast.tokens(first, first + chunks), MOST_TOKENS)

    def patience(self, chunk: int) -> float:
        """Seconds that a chunk may still take to arrive: as long as computing it takes."""
        seconds = self._forecast.computing(chunk, chunk + 1)
        return _AT_FIRST if seconds is None else seconds

    def _column(self, first: int, stop: int) -> bool:
        """Add chunks `first` to `stop` to all layers; False: some of it did not arrive, and none of it is stored."""
        held, last = self._forecast.begin(first), self._forecast.begin(stop)
        ids, begun, unknown = self._ids[:, held:last], time.perf_counter(), self._speed.line is None
        attended = float(np.mean(self._forecast.attended(first, stop)))
        self._awaits = False

        def goes_on(layer: int) -> bool:
            more = self.cells.goes_on(first, stop, layer) or self._forecast.sooner_computed(first, stop, layer)
            self._on_progress(self.cells)
            if unknown and layer == _TELLS:
                took = (time.perf_counter() - begun) / (layer + 1) * self.cells.layers
                self._speed.guess(ids.shape[1], attended, took)
                self._plan(first)
            if more and bool(self.cells.may_come(first)[: stop - first, layer + 1 :].all()):
                self._awaits = self.cells.from_the_front or self._forecast.comes_meanwhile(first, stop, layer)
            return more and not self._awaits

        depth = self._filling.compute(ids, goes_on, self._extras.sparse)
        seconds = time.perf_counter() - begun
        self._timeline.add("computing", f"chunks {first} to {stop - 1}, {depth} layers", begun, begun + seconds)
        self.computing_seconds += seconds
        if depth == self.cells.layers:
            self._speed.note(ids.shape[1], attended, seconds)
        elif not self._take_above(first, stop, depth):
            self._filling.take_back(held)
            self.cells.taken_back(first, stop)
            self.recomputed_tokens += ids.shape[1]
            return False
        self._filling.note(ids)
        self._on_progress(self.cells)
        return True

    # --- streamed cells ----------------------------------------------------------------------------------------

    def _take_above(self, first: int, stop: int, depth: int) -> bool:
        """Add the streamed cells above `depth` layers; False: some do not arrive, or are useless."""
        self._extras.look(self._lane)
        try:
            with self._account.holding("streaming", self._decoder.nbytes):
                for (_, layer), (keys, values, *indexer) in self._decoder.decoded(
                    self._as_they_come(first, stop, depth)
                ):
                    begun = time.perf_counter()
                    self._filling.take(layer, keys[None], values[None], *indexer)
                    self._speed.note_taking(keys.shape[1], time.perf_counter() - begun)
            return True
        except _LateError:
            self._patient = self.cells.from_the_front = False
        except UselessError as error:
            self.cells.spoil(error.cell)
            self._lane.trouble.append(str(error.__cause__))
            self._useless += 1
            if self._useless == _USELESS:
                self.cells.distrust()
                self._lane.trouble.append(f"{_USELESS} cells were useless: no others are requested")
        return False

    def _as_they_come(self, first: int, stop: int, depth: int) -> Iterator[Cell | None]:
        """The cells above `depth` layers, from the top, as the network delivers them. None: the next one has yet to
        arrive. Raises `_LateError`."""
        until = time.perf_counter() + sum(map(self.patience, range(first, stop)))
        for layer in range(self.cells.layers - 1, depth - 1, -1):
            for chunk in range(first, stop):
                if not self.cells.has((chunk, layer)):
                    yield None
                left, asked = max(0.0, until - time.perf_counter()), not self._awaits
                if not self.cells.wait(chunk, layer - 1, left, self._silence, asked=asked, below=layer + 1):
                    raise _LateError
                yield chunk, layer
