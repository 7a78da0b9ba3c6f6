"""What bytes of coded compact keys are worth against slots, by what was measured: how a budget is divided."""

from __future__ import annotations

import numpy as np

LOST = ((0.0625, 0.27), (0.083, 0.13), (0.104, 0.06), (0.125, 0.02), (0.167, 0.01), (0.25, 0.0))
"""Bytes of a code over the elements of a joined key -> facts lost of those that the full cache finds: SmolLM2-135M,
prompts of 7,000 tokens, 400 of them selected, trials of 16 facts, so that each value may be off by one fact. Another
model has another curve."""
HITS = ((0.0, 0.0), (0.04, 0.035), (0.27, 0.23), (0.5, 0.39), (1.0, 0.79), (1.5, 0.86), (2.0, 0.89), (4.0, 0.95))
"""Slots over the units of one selection -> hit rate: the same model, on text."""
RETRIEVES = 0.1
"""Bytes over elements below which facts get lost: worth a warning."""
_SPEED = 0.1
"""What a hit rate of 1 is worth, in facts: a step without any takes about half as long again."""
QUEUE_HALVED = 0.004
"""What a write queue of half the size costs, in facts: a prefill waits for the disk more often."""
SHARES = (1 / 4, 1 / 6, 1 / 8, 5 / 48, 1 / 12, 1 / 16, 1 / 24, 1 / 32)
"""Bytes over elements that are tried."""


def worth(summary_bytes: int, key_width: int, slots: float, selected: float) -> float:
    """How good a cache with codes of so many bytes and slots for so many tokens is, to be compared."""
    return _SPEED * _at(slots / max(1, selected), HITS) - _at(summary_bytes / key_width, LOST)


def _at(place: float, curve: tuple[tuple[float, float], ...]) -> float:
    places, values = np.array(curve).T
    return float(np.interp(place, places, values))
