"""KV caches on disk or in host memory for transformers models: `model.generate(..., past_key_values=DiskSwapCache(model))`."""

from .attach import detach
from .cache import OffloadCache
from .caches.disk_swap import DiskSwapCache
from .config import DiskSwapConfig, OffloadConfig
from .report import CacheReport
from .tuning.calibrate import calibrate

__all__ = [
    "CacheReport",
    "DiskSwapCache",
    "DiskSwapConfig",
    "OffloadCache",
    "OffloadConfig",
    "calibrate",
    "detach",
]
