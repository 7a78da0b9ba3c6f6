"""How a total of selected groups is spread over layers: dense layers get more, sharp ones less, at equal memory.

Beyond the paper, whose budget is the same for every layer. On a small model a few layers attend to thousands of tokens
and others to thirty; one budget starves the first and is wasted on the second.
"""

from __future__ import annotations

import numpy as np

LATEST_QUERIES, SPACING = 12, 8
"""Of the prompt, that a density is measured with: so many, every so many tokens."""
MOST = 3
"""Times the mean that a layer may get: what the buffers shared by all layers are sized for."""


def spread(curves: np.ndarray, mean: int) -> np.ndarray:
    """Groups for each layer, (L,) int64, that sum to L * mean, so that the product of captured masses is largest.

    `curves` (L, n): entry m is the share of a layer's attention mass that m groups capture, concave, for up to
    n - 1 = MOST * mean groups. The product, and not the sum, because a layer that sees half of what it attends to does
    more harm than two that miss a tenth. No layer gets less than a third of the mean, or more than its curve is long.
    """
    layers, most = curves.shape[0], curves.shape[1] - 1
    groups = np.full(layers, min(max(1, mean // 3), most))
    gains = np.diff(np.log(np.maximum.accumulate(curves, 1) + 1e-3), axis=1)
    gains = np.concatenate([gains, np.full((layers, 1), -1.0)], 1)  # nothing beyond the end
    for _ in range(layers * mean - int(groups.sum())):
        groups[gains[np.arange(layers), groups].argmax()] += 1
    return groups
