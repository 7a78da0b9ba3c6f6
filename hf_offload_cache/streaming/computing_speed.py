"""What forwards of a model take on this machine, by those that it has run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .plan import Line

# What a chunk takes to compute in a layer, told by a small network: the paper's, for sparse attention (SparKV, section

_HIDDEN, _DECAY = (48, 24), 1e-5
PLACE = 1024
"""Tokens of a place in a context."""


@dataclass(frozen=True)
class LayerCells:
    """Arrays (n,): of chunks in a layer, what their seconds are told by."""

    tokens: np.ndarray
    attended: np.ndarray
    """Tokens that a query attends to in the mean."""
    place: np.ndarray
    """Of the chunk's middle in the context, in `PLACE` tokens."""
    blocks: np.ndarray
    """Active blocks of keys a block of queries, in the mean."""
    load: np.ndarray
    """Share of the machine that others take."""

    def __getitem__(self, at: Any) -> LayerCells:
        return LayerCells(*(getattr(self, name)[at] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: list[LayerCells]) -> LayerCells:
        return cls(*(np.concatenate([getattr(one, name) for one in parts]) for name in cls.__dataclass_fields__))


class CostNetwork:
    """Two hidden layers, of a chunk's place, its active blocks and the machine's load. It has the least mean squared
    error of what is scaled to unit variance: seconds of a token, as chunks may differ in these. Any thread.

    Args:
        seconds: (n,) that these cells took.
        steps: of L-BFGS over all cells (the paper descends by batches), at most: some 50 ms in all.
    """

    def __init__(self, cells: LayerCells, seconds: np.ndarray, *, seed: int = 0, steps: int = 150) -> None:
        from scipy.optimize import minimize

        found, each = self._features(cells), seconds / cells.tokens
        self._mean, self._deviation = found.mean(0), found.std(0) + 1e-9
        self._level, self._spread = float(each.mean()), float(each.std()) + 1e-12
        inputs, targets = (found - self._mean) / self._deviation, (each - self._level) / self._spread
        self._sizes = (found.shape[1], *_HIDDEN, 1)
        noise = np.random.default_rng(seed)
        start = [
            np.concatenate([noise.normal(0, (2 / before) ** 0.5, before * after), np.zeros(after)])
            for before, after in pairwise(self._sizes)
        ]
        told = minimize(
            self._error, np.concatenate(start), (inputs, targets), "L-BFGS-B", jac=True, options={"maxiter": steps}
        )
        self._weights: np.ndarray = told.x

    @staticmethod
    def _features(cells: LayerCells) -> np.ndarray:
        return np.stack([cells.place, cells.blocks, cells.load], 1)

    def _layers(self, weights: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Matrices and offsets; views."""
        at = 0
        for before, after in pairwise(self._sizes):
            stop = at + before * after
            yield weights[at:stop].reshape(before, after), weights[stop : stop + after]
            at = stop + after

    def _through(self, weights: np.ndarray, inputs: np.ndarray) -> list[np.ndarray]:
        """What each layer is given, and in the end what the last one gives."""
        given = [inputs]
        for number, (matrix, offset) in enumerate(self._layers(weights), 1):
            found = given[-1] @ matrix + offset
            given.append(found if number == len(self._sizes) - 1 else np.maximum(found, 0.0))
        return given

    def _error(self, weights: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
        """Mean squared error, with a little for large weights, and its gradient."""
        given = self._through(weights, inputs)
        rest = given[-1][:, 0] - targets
        change, parts = (2 / len(rest) * rest)[:, None], []
        for (matrix, _), own in zip(reversed(list(self._layers(weights))), reversed(given[:-1]), strict=True):
            parts += [change.sum(0), (own.T @ change).reshape(-1)]
            change = (change @ matrix.T) * (own > 0)
        gradient = np.concatenate(parts[::-1]) + 2 * _DECAY * weights
        return float((rest**2).mean() + _DECAY * (weights**2).sum()), gradient

    def seconds(self, cells: LayerCells) -> np.ndarray:
        """(n,), at least a tenth of what cells took in the mean: it is asked of what it has not seen."""
        inputs = (self._features(cells) - self._mean) / self._deviation
        each = self._through(self._weights, inputs)[-1][:, 0] * self._spread + self._level
        return np.asarray(np.maximum(each, self._level / 10) * cells.tokens)


# What sparse forwards took layer by layer, and what tells it better: a line, or the paper's network

_COLUMNS, _LEAST = 48, 4
"""Columns that are remembered; those that there are to be before the network is asked."""


class LayerCosts:
    """Of one model, in the thread that runs it."""

    def __init__(self) -> None:
        self._columns: deque[tuple[LayerCells, np.ndarray]] = deque(maxlen=_COLUMNS)
        self._new = False
        self.network: CostNetwork | None = None
        """None: a line tells as well, or too little is known."""

    def note(self, cells: LayerCells, seconds: np.ndarray) -> None:
        """What the layers of one forward took: seconds (n,)."""
        self._columns.append((cells, seconds))
        self._new = True

    def fit(self) -> None:
        """Learn of all columns but the latest, and let whichever tells that one better tell what is to come."""
        if not self._new or len(self._columns) < _LEAST:
            return
        self._new = False
        *known, (last, took) = self._columns
        cells, seconds = LayerCells.joined([one for one, _ in known]), np.concatenate([one for _, one in known])
        line, network = Line.fitted(cells.tokens, cells.attended, seconds), CostNetwork(cells, seconds)
        told = line.seconds(last.tokens, last.attended), network.seconds(last)
        of_line, of_network = (float(np.mean(np.abs(one / took - 1))) for one in told)
        self.network = network if of_network < of_line else None


_KNOWN = 4
"""Forwards that tell: the machine may be another's soon."""
_CELLS = 32


class ComputingSpeed:
    """Of one model, in the thread that runs it. Until a forward has run through all layers, the first layers of one
    tell."""

    def __init__(self) -> None:
        self._took: deque[tuple[int, float, float]] = deque(maxlen=_KNOWN)
        self._guessed = False
        self.layers = LayerCosts()
        self._taking: deque[float] = deque(maxlen=_CELLS)

    @classmethod
    def of(cls, model: torch.nn.Module) -> ComputingSpeed:
        """The same for all contexts that this process loads into a model: the next one begins with what is known."""
        return _SPEEDS.setdefault(model, cls())

    @property
    def known(self) -> bool:
        """Something tells, be it a guess."""
        return bool(self._took)

    @property
    def line(self) -> Line | None:
        """None: nothing is known."""
        return Line.fitted(*zip(*self._took, strict=True)) if self._took else None

    @property
    def taking(self) -> float:
        """Seconds a token that it takes to take in what has come of a layer's chunk; 0.0: that is not known."""
        return statistics.median(self._taking) if self._taking else 0.0

    def note_taking(self, tokens: int, seconds: float) -> None:
        """What so many tokens of a layer took."""
        self._taking.append(seconds / tokens)

    def guess(self, tokens: int, attended: float, seconds: float) -> None:
        """What a forward will take by what it has taken so far, where nothing else is known; see `note`."""
        if not self._took:
            self._took.append((tokens, attended, seconds))
            self._guessed = True

    def note(self, tokens: int, attended: float, seconds: float) -> None:
        """What a forward through all layers took, of so many tokens that attended to so many in the mean."""
        if self._guessed:
            self._took.clear()
            self._guessed = False
        self._took.append((tokens, attended, seconds))


# State of the process, as what is attached to a model is: it cannot lie on the model, it would be copied with it.
_SPEEDS: WeakKeyDictionary[torch.nn.Module, ComputingSpeed] = WeakKeyDictionary()
