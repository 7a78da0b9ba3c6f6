"""The paper's own scheduler, for comparison: potential-aware greedy (SparKV, section IV-B)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_offload_cache.streaming import Cell, Costs, Plan

_INSTANT = 1e-9
"""Seconds that anything takes at least."""


def potential_aware(costs: Costs, stage: float, weights: tuple[float, float] = (1.0, 1.0)) -> Plan:
    """Stage by stage of `stage` seconds: the ready cells of highest priority are computed, then what is left of highest
    priority is streamed. A cell's priority is one over what it costs, times the first of the `weights`, and over what
    each cell costs to compute that it makes ready, times the second. Whole heads: they are not split."""
    state = _State(costs)
    order: list[Cell] = []
    while state.left.any():
        for budget, streams in ((stage, False), (stage, True)):
            while budget > 0 and (cell := state.best(streams, weights)) is not None:
                budget -= max(float(costs.streamed[cell]), _INSTANT) if streams else state.price(cell)
                if streams:
                    order.append(cell)
                state.take(cell, streams)
    return Plan(tuple(int(depth) for depth in state.depths), tuple(order))


class _State:
    """Which cells are left, and how deep each chunk is computed."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.left = np.ones((costs.chunks, costs.layers), dtype=bool)
        self.depths = np.zeros(costs.chunks, dtype=int)

    def price(self, cell: Cell) -> float:
        chunk, layer = cell
        top = layer == self._costs.layers - 1
        return max(float((self._costs.projected if top else self._costs.computed)[chunk, layer]), _INSTANT)

    def _ready(self, chunk: int, layer: int) -> bool:
        if chunk >= self._costs.chunks or layer >= self._costs.layers or not self.left[chunk, layer]:
            return False
        beside = chunk == 0 or layer == self._costs.layers - 1 or not self.left[chunk - 1, layer]
        return beside and layer == self.depths[chunk]

    def best(self, streams: bool, weights: tuple[float, float]) -> Cell | None:
        found: tuple[float, Cell] | None = None
        for chunk, layer in zip(*self.left.nonzero(), strict=True):
            cell = int(chunk), int(layer)
            if streams and (not layer or np.isinf(self._costs.streamed[cell])):  # the first layer never is
                continue
            if not streams and not self._ready(*cell):
                continue
            own = max(float(self._costs.streamed[cell]), _INSTANT) if streams else self.price(cell)
            score = weights[0] / own + weights[1] * sum(1 / self.price(one) for one in self._opened(cell, streams))
            if found is None or score > found[0]:
                found = score, cell
        return None if found is None else found[1]

    def _opened(self, cell: Cell, streams: bool) -> list[Cell]:
        """The cells that become ready when this one is there."""
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
