"""The paper's own scheduler: potential-aware greedy (SparKV, section IV-B). The command judges its plans.

Costs are in units of a prefill, so the ratios depend on no machine. No network and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_offload_cache.streaming import Cell, Costs, Line, Plan, bound, meet

from ..studies.common import one_run, write_json

_INSTANT = 1e-9
"""Least seconds of anything."""


def potential_aware(costs: Costs, stage: float, weights: tuple[float, float] = (1.0, 1.0)) -> Plan:
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
    return Plan(tuple(int(depth) for depth in state.depths), tuple(order))


class _State:
    """Which cells are left, and how deep each chunk is computed."""

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

    def take(self, cell: Cell, streams: bool) -> None:
        self.left[cell] = False
        if not streams:
            self.depths[cell[0]] = cell[1] + 1


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
            over = {"greedy": potential_aware(costs, stage), "meet": meet(costs)}
            row = {name: round(float(plan.seconds(costs) / least), 3) for name, plan in over.items()}
            rows.append({"tokens": tokens, "balance": round(balance, 3), **row})
            print(rows[-1])
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
