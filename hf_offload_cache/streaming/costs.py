"""What each cell of a context costs: a chunk of tokens in one layer, computed here or brought over the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Costs:
    """Seconds of each cell, (chunks, layers).

    `computed[c, l]` lets chunk `c` go on above layer `l`; `projected[c, l]` is for its keys and values alone, where it
    goes no further. `streamed[c, l]`: bytes over bandwidth, and what decoding takes beyond that.
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
    def columns(self) -> np.ndarray:
        """(chunks, layers): seconds to compute a chunk to `depth` layers, at `depth - 1`; the last of them is projected
        alone."""
        below = np.concatenate([np.zeros((self.chunks, 1)), self.computed.cumsum(1)[:, :-1]], 1)
        return below + self.projected

    @cached_property
    def rest(self) -> np.ndarray:
        """(chunks, layers): seconds to stream what lies above `depth` layers of a chunk, at `depth - 1`."""
        above = self.streamed[:, ::-1].cumsum(1)[:, ::-1]
        return np.concatenate([above[:, 1:], np.zeros((self.chunks, 1))], 1)

    @classmethod
    def of_line(
        cls, line: Line, tokens: Sequence[int], layers: int, cell_bytes: int, bandwidth: float, decoded: float = 0.0,
        projected: float = 0.1,
    ) -> Costs:
        """Of chunks of so many `tokens`, whose columns take what `line` says, each layer alike. `cell_bytes`: of a
        whole chunk of one layer, the longest of them; `bandwidth` in bytes a second; `decoded`: seconds a byte that
        decoding takes; `projected`: share of a layer's time that its keys and values take alone."""
        lengths = np.asarray(tokens, dtype=float)
        before = np.concatenate([[0.0], lengths.cumsum()[:-1]])
        columns = line.seconds(lengths, before)
        computed = np.repeat(columns[:, None] / layers, layers, 1)
        nbytes = cell_bytes * lengths / lengths.max()
        streamed = np.repeat((nbytes * (1 / bandwidth + decoded))[:, None], layers, 1)
        return cls(computed, computed * projected, streamed)


@dataclass(frozen=True)
class Line:
    """Seconds of a token in a forward: `fixed`, and `slope` for each token before it."""

    fixed: float
    slope: float

    def seconds(self, tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Of forwards of so many tokens each, with so many before the first."""
        return tokens * (self.fixed + self.slope * (before + tokens / 2))

    @classmethod
    def fitted(cls, tokens: Sequence[int], before: Sequence[int], seconds: Sequence[float]) -> Line:
        """By least squares of the relative error, without a negative coefficient. Of one measurement all is `fixed`."""
        many, first, took = (np.asarray(one, dtype=float) for one in (tokens, before, seconds))
        parts = np.stack([many, many * (first + many / 2)], 1) / took[:, None]
        if len(took) > 1:
            from scipy.optimize import nnls

            scale = parts.max(0)
            found = nnls(parts / scale, np.ones(len(took)))[0] / scale
            return cls(float(found[0]), float(found[1]))
        return cls(float(took[0] / many[0]), 0.0)
