"""The paper's own scheduler: potential-aware greedy (SparKV, section IV-B). The command judges its plans. Costs are in
units of a prefill, so the ratios depend on no machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_offload_cache.streaming import Cell, Costs, Line, Plan, meet

from ..studies.common import one_run, write_json

_INSTANT = 1e-9
"""Least seconds of anything."""


@dataclass(frozen=True)
class Schedule(Plan):
    """A plan, and the order in which its cells are streamed."""

    order: tuple[Cell, ...]

    @classmethod
    def from_the_end(cls, plan: Plan, costs: Costs) -> Schedule:
        """As the package streams: from the last chunk, its top layer downwards."""
        chunks = reversed(list(enumerate(plan.depths)))
        order = [(chunk, layer) for chunk, depth in chunks for layer in range(costs.layers - 1, depth - 1, -1)]
        return cls(plan.depths, tuple(order))

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


def bound(costs: Costs) -> float:
    """Seconds that no plan is below: any depths, and neither lane ever waits. An integer program (HiGHS)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not costs.chunks:
        return 0.0
    cells = costs.chunks * costs.layers
    objective = np.concatenate([np.zeros(cells), [1.0]])
    once = np.zeros((costs.chunks, cells + 1))
    for chunk in range(costs.chunks):
        once[chunk, chunk * costs.layers : (chunk + 1) * costs.layers] = 1
    lanes = np.stack([np.append(lane.reshape(-1), -1.0) for lane in (costs.columns, costs.rest)])
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


def potential_aware(costs: Costs, stage: float, weights: tuple[float, float] = (1.0, 1.0)) -> Schedule:
    """Plan stage by stage of `stage` seconds: compute the ready cells of highest priority, then stream the rest by
    priority. The priority is the first of `weights` over the cell's own cost, plus the second over the cost of each
    cell that it makes ready. Heads are not split."""
    state, order = _State(costs), list[Cell]()
    while state.left.any():
        for streams in (False, True):
            budget = stage
            while budget > 0 and (cell := state.best(streams, weights)) is not None:
                budget -= state.price(cell, streams)
                if streams:
                    order.append(cell)
                else:
                    state.depths[cell[0]] = cell[1] + 1
                state.left[cell] = False
    return Schedule(tuple(int(depth) for depth in state.depths), tuple(order))


class _State:
    """The cells that are left, and the computed depth of each chunk."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.left = np.ones((costs.chunks, costs.layers), dtype=bool)
        self.depths = np.zeros(costs.chunks, dtype=int)

    def price(self, cell: Cell, streams: bool = False) -> float:
        top = cell[1] == self._costs.layers - 1
        of = self._costs.streamed if streams else self._costs.projected if top else self._costs.computed
        return max(float(of[cell]), _INSTANT)

    def _ready(self, chunk: int, layer: int) -> bool:
        if chunk >= self._costs.chunks or layer >= self._costs.layers or not self.left[chunk, layer]:
            return False
        before = chunk == 0 or layer == self._costs.layers - 1 or not self.left[chunk - 1, layer]
        return before and layer == self.depths[chunk]

    def best(self, streams: bool, weights: tuple[float, float]) -> Cell | None:
        best: tuple[float, Cell] | None = None
        for chunk, layer in zip(*self.left.nonzero(), strict=True):
            cell = int(chunk), int(layer)
            # The first layer is never streamed.
            if (not layer or np.isinf(self._costs.streamed[cell])) if streams else not self._ready(*cell):
                continue
            opened = sum(1 / self.price(one) for one in self._opened(cell, streams))
            score = weights[0] / self.price(cell, streams) + weights[1] * opened
            if best is None or score > best[0]:
                best = score, cell
        return None if best is None else best[1]

    def _opened(self, cell: Cell, streams: bool) -> list[Cell]:
        """The cells that become ready with this one."""
        chunk, layer = cell
        others = [(chunk + 1, layer)] if streams else [(chunk + 1, layer), (chunk, layer + 1)]
        before = {other for other in others if self._ready(*other)}
        kept = self.left[cell], self.depths[chunk]
        self.left[cell] = False
        if not streams:
            self.depths[chunk] = layer + 1
        after = {other for other in others if self._ready(*other)}
        self.left[cell], self.depths[chunk] = kept
        return sorted(after - before)


def attended_by_all(tokens: Sequence[int], layers: int) -> np.ndarray:
    """(chunks, layers): tokens that a query attends to in the mean, where it attends to all before it."""
    stops = np.cumsum(np.asarray(tokens, dtype=float))
    return np.repeat((stops - np.asarray(tokens) / 2)[:, None], layers, 1)


def costs_of(tokens: int, balance: float, layers: int = 30, chunk: int = 1024) -> Costs:
    """Costs of a context, each token attending to all before it; `balance`: streaming over prefill."""
    lengths = [chunk] * -(-tokens // chunk)
    nbytes = np.ones((len(lengths), layers))
    costs = Costs.of_line(Line(1.0e-3, 1.2e-7), lengths, attended_by_all(lengths, layers), nbytes, 1.0)
    scale = balance * costs.columns[:, -1].sum() / costs.rest[:, 0].sum()
    return Costs(costs.computed, costs.projected, costs.streamed * scale)


def main(argv: Sequence[str] | None = None) -> None:
    """Seconds of the greedy plan and of meet, over the lower bound."""
    options = {"tokens": ([2048, 7168], "of a context"), "balances": ([1 / 3, 1.0, 3.0], "streaming over prefill")}
    arguments, rows = one_run(main.__doc__, options, argv), []
    for tokens in arguments.tokens:
        for balance in arguments.balances:
            costs = costs_of(tokens, balance)
            least, stage = bound(costs), float(costs.columns[:, -1].sum()) / 10
            over = {"greedy": potential_aware(costs, stage), "meet": Schedule.from_the_end(meet(costs), costs)}
            row = {name: round(float(plan.seconds(costs) / least), 3) for name, plan in over.items()}
            rows.append({"tokens": tokens, "balance": round(balance, 3), **row})
            print(rows[-1])
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
