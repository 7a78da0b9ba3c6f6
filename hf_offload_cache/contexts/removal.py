"""Removing contexts, and leftovers of killed savers: file by file, only a context's files, never through a link."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import ContextError
from .file_system import FILE_SYSTEM, FOLDER, FileSystem, reported, sync_folder, try_lock
from .folder import MANIFEST_NAME, is_temporary, open_existing, survey, temporary_name

_STALE_SECONDS = 24 * 3600
"""Age at which a temporary folder counts as a leftover on a file system without locks."""
_WIPE_BYTES = 2**20


def remove(path: str | os.PathLike[str], *, wipe: bool = False, file_system: FileSystem = FILE_SYSTEM) -> int:
    """Remove the context at `path`, which loses its name in one atomic step. Returns the bytes of disk that this frees.

    Files that another context shares (hard links) free nothing and are never overwritten. `wipe` overwrites the others
    with random bytes first, so that a cache that has the context open gets read errors; otherwise it keeps the files
    that it opened. If the process is killed, the context is intact, or it has lost its name and is removed (and
    overwritten, with `wipe`) by the next `sweep` of its folder.

    Raises `ContextError`, with nothing removed, if there is no context at `path` (or the remains of one), or if it
    contains another file, which is named; `StoreError` if the device fails, saying what became of the context.
    """
    path = Path(path)
    with reported(f"removing the context {str(path)!r}"):
        parent = file_system.open(str(path.parent), FOLDER)
        with parent as parent_fd, open_existing(file_system, path.name, parent_fd, str(path)) as folder_fd:
            freed = _check_removable(file_system, folder_fd, path)
            file_system.fchmod(folder_fd, 0o700)  # a user may have made it read-only; fail before it loses its name
            try_lock(file_system, folder_fd)  # so that no sweeper takes it for a killed saver's
            name = temporary_name(wiping=wipe)
            file_system.rename(path.name, name, parent_fd)
            with reported(f"{str(path)!r} is {name!r} until the next save to its folder removes that; removing it now"):
                sync_folder(file_system, parent_fd)
                discard(file_system, parent_fd, name)
                sync_folder(file_system, parent_fd)
    return freed


def sweep(parent: str | os.PathLike[str], *, file_system: FileSystem = FILE_SYSTEM) -> int:
    """Remove leftovers of this user's killed savers and removers from the folder `parent`; returns their number.

    A living process has a lock on its temporary folder. Without locks, only folders older than a day are removed; if
    that is wrong, the saver fails and its target stays as it was. Raises `StoreError` if `parent` cannot be read.
    """
    place = os.fspath(parent)
    with reported(f"removing leftovers in {place!r}"), file_system.open(place, FOLDER) as parent_fd:
        return sweep_open(file_system, parent_fd)


def sweep_open(file_system: FileSystem, parent_fd: int) -> int:
    """`sweep` of an open directory. Raises `OSError` when it cannot be read."""
    removed = 0
    for name in file_system.names(parent_fd):
        if is_temporary(name):
            try:
                removed += _sweep_one(file_system, parent_fd, name)
            except (OSError, ContextError):
                continue  # of another user, taken by another sweeper, or the device fails: it stays a leftover
    return removed


def _sweep_one(file_system: FileSystem, parent_fd: int, name: str) -> bool:
    with file_system.open(name, FOLDER | os.O_NOFOLLOW, parent_fd) as fd:
        status = file_system.fstat(fd)
        locked = try_lock(file_system, fd)
        stale = time.time() - status.st_mtime > _STALE_SECONDS if locked is None else locked
        if not stale or status.st_uid != os.geteuid() or survey(file_system, fd)[1]:
            return False
        # Renaming fails if a saver has just published it, and keeps a saver that is alive from publishing half of it.
        taken = temporary_name(wiping=name.endswith(".wiping"))
        file_system.rename(name, taken, parent_fd)
        discard(file_system, parent_fd, taken)
        return True


def discard(file_system: FileSystem, parent_fd: int, name: str) -> None:
    """Remove the temporary folder `name`, if it exists. `OSError`: some of it remains after a second attempt.
    `ContextError`: it contains another file; nothing was removed."""
    twice(lambda: _discard(file_system, parent_fd, name))


def twice(clean_up: Callable[[], None]) -> None:
    """Call `clean_up`, and again after an `OSError`, whose second one is raised."""
    try:
        clean_up()
    except OSError:
        clean_up()


def _discard(file_system: FileSystem, parent_fd: int, name: str) -> None:
    try:
        folder = file_system.open(name, FOLDER | os.O_NOFOLLOW, parent_fd)
    except FileNotFoundError:
        return
    except PermissionError:
        _unless_missing(file_system.rmdir, name, parent_fd)  # made under a umask that forbids all, still empty
        return
    with folder as folder_fd:
        ours, foreign = survey(file_system, folder_fd)
        if foreign:
            raise ContextError(f"the temporary folder {name!r} contains a file that is not a context's: {foreign[0]!r}")
        for file in sorted(ours, key=lambda file: file != MANIFEST_NAME):  # the manifest first
            if name.endswith(".wiping"):
                _wipe(file_system, folder_fd, file)
            _unless_missing(file_system.unlink, file, folder_fd)
    _unless_missing(file_system.rmdir, name, parent_fd)


def _wipe(file_system: FileSystem, folder_fd: int, name: str) -> None:
    """Overwrite a file, unless another context shares its blocks."""
    try:
        file = file_system.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder_fd)
    except FileNotFoundError:
        return
    with file as fd:
        status = file_system.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            missing = status.st_size
            while missing:
                missing -= file_system.write(fd, memoryview(secrets.token_bytes(min(missing, _WIPE_BYTES))))
            file_system.fsync(fd)


def _unless_missing(call: Callable[[str, int], None], name: str, folder_fd: int) -> None:
    with suppress(FileNotFoundError):  # another process removes the same
        call(name, folder_fd)


def _check_removable(file_system: FileSystem, folder_fd: int, path: Path) -> int:
    """Bytes of disk that removing the open context frees. Raises `ContextError`."""
    ours, foreign = survey(file_system, folder_fd)
    if foreign:
        raise ContextError(
            f"{str(path)!r} contains {foreign[0]!r}, not a context's file: nothing was removed; move it away first"
        )
    if not ours:
        raise ContextError(f"{str(path)!r} is an empty folder, not a context: nothing was removed")
    return sum(status.st_blocks * 512 for status in ours.values() if status.st_nlink == 1)
