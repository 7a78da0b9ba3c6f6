"""Counts of decoding, made by the thread that runs the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


MOST_WAITING = 2048
"""Numbers on devices from which on the end of a step adds them to the counts, for which it waits."""


@dataclass
class Counters:
    """Counts since construction or `reset`; for the model's thread. Complete after `fold`."""

    units_selected: int = 0
    units_resident: int = 0
    units_ready: int = 0
    records_read: int = 0
    """Records read by layers that have 4-bit copies."""
    records_compressed: int = 0
    """Records among `records_read` that were read as copies."""
    unpack_seconds: float = 0.0
    look_bytes: int = 0
    """Bytes that predictors read before they selected."""
    tokens_visible: int = 0
    tokens_attended: int = 0
    estimated_millionths: int = 0
    """Sum of the shares of attention mass that steps estimated, over `times_estimated` layers and steps."""
    times_estimated: int = 0
    lost_millionths: int = 0
    """Sum of the shares of attention mass that steps lost, over `times_lost` layers and steps."""
    times_lost: int = 0
    stall_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    decode_stall_seconds: float = 0.0
    decode_flight_seconds: float = 0.0
    steps_ahead: int = 0
    """Steps of one token in which layers could begin reads in the layer before."""
    stall_seen: float = 0.0
    flight_seen: float = 0.0
    told: Callable[[], None] | None = None
    """Called once, when the next step has ended."""
    _on_devices: dict[torch.device, list[tuple[Callable[..., None] | str, tuple[torch.Tensor, ...]]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def attend(self, queries: int, visible: int, entries: int) -> None:
        """Count queries that attended to `entries` stored tokens each, of `visible` ones."""
        self.tokens_visible += queries * visible
        self.tokens_attended += queries * entries

    def count_ready(self, units: int) -> None:
        """Count selected units that are ready when a step needs them. Those that had to be read are not resident."""
        self.units_selected += units
        self.units_resident += units
        self.units_ready += units

    def later(self, **numbers: torch.Tensor) -> None:
        """Add numbers, () int64, to the counts of these names at `fold`, so that nobody waits for a device now."""
        for name, number in numbers.items():
            self._on_devices[number.device].append((name, (number,)))

    def tell_later(self, told: Callable[[int], None], number: torch.Tensor) -> None:
        """Call `told` with this number, () int64, or the sum of these, (n,), at `fold`."""
        self._on_devices[number.device].append((lambda numbers: told(int(numbers.sum())), (number,)))

    def lost_later(self, lost: torch.Tensor, queries: int) -> None:
        """Count, at `fold`, a layer's step in which so many `queries`, each of an attention mass of 1, lost the masses
        (n,) float32 together."""

        def count(masses: torch.Tensor) -> None:
            self.lost_millionths += round(float(masses.sum()) / queries * 1e6)

        self.times_lost += 1
        self._on_devices[lost.device].append((count, (lost,)))

    def estimated_later(self, weight: torch.Tensor, logarithm: torch.Tensor) -> None:
        """Count, at `fold`, a layer's step that estimated a part of each softmax: logarithms of that part and of the
        softmax's sum, (B, H) float32 each. The share of a head with a NaN is 0."""

        def count(weights: torch.Tensor, logarithms: torch.Tensor) -> None:
            self.estimated_millionths += round(float((weights - logarithms).exp().nan_to_num().mean()) * 1e6)

        self.times_estimated += 1
        self._on_devices[weight.device].append((count, (weight, logarithm)))

    def fold(self) -> None:
        """Add everything given to `later`; waits once for each device."""
        if not self._on_devices:
            return
        import torch  # here, so that the console checks its arguments without it

        for counted in self._on_devices.values():
            every = [number.view(-1).view(torch.uint8) for _, numbers in counted for number in numbers]
            parts = iter(torch.cat(every).cpu().split([len(part) for part in every]))
            for told, numbers in counted:
                values = [next(parts).clone().view(number.dtype) for number in numbers]  # a copy is aligned
                if isinstance(told, str):
                    setattr(self, told, getattr(self, told) + int(values[0].sum()))
                else:
                    told(*values)
        self._on_devices.clear()

    def begin_step(self, flight_seconds: float) -> None:
        """Begin a decoding step now: what was counted since the last step belongs to none. `flight_seconds`: the
        prefetcher's."""
        self.stall_seen, self.flight_seen = self.stall_seconds, flight_seconds

    def end_step(self, decode_seconds: float | None, flight_seconds: float) -> None:
        """Count a step that took `decode_seconds` (None: not a decoding step).

        Increases of the prefetcher's `flight_seconds` and of `stall_seconds` since the last step belong to this one.
        """
        if sum(map(len, self._on_devices.values())) > MOST_WAITING:
            self.fold()
        told, self.told = self.told, None
        if told is not None:
            told()
        if decode_seconds is not None:
            self.decode_steps += 1
            self.decode_seconds += decode_seconds
            self.decode_stall_seconds += self.stall_seconds - self.stall_seen
            self.decode_flight_seconds += flight_seconds - self.flight_seen
        self.stall_seen, self.flight_seen = self.stall_seconds, flight_seconds

    @property
    def overlap(self) -> float | None:
        """`CacheReport.overlap`."""
        if self.decode_flight_seconds <= 0:
            return None
        return min(1.0, max(0.0, 1 - self.decode_stall_seconds / self.decode_flight_seconds))
