"""How much of the attention mass units capture, by estimate: where a step may stop, and how dense a layer is."""

from __future__ import annotations

import numpy as np

from .ranking import Ranking


def enough(
    chosen: np.ndarray, importance: np.ndarray, ranking: Ranking, target: float, heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """As many of the units `chosen` (B, M) as every row needs for the share `target` of its mass, most important first;
    and the share that they capture, (B,). `importance` (B, units) orders them, `ranking` has their mass."""
    assert ranking.rest is not None
    order = np.argsort(-np.take_along_axis(importance, chosen, 1), 1, kind="stable")
    chosen = np.take_along_axis(chosen, order, 1)
    mass = np.take_along_axis(ranking.importance, chosen, 1).clip(min=0)
    captured = (ranking.rest[:, None] + np.cumsum(mass, 1)) / heads
    reached = captured >= target
    needed = np.where(reached.any(1), reached.argmax(1) + 1, chosen.shape[1]).max()
    return chosen[:, :needed], captured[:, needed - 1]


def curve(ranking: Ranking, most: int, heads: int) -> np.ndarray:
    """(most + 1,): the share of the mass that what is compared exactly and the m best units capture, mean of rows."""
    assert ranking.candidates is not None and ranking.rest is not None
    mass = -np.sort(-np.take_along_axis(ranking.importance, ranking.candidates, 1), 1)[:, :most]
    captured = (ranking.rest[:, None] + np.cumsum(mass, 1)).mean(0) / heads
    captured = np.concatenate([[ranking.rest.mean() / heads], captured])
    return np.pad(captured, (0, most + 1 - len(captured)), "edge")
