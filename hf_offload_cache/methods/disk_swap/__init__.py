"""`DiskSwapCache`: KVSwap. Compact keys in memory rank the groups on disk."""

from .cache import DiskSwapCache as DiskSwapCache
from .config import DiskSwapConfig as DiskSwapConfig
