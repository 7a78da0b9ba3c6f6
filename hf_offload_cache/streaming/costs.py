"""What each cell of a context costs: a chunk of tokens in one layer, computed here or brought over the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Costs:
    """Seconds of each cell, (chunks, layers).

    `computed[c, l]` lets chunk `c` go on above layer `l`; `projected[c, l]` is for its keys and values alone, where it
    goes no further. `streamed[c, l]`: bytes over bandwidth, and what decoding takes beyond that; infinite: it cannot be
    streamed.
    """

    computed: np.ndarray
    projected: np.ndarray
    streamed: np.ndarray

    @property
    def chunks(self) -> int:
        return int(self.computed.shape[0])

    @property
    def layers(self) -> int:
        return int(self.computed.shape[1])

    @cached_property
    def least(self) -> np.ndarray:
        """(chunks,): to how many layers a chunk has to be computed, since some of it cannot be streamed (infinite)."""
        cannot = np.isinf(self.streamed)
        cannot[:, 0] = True
        return self.layers - cannot[:, ::-1].argmax(1)

    @cached_property
    def columns(self) -> np.ndarray:
        """(chunks, layers): seconds to compute a chunk to `depth` layers, or its `least`, at `depth - 1`; the last of
        them is projected alone."""
        below = np.concatenate([np.zeros((self.chunks, 1)), self.computed.cumsum(1)[:, :-1]], 1)
        return self._from_the_least(below + self.projected)

    @cached_property
    def rest(self) -> np.ndarray:
        """(chunks, layers): seconds to stream what lies above `depth` layers of a chunk, or its `least`, at
        `depth - 1`."""
        above = self.streamed[:, ::-1].cumsum(1)[:, ::-1]
        return self._from_the_least(np.concatenate([above[:, 1:], np.zeros((self.chunks, 1))], 1))

    def _from_the_least(self, seconds: np.ndarray) -> np.ndarray:
        at = np.maximum(np.arange(self.layers), self.least[:, None] - 1)
        return np.take_along_axis(seconds, at, 1)

    @classmethod
    def of_line(
        cls, line: Line, tokens: Sequence[int], attended: np.ndarray, nbytes: np.ndarray, bandwidth: float, *,
        decoded: float = 0.0, projected: float = 0.1,
    ) -> Costs:  # fmt: skip
        """Of chunks of so many `tokens`, whose columns take what `line` says.

        Args:
            attended: (chunks, layers), tokens that a query attends to in the mean (`attended_by_all`).
            nbytes: (chunks, layers), of what is streamed.
            bandwidth: bytes a second.
            decoded: seconds that decoding takes, a cell.
            projected: share of a layer's time that its keys and values take alone.
        """
        lengths = np.asarray(tokens, dtype=float)[:, None]
        computed = line.seconds(lengths, attended) / attended.shape[1]
        return cls(computed, computed * projected, nbytes / bandwidth + decoded)


def attended_by_all(tokens: Sequence[int], layers: int) -> np.ndarray:
    """(chunks, layers): tokens that a query attends to in the mean, where it attends to all before it."""
    stops = np.cumsum(np.asarray(tokens, dtype=float))
    return np.repeat((stops - np.asarray(tokens) / 2)[:, None], layers, 1)


@dataclass(frozen=True)
class Line:
    """Seconds of a token in a forward: `fixed`, and `slope` for each token that it attends to."""

    fixed: float
    slope: float

    def seconds(self, tokens: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """Of forwards of so many tokens each, which attend to so many in the mean: all before them, and half of their
        own."""
        return tokens * (self.fixed + self.slope * attended)

    @classmethod
    def fitted(cls, tokens: ArrayLike, attended: ArrayLike, seconds: ArrayLike) -> Line:
        """By least squares of the relative error, without a negative coefficient. Of one measurement all is `fixed`."""
        many, mean, took = (np.asarray(one, dtype=float) for one in (tokens, attended, seconds))
        parts = np.stack([many, many * mean], 1) / took[:, None]
        if len(took) > 1:
            from scipy.optimize import nnls

            scale = parts.max(0)
            found = nnls(parts / scale, np.ones(len(took)))[0] / scale
            return cls(float(found[0]), float(found[1]))
        return cls(float(took[0] / many[0]), 0.0)
