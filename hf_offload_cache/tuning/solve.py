"""The greedy parameter solver (KVSwap, appendix A.4, figure 1): a pure function of tables and profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import BudgetError, ConfigError
from .tables import CompressionTable, IoProfile, ModelProfile, ReuseTable

Memory = Callable[[dict[str, Any], int, int], int]
"""Bytes that a cache with these fields holds at most, for a context (tokens a sequence) and a batch."""


@dataclass(frozen=True)
class Limits:
    """What the solver keeps within. Sizes are tokens a sequence and layer."""

    num_selected: int = 400
    """MG, the same in every row (appendix A.2)."""
    num_sinks: int = 4
    group_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Ascending; the last is G_max."""
    sigma_max: float = 32.0
    alpha: float = 0.15
    """Share of the I/O that need not be hidden. A step then waits for at most this share of its time."""
    delta: int = 100
    """By how much the reuse buffer grows when hiding fails."""
    first_capacity: int = 0
    """Reuse capacity that the search begins with. 0 is the paper's. More than that is taken only as far as σ then stays
    within `first_sigma`: what the look-ahead guesses wrong is read while the step waits, hidden or not, and slots
    make that less."""
    first_sigma: float = 0.0
    size_field: str = "rank"
    """What of a configuration the size of compact keys is: "rank", or "summary_bytes" of coded ones."""
    spend_rest: bool = True
    """Give what a solution leaves of its budget to the reuse buffer, at the same σ and G. Beyond the paper: it costs
    no quality, and saves reads."""

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
        """M: groups that a sequence reads in one layer and step at most, sinks included."""
        return -(-self.num_selected // group_size) + -(-self.num_sinks // group_size)


@dataclass(frozen=True)
class Solution:
    """The parameters for one (b, S), and what is expected of them. Bytes; seconds of one layer in one step."""

    batch: int
    context: int
    group_size: int
    size: int
    reuse_capacity: int
    sigma: float
    record_bytes: int
    """Of one group on the disk: the read unit."""
    groups: int
    """M, sinks included."""
    memory: int
    """The budget of this row."""
    planned_bytes: int
    """What of it is used at most."""
    reuse_rate: float
    io_seconds: float
    model_seconds: float
    hidden_share: float
    """Of the I/O, behind the model delay; 1 where all of it is."""
    hidden: bool
    """`hidden_share` is at least 1 - α."""

    @property
    def waiting_seconds(self) -> float:
        """I/O that sticks out behind the model delay."""
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

    From an empty reuse buffer on (or `Limits.first_capacity`): the smallest σ that fits, then the smallest group that
    hides a share 1 - α of the I/O. Where none does, the buffer grows by δ, which takes σ up, and the groups begin with
    the smallest again, until σ_max or the table's last capacity. Then the best that was seen is returned, with `hidden`
    False: the largest hidden share, and of equals the first, which has the smaller σ and C.

    `memory` must not fall when the size or the capacity grows. Raises `BudgetError`, with the least that would do,
    where not even σ_max without a reuse buffer fits.
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
            found = attempt(group_size, size, capacity)
            if best is None or found.hidden_share > best.hidden_share:
                best = found
            if found.hidden:
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
