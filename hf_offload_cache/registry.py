"""The caches by name. A new method appears in the console, contexts, tuning and the tests by one line in here."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from .errors import ConfigError

CACHES = {
    "disk-swap": "hf_offload_cache.caches.disk_swap:DiskSwapCache",
}
"""Name and where the class is, as "module:Class"; it is imported when it is asked for."""


def cache_class(name: str) -> Any:
    """The class of a registered name, or of an outsider's "module:Class". Raises `ConfigError`, which names what is
    known."""
    place = CACHES.get(name, name)
    module, colon, class_name = place.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, CACHES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(CACHES)}"
        raise ConfigError(f"there is no cache {name!r}; {hint} A class of your own is named 'module:Class'")
    try:
        return getattr(import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cache {name!r} cannot be imported ({error}): name it 'module:Class'") from error


def class_named(class_name: str) -> Any:
    """The registered class whose `__name__` a manifest has; None: there is none."""
    places = (place for place in CACHES.values() if place.rpartition(":")[2] == class_name)
    return next((cache_class(place) for place in places), None)
