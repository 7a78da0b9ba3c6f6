"""Places to publish contexts to, each read and written object by object: local folders, web servers, and all other file
systems of fsspec."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..errors import DamagedObjectError
from ..stores.atomic_file import replace_bytes
from ..stores.descriptor import Descriptor, open_descriptor
from .answers import Answer, of_error, place_error, received, too_large
from .hub_commits import HubCommits
from .places import file_system_of, is_web, join, local_folder
from .web_client import WebClient

Received = TypeVar("Received")

_SILENCE = 60.0
"""Seconds without a byte after which a web server that takes objects counts as failed."""
_SLOWEST = 32768
"""Bytes a second that it takes or gives at least."""
_GRACE = 5.0
_LINK = (errno.ELOOP, errno.EMLINK)
"""How opening with `os.O_NOFOLLOW` fails where there is a link, on BSD too."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ObjectFolder(Protocol):
    """Reads and writes objects. Both raise `ObjectError`, or the file system's errors."""

    def read(self, name: str, most: int) -> bytes:
        """The complete current content of an object of at most `most` bytes."""

    def write(self, name: str, data: bytes) -> None:
        """Write these bytes as the object of this name: at once, or with the next `flush`."""

    def flush(self) -> None:
        """Complete all writes."""

    def close(self) -> None:
        """Release threads, connections and descriptors."""


def object_folder(url: str, options: dict[str, Any] | None) -> ObjectFolder:
    """The folder at a path or URL; `options` go to its file system. Raises `ConfigError`, `ObjectError`."""
    if is_web(url):
        return WebFolder(url, options)
    system, root = file_system_of(url, options)
    local = local_folder(system, root)
    return RemoteFolder(system, root) if local is None else LocalFolder(local)


class LocalFolder:
    """A local folder, created (0700) with the first object. Files have mode 0600, and each is replaced in one step and
    is then on the disk. Links are not followed, except above the folder."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self._folder: Descriptor | None = None

    def read(self, name: str, most: int) -> bytes:
        folder, place = self._opened(make=False), str(self._root / name)
        try:
            found = open_descriptor(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder_fd=folder)
        except OSError as error:
            if error.errno not in _LINK:
                raise
            raise place_error(Answer.BROKEN, f"{place}: is a link", kind=DamagedObjectError) from error
        with found as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise place_error(Answer.BROKEN, f"{place}: is no regular file", kind=DamagedObjectError)
            with open(fd, "rb", closefd=False) as file:
                return received(file.read(most + 1), place, most)

    def write(self, name: str, data: bytes) -> None:
        replace_bytes(self._opened(make=True), name, data)

    def flush(self) -> None:
        """Do nothing: each write is complete when it returns."""

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
        if os.stat(folder.name, dir_fd=parent, follow_symlinks=False).st_mode & 0o700 != 0o700:  # the umask's doing
            os.chmod(folder.name, 0o700, dir_fd=parent)
        made = open_descriptor(folder.name, _FOLDER, folder_fd=parent)
        os.fchmod(made.fd, 0o700)
        os.fsync(parent)
        return made


class WebFolder:
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

    def flush(self) -> None:
        """Do nothing: each write is complete when it returns."""

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self._call(self._client.close(), 0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, what: Coroutine[Any, Any, Received], size: int) -> Received:
        seconds = _SILENCE + size / _SLOWEST

        async def within() -> Received:
            return await asyncio.wait_for(what, seconds)

        future = asyncio.run_coroutine_threadsafe(within(), self._loop)
        try:
            return future.result(seconds + _GRACE)
        except TimeoutError as error:
            raise place_error(Answer.LATER, f"nothing came of it within {seconds:g} s") from error
        finally:
            future.cancel()


class RemoteFolder:
    """A folder in any other fsspec file system. In a Hub repository objects wait for the next commit."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root
        system.invalidate_cache()  # what others have changed since it was listed
        self._commits = HubCommits.of(system, root)
        self._made = False

    def read(self, name: str, most: int) -> bytes:
        place = join(self._root, name)
        size = self._system.info(place).get("size")  # `exists` takes any trouble for a no
        if size is not None and size > most:
            raise too_large(place, most)
        data: bytes = self._system.cat_file(place)
        return received(data, place, most)

    def write(self, name: str, data: bytes) -> None:
        if self._commits is not None:
            self._commits.add(name, data)
            return
        self._make()
        with self._whole(), self._system.open(join(self._root, name), "wb") as file:
            file.write(data)

    def flush(self) -> None:
        if self._commits is not None:
            self._commits.commit()

    def close(self) -> None:
        """Do nothing: fsspec keeps its connections."""

    def _make(self) -> None:
        if self._made:
            return
        try:
            self._system.makedirs(self._root, exist_ok=True)
        except Exception as error:  # each file system has its own
            if of_error(error) is not Answer.REFUSED:  # as for a bucket, which may be written to all the same
                raise
        self._made = True

    def _whole(self) -> AbstractContextManager[object]:
        """What is written in it is there whole, or not at all; a file system without such a thing stores objects."""
        try:
            return self._system.transaction
        except NotImplementedError:
            return nullcontext()
