"""KVSwap's parameter solver (appendix A, figure 1): the tables and profiles that it looks up, and the greedy search.

Pure functions of plain numbers, which go to JSON; nothing here measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import BudgetError, ConfigError

# The tables of the model (appendix A.1) and the profiles of the machine (appendix A.3)

@dataclass(frozen=True)
class ReuseTable:
    """Capacity of the reuse buffer to reuse rate, for each group size: a property of the model and of text.

    Lists under a group size correspond to `capacities`. A rate is the share of a step's selected groups that were in
    slots before it; `mean`, `least`, `most` and `deviation` are over the samples, each the mean of its layers and
    steps.
    """

    capacities: list[int]
    """Tokens per sequence and layer, ascending from 0."""
    mean: dict[int, list[float]]
    least: dict[int, list[float]]
    most: dict[int, list[float]]
    deviation: dict[int, list[float]]

    def rate(self, group_size: int, capacity: float) -> float:
        """Mean rate at a capacity (tokens), interpolated linearly; beyond the last, the last."""
        return float(np.interp(capacity, self.capacities, self.mean[group_size]))


@dataclass(frozen=True)
class CompressionTable:
    """Size of a compact key to the compression ratio σ and to the share kept: of the keys' energy for truncated ones,
    of the best selection's attention mass for coded ones."""

    key_bytes: int
    """Bytes of a token's full keys in one layer, all heads."""
    component_bytes: int
    """Bytes of one component of a truncated key; 1 for coded ones."""
    sizes: list[int]
    """Components of a truncated key, bytes of a coded one. Descending: σ ascends."""
    kept: list[float]
    """Share kept of the keys' energy or of the attention mass; the mean over layers."""
    least_kept: list[float]
    """The same for the worst layer."""

    def sigma(self, size: int) -> float:
        """Full key bytes per token over compact key bytes per token."""
        return self.key_bytes / (size * self.component_bytes)

    def enough(self, share: float) -> int:
        """The smallest size that keeps this share of what the largest keeps."""
        return min(size for size, kept in zip(self.sizes, self.kept, strict=True) if kept >= share * self.kept[0])

    def up_to(self, size: int) -> CompressionTable:
        """The table without larger sizes."""
        first = next(place for place, each in enumerate(self.sizes) if each <= size)
        parts = (self.sizes[first:], self.kept[first:], self.least_kept[first:])
        return CompressionTable(self.key_bytes, self.component_bytes, *parts)


@dataclass(frozen=True)
class IoProfile:
    """Seconds of a cold read of random records on this disk, with nothing else going on.

    A read's time depends on batch, selection and reuse only through the number of records, so it is measured over that
    number, and serves all of T_io(b, MG, G, C).
    """

    counts: dict[int, list[int]]
    """Records per read, by the size of a record in bytes; ascending."""
    seconds: dict[int, list[float]]
    """Corresponds to `counts`."""
    record_bytes: dict[int, int]
    """Bytes of one layer's record, by the tokens of a group."""

    def time(self, group_size: int, records: float) -> float:
        """Seconds of one layer's reads in one step; interpolated linearly, and extrapolated after the last."""
        size = self.record_bytes[group_size]
        return max(0.0, along([0, *self.counts[size]], np.array([0.0, *self.seconds[size]]), records).item())


@dataclass(frozen=True)
class ModelProfile:
    """Seconds of one decoder block in a decoding step without I/O: T_model(b, MG, C, S, σ).

    Attention and the feed-forward part depend on b, prediction on b, S and σ, the reuse buffer on b and C (appendix
    A.3). The sum of two grids therefore replaces the full product.
    """

    batches: list[int]
    contexts: list[int]
    sizes: list[int]
    """Sizes of compact keys, as in `CompressionTable`."""
    seconds: list[list[list[float]]]
    """By batch, context and size, at the capacity where `reuse_seconds` is zero. All axes ascend."""
    capacities: list[int]
    reuse_seconds: list[list[float]]
    """By batch and capacity: seconds added."""

    def time(self, batch: int, context: int, size: int, capacity: int) -> float:
        """Interpolated linearly along each axis; extrapolated beyond its last point."""
        block: Any = np.array(self.seconds)
        for axis, at in ((self.batches, batch), (self.contexts, context), (self.sizes, size)):
            block = along(axis, block, at)
        reuse: Any = np.array(self.reuse_seconds)
        for axis, at in ((self.batches, batch), (self.capacities, capacity)):
            reuse = along(axis, reuse, at)
        return max(0.0, (block + reuse).item())


