"""KV caches on disk or in host memory for transformers models: `generate(..., past_key_values=DiskSwapCache(model))`.

Names are imported when first asked for, so that importing the package neither loads torch nor runs anything.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .caches.adapter import Adapter
    from .caches.disk_swap import DiskSwapCache
    from .caches.disk_swap_config import DiskSwapConfig
    from .config import OffloadConfig
    from .contexts.library import ContextLibrary
    from .contexts.verify import verify
    from .core.offload_cache import OffloadCache
    from .model.attach import detach
    from .report.cache_report import CacheReport
    from .tuning.calibrate import calibrate
    from .tuning.calibrate_budgets import calibrate_budgets
    from .tuning.tuner import tune

__all__ = [
    "Adapter",
    "CacheReport",
    "ContextLibrary",
    "DiskSwapCache",
    "DiskSwapConfig",
    "OffloadCache",
    "OffloadConfig",
    "calibrate",
    "calibrate_budgets",
    "detach",
    "tune",
    "verify",
]

_HOME = {
    "Adapter": "caches.adapter",
    "CacheReport": "report.cache_report",
    "ContextLibrary": "contexts.library",
    "DiskSwapCache": "caches.disk_swap",
    "DiskSwapConfig": "caches.disk_swap_config",
    "OffloadCache": "core.offload_cache",
    "OffloadConfig": "config",
    "calibrate": "tuning.calibrate",
    "calibrate_budgets": "tuning.calibrate_budgets",
    "detach": "model.attach",
    "tune": "tuning.tuner",
    "verify": "contexts.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
