"""`ClusterCache`: DynaKV. Clusters of keys that adapt to a long generation.

A decoding step in reading order: `entries.py` adds new tokens to clusters (`add`), `predictor.py` selects clusters, and
`cache.py` attends to them and settles buffered entries (`settle`). For a step on a device, `on_device.py` does the
first and the last of these (`join`, `settle`). `partition.py` has the clusters themselves, their statistics and splits.
`new_clusters.py` orders a prompt's clusters on disk. `pages.py`, `arrivals.py` and `history.py` store the entries.
`plan.py` fits a budget.

Where to find the paper:

* section 4.1, equation 4, sizes n, centroids r and variances of the clusters: `Partition`, `Moments`
* algorithm 1 (section 4.2), line by line:
    * prefill, NewCluster: `NewClusters`, `Partition.add`, `k_means`, on a device `clusters_of_rows`; the buffers:
      `AppendBuffer`
    * load the top-k clusters by query-centroid similarity: `ClusterPredictor.select`
    * assign the new entry to its nearest cluster: `ClusteredEntries.add`, `Partition.nearest`, on a device
      `DeviceClusters.join`
    * UpdateVar, UpdateStats: `Partition.join`
    * the threshold tau and the flag Split: `Partition.to_split`, `ClusterConfig.split_threshold`
    * buffer the entry: `AppendBuffer.add`; AddEntry: `ClusteredEntries.settle`
    * delayed SplitCluster of the clusters that a step has read: `ClusterLayer.settle`, `ClusteredEntries.settle`,
      `Partition.parts`, `Partition.split`, `halves`
    * the buffer budget: `ClusterConfig.append_buffer`; the cluster with the fullest buffer: `fullest`
* section 5.1, clusters on disk: `PageWriter`; correlation-aware placement: `ClusterHistory.place`, `NewClusters.write`;
  equation 8: `co_retrieved`, then `pairs`, `chain` and `in_pools`
* section 5.2, dual-head layout: `ClusterPages`; the page-aligned buffer: `AppendBuffer`, `Settling`
* section 6.1, centroids on disk: `ClusterConfig.centroids`, mapped for their use: `Partition.will_need`,
  `Partition.rest`; the next layer's clusters are prefetched: `SelectiveCache.leave_attention` in `core`
* section 6.2, cluster-aligned replacement: `ClusterAligned`; updated clusters stay: `ClusterLayer.renewed`. Slots on a
  device are replaced by use: `ClusterLayer.by_use`

Differences from algorithm 1:

* Tokens join in batches (the field join_every), and over the host layers settle in turns.
* Every new entry is buffered first, because a page on disk is only rewritten after it was read.
* The flag is computed from the variance, which a joining key updates at once: `Partition.to_split`.
* The threshold tau of a head is not an input. It is 1.25 times (split_threshold) the mean variance of the head's
  clusters at the last bulk clustering.
* A cluster over capacity is split whatever its variance, and into more than two parts if they would be over capacity:
  `Partition.parts`.
* A variance splits no cluster once the head's clusters reserve 2.5 times the disk space of its keys: `Partition.roomy`.
* On a device a new cluster over capacity becomes equal runs of its keys, in the order of the sequence:
  `clusters_of_rows`.
* Over the buffer budget, as many of the fullest clusters as needed are settled (`fullest`), and only flagged ones are
  split. The paper always splits the fullest one.
* Shared clusters are closed: no key joins them, and they are not split (`Partition.nearest`, `Partition.close`).
"""

from .arrivals import AppendBuffer as AppendBuffer
from .cache import ClusterAligned as ClusterAligned
from .cache import ClusterCache as ClusterCache
from .cache import ClusterLayer as ClusterLayer
from .config import ClusterConfig as ClusterConfig
from .config import ClusterForm as ClusterForm
from .entries import ClusteredEntries as ClusteredEntries
from .entries import Settling as Settling
from .entries import fullest as fullest
from .history import HELD_BACK as HELD_BACK
from .history import ClusterHistory as ClusterHistory
from .new_clusters import NewClusters as NewClusters
from .new_clusters import chain as chain
from .new_clusters import clusters_of_rows as clusters_of_rows
from .new_clusters import co_retrieved as co_retrieved
from .new_clusters import in_pools as in_pools
from .new_clusters import pairs as pairs
from .on_device import DeviceClusters as DeviceClusters
from .pages import ClusterPages as ClusterPages
from .pages import PageWriter as PageWriter
from .pages import in_order as in_order
from .partition import FEWEST as FEWEST
from .partition import Moments as Moments
from .partition import Partition as Partition
from .partition import halves as halves
from .partition import k_means as k_means
from .plan import streaming as streaming
from .predictor import ClusterPredictor as ClusterPredictor
