"""`ClusterCache`: DynaKV. Clusters of keys that follow a long generation.

Where to find the paper:

* section 4.1, clusters are retrieved by their centroids: `ClusterPredictor.select`
* algorithm 1, prefill, NewCluster: `Partition.add`
* algorithm 1, decode, a new entry joins its nearest cluster, UpdateVar and UpdateStats: `ClusteredEntries.add`,
  `Partition.nearest`, `Partition.join`
* algorithm 1, delayed splits of the clusters that a step has read: `ClusterLayer.settle`, `ClusteredEntries.settle`,
  `Partition.to_split`, `Partition.split`
* algorithm 1, the buffer budget: `AppendBuffer`, `fullest`
* section 5.1, correlation-aware placement: `ClusterHistory.place`, `co_retrieved`, `chain`, `in_pools`
* section 5.2, two clusters of a pool grow towards each other: `ClusterPages`
* section 6.1, centroids on the disk, mapped while they are used: `Partition.will_need`
* section 6.2, cluster-aligned replacement: `ClusterAligned` in `fetch`
"""

from .append_buffer import AppendBuffer as AppendBuffer
from .cache import ClusterCache as ClusterCache
from .cache import ClusterLayer as ClusterLayer
from .config import ClusterConfig as ClusterConfig
from .config import ClusterForm as ClusterForm
from .entries import ClusteredEntries as ClusteredEntries
from .entries import fullest as fullest
from .history import HELD_BACK as HELD_BACK
from .history import ClusterHistory as ClusterHistory
from .pages import ClusterPages as ClusterPages
from .pages import in_order as in_order
from .partition import FEWEST as FEWEST
from .partition import Moments as Moments
from .partition import Partition as Partition
from .partition import chain as chain
from .partition import co_retrieved as co_retrieved
from .partition import halves as halves
from .partition import in_pools as in_pools
from .partition import k_means as k_means
from .partition import pairs as pairs
from .plan import streaming as streaming
from .predictor import ClusterPredictor as ClusterPredictor
