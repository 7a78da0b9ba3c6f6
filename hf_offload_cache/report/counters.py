"""What the thread that runs the model counts."""

from __future__ import annotations

from dataclasses import dataclass


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
    mass_captured: float = 0.0
    mass_steps: int = 0
    stall_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    decode_stall_seconds: float = 0.0
    decode_flight_seconds: float = 0.0
    stall_seen: float = 0.0
    flight_seen: float = 0.0

    def attend(self, queries: int, held: int, entries: int) -> None:
        """So many queries, to each of which `held` tokens were visible, attended to `entries` as they were stored."""
        self.tokens_visible += queries * held
        self.tokens_attended += queries * entries

    def end_step(self, decode_seconds: float | None, flight_seconds: float) -> None:
        """A step has ended, after `decode_seconds` (None: it was not one of decoding). `flight_seconds` is the
        prefetcher's; what came to it and to `stall_seconds` since the step before is of this one."""
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
