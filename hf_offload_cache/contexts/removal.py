"""Taking contexts away, and what killed savers left: file by file, only files of ours, never through a link."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import ContextError
from ..stores.atomic_file import Descriptor
from .data_files import MANIFEST_NAME, survey
from .file_system import FILE_SYSTEM, FOLDER, NO_FOLDER, FileSystem, reported, sync_folder, try_lock

_TEMPORARY = re.compile(r"\.hf_offload_cache-[0-9a-f]{32}\.(partial|wiping)")
_STALE_SECONDS = 24 * 3600
"""Age at which a temporary folder counts as left behind where there are no locks to tell."""
_WIPE_BYTES = 2**20


def temporary_name(*, wiping: bool = False) -> str:
    """A name for a folder that is on its way in or out. `wiping`: what lies in it is overwritten before it goes."""
    return f".hf_offload_cache-{secrets.token_hex(16)}.{'wiping' if wiping else 'partial'}"


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` gives such names."""
    return _TEMPORARY.fullmatch(name) is not None


def remove(path: str | os.PathLike[str], *, wipe: bool = False, file_system: FileSystem = FILE_SYSTEM) -> int:
    """Remove the context at `path`: it leaves its name in one atomic step. Returns the bytes of disk that this frees.

    Files whose blocks another context shares (hard links) free nothing and are never overwritten. `wipe` overwrites the
    others with random bytes first; a cache that has the context open then reads errors, else it keeps what it opened.
    Killed: the context is there in full, or gone from its name and taken away (overwritten, with `wipe`) by the next
    `sweep` of its folder.

    Raises `ContextError` when there is no context (or the remains of one) at `path`, or when something else lies in it,
    which is named: nothing is removed then. `StoreError` when the device fails: the message says what became of it.
    """
    path = Path(path)
    with reported(f"removing the context {str(path)!r}"):
        parent = file_system.open(str(path.parent), FOLDER)
        with parent as parent_fd, _open_existing(file_system, path, parent_fd) as folder_fd:
            freed = _check_removable(file_system, folder_fd, path)
            file_system.fchmod(folder_fd, 0o700)  # a user may have made it read-only: told before it loses its name
            try_lock(file_system, folder_fd)  # so that no sweeper takes it for a dead saver's
            name = temporary_name(wiping=wipe)
            file_system.rename(path.name, name, parent_fd)
            with reported(f"{str(path)!r} is {name!r} until the next save beside it removes that; removing it now"):
                sync_folder(file_system, parent_fd)
                discard(file_system, parent_fd, name)
                sync_folder(file_system, parent_fd)
    return freed


def sweep(parent: str | os.PathLike[str], *, file_system: FileSystem = FILE_SYSTEM) -> int:
    """Remove what killed savers and removers of this user left in the folder `parent`; returns how many they were.

    A living one holds a lock on its temporary folder; where there are no locks, only what is older than a day goes. If
    that is wrong, the saver fails and its target stays as it was. What cannot be removed stays. `StoreError`: `parent`
    cannot be read.
    """
    looking = f"looking for what killed savers left in {os.fspath(parent)!r}"
    with reported(looking), file_system.open(os.fspath(parent), FOLDER) as parent_fd:
        return sweep_open(file_system, parent_fd)


def sweep_open(file_system: FileSystem, parent_fd: int) -> int:
    """`sweep` of an open directory. Raises `OSError` when it cannot be read."""
    removed = 0
    for name in file_system.names(parent_fd):
        if is_temporary(name):
            try:
                removed += _sweep_one(file_system, parent_fd, name)
            except (OSError, ContextError):
                continue  # another user's, another sweeper's, or a device that fails: a leftover stays a leftover
    return removed


def _sweep_one(file_system: FileSystem, parent_fd: int, name: str) -> bool:
    with file_system.open(name, FOLDER | os.O_NOFOLLOW, parent_fd) as fd:
        here = file_system.fstat(fd)
        locked = try_lock(file_system, fd)
        stale = time.time() - here.st_mtime > _STALE_SECONDS if locked is None else locked
        if not stale or here.st_uid != os.geteuid() or survey(file_system, fd)[1]:
            return False
        # Under its own name no more, which fails when a saver has just published it; and a saver that lives after all
        # cannot publish a folder that is half gone.
        taken = temporary_name(wiping=name.endswith(".wiping"))
        file_system.rename(name, taken, parent_fd)
        discard(file_system, parent_fd, taken)
        return True


def discard(file_system: FileSystem, parent_fd: int, name: str) -> None:
    """Remove the temporary folder `name`, if it is there. `OSError`: some of it stays, also after a second try.

    `ContextError`: something that is not ours lies in it; nothing was removed.
    """
    twice(lambda: _discard(file_system, parent_fd, name))


def twice(clean_up: Callable[[], None]) -> None:
    """Clean up; once more from its start when an `OSError` comes, and raise what comes then."""
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
        _unless_missing(file_system.rmdir, name, parent_fd)  # made under a umask that forbids all, and empty still
        return
    with folder as folder_fd:
        ours, foreign = survey(file_system, folder_fd)
        if foreign:
            raise ContextError(f"the temporary folder {name!r} holds what is not of a context: {foreign[0]!r}")
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
        here = file_system.fstat(fd)
        if stat.S_ISREG(here.st_mode) and here.st_nlink == 1:
            missing = here.st_size
            while missing:
                missing -= file_system.write(fd, memoryview(secrets.token_bytes(min(missing, _WIPE_BYTES))))
            file_system.fsync(fd)


def _unless_missing(call: Callable[[str, int], None], name: str, folder_fd: int) -> None:
    with suppress(FileNotFoundError):  # another process removes the same
        call(name, folder_fd)


def _open_existing(file_system: FileSystem, path: Path, parent_fd: int) -> Descriptor:
    try:
        return file_system.open(path.name, FOLDER | os.O_NOFOLLOW, parent_fd)
    except OSError as error:
        if error.errno in NO_FOLDER:
            raise ContextError(f"there is no context at {str(path)!r}: it must be a folder, not a link") from error
        raise


def _check_removable(file_system: FileSystem, folder_fd: int, path: Path) -> int:
    """The bytes of disk that removing the open context frees. Raises `ContextError`."""
    ours, foreign = survey(file_system, folder_fd)
    if foreign:
        raise ContextError(
            f"{str(path)!r} holds {foreign[0]!r}, which is not of a context: nothing was removed; move that away first"
        )
    if not ours:
        raise ContextError(f"{str(path)!r} is an empty folder, not a context: nothing was removed")
    return sum(there.st_blocks * 512 for there in ours.values() if there.st_nlink == 1)
