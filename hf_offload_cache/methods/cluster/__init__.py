"""`ClusterCache`: DynaKV. Clusters of keys that follow a long generation."""

from .cache import ClusterCache as ClusterCache
from .config import ClusterConfig as ClusterConfig
