"""Objects in a folder of any file system that fsspec knows, as they are published."""

from __future__ import annotations

import errno
import io
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import ConfigError, StoreError
from .hub_commits import HubCommits
from .stream_manifest import digest


class Objects:
    """A folder of objects: a path, or a URL of a file system that fsspec has ("s3://...", "hf://..."; http(s) by PUT).
    `options` go to it. Raises `ConfigError` for a URL that none is known of, `StoreError` where it cannot be used.

    Of a repository of the Hub, objects wait for the next commit, which has many; a file that is written is there."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url = url
        self._file_system, self._root = file_system_of(url, options)
        try:
            self._commits = HubCommits.of(self._file_system, self._root)
        except Exception as error:  # whatever the Hub has against it
            raise _failed(url, "reaching", "it", error) from error

    def _place(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        """Raises `StoreError`."""
        try:
            if self._commits is not None:
                return self._commits.exists(self._place(name))
            return bool(self._file_system.exists(self._place(name)))
        except Exception as error:  # each file system has its own
            raise _failed(self.url, "looking for", name, error) from error

    def _has(self, name: str, data: bytes) -> bool:
        """Whether the object of this name has these bytes: it is read, where it has as many."""
        try:
            place, system = self._place(name), self._file_system
            return int(system.size(place) or -1) == len(data) and system.cat_file(place) == data
        except Exception as error:  # each file system has its own
            raise _failed(self.url, "looking at", name, error) from error

    def put(self, data: bytes) -> str:
        """An object of these bytes is there when the next file is written, and its name: one that has them is left as
        it is. Raises `StoreError`."""
        name = digest(data)
        if self._commits is not None and self._commits.has(name):
            return name
        if not self.exists(name) or not self._has(name, data):
            self._write(name, data)
        return name

    def write(self, name: str, data: bytes) -> None:
        """A file of this name has these bytes, behind all that was `put`: it is whole, or as it was, where the file
        system can move files or stores objects, or a web server takes what it was put so. Raises `StoreError`."""
        self._commit(name)
        self._write(name, data)
        self._commit(name)

    def _commit(self, name: str) -> None:
        try:
            if self._commits is not None:
                self._commits.commit()
        except Exception as error:  # whatever the Hub has against it
            raise _failed(self.url, "writing", name, error) from error

    def _write(self, name: str, data: bytes) -> None:
        system = self._file_system
        try:
            if self._commits is not None:
                self._commits.add(name, data)
                return
            if "http" in system.protocol:  # as WebDAV has it
                system.put_file(io.BytesIO(data), self._place(name), method="put")
                return
            system.makedirs(self._root, exist_ok=True)
            with self._whole(), system.open(self._place(name), "wb") as file:
                file.write(data)
        except Exception as error:
            raise _failed(self.url, "writing", name, error) from error

    def _whole(self) -> AbstractContextManager[object]:
        """What is written in it is there whole, or not at all; a file system without such a thing stores objects."""
        try:
            return self._file_system.transaction
        except NotImplementedError:
            return nullcontext()


def file_system_of(url: str, options: dict[str, Any] | None) -> tuple[Any, str]:
    """fsspec's file system of a path or URL, and the place in it. Raises `ConfigError`."""
    import fsspec

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url, **(options or {}))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"url {url!r}: no file system of that kind can be used here: {error}") from error
    except Exception as error:  # each file system has its own
        raise _failed(url, "reaching", "it", error) from error
    return found


def _failed(url: str, doing: str, name: str, error: Exception) -> StoreError:
    return StoreError(getattr(error, "errno", None) or errno.EIO, f"{url}: {doing} {name}: {error}")
