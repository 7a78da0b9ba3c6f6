"""The caches of this library by name, as import strings: what the console, planning, contexts and tests offer.

A new method is one line here; a method from outside is named as "module:Class" and needs none.
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
"""Name -> "module:Class". Nothing is imported before `cache_class` asks for it."""


def cache_class(name: str, others: Sequence[str] = ()) -> type[Any]:
    """The cache class of a registered name, or of "module:Class", where the module can be imported.

    `others` are names that the caller knows besides; they are in the message alone. Raises `ConfigError`. What the
    module of another raises while it is imported, other than that it is not there, passes through.
    """
    place = CACHES.get(name, name)
    module, colon, class_name = place.partition(":")
    if not colon or not module or not class_name.isidentifier():
        known = (*CACHES, *others)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "name one of these, or where its class is"
        raise ConfigError(f"cache must be one of {', '.join(known)}, or module:Class, got {name!r}: {hint}")
    try:
        found = getattr(import_module(module), class_name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another one
        raise ConfigError(
            f"cache {name!r}: there is no module {error.name!r}: put the folder that has it into PYTHONPATH, or run "
            "the console there"
        ) from error
    if not isinstance(found, type) or not hasattr(found, "config_class"):
        raise ConfigError(
            f"cache {name!r}: {class_name!r} in module {module!r} must be a subclass of OffloadCache, "
            f"got {'nothing of that name' if found is None else repr(found)}"
        )
    return found


def exported() -> dict[str, str]:
    """Name -> module of every registered class, and of its configuration, `SomeConfig` for `SomeCache`, in the same."""
    found = {}
    for place in CACHES.values():
        module, _, class_name = place.partition(":")
        found[class_name] = found[f"{class_name.removesuffix('Cache')}Config"] = module
    return found


def name_of(class_name: str) -> str | None:
    """The registered name of the class of that `__name__`; None where there is none. Imports nothing."""
    return next((name for name, place in CACHES.items() if place.partition(":")[2] == class_name), None)


def class_named(class_name: str) -> type[Any] | None:
    """The registered class of that `__name__`, as the manifest of a saved context has it; None where there is none."""
    name = name_of(class_name)
    return None if name is None else cache_class(name)
