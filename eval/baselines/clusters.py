"""Clusters that do not follow what is decoded as `ClusterCache`'s do: what adapting them is compared with (DynaKV,
section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_offload_cache.history import places_within
from hf_offload_cache.methods.cluster import ClusterCache, ClusterConfig, ClusterHistory, ClusterLayer, Partition

WINDOW = 256
"""Decoded tokens that `LocalClusterCache` makes clusters of at a time."""


class StaticPartition(Partition):
    """Clusters stay what the prompt made them: new keys join the nearest one, whose centroid does not move. A cluster
    that is full goes on in another one of the same centroid, with the later half of its tokens."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.most_room = np.inf  # of the prompt's keys there may be as many clusters as others come to have

    def join(self, keys: np.ndarray, clusters: np.ndarray) -> None:
        before = self.centroids.copy()
        super().join(keys, clusters)
        self.centroids[:] = before

    @property
    def to_split(self) -> np.ndarray:
        return (self.counts > self.capacity) & ~self.closed

    def nearest(self, keys: np.ndarray) -> np.ndarray:
        """Nearest cluster of each key; of several with one centroid the last, which has room."""
        found = super().nearest(keys)
        own = self.centroids
        for row, clusters in enumerate(found):
            for place, cluster in enumerate(clusters.tolist()):
                if cluster >= 0:
                    alike = (own[row] == own[row, cluster]).all(1) & (self.counts[row] > 0)
                    found[row, place] = alike.nonzero()[0][-1]
        return found

    def parts(self, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """In the order of the sequence."""
        return (places_within(counts) >= np.repeat(np.minimum(self.capacity, counts - 1), counts)).astype(np.int64)

    def split(
        self, rows: np.ndarray, clusters: np.ndarray, keys: np.ndarray, counts: np.ndarray, parts: np.ndarray
    ) -> np.ndarray:
        before = self.centroids[rows, clusters]
        numbers = super().split(rows, clusters, keys, counts, parts)
        self.centroids[np.repeat(rows, counts), numbers] = np.repeat(before, counts, 0)
        return numbers


@dataclass(frozen=True)
class LocalClusterConfig(ClusterConfig):
    """Tokens wait in the tail until there is a window of them, which is made into clusters of its own."""

    @property
    def leave_together(self) -> int:
        return max(WINDOW, super().leave_together)


class LocalClusterLayer(ClusterLayer):
    """See `LocalClusterCache`. What waits in the tail is among what a step attends to, as what waits for its cluster is
    of the others."""

    @property
    def budget(self) -> int:
        group = self.history.form.group_size
        waits = max(0, self.history.recent.shape[1] - self.config.num_recent - group)
        return max(1, super().budget - waits // group)


class StaticClusterHistory(ClusterHistory):
    partition_class = StaticPartition


class StaticClusterLayer(ClusterLayer):
    history_class = StaticClusterHistory


class StaticClusterCache(ClusterCache):
    """PQCache-like: clusters of the prompt alone, to which what is decoded is added."""

    layer_class = StaticClusterLayer


class LocalClusterCache(ClusterCache):
    """ClusterKV-like: what is decoded is clustered by itself, a window at a time; older clusters stay."""

    layer_class = LocalClusterLayer
    config_class = LocalClusterConfig
