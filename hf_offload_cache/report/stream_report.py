"""What `stream_context` did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StreamReport:
    """A cell is a chunk of tokens in one layer; those of the first layer, always computed, are not counted."""

    level: str | None
    """What is kept of what was streamed; "lossless": all. None: nothing was."""
    tokens: int
    """Filled in."""
    cells: int
    computed: int
    streamed: int
    cancelled: int
    """Computing overtook them on their way."""
    overtaken: int
    """They had come, and were computed all the same."""
    stolen: int
    """On their way for too long, and computed."""
    lost: int
    """They could not be had: missing, damaged, or of a server that failed."""
    recomputed_tokens: int
    """Computed a second time, since what was to lie above did not come."""
    received_bytes: int
    bandwidth: float | None
    """Bytes a second, between the first and the last that came."""
    seconds: float
    """From the call to the filled cache."""
    computing_seconds: float
    attended: float
    """Share of the blocks of keys before them that what was computed attended to; below 1.0 with `sparse`."""
    whole: str | None
    """Why it was prefilled whole, without the network; None: it was not."""
    trouble: tuple[str, ...]
    first_token_seconds: float | None = None
    """From the call to the end of the first forward of what follows (TTFT); None: there was none yet."""
    unavailable: int = 0
    """Of the cells lost, those that the store refused or failed to give: they may be there."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.whole:
            return f"{self.tokens:,} tokens prefilled in {self.seconds:.2f} s: {self.whole}"
        rate = "" if self.bandwidth is None else f", {self.bandwidth * 8e-6:.1f} Mbit/s"
        text = (
            f"{self.tokens:,} tokens in {self.seconds:.2f} s: {self.computed:,} cells computed, {self.streamed:,} "
            f"streamed ({self.level}, {self.received_bytes:,} bytes{rate})"
        )
        if self.attended < 1:
            text += f", computing attended to {self.attended:.0%} of what came before"
        if self.first_token_seconds is not None:
            text += f", first token after {self.first_token_seconds:.2f} s"
        others = {name: getattr(self, name) for name in ("cancelled", "overtaken", "stolen", "lost")}
        return text + "".join(f", {count:,} {name}" for name, count in others.items() if count)
