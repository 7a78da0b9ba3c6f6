"""The fields of `ClusterCache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...config import SelectedShareConfig
from ...errors import ConfigError
from .partition import FEWEST, MOST_ROOM

# Sizes of clusters and buffer

USUAL_SIZE = 12
"""Keys a cluster, if there is room."""


@dataclass(frozen=True)
class ClusterForm:
    """Sizes of clusters and buffer: see the arguments of `Partition` and `AppendBuffer`."""

    size: int
    capacity: int
    threshold: float = 1.25
    append_buffer: int = 16
    join_every: int = 32
    """Tokens that leave the tail together, at least."""
    number: int | None = None
    mapped: bool = False
    """True if centroids are in a mapped file."""

    def together(self, group_size: int) -> int:
        """Tokens that leave the tail together: `join_every`, in complete groups."""
        return -(-max(1, self.join_every) // group_size) * group_size

    def places(self, group_size: int) -> int:
        """Room of a cluster on disk, in entries: `capacity`, in complete pages."""
        return -(-self.capacity // group_size) * group_size

    def most_clusters(self, tokens: int, group_size: int) -> int:
        """Upper bound on the clusters of a row's `tokens` tokens. It holds for any model's keys, but not for many equal
        keys with each other key far from all."""
        return round(tokens * MOST_ROOM / self.places(group_size)) + FEWEST

    def most_places(self, tokens: int, group_size: int) -> int:
        """Upper bound on the records that a row's `tokens` tokens reserve, in pools of two clusters each."""
        return 2 * self.places(group_size) // group_size * -(-self.most_clusters(tokens, group_size) // 2)


@dataclass(frozen=True)
class ClusterConfig(SelectedShareConfig):
    """The fields of all caches, and those of clusters. Sizes are tokens per sequence and layer; sizes of clusters and
    buffer are per KV head and layer."""

    stored_format: ClassVar[tuple[str, ...]] = (*SelectedShareConfig.stored_format, "cluster_capacity")
    kept_on_open: ClassVar[tuple[str, ...]] = (*SelectedShareConfig.kept_on_open, "cluster_size", "cluster_capacity")

    cluster_size: int | None = None
    """Average keys a cluster when many are clustered at once. None: half of `cluster_capacity`, or 12. Larger clusters
    lose needles and distort the next token's distribution; smaller ones take longer (docs/caches/cluster.md has
    figures). Clusters become larger if their disk space would exceed two and a half times the keys."""
    num_clusters: int | None = None
    """Clusters made from each call of many tokens, instead of clusters of `cluster_size`: at least two keys each, and
    no more than there is room for. None: by `cluster_size`."""
    cluster_capacity: int | None = None
    """Maximum keys a cluster, in complete pages of `group_size`; each cluster has this much room on disk. None: twice
    `cluster_size`."""
    split_threshold: float = 1.25
    """Split a cluster whose variance exceeds this multiple of its head's mean cluster variance at the last bulk
    clustering."""
    centroids: str = "memory"
    """Storage of the centroids: "memory", or "disk", in files that are mapped while they are used."""
    append_buffer: int = 16
    """Entries that may wait in memory until their clusters are read, in addition to the latest `join_every`. Steps
    attend to them as a part of `num_selected`."""
    join_every: int = 32
    """Tokens moved from the recent window into clusters at once, in complete pages of `group_size`."""
    remainder: bool = False
    """Estimate what the clusters that a step does not select would add to its attention, from their centroids. False:
    they are dropped, as in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster_size is None:
            if self.cluster_capacity is not None:
                self._at_least("cluster_capacity", 4)
            half = USUAL_SIZE if self.cluster_capacity is None else self.cluster_capacity // 2
            object.__setattr__(self, "cluster_size", half)
        self._at_least("cluster_size", 2)
        assert self.cluster_size is not None
        if self.cluster_capacity is None:
            object.__setattr__(self, "cluster_capacity", 2 * self.cluster_size)
        self._at_least("cluster_capacity", self.cluster_size)
        assert self.cluster_capacity is not None
        if self.cluster_capacity > MOST_ROOM * self.cluster_size:
            raise ConfigError(
                f"cluster_capacity must be at most {MOST_ROOM} times cluster_size ({self.cluster_size}), which is the "
                f"room on disk, got {self.cluster_capacity}: use {2 * self.cluster_size}"
            )
        if self.num_clusters is not None:
            self._at_least("num_clusters", 1)
        self._at_least("append_buffer", 0)
        self._at_least("join_every", 1)
        for name in ("cluster_size", "append_buffer", "join_every"):
            self._at_most(name, 4096)
        self._one_of("centroids", ("memory", "disk"))
        self._one_of("remainder", (True, False))
        if self.centroids == "disk" and self.encryption_key is not None:
            raise ConfigError(
                "centroids='disk' writes means of keys to the disk unencrypted, which encryption_key forbids: use "
                "centroids='memory'"
            )
        threshold = self.split_threshold
        if isinstance(threshold, bool) or not (isinstance(threshold, int | float) and 0 < threshold < float("inf")):
            raise ConfigError(f"split_threshold must be a number above 0, got {threshold!r}: use 1.25")

    @property
    def heads_apart(self) -> bool:
        return True

    @property
    def leave_together(self) -> int:
        return max(1, self.join_every)

    @property
    def clusters(self) -> ClusterForm:
        """The sizes of clusters and buffer."""
        assert self.cluster_size is not None and self.cluster_capacity is not None
        others = self.split_threshold, self.append_buffer, self.join_every, self.num_clusters, self.centroids == "disk"
        return ClusterForm(self.cluster_size, self.cluster_capacity, *others)
