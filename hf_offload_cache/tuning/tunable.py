"""What can be tuned: which caches, and with which fields given."""

from __future__ import annotations

import json
from typing import Any

from ..caches.disk_swap import DiskSwapCache
from ..caches.disk_swap_config import DiskSwapConfig
from ..core.selective_cache import SelectiveCache
from ..errors import ConfigError
from ..registry import cache_class

_NO_PART = ("memory", "max_context", "max_batch", "exact", "trace")
"""Fields that have no part in tuning."""
_SOLVED = ("group_size", "rank", "summary_bytes", "reuse_capacity", "adapter")
"""Those of `DiskSwapCache` that the solver decides."""


def tunable(cache: str | type[Any]) -> type[SelectiveCache]:
    """The class of that name. Raises `ConfigError` where there is nothing that tuning could measure."""
    found = cache_class(cache) if isinstance(cache, str) else cache
    if not issubclass(found, SelectiveCache) or not (issubclass(found, DiskSwapCache) or found.to_try({})):
        raise ConfigError(
            f"cache must be DiskSwapCache, inherit from it, or name what is to be tried, got {found.__name__}: use "
            f"{found.__name__}.for_budget, which chooses by memory alone"
        )
    return found


def settings_of(measured: type[SelectiveCache], fields: dict[str, Any]) -> Any:
    """The configuration of the user's `fields`. Raises `ConfigError`."""
    solved = issubclass(measured, DiskSwapCache)
    for name in (*_NO_PART, *(_SOLVED if solved else ())):
        if name in fields:
            raise ConfigError(f"{name} is not to be given: tuning decides it, or does without; leave it out")
    for name, value in fields.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(
                f"{name} goes to the file that tuning writes, as JSON, got {type(value).__name__}: give it as text, or "
                "to the cache that takes the file"
            ) from None
    if not solved:
        return measured.config_class.load(None, fields)
    if fields.get("selection", "default") == "random":
        raise ConfigError('selection="random" has nothing to tune: leave it out')
    if fields.get("look_ahead") is False:
        raise ConfigError("look_ahead=False reads nothing ahead, so there is nothing to hide: leave it out")
    settings = measured.config_class.load(None, fields)
    assert isinstance(settings, DiskSwapConfig)
    return settings
