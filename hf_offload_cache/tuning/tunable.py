"""What can be tuned: of which caches, and with which fields given."""

from __future__ import annotations

from typing import Any

from ..caches.disk_swap import DiskSwapCache
from ..caches.disk_swap_config import DiskSwapConfig
from ..errors import ConfigError
from ..registry import cache_class

_SOLVED = (
    "group_size", "rank", "summary_bytes", "reuse_capacity", "adapter", "memory", "max_context", "max_batch", "exact",
    "trace",
)  # fmt: skip
"""Fields that tuning decides, or that have no part in it."""


def tunable(cache: str | type[Any]) -> type[DiskSwapCache]:
    """The class of that name. Raises `ConfigError` where its fields are none that tuning measures."""
    found = cache_class(cache) if isinstance(cache, str) else cache
    if not issubclass(found, DiskSwapCache):
        raise ConfigError(
            f"cache must be DiskSwapCache or inherit from it, got {found.__name__}: tuning measures what group_size, "
            f"compact keys and reuse_capacity cost and save; use {found.__name__}.for_budget, which chooses by memory "
            "alone"
        )
    return found


def settings_of(measured: type[DiskSwapCache], fields: dict[str, Any]) -> DiskSwapConfig:
    """The configuration of the user's `fields`. Raises `ConfigError`."""
    for name in _SOLVED:
        if name in fields:
            raise ConfigError(f"{name} is not to be given: tuning decides it, or does without; leave it out")
    if fields.get("selection", "default") == "random":
        raise ConfigError('selection="random" has nothing to tune: leave it out')
    if fields.get("look_ahead") is False:
        raise ConfigError("look_ahead=False reads nothing ahead, so there is nothing to hide: leave it out")
    settings = measured.config_class.load(None, fields)
    assert isinstance(settings, DiskSwapConfig)
    return settings


def at_least(**numbers: Any) -> None:
    """Raises `ConfigError` for what is no whole number of at least 1."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
