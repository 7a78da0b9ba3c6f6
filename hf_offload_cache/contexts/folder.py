"""A context as a directory: a manifest and data files under digests. What the rest of the package needs of that."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import ContextError
from ..stores.atomic_file import Descriptor
from .data_files import MANIFEST_NAME, open_file, read_small, write_file
from .file_system import ATTEMPTS, FILE_SYSTEM, FOLDER, NO_FOLDER, FileSystem, leads_to, reported
from .publish import publish
from .removal import is_temporary, remove, sweep

__all__ = [
    "MANIFEST_NAME",
    "entries",
    "open_file",
    "open_folder",
    "publish",
    "read_small",
    "reading",
    "remove",
    "sweep",
    "write_file",
]

Result = TypeVar("Result")


def open_folder(path: str | os.PathLike[str], *, file_system: FileSystem = FILE_SYSTEM) -> Descriptor:
    """Open the context at `path`; the caller closes it. It stays on this context if the path is replaced.

    Raises `ContextError` if there is no context: nothing, a file, a link, or a directory without a manifest;
    `StoreError`.
    """
    place = str(Path(path))  # without a slash at the end, which would lead through a link
    with reported(f"opening the context {place!r}"):
        for _ in range(ATTEMPTS):
            try:
                folder = file_system.open(place, FOLDER | os.O_NOFOLLOW)
            except OSError as error:
                if error.errno in NO_FOLDER:
                    raise ContextError(f"there is no context at {place!r}: it must be a folder, not a link") from error
                raise
            try:
                if _has_manifest(file_system, folder.fd):
                    return folder
                replaced = not leads_to(file_system, place, None, folder.fd)  # then this is the old one, on its way out
            except BaseException:
                folder.close()
                raise
            folder.close()
            if not replaced:
                break
        raise ContextError(f"{place!r} is not a context: it has no file {MANIFEST_NAME!r}")


def reading(
    path: str | os.PathLike[str], read: Callable[[int], Result], *, file_system: FileSystem = FILE_SYSTEM
) -> Result:
    """What `read` returns for the descriptor of the context at `path` (closed afterwards).

    Other processes may replace the context at any time: its files are then removed one by one, while who has them open
    keeps them. When `read` raises an `OSError` or a `ContextError` and the context was replaced meanwhile, it is called
    again, for the new one. Raises what `open_folder` and `read` raise.
    """
    for attempt in range(1, ATTEMPTS + 1):
        with open_folder(path, file_system=file_system) as fd:
            before = _manifest(file_system, fd)
            try:
                return read(fd)
            except (OSError, ContextError):
                same = leads_to(file_system, str(Path(path)), None, fd) and _manifest(file_system, fd) == before
                if same or attempt == ATTEMPTS:
                    raise
    raise AssertionError("unreachable")


def entries(folder: str | os.PathLike[str]) -> list[Path]:
    """The contexts that lie directly in `folder`, sorted. Not shown: links, temporary folders, what may not be entered.

    Raises `ContextError` when `folder` is not a directory; `StoreError` when it cannot be read.
    """
    place = os.fspath(folder)
    found = []
    try:
        with os.scandir(place) as listed:
            for entry in listed:
                if not is_temporary(entry.name) and entry.is_dir(follow_symlinks=False) and _is_context(entry.path):
                    found.append(Path(entry.path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ContextError(f"{place!r} is not a folder: give one that exists, with contexts in it") from error
    return sorted(found)


def _is_context(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(os.path.join(path, MANIFEST_NAME), follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False


def _has_manifest(file_system: FileSystem, fd: int) -> bool:
    try:
        return stat.S_ISREG(file_system.stat(MANIFEST_NAME, fd).st_mode)
    except FileNotFoundError:
        return False


def _manifest(file_system: FileSystem, fd: int) -> tuple[int, ...] | None:
    """What tells the manifest that is there now from any other; None: there is none."""
    try:
        there = file_system.stat(MANIFEST_NAME, fd)
    except FileNotFoundError:
        return None
    return there.st_ino, there.st_mtime_ns, there.st_ctime_ns, there.st_size
