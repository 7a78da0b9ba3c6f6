"""How a history makes clusters."""

from __future__ import annotations

from dataclasses import dataclass

from .partition import FEWEST, MOST_ROOM


@dataclass(frozen=True)
class ClusterForm:
    """See the arguments of `Partition`, and of `AppendBuffer`."""

    size: int = 32
    capacity: int = 64
    threshold: float = 1.25
    append_buffer: int = 16
    number: int | None = None
    mapped: bool = False
    """Means lie in a file."""

    def most_clusters(self, tokens: int) -> int:
        """Clusters that so many tokens of a row are in at most, but for keys that lie as no model's do: many in one
        place, and each of the others alone."""
        return round(tokens * MOST_ROOM / self.capacity) + FEWEST
