"""`ClusterCache`: DynaKV. Clusters of keys that follow a long generation."""

from .cache import ClusterCache as ClusterCache
from .cache import ClusterLayer as ClusterLayer
from .config import ClusterConfig as ClusterConfig
from .config import ClusterForm as ClusterForm
from .entries import ClusteredEntries as ClusteredEntries
from .entries import fullest as fullest
from .history import HELD_BACK as HELD_BACK
from .history import ClusterHistory as ClusterHistory
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
