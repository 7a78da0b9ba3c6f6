"""What sparse forwards took layer by layer, and what tells it better: a line, or the paper's network."""

from __future__ import annotations

from collections import deque

import numpy as np

from .cost_network import CostNetwork, LayerCells
from .costs import Line

_COLUMNS, _LEAST = 48, 4
"""Columns that are remembered; those that there are to be before the network is asked."""


class LayerCosts:
    """Of one model, in the thread that runs it."""

    def __init__(self) -> None:
        self._columns: deque[tuple[LayerCells, np.ndarray]] = deque(maxlen=_COLUMNS)
        self._new = False
        self.network: CostNetwork | None = None
        """None: a line tells as well, or too little is known."""

    def note(self, cells: LayerCells, seconds: np.ndarray) -> None:
        """What the layers of one forward took: seconds (n,)."""
        self._columns.append((cells, seconds))
        self._new = True

    def fit(self) -> None:
        """Learn of all columns but the latest, and let whichever tells that one better tell what is to come."""
        if not self._new or len(self._columns) < _LEAST:
            return
        self._new = False
        *known, (last, took) = self._columns
        cells, seconds = LayerCells.joined([one for one, _ in known]), np.concatenate([one for _, one in known])
        line, network = Line.fitted(cells.tokens, cells.attended, seconds), CostNetwork(cells, seconds)
        told = line.seconds(last.tokens, last.attended), network.seconds(last)
        of_line, of_network = (float(np.mean(np.abs(one / took - 1))) for one in told)
        self.network = network if of_network < of_line else None
