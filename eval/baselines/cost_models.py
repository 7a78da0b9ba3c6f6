"""What a line and the paper's network are compared with that tell seconds of a chunk in a layer: a roofline."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_offload_cache.streaming import LayerCells


class Roofline:
    """The longer of work over the machine's rate and bytes over its bandwidth, both as they fit best.

    Args:
        model: of transformers; its decoder layers are alike.
    """

    def __init__(self, model: Any) -> None:
        config, layers = model.config, model.config.num_hidden_layers
        outside = model.get_input_embeddings().weight.numel()
        self._weights = (sum(one.numel() for one in model.model.parameters()) - outside) / layers
        self._width = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
        self._entry = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
        self._hidden, self._size = config.hidden_size, next(model.parameters()).element_size()
        self._rates = (1.0, 1.0)

    def _parts(self, cells: LayerCells) -> tuple[np.ndarray, np.ndarray]:
        work = cells.tokens * (2 * self._weights + 4 * self._width * cells.attended)
        moved = self._weights + cells.tokens * 4 * self._hidden + self._entry * (cells.attended + cells.tokens)
        return work, moved * self._size

    def fit(self, cells: LayerCells, seconds: np.ndarray) -> None:
        """By least squares of the relative error, from several starts."""
        from scipy.optimize import minimize

        work, moved = self._parts(cells)
        starts = [np.log([(work / seconds).mean(), (moved / seconds).mean() * factor]) for factor in (0.5, 1.0, 8.0)]

        def error(logs: np.ndarray) -> float:
            rates = np.exp(logs)
            return float(np.mean((np.maximum(work / rates[0], moved / rates[1]) / seconds - 1) ** 2))

        found = min((minimize(error, start, method="Nelder-Mead") for start in starts), key=lambda one: one.fun)
        self._rates = tuple(np.exp(found.x))

    def seconds(self, cells: LayerCells) -> np.ndarray:
        work, moved = self._parts(cells)
        return np.maximum(work / self._rates[0], moved / self._rates[1])