def along(axis: Sequence[float], values: np.ndarray, at: float) -> np.ndarray:
    """`values` (n, ...) at a position of their first axis, whose n points ascend: interpolated linearly between two
    points, the first value before the first point, extrapolated after the last."""
    if len(axis) == 1:
        return values[0]
    right = int(np.clip(np.searchsorted(axis, at), 1, len(axis) - 1))
    share = max(0.0, (at - axis[right - 1]) / (axis[right] - axis[right - 1]))
    result: np.ndarray = values[right - 1] + share * (values[right] - values[right - 1])
    return result


# The search (appendix A.4)

Memory = Callable[[dict[str, Any], int, int], int]
"""Upper bound on the bytes of a cache with these fields, for a context (tokens per sequence) and a batch."""


@dataclass(frozen=True)
class Limits:
    """The solver's limits. Sizes are tokens per sequence and layer."""

    num_selected: int = 400
    """MG, the same in every row (appendix A.2)."""
    num_sinks: int = 4
    group_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Ascending; the last is G_max."""
    sigma_max: float = 32.0
    alpha: float = 0.15
    """Share of the I/O that need not be hidden. A step then waits for at most this share of its time."""
    delta: int = 100
    """Growth of the reuse buffer if hiding fails."""
    first_capacity: int = 0
    """Reuse capacity at which the search begins. 0 is the paper's. A larger one is used only while σ stays within
    `first_sigma`: reads for wrong guesses of the look-ahead make the step wait, hidden or not, and slots reduce
    them."""
    first_sigma: float = 0.0
    size_field: str = "rank"
    """Field with the size of compact keys: "rank", or "summary_bytes" for coded ones."""
    spend_rest: bool = True
    """Give the remaining budget to the reuse buffer, at the same σ and G. Beyond the paper: it costs no quality, and
    saves reads."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"alpha must be at least 0 and below 1, got {self.alpha}: use 0.15")
        if self.delta < 1:
            raise ConfigError(f"delta must be at least 1 token, got {self.delta}: use 100")
        if not self.sigma_max > 0:
            raise ConfigError(f"sigma_max must be above 0, got {self.sigma_max}: use 32")
        if not self.group_sizes or list(self.group_sizes) != sorted(set(self.group_sizes)):
            raise ConfigError(f"group_sizes must ascend, got {self.group_sizes}: use (4, 8, 16)")

    def groups(self, group_size: int) -> int:
        """M: upper bound on the groups that a sequence reads in one layer and step, sinks included."""
        return -(-self.num_selected // group_size) + -(-self.num_sinks // group_size)


@dataclass(frozen=True)
class Solution:
    """The parameters for one (b, S), and the expected costs. Bytes; seconds of one layer in one step."""

    batch: int
    context: int
    group_size: int
    size: int
    reuse_capacity: int
    sigma: float
    record_bytes: int
    """Bytes of one group on the disk: the read unit."""
    groups: int
    """M, sinks included."""
    memory: int
    """The budget of this row."""
    planned_bytes: int
    """Upper bound on its use."""
    reuse_rate: float
    io_seconds: float
    model_seconds: float
    hidden_share: float
    """Share of the I/O hidden behind the model delay."""
    hidden: bool
    """`hidden_share` is at least 1 - α."""

    @property
    def waiting_seconds(self) -> float:
        """I/O beyond the model delay."""
        return max(0.0, self.io_seconds - self.model_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return {**dataclasses.asdict(self), "waiting_seconds": self.waiting_seconds}


def solve(
    batch: int,
    context: int,
    budget: int,
    reuse: ReuseTable,
    compression: CompressionTable,
    io: IoProfile,
    model: ModelProfile,
    memory: Memory,
    limits: Limits,
) -> Solution:
    """The solution for `batch` sequences of `context` tokens in `budget` bytes.

    Beginning with an empty reuse buffer (or `Limits.first_capacity`): the smallest σ that fits, then the smallest group
    that hides a share 1 - α of the I/O. If none does, the buffer grows by δ, which raises σ, and the groups begin with
    the smallest again, until σ_max or the table's last capacity. Then the best attempt is returned, with `hidden`
    False: the largest hidden share, and among equals the first, which has the smaller σ and C.

    `memory` must not fall when the size or the capacity grows. If not even σ_max without a reuse buffer fits, raises
    `BudgetError` with the required memory.
    """
    allowed = [size for size in compression.sizes if compression.sigma(size) <= limits.sigma_max]
    sizes = allowed or compression.sizes[:1]

    def planned(group_size: int, size: int, capacity: int) -> int:
        return memory(_fields(limits, group_size, size, capacity), context, batch)

    def attempt(group_size: int, size: int, capacity: int) -> Solution:
        rate = reuse.rate(group_size, capacity)
        reading = io.time(group_size, batch * limits.groups(group_size) * (1 - rate))
        working = model.time(batch, context, size, capacity)
        share = 1.0 if reading <= working else working / reading
        return Solution(
            batch, context, group_size, size, capacity, compression.sigma(size), io.record_bytes[group_size],
            limits.groups(group_size), budget, planned(group_size, size, capacity), rate, reading, working, share,
            share >= 1 - limits.alpha,
        )  # fmt: skip

    def smallest(group_size: int, capacity: int) -> int | None:
        """The size of the smallest σ that fits."""
        return next((size for size in sizes if planned(group_size, size, capacity) <= budget), None)

    def begins(capacity: int) -> bool:
        size = smallest(limits.group_sizes[0], capacity)
        return size is not None and compression.sigma(size) <= limits.first_sigma

    best: Solution | None = None
    capacities = range(0, reuse.capacities[-1] + 1, limits.delta)
    first = next((c for c in reversed(capacities) if 0 < c <= limits.first_capacity and begins(c)), 0)
    capacities = range(first, reuse.capacities[-1] + 1, limits.delta)
    for capacity in capacities:
        fitted = False
        for group_size in limits.group_sizes:
            size = smallest(group_size, capacity)
            if size is None:
                continue
            fitted = True
            tried = attempt(group_size, size, capacity)
            if best is None or tried.hidden_share > best.hidden_share:
                best = tried
            if tried.hidden:
                break
        if not fitted or (best is not None and best.hidden):
            break
    if best is None:
        least = min(planned(group_size, sizes[-1], 0) for group_size in limits.group_sizes)
        raise BudgetError(
            f"memory: {budget:,} bytes are too little for {batch} sequences of {context:,} tokens; at a compression of "
            f"{compression.sigma(sizes[-1]):.0f} without a reuse buffer it takes {least:,}: allow that, or take a "
            "shorter context"
        )
    if limits.spend_rest:
        fits = [c for c in capacities if c >= best.reuse_capacity and planned(best.group_size, best.size, c) <= budget]
        spent = attempt(best.group_size, best.size, fits[-1])
        if spent.hidden_share >= best.hidden_share:
            best = spent
    return best


def _fields(limits: Limits, group_size: int, size: int, capacity: int) -> dict[str, Any]:
    return {
        "num_selected": limits.num_selected,
        "group_size": group_size,
        limits.size_field: size,
        "reuse_capacity": capacity,
    }
