"""What a user may set of `ClusterCache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...config import SelectedShareConfig
from ...errors import ConfigError
from .partition import FEWEST, MOST_ROOM

# How a history makes clusters

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


@dataclass(frozen=True)
class ClusterConfig(SelectedShareConfig):
    """The fields that all caches have, and those of clusters. Sizes in tokens a sequence and layer, or, of clusters and
    what waits for them, a key head and layer."""

    stored_format: ClassVar[tuple[str, ...]] = (*SelectedShareConfig.stored_format, "cluster_capacity")
    kept_on_open: ClassVar[tuple[str, ...]] = (*SelectedShareConfig.kept_on_open, "cluster_size", "cluster_capacity")

    cluster_size: int | None = None
    """Keys a cluster, on average, where many are clustered at once. None: half of `cluster_capacity`, or 12:
    of larger ones hidden facts and the next token's distribution suffer, smaller ones take longer
    (docs/caches/cluster.md has figures). They are larger where the disk would have to have room for more than two and a
    half times the keys."""
    num_clusters: int | None = None
    """Clusters that each call of many tokens is made into, instead of those of `cluster_size`: two keys for each
    at least, and no more than there is room for. None: by `cluster_size`."""
    cluster_capacity: int | None = None
    """Keys a cluster at most, in whole pages of `group_size`: on the disk each has room for as many. None: twice
    `cluster_size`."""
    split_threshold: float = 1.25
    """How far apart keys of a cluster may be until it is split: its variance over the mean of its key head's clusters
    as many tokens came last."""
    centroids: str = "memory"
    """Where the means of clusters are: "memory", or "disk", in files that are mapped while they are used."""
    append_buffer: int = 16
    """Entries that may wait in memory until their clusters are read anyhow, beside those that have just come
    together. What waits is attended to, and is a part of `num_selected`."""
    join_every: int = 32
    """Tokens that leave the latest ones together and join clusters, in whole pages of `group_size`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster_size is None:
            if self.cluster_capacity is not None:
                self._at_least("cluster_capacity", 4)
            half = 12 if self.cluster_capacity is None else self.cluster_capacity // 2
            object.__setattr__(self, "cluster_size", half)
        self._at_least("cluster_size", 2)
        assert self.cluster_size is not None
        if self.cluster_capacity is None:
            object.__setattr__(self, "cluster_capacity", 2 * self.cluster_size)
        self._at_least("cluster_capacity", self.cluster_size)
        assert self.cluster_capacity is not None
        if self.cluster_capacity > MOST_ROOM * self.cluster_size:
            raise ConfigError(
                f"cluster_capacity must be at most {MOST_ROOM} times cluster_size ({self.cluster_size}), for the "
                f"disk has room for that many, got {self.cluster_capacity}: use {2 * self.cluster_size}"
            )
        if self.num_clusters is not None:
            self._at_least("num_clusters", 1)
        self._at_least("append_buffer", 0)
        self._at_least("join_every", 1)
        for name in ("cluster_size", "append_buffer", "join_every"):
            self._at_most(name, 4096)
        self._one_of("centroids", ("memory", "disk"))
        if self.centroids == "disk" and self.encryption_key is not None:
            raise ConfigError(
                "centroids='disk' leaves means of keys on the disk as they are, and encryption_key wants nothing to be "
                "readable there: use centroids='memory'"
            )
        threshold = self.split_threshold
        if isinstance(threshold, bool) or not (isinstance(threshold, int | float) and 0 < threshold < float("inf")):
            raise ConfigError(f"split_threshold must be a number above 0, got {threshold!r}: use 1.25")

    @property
    def leave_together(self) -> int:
        return max(1, self.join_every)

    @property
    def clusters(self) -> ClusterForm:
        """How a history makes clusters."""
        assert self.cluster_size is not None and self.cluster_capacity is not None
        how = self.split_threshold, self.append_buffer, self.join_every, self.num_clusters, self.centroids == "disk"
        return ClusterForm(self.cluster_size, self.cluster_capacity, *how)
