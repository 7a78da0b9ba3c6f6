"""Attention sinks: the first tokens of a sequence, which every step attends to whatever a predictor selects."""

from __future__ import annotations

import numpy as np
import torch


def sink_units(num_sinks: int, unit_size: int, padded: bool) -> int:
    """Maximum units a row that contain sinks. A padded row's first token may lie anywhere in a unit."""
    early = unit_size - 1 if padded and num_sinks else 0
    return -(-(num_sinks + early) // unit_size)


def with_sinks(
    importance: np.ndarray, num_sinks: int, unit_size: int, visible: torch.Tensor | None = None
) -> np.ndarray:
    """`importance` (rows, units), changed in place: units with sinks rank above all, units of padding below all.

    Units are in the order of the sequence. `visible` (B or 1, at least units * unit_size) marks the tokens that are not
    padding; each sequence has the same number of rows.
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
    """Positions (rows, count) of the largest of values (rows, n), unordered, in a new array."""
    first = values.shape[1] - count
    return values.argpartition(first if count else first - 1, 1)[:, first:]
