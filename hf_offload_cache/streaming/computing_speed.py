"""What forwards of a model take on this machine, by those that it has run."""

from __future__ import annotations

import statistics
from collections import deque
from weakref import WeakKeyDictionary

import torch

from .costs import Line
from .layer_costs import LayerCosts

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
