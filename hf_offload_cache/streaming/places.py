"""Locations of a published context's objects: names in a path or URL, and the file system behind it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ..errors import ConfigError
from .answers import reported, without_secrets


def is_web(place: str) -> bool:
    """Whether a place is a web URL, http or https in any case."""
    return place.lower().startswith(("http://", "https://"))


def join(place: str, name: str) -> str:
    """The place of `name` below a path or URL.

    In a web URL the name is added to the path, the query stays behind it, and a fragment is dropped. In an fsspec chain
    ("simplecache::https://...") it is added to the first URL with a path. In all other places "?" and "#" are ordinary
    characters.
    """
    if is_web(place):  # "::" may belong to an IPv6 address
        return _below(place, name)
    links = place.split("::")
    at = next((index for index, link in enumerate(links) if "://" in link), len(links) - 1)
    links[at] = _below(links[at], name)
    return "::".join(links)


def _below(place: str, name: str) -> str:
    if is_web(place):
        path, mark, query = place.partition("#")[0].partition("?")
        return f"{path.rstrip('/')}/{quote(name)}{mark}{query}"
    folder = place.rstrip("/")
    return f"{place}{name}" if folder.endswith(":") else f"{folder}/{name}"


def file_system_of(url: str, options: dict[str, Any] | None) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the place in it. Raises `ConfigError`, `ObjectError`."""
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url, **(options or {}))
    except (ValueError, TypeError, ImportError) as error:
        text = f"url {url!r}: no file system of that kind can be used here: {error}"
        raise ConfigError(without_secrets(text)) from error
    except Exception as error:  # each file system has its own
        raise reported(f"{url}: reaching it", error) from error
    return system, root


def is_local(system: Any) -> bool:
    """Whether an fsspec file system is this machine's: a path, "file://" or "local://"."""
    return "file" in _protocols(system)


def local_folder(system: Any, root: str) -> str | None:
    """The folder on this machine that `root` stands for, also behind fsspec's "dir::" or a cache; None if it is on
    another machine."""
    while not is_local(system):
        if _WRAPPERS.isdisjoint(_protocols(system)):
            return None
        root = system._join(root) if "dir" in _protocols(system) else root
        system = system.fs
    return root


_WRAPPERS = frozenset(("dir", "simplecache", "filecache", "blockcache", "cached"))
"""fsspec file systems that write to another one, their `fs`."""


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
