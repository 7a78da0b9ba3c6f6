"""The first tokens of a sequence, which are attended to whatever a predictor says."""

from __future__ import annotations

import numpy as np
import torch


def sink_units(num_sinks: int, unit_size: int, padded: bool) -> int:
    """Units a row that the sinks may lie in. Those of a padded row may begin anywhere in a unit."""
    early = unit_size - 1 if padded and num_sinks else 0
    return -(-(num_sinks + early) // unit_size)


def with_sinks(
    importance: np.ndarray, num_sinks: int, unit_size: int, visible: torch.Tensor | None = None
) -> np.ndarray:
    """`importance` (rows, units), in place, of units in the order of the sequence: those with sinks are above all,
    those of padding alone below all.

    `visible` (B or 1, at least units * unit_size) says what is no padding; each sequence has as many rows.
    """
    if visible is None:
        importance[:, : -(-num_sinks // unit_size)] = np.inf
        return importance
    rows, units = importance.shape
    tokens = visible[:, : units * unit_size].cpu().numpy()
    tokens = np.repeat(tokens, rows // len(tokens), 0)
    importance[~tokens.reshape(rows, units, unit_size).any(-1)] = -np.inf
    positions = tokens.argmax(-1)[:, None] + np.arange(min(num_sinks, tokens.shape[1]))
    np.put_along_axis(importance, positions.clip(max=tokens.shape[1] - 1) // unit_size, np.inf, 1)
    return importance


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Positions (rows, count) of the largest of values (rows, n), in no order; the caller's own."""
    first = values.shape[1] - count
    return values.argpartition(first if count else first - 1, 1)[:, first:]
