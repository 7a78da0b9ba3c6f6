"""Objects of a published context: written where others read them, and read back."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import ConfigError, DamagedObjectError, ObjectError, StoreFullError
from .answers import TRIES, Answer, pause_after, place_error, reported
from .object_folders import LocalFolder, object_folder
from .stream_manifest import digest

_LONGEST_PAUSE = 30.0
"""Seconds that a store may ask to wait; one that asks for more is not asked again."""
Result = TypeVar("Result")


class Objects:
    """A folder of objects: a path, or a URL of a file system that fsspec knows ("s3://...", "hf://..."; http(s) by
    PUT).

    If the store answers "later", the request is retried. Use as a context manager, or `close` it.

    Args:
        options: options of the file system.
        check: `check` reads back all that was written. Without it, write access to the store is enough.

    Raises `ConfigError` for a URL without a known file system. All methods raise `ObjectError`, a `StoreError`.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None, *, check: bool = True) -> None:
        self.url, self._checked = url, check
        self._folder = self._tried("reaching", "it", lambda: object_folder(url, options))
        self._written: dict[str, int] = {}

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release threads, connections and descriptors."""
        self._folder.close()

    def read(self, name: str, most: int) -> bytes | None:
        """An object of at most `most` bytes; None: it does not exist."""
        try:
            return self._tried("reading", name, lambda: self._folder.read(name, most))
        except ObjectError as error:
            if error.answer is Answer.ABSENT:
                return None
            raise

    def put(self, data: bytes) -> str:
        """Store an object of these bytes and return its name; it exists after the next `check` or `write`. An object
        that already has these bytes is left unchanged."""
        name = digest(data)
        if name in self._written:
            return name
        try:
            if self.read(name, len(data)) == data:
                return name
        except DamagedObjectError:
            pass  # it is replaced
        except ObjectError as error:
            if self._checked:
                raise self._advised(error) from error
        self._tried("writing", name, lambda: self._folder.write(name, data))
        self._written[name] = len(data)
        return name

    def write(self, name: str, data: bytes) -> None:
        """Write a file of this name with these bytes, after everything that was `put`. A concurrent reader gets the old
        or the new file if the file system can move files or stores objects."""
        self._flush(name)
        self._tried("writing", name, lambda: self._folder.write(name, data))
        self._flush(name)

    def check(self) -> None:
        """Check that everything that was `put` exists, byte for byte. Raises `DamagedObjectError` if not."""
        self._flush("objects")
        if not self._checked:
            return
        for name, size in self._written.items():
            try:
                data = self.read(name, size)
            except DamagedObjectError:
                data = b""
            except ObjectError as error:
                raise self._advised(error) from error
            if data is None or len(data) != size or digest(data) != name:
                raise self.not_written(name, "it is missing" if data is None else "its bytes differ")
        self._written.clear()

    def not_written(self, name: str, what: str) -> ObjectError:
        """The error for a file that is not as it was written."""
        text = f"{self.url}: {name} is not as it was written, {what}: publish the context again"
        return place_error(Answer.BROKEN, text, kind=DamagedObjectError)

    def _flush(self, name: str) -> None:
        self._tried("writing", name, self._folder.flush)

    def _advised(self, error: ObjectError) -> ObjectError:
        """For what cannot be read back. A folder of this machine that cannot be read cannot be written to either."""
        if error.answer == Answer.LATER or isinstance(self._folder, LocalFolder):
            return error
        text = f"{error.strerror}; give check=False to publish without reading"
        return place_error(Answer(error.answer), text, number=error.errno)

    def _tried(self, doing: str, name: str, call: Callable[[], Result]) -> Result:
        for tries in itertools.count(1):
            try:
                return call()
            except ConfigError:
                raise
            except Exception as error:  # each file system has its own
                failure = reported(f"{self.url}: {doing} {name}", error)
                if failure.errno in (errno.ENOSPC, errno.EDQUOT):
                    full = f"{failure.strerror}; make room or choose another folder"
                    raise StoreFullError(failure.errno, full) from error
                pause = pause_after(failure, tries)
                if failure.answer is not Answer.LATER or tries == TRIES or pause > _LONGEST_PAUSE:
                    raise failure from error
            time.sleep(pause)
        raise AssertionError("unreachable")
