"""What is computed and what is streamed, from what each costs: no network and no model (SparKV, section IV-B).

The first layer of a chunk is never streamed: its keys and values are a projection of the tokens. A chunk is computed
from there upwards to its depth, and what lies above is streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

# What each cell of a context costs: a chunk of tokens in one layer, computed here or brought over the network

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
            attended: (chunks, layers), tokens that a query attends to in the mean.
            nbytes: (chunks, layers), of what is streamed.
            bandwidth: bytes a second.
            decoded: seconds that decoding takes, a cell.
            projected: share of a layer's time that its keys and values take alone.
        """
        lengths = np.asarray(tokens, dtype=float)[:, None]
        computed = line.seconds(lengths, attended) / attended.shape[1]
        return cls(computed, computed * projected, nbytes / bandwidth + decoded)


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


Cell = tuple[int, int]
"""(chunk, layer)."""


@dataclass(frozen=True)
class Plan:
    """Depths that chunks are computed to, (chunks,), 1 to layers; and in which order what lies above is streamed."""

    depths: tuple[int, ...]
    order: tuple[Cell, ...]

    @classmethod
    def from_the_end(cls, depths: np.ndarray, costs: Costs) -> Plan:
        """Streamed from the last chunk, its top layer downwards: what computing comes to last. Chunks are computed to
        what they have to be at least."""
        depths, layers = np.maximum(depths, costs.least), costs.layers
        order = [
            (chunk, layer)
            for chunk in range(len(depths) - 1, -1, -1)
            for layer in range(layers - 1, int(depths[chunk]) - 1, -1)
        ]
        return cls(tuple(int(depth) for depth in depths), tuple(order))

    def lanes(self, costs: Costs) -> tuple[float, float]:
        """Seconds of computing and of streaming, if neither waits for the other."""
        at = np.arange(costs.chunks), np.asarray(self.depths) - 1
        return float(costs.columns[at].sum()), float(costs.rest[at].sum())

    def seconds(self, costs: Costs) -> float:
        """Until everything is there. Columns are computed one after another, each layer as soon as its chunk's layer
        below is computed and what earlier chunks have of this layer is there."""
        there = np.zeros((costs.chunks, costs.layers))
        clock = 0.0
        for cell in self.order:
            clock += costs.streamed[cell]
            there[cell] = clock
        streamed, clock = clock, 0.0
        for chunk, depth in enumerate(self.depths):
            for layer in range(depth - 1):
                if chunk:
                    clock = max(clock, float(there[chunk - 1, layer]))
                clock += costs.computed[chunk, layer]
                there[chunk, layer] = clock
            clock += costs.projected[chunk, depth - 1]
            there[chunk, depth - 1] = clock
            if chunk:  # whoever waits for a chunk waits for those before it
                there[chunk] = np.maximum(there[chunk], there[chunk - 1])
        return max(streamed, clock)


def meet(costs: Costs) -> Plan:
    """Computed from the front, streamed from the end, until both come to the same cell. On costs that are equal for all
    layers nothing is much better: one chunk is divided at most."""
    if not costs.chunks:
        return Plan((), ())
    choices = [(chunk, depth) for chunk in range(costs.chunks) for depth in range(1, costs.layers + 1)]
    first, last = 0, len(choices) - 1
    while first < last:  # the further computing goes, the longer it takes, and the shorter streaming
        middle = (first + last) // 2
        computing, streaming = _front(choices[middle], costs).lanes(costs)
        if computing < streaming:
            first = middle + 1
        else:
            last = middle
    around = (_front(choices[at], costs) for at in (max(0, first - 1), first))
    return min(around, key=lambda plan: max(plan.lanes(costs)))


def _front(cell: Cell, costs: Costs) -> Plan:
    """All chunks before a cell's are computed, its own to a depth, those behind it to the first layer alone."""
    chunk, depth = cell
    depths = np.ones(costs.chunks, dtype=int)
    depths[:chunk], depths[chunk] = costs.layers, depth
    return Plan.from_the_end(depths, costs)


def staircase(costs: Costs, rounds: int = 40) -> Plan:
    """Depths that never rise from chunk to chunk, so that computing waits for nothing, by a multiplier between the
    lanes: for costs that differ between chunks and layers."""
    if not costs.chunks:
        return Plan((), ())
    low, high = 0.0, 1.0
    best: Plan | None = None
    for _ in range(rounds):
        weight = (low + high) / 2
        plan = Plan.from_the_end(_never_rising((1 - weight) * costs.columns + weight * costs.rest), costs)
        computing, streaming = plan.lanes(costs)
        if best is None or max(computing, streaming) < max(best.lanes(costs)):
            best = plan
        low, high = (low, weight) if computing > streaming else (weight, high)
    assert best is not None
    return min((best, meet(costs)), key=lambda plan: max(plan.lanes(costs)))


def _never_rising(cost: np.ndarray) -> np.ndarray:
    """Depths of least total `cost` (chunks, depth - 1) among those that never rise."""
    chunks, depths = cost.shape
    chosen = np.zeros((chunks, depths), dtype=int)
    total = cost[0].copy()
    for chunk in range(1, chunks):
        least = np.minimum.accumulate(total[::-1])[::-1]  # of the chunk before, at this depth or deeper
        where = np.arange(depths)
        for depth in range(depths - 2, -1, -1):
            where[depth] = depth if total[depth] <= total[where[depth + 1]] else where[depth + 1]
        chosen[chunk] = where
        total = cost[chunk] + least
    found = np.zeros(chunks, dtype=int)
    found[-1] = int(total.argmin())
    for chunk in range(chunks - 1, 0, -1):
        found[chunk - 1] = chosen[chunk, found[chunk]]
    return found + 1


def bound(costs: Costs) -> float:
    """Seconds that no plan is below: depths as they please, and neither lane ever waits. An integer program (HiGHS)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not costs.chunks:
        return 0.0
    cells = costs.chunks * costs.layers
    objective = np.concatenate([np.zeros(cells), [1.0]])
    once = np.zeros((costs.chunks, cells + 1))
    for chunk in range(costs.chunks):
        once[chunk, chunk * costs.layers : (chunk + 1) * costs.layers] = 1
    lanes = np.stack([np.append(one.reshape(-1), -1.0) for one in (costs.columns, costs.rest)])
    may = np.isfinite(lanes).all(0)
    lanes[:, ~may] = 0
    most = float(lanes[:, :-1].max())
    scale = 1.0 if 1e-6 < most < 1e6 or not most else most  # its tolerances are for numbers of about one
    lanes[:, :-1] /= scale
    found = milp(
        objective,
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(lanes, -np.inf, 0)],
        integrality=np.append(np.ones(cells), 0),
        bounds=Bounds(0, np.append(may[:-1].astype(float), np.inf)),
        options={"mip_rel_gap": 1e-3},
    )
    if found.x is None:
        raise RuntimeError(f"the integer program was not solved: {found.message}")
    return scale * float(found.mip_dual_bound if found.mip_dual_bound is not None else found.fun)
