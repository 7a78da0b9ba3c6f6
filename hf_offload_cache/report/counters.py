"""What the thread that runs the model counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Counters:
    """What the model's thread counts while it decodes; all since construction or `reset`."""

    units_selected: int = 0
    units_resident: int = 0
    units_ready: int = 0
    records_read: int = 0
    """By who may read replicas in their place; and so many of them were."""
    records_compressed: int = 0
    unpack_seconds: float = 0.0
    look_bytes: int = 0
    """Of what predictors looked at before they chose."""
    tokens_visible: int = 0
    tokens_attended: int = 0
    stall_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    decode_stall_seconds: float = 0.0
    decode_flight_seconds: float = 0.0
    stall_seen: float = 0.0
    flight_seen: float = 0.0
    told: Callable[[], None] | None = None
    """Called when the next step has ended, once."""
    _on_devices: dict[torch.device, list[tuple[Callable[[int], None] | str, torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def attend(self, queries: int, held: int, entries: int) -> None:
        """So many queries, to each of which `held` tokens were visible, attended to `entries` as they were stored."""
        self.tokens_visible += queries * held
        self.tokens_attended += queries * entries

    def later(self, **numbers: torch.Tensor) -> None:
        """These numbers, () int64, come to the figures of these names at `fold`, so that nobody waits for a device."""
        for name, number in numbers.items():
            self._on_devices[number.device].append((name, number))

    def tell_later(self, told: Callable[[int], None], number: torch.Tensor) -> None:
        """`told` is told this number, () int64, at `fold`."""
        self._on_devices[number.device].append((told, number))

    def fold(self) -> None:
        """All that `later` was given is in the figures; waits once for each device."""
        if not self._on_devices:
            return
        import torch  # not above: the console says what is wrong with its arguments without it

        for counted in self._on_devices.values():
            who, numbers = zip(*counted, strict=True)
            for told, number in zip(who, torch.stack(numbers).tolist(), strict=True):
                if isinstance(told, str):
                    setattr(self, told, getattr(self, told) + number)
                else:
                    told(number)
        self._on_devices.clear()

    def end_step(self, decode_seconds: float | None, flight_seconds: float) -> None:
        """A step has ended, after `decode_seconds` (None: it was not one of decoding). `flight_seconds` is the
        prefetcher's; what came to it and to `stall_seconds` since the step before is of this one."""
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
