"""Plans of cells to compute and to stream, from the costs of both (SparKV, section IV-B). No network and no model.

A cell is a chunk of tokens in one layer. A chunk is computed from the first layer up to its depth, and the layers above
are streamed. The first layer is never streamed, because it is a projection of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

Cell = tuple[int, int]
"""(chunk, layer)."""


@dataclass(frozen=True)
class Line:
    """Seconds per token of a forward: `fixed`, and `slope` for each token attended to."""

    fixed: float
    slope: float

    def seconds(self, tokens: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """Seconds of forwards of `tokens` tokens that each attend to `attended` tokens on average."""
        return tokens * (self.fixed + self.slope * attended)

    @classmethod
    def fitted(cls, tokens: ArrayLike, attended: ArrayLike, seconds: ArrayLike) -> Line:
        """Least squares of the relative error, with coefficients of at least 0. One measurement is all `fixed`."""
        counts, mean, took = (np.asarray(values, dtype=float) for values in (tokens, attended, seconds))
        if len(took) == 1:
            return cls(float(took[0] / counts[0]), 0.0)
        from scipy.optimize import nnls

        parts = np.stack([counts, counts * mean], 1) / took[:, None]
        scale = parts.max(0)
        fixed, slope = nnls(parts / scale, np.ones(len(took)))[0] / scale
        return cls(float(fixed), float(slope))


@dataclass(frozen=True)
class Costs:
    """Seconds of each cell, (chunks, layers).

    Attributes:
        computed: seconds to compute chunk `c` in layer `l` such that it can continue above.
        projected: seconds of the keys and values alone, if the chunk ends at this layer.
        streamed: bytes over bandwidth, plus decoding; infinite if the cell cannot be streamed.
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
        """(chunks,): least depth of each chunk, so that all layers above can be streamed."""
        fixed = np.isinf(self.streamed)
        fixed[:, 0] = True
        return self.layers - fixed[:, ::-1].argmax(1)

    @cached_property
    def columns(self) -> np.ndarray:
        """(chunks, layers): at `depth - 1`, seconds to compute a chunk to `depth` layers, or to its `least`."""
        below = np.concatenate([np.zeros((self.chunks, 1)), self.computed.cumsum(1)[:, :-1]], 1)
        return self._from_the_least(below + self.projected)

    @cached_property
    def rest(self) -> np.ndarray:
        """(chunks, layers): at `depth - 1`, seconds to stream the layers above `depth`, or above its `least`."""
        above = self.streamed[:, ::-1].cumsum(1)[:, ::-1]
        return self._from_the_least(np.concatenate([above[:, 1:], np.zeros((self.chunks, 1))], 1))

    def _from_the_least(self, seconds: np.ndarray) -> np.ndarray:
        return np.take_along_axis(seconds, np.maximum(np.arange(self.layers), self.least[:, None] - 1), 1)

    @classmethod
    def of_line(
        cls, line: Line, tokens: Sequence[int], attended: np.ndarray, nbytes: np.ndarray, bandwidth: float, *,
        decoded: float = 0.0, projected: float = 0.1,
    ) -> Costs:  # fmt: skip
        """Costs of chunks whose forwards take what `line` predicts.

        Args:
            tokens: tokens of each chunk.
            attended: (chunks, layers), mean number of tokens that a query attends to.
            nbytes: (chunks, layers), bytes to stream.
            bandwidth: bytes a second.
            decoded: seconds to decode a cell.
            projected: share of a layer's time that its keys and values take.
        """
        computed = line.seconds(np.asarray(tokens, dtype=float)[:, None], attended) / attended.shape[1]
        return cls(computed, computed * projected, nbytes / bandwidth + decoded)


@dataclass(frozen=True)
class Plan:
    """Depth to which each chunk is computed, (chunks,), 1 to `layers`. The layers above are streamed, from the last
    chunk's top layer downwards."""

    depths: tuple[int, ...]

    @classmethod
    def at_least(cls, depths: np.ndarray, costs: Costs) -> Plan:
        """These depths, raised to what cannot be streamed."""
        return cls(tuple(np.maximum(depths, costs.least).tolist()))

    def lanes(self, costs: Costs) -> tuple[float, float]:
        """Seconds of computing and of streaming, if neither waits for the other."""
        at = np.arange(costs.chunks), np.asarray(self.depths, dtype=int) - 1
        return float(costs.columns[at].sum()), float(costs.rest[at].sum())


def meet(costs: Costs) -> Plan:
    """Compute from the front and stream from the end until both reach the same cell. At most one chunk is divided. For
    costs that are equal in all layers hardly any plan is better."""
    first, last = 0, costs.chunks * costs.layers - 1
    if last < 0:
        return Plan(())
    while first < last:  # the further computing goes, the longer it takes, and the shorter streaming
        middle = (first + last) // 2
        computing, streaming = _front(middle, costs).lanes(costs)
        if computing < streaming:
            first = middle + 1
        else:
            last = middle
    return min((_front(at, costs) for at in (max(0, first - 1), first)), key=lambda plan: max(plan.lanes(costs)))


def _front(at: int, costs: Costs) -> Plan:
    """All chunks before the `at`-th cell's are computed, its own up to that cell, and the others to the first layer."""
    chunk, layer = divmod(at, costs.layers)
    depths = np.ones(costs.chunks, dtype=int)
    depths[:chunk], depths[chunk] = costs.layers, layer + 1
    return Plan.at_least(depths, costs)


def staircase(costs: Costs, rounds: int = 40) -> Plan:
    """Depths that never rise from chunk to chunk, so that computing never waits: for costs that differ between chunks
    and layers. Bisects the weight between the two lanes."""
    if not costs.chunks:
        return Plan(())
    low, high, plans = 0.0, 1.0, [meet(costs)]
    for _ in range(rounds):
        weight = (low + high) / 2
        plan = Plan.at_least(_never_rising((1 - weight) * costs.columns + weight * costs.rest), costs)
        computing, streaming = plan.lanes(costs)
        plans.append(plan)
        low, high = (low, weight) if computing > streaming else (weight, high)
    return min(plans, key=lambda plan: max(plan.lanes(costs)))


def _never_rising(cost: np.ndarray) -> np.ndarray:
    """Depths of least total `cost` (chunks, depth - 1) among those that never rise."""
    chunks, depths = cost.shape
    chosen, total = np.zeros((chunks, depths), dtype=int), cost[0]
    for chunk in range(1, chunks):
        where = np.arange(depths)  # for each depth, the best one of the chunk before that is as deep or deeper
        for depth in range(depths - 2, -1, -1):
            where[depth] = depth if total[depth] <= total[where[depth + 1]] else where[depth + 1]
        chosen[chunk] = where
        total = cost[chunk] + total[where]
    at = np.zeros(chunks, dtype=int)
    at[-1] = int(total.argmin())
    for chunk in range(chunks - 1, 0, -1):
        at[chunk - 1] = chosen[chunk, at[chunk]]
    return at + 1
