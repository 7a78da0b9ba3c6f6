"""How a history makes clusters."""

from __future__ import annotations

from dataclasses import dataclass

from .partition import FEWEST, MOST_ROOM


@dataclass(frozen=True)
class ClusterForm:
    """See the arguments of `Partition`, and of `AppendBuffer`."""

    size: int
    capacity: int
    threshold: float = 1.25
    append_buffer: int = 16
    join_every: int = 32
    """Tokens that leave the tail together, at least."""
    number: int | None = None
    mapped: bool = False
    """Means lie in a file."""

    def together(self, group_size: int) -> int:
        """Tokens that leave the tail together: `join_every`, in whole groups."""
        return -(-max(1, self.join_every) // group_size) * group_size

    def places(self, group_size: int) -> int:
        """That a cluster has on the disk: `capacity`, in whole pages."""
        return -(-self.capacity // group_size) * group_size

    def most_clusters(self, tokens: int, group_size: int) -> int:
        """Clusters that so many tokens of a row are in at most, but for keys that lie as no model's do: many in one
        place, and each of the others alone."""
        return round(tokens * MOST_ROOM / self.places(group_size)) + FEWEST

    def most_places(self, tokens: int, group_size: int) -> int:
        """Records of a store that so many tokens of a row have places in at most: of pools of two clusters each."""
        return 2 * self.places(group_size) // group_size * -(-self.most_clusters(tokens, group_size) // 2)
