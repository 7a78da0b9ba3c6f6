"""What tuning looks up (KVSwap, appendix A.1 and A.3): two tables of the model, two profiles of the machine.

Plain numbers that go to JSON; nothing here measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class _Plain:
    """To JSON by field name."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class ReuseTable(_Plain):
    """Capacity of the reuse buffer to reuse rate, for each group size: a property of the model and of text.

    Lists under a group size go with `capacities`. A rate is the share of a step's selected groups that lay in slots
    before it; `mean`, `least`, `most` and `deviation` are over the samples, each the mean of its layers and steps.
    """

    capacities: list[int]
    """Tokens a sequence and layer, ascending from 0."""
    mean: dict[int, list[float]]
    least: dict[int, list[float]]
    most: dict[int, list[float]]
    deviation: dict[int, list[float]]

    def rate(self, group_size: int, capacity: float) -> float:
        """The mean rate at a capacity (tokens), between two measured ones in proportion; beyond the last, the last."""
        return float(np.interp(capacity, self.capacities, self.mean[group_size]))


@dataclass(frozen=True)
class CompressionTable(_Plain):
    """Size of a compact key to the compression ratio σ and to what such keys keep: truncated ones of the keys' energy,
    coded ones of the attention mass that the best choice has."""

    key_bytes: int
    """Of a token's full keys in one layer, all heads."""
    component_bytes: int
    """Of one component of a truncated key; 1 for coded ones."""
    sizes: list[int]
    """Components of a truncated key, bytes of a coded one. Descending: σ ascends."""
    kept: list[float]
    """Share of the keys' energy in so many columns, or of the attention mass; the mean over layers."""
    least_kept: list[float]
    """The same of the worst layer."""

    def sigma(self, size: int) -> float:
        """Full key bytes a token over compact key bytes a token."""
        return self.key_bytes / (size * self.component_bytes)

    def enough(self, share: float) -> int:
        """The least size that keeps this share of what the largest keeps."""
        return min(size for size, kept in zip(self.sizes, self.kept, strict=True) if kept >= share * self.kept[0])

    def up_to(self, size: int) -> CompressionTable:
        """Without what is larger."""
        first = next(place for place, each in enumerate(self.sizes) if each <= size)
        parts = (self.sizes[first:], self.kept[first:], self.least_kept[first:])
        return CompressionTable(self.key_bytes, self.component_bytes, *parts)


@dataclass(frozen=True)
class IoProfile(_Plain):
    """Seconds that a cold read of so many random records takes on this disk, nothing else going on.

    A read's time depends on batch, selection and reuse only through the number of records, so it is measured over
    that number, and serves all of T_io(b, MG, G, C).
    """

    counts: dict[int, list[int]]
    """Records a read, by the size of a record in bytes; ascending."""
    seconds: dict[int, list[float]]
    """Goes with `counts`."""
    record_bytes: dict[int, int]
    """Bytes of one layer's record, by the tokens of a group."""

    def time(self, group_size: int, records: float) -> float:
        """Seconds of one layer's reads in one step; between two measured numbers in proportion, and so on after the
        last."""
        size = self.record_bytes[group_size]
        return max(0.0, along([0, *self.counts[size]], np.array([0.0, *self.seconds[size]]), records).item())


@dataclass(frozen=True)
class ModelProfile(_Plain):
    """Seconds of one decoder block in a decoding step without I/O: T_model(b, MG, C, S, σ).

    Attention and the feed-forward part depend on b, prediction on b, S and σ, the reuse buffer on b and C (appendix
    A.3): so two grids, whose sum it is, stand for the full product.
    """

    batches: list[int]
    contexts: list[int]
    sizes: list[int]
    """Of compact keys, as in `CompressionTable`."""
    seconds: list[list[list[float]]]
    """By batch, context and size, at the capacity where `reuse_seconds` is zero. All axes ascend."""
    capacities: list[int]
    reuse_seconds: list[list[float]]
    """By batch and capacity: what is added."""

    def time(self, batch: int, context: int, size: int, capacity: int) -> float:
        """Between grid points in proportion along each axis; beyond the last point of an axis, straight on."""
        block: Any = np.array(self.seconds)
        for axis, at in ((self.batches, batch), (self.contexts, context), (self.sizes, size)):
            block = along(axis, block, at)
        reuse: Any = np.array(self.reuse_seconds)
        for axis, at in ((self.batches, batch), (self.capacities, capacity)):
            reuse = along(axis, reuse, at)
        return max(0.0, (block + reuse).item())


def along(axis: Sequence[float], values: np.ndarray, at: float) -> np.ndarray:
    """`values` (n, ...) at a position of their first axis, whose n points ascend: in proportion between two points,
    the first value before the first point, straight on after the last."""
    if len(axis) == 1:
        return values[0]
    right = int(np.clip(np.searchsorted(axis, at), 1, len(axis) - 1))
    share = max(0.0, (at - axis[right - 1]) / (axis[right] - axis[right - 1]))
    result: np.ndarray = values[right - 1] + share * (values[right] - values[right - 1])
    return result
