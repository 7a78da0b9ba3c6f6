"""The library's caches by name, for the console, planning, contexts and tests.

A new method is one line here. A method from outside is named as "module:Class" and needs none.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .errors import ConfigError

CACHES = {
    "disk-swap": "hf_offload_cache.methods.disk_swap.cache:DiskSwapCache",
    "abstract-tree": "hf_offload_cache.methods.abstract_tree.cache:AbstractTreeCache",
    "cluster": "hf_offload_cache.methods.cluster.cache:ClusterCache",
    "spec": "hf_offload_cache.methods.spec.cache:SpecCache",
}
"""Name -> "module:Class", which only `cache_class` imports."""


def cache_class(name: str, others: Sequence[str] = ()) -> type[Any]:
    """The cache class with a registered name, or of "module:Class". Raises `ConfigError`, whose message also lists
    `others`, further names that the caller accepts. Other errors of importing the module pass through."""
    place = CACHES.get(name, name)
    module, colon, class_name = place.partition(":")
    if not colon or not module or not class_name.isidentifier():
        known = (*CACHES, *others)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "name one of these, or the place of its class"
        raise ConfigError(f"cache must be one of {', '.join(known)}, or module:Class, got {name!r}: {hint}")
    try:
        cls = getattr(import_module(module), class_name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and lacks another one
        raise ConfigError(
            f"cache {name!r}: there is no module {error.name!r}: put the folder that has it into PYTHONPATH, or run "
            "the console there"
        ) from error
    if not isinstance(cls, type) or not hasattr(cls, "config_class"):
        raise ConfigError(
            f"cache {name!r}: {class_name!r} in module {module!r} must be a subclass of OffloadCache, "
            f"got {'nothing of that name' if cls is None else repr(cls)}"
        )
    return cls


def exported() -> dict[str, str]:
    """Name -> module of every registered class, and of its configuration in the same module (`SomeConfig` for
    `SomeCache`)."""
    modules = {}
    for place in CACHES.values():
        module, _, class_name = place.partition(":")
        modules[class_name] = modules[f"{class_name.removesuffix('Cache')}Config"] = module
    return modules


def name_of(class_name: str) -> str | None:
    """The registered name of a class, by its `__name__`; None if it is not registered. Imports nothing."""
    return next((name for name, place in CACHES.items() if place.partition(":")[2] == class_name), None)


def class_named(class_name: str) -> type[Any] | None:
    """The registered class with that `__name__`, as in a context's manifest; None if it is not registered."""
    name = name_of(class_name)
    return None if name is None else cache_class(name)
