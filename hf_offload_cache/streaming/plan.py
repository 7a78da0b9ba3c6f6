"""What is computed and what is streamed, from what each costs: no network and no model (SparKV, section IV-B).

The first layer of a chunk is never streamed: its keys and values are a projection of the tokens. A chunk is computed
from there upwards to its depth, and what lies above is streamed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import Costs

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
    """Computed from the front, streamed from the end, until both come to the same cell. On costs that are alike for all
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
