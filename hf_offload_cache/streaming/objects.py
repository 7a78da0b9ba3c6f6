"""Writing a published context's objects to a store, and reading them back."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, DamagedObjectError, ObjectError, StoreFullError
from ..stores.atomic_file import Descriptor, open_descriptor, replace_bytes
from .answers import TRIES, Answer, of_error, pause_after, place_error, received, reported, too_large
from .places import file_system_of, is_web, join, local_folder
from .stream_manifest import digest
from .web_client import WebClient

_FILES, _BYTES = 256, 64 << 20
"""Most files and bytes of a commit, unless one file is larger. They wait in memory."""


class HubCommits:
    """Files of a Hub repository, many in a commit: the Hub accepts few commits an hour, and a context has a thousand
    files. For one thread. Raises the Hub's errors; uncommitted files are then lost.

    Args:
        system: an `HfFileSystem`.
        place: the folder, from `resolve_path`.
    """

    def __init__(self, system: Any, place: Any) -> None:
        self._system, self._place = system, place
        self._waiting: dict[str, bytes] = {}

    @classmethod
    def of(cls, system: Any, root: str) -> HubCommits | None:
        """None: `root` is not in a repository."""
        if "hf" not in system.protocol:
            return None
        place = system.resolve_path(root)
        return cls(system, place) if hasattr(place, "path_in_repo") else None  # a bucket has no commits

    def add(self, name: str, data: bytes) -> None:
        """Add a file to the next commit, and commit if there are enough."""
        self._waiting[name] = data
        if len(self._waiting) >= _FILES or sum(map(len, self._waiting.values())) >= _BYTES:
            self.commit()

    def commit(self) -> None:
        """Commit all waiting files."""
        from huggingface_hub import CommitOperationAdd, HfApi

        if not self._waiting:
            return
        place, system = self._place, self._system
        folder = f"{place.path_in_repo.rstrip('/')}/" if place.path_in_repo else ""
        HfApi(endpoint=system.endpoint, token=system.token).create_commit(
            place.repo_id,
            [CommitOperationAdd(f"{folder}{name}", data) for name, data in self._waiting.items()],
            commit_message=f"Publish a context: {len(self._waiting)} files",
            repo_type=place.repo_type,
            revision=place.revision,
        )
        self._waiting.clear()
        system.invalidate_cache(place.unresolve())


Received = TypeVar("Received")
Result = TypeVar("Result")

_SILENCE = 60.0
"""Seconds without a byte after which a web server that takes objects counts as failed."""
_SLOWEST = 32768
"""Least bytes a second of such a server."""
_GRACE = 5.0
_LONGEST_PAUSE = 30.0
"""Most seconds that a store may ask to wait; one that asks for more is not asked again."""
_LINK = (errno.ELOOP, errno.EMLINK)
"""Errors of opening a link with `os.O_NOFOLLOW`, also on BSD."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ObjectFolder(ABC):
    """A folder of objects. Raises `ObjectError`, or the file system's errors."""

    @abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """The complete current content of an object of at most `most` bytes."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write these bytes as the object of this name: at once, or with the next `flush`."""

    def flush(self) -> None:  # noqa: B027
        """Complete all writes."""

    def close(self) -> None:  # noqa: B027
        """Release threads, connections and descriptors."""


def object_folder(url: str, options: dict[str, Any] | None) -> ObjectFolder:
    """The folder at a path or URL; `options` go to its file system. Raises `ConfigError`, `ObjectError`."""
    if is_web(url):
        return WebFolder(url, options)
    system, root = file_system_of(url, options)
    local = local_folder(system, root)
    return RemoteFolder(system, root) if local is None else LocalFolder(local)


