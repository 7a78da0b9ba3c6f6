"""KV caches on disk or in host memory for transformers models: `generate(..., past_key_values=DiskSwapCache(model))`.

Names are imported when first asked for, so that importing the package neither loads torch nor runs anything.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import Adapter
    from .attach import detach
    from .cache import OffloadCache
    from .caches.disk_swap import DiskSwapCache
    from .config import DiskSwapConfig, OffloadConfig
    from .contexts.library import ContextLibrary
    from .contexts.verify import verify
    from .report import CacheReport
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
    "Adapter": "adapter",
    "CacheReport": "report",
    "ContextLibrary": "contexts.library",
    "DiskSwapCache": "caches.disk_swap",
    "DiskSwapConfig": "config",
    "OffloadCache": "cache",
    "OffloadConfig": "config",
    "calibrate": "tuning.calibrate",
    "calibrate_budgets": "tuning.calibrate_budgets",
    "detach": "attach",
    "tune": "tuning.tuner",
    "verify": "contexts.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