class LocalFolder(ObjectFolder):
    """A local folder, created (0700) with the first object. Files have mode 0600, and each is replaced in one step and
    is then on the disk. Links are not followed, except above the folder."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self._folder: Descriptor | None = None

    def read(self, name: str, most: int) -> bytes:
        folder, place = self._opened(make=False), str(self._root / name)
        try:
            opened = open_descriptor(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder_fd=folder)
        except OSError as error:
            if error.errno not in _LINK:
                raise
            raise place_error(Answer.BROKEN, f"{place}: is a link", kind=DamagedObjectError) from error
        with opened as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise place_error(Answer.BROKEN, f"{place}: is no regular file", kind=DamagedObjectError)
            with open(fd, "rb", closefd=False) as file:
                return received(file.read(most + 1), place, most)

    def write(self, name: str, data: bytes) -> None:
        replace_bytes(self._opened(make=True), name, data)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
        self._folder = None

    def _opened(self, *, make: bool) -> int:
        if self._folder is None:
            try:
                self._folder = made_folder(self._root) if make else open_descriptor(str(self._root), _FOLDER)
            except OSError as error:
                if error.errno not in (*_LINK, errno.ENOTDIR):
                    raise
                raise OSError(error.errno, f"{self._root} is a link or no folder: give a folder") from error
        return self._folder.fd


def made_folder(folder: Path) -> Descriptor:
    """A folder, open. The folder and its parents are created if missing: 0700 whatever the umask. Raises `OSError`,
    also for a link."""
    try:
        return open_descriptor(str(folder), _FOLDER)
    except FileNotFoundError:
        pass
    if not folder.parent.is_dir():
        made_folder(folder.parent).close()
    with open_descriptor(str(folder.parent), os.O_RDONLY | os.O_DIRECTORY) as parent:
        try:
            os.mkdir(folder.name, 0o700, dir_fd=parent)
        except FileExistsError:  # another process was first
            return open_descriptor(folder.name, _FOLDER, folder_fd=parent)
        if os.stat(folder.name, dir_fd=parent, follow_symlinks=False).st_mode & 0o700 != 0o700:  # because of the umask
            os.chmod(folder.name, 0o700, dir_fd=parent)
        made = open_descriptor(folder.name, _FOLDER, folder_fd=parent)
        os.fchmod(made.fd, 0o700)
        os.fsync(parent)
        return made


class WebFolder(ObjectFolder):
    """A web server that accepts objects by PUT. Requests run in a thread with an event loop, until `close`."""

    def __init__(self, url: str, options: dict[str, Any] | None) -> None:
        self._client = WebClient(url, _SILENCE, options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hf_offload_cache publishing", daemon=True)
        self._thread.start()

    def read(self, name: str, most: int) -> bytes:
        return self._call(self._client.get(name, most, fresh=True), most)

    def write(self, name: str, data: bytes) -> None:
        self._call(self._client.put(name, data), len(data))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self._call(self._client.close(), 0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, request: Coroutine[Any, Any, Received], size: int) -> Received:
        seconds = _SILENCE + size / _SLOWEST

        async def within() -> Received:
            return await asyncio.wait_for(request, seconds)

        future = asyncio.run_coroutine_threadsafe(within(), self._loop)
        try:
            return future.result(seconds + _GRACE)
        except TimeoutError as error:
            raise place_error(Answer.LATER, f"the request did not end within {seconds:g} s") from error
        finally:
            future.cancel()


class RemoteFolder(ObjectFolder):
    """A folder in any other fsspec file system. In a Hub repository objects wait for the next commit."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root
        system.invalidate_cache()  # others may have changed it since it was listed
        self._commits = HubCommits.of(system, root)
        self._made = False

    def read(self, name: str, most: int) -> bytes:
        place = join(self._root, name)
        size = self._system.info(place).get("size")  # `exists` reports every error as False
        if size is not None and size > most:
            raise too_large(place, most)
        data: bytes = self._system.cat_file(place)
        return received(data, place, most)

    def write(self, name: str, data: bytes) -> None:
        if self._commits is not None:
            self._commits.add(name, data)
            return
        self._make()
        with self._transaction(), self._system.open(join(self._root, name), "wb") as file:
            file.write(data)

    def flush(self) -> None:
        if self._commits is not None:
            self._commits.commit()

    def _make(self) -> None:
        if self._made:
            return
        try:
            self._system.makedirs(self._root, exist_ok=True)
        except Exception as error:  # each file system has its own
            if of_error(error) is not Answer.REFUSED:  # a bucket may refuse this and still accept objects
                raise
        self._made = True

    def _transaction(self) -> AbstractContextManager[object]:
        """Makes a write complete or absent. A file system without transactions is an object store, which does so
        itself."""
        try:
            return self._system.transaction
        except NotImplementedError:
            return nullcontext()


class Objects:
    """A folder of named objects: a path, or a URL of an fsspec file system ("s3://...", "hf://..."; http(s) by PUT).

    If the store answers "later", the request is retried. Use it as a context manager, or `close` it.

    Args:
        options: options of the file system.
        check: whether `check` reads back everything that was written. Without that, write access is enough.

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

    def not_written(self, name: str, problem: str) -> ObjectError:
        """The error for a file that is not as it was written."""
        text = f"{self.url}: {name} is not as it was written, {problem}: publish the context again"
        return place_error(Answer.BROKEN, text, kind=DamagedObjectError)

    def _flush(self, name: str) -> None:
        self._tried("writing", name, self._folder.flush)

    def _advised(self, error: ObjectError) -> ObjectError:
        """The error with advice, if an object cannot be read back but the store may still accept writes."""
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
