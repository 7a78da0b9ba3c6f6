"""A context as a directory: a manifest and data files. How they are named, found, read and written; none leads out."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ContextError, StoreFullError
from ..memory.machine import free_disk
from ..stores.atomic_file import Descriptor
from .file_system import ATTEMPTS, FILE_SYSTEM, FOLDER, NO_FOLDER, FileSystem, failure, leads_to, reported

MANIFEST_NAME = "manifest.json"
_LARGE, _MOST_HOLES = 16 * 2**20, 64
"""`read_small` refuses a larger file if its size is more than this multiple of its disk space. `save` writes no holes,
and reading a file of holes would take memory for bytes that nobody wrote. File systems may compress, though."""
_DATA = re.compile(r"[0-9a-f]{32}\.(records|state|damaged)")
_TEMPORARY = re.compile(r"\.hf_offload_cache-[0-9a-f]{32}\.(partial|wiping)")

Result = TypeVar("Result")


def temporary_name(*, wiping: bool = False) -> str:
    """A name for a folder that is being filled or removed. `wiping`: its files are overwritten before removal."""
    return f".hf_offload_cache-{secrets.token_hex(16)}.{'wiping' if wiping else 'partial'}"


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` makes such names."""
    return _TEMPORARY.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether a file of a context may have this name."""
    return name == MANIFEST_NAME or _DATA.fullmatch(name) is not None


def survey(file_system: FileSystem, folder_fd: int) -> tuple[dict[str, os.stat_result], list[str]]:
    """Contents of an open directory: the files that a context may have, and the names of all others, sorted."""
    ours, foreign = {}, []
    for name in sorted(file_system.names(folder_fd)):
        try:
            status = file_system.stat(name, folder_fd)
        except FileNotFoundError:  # removed since
            continue
        if is_ours(name) and stat.S_ISREG(status.st_mode):
            ours[name] = status
        else:
            foreign.append(name)
    return ours, foreign


# ------------------------------------------------------------------------------------------------- directories


def open_existing(
    file_system: FileSystem, name: str, parent_fd: int | None = None, place: str | None = None
) -> Descriptor:
    """Open the directory `name`. Raises `ContextError`, which calls it `place`, if it is not a directory."""
    try:
        return file_system.open(name, FOLDER | os.O_NOFOLLOW, parent_fd)
    except OSError as error:
        if error.errno in NO_FOLDER:
            message = f"there is no context at {place or name!r}: it must be a folder, not a link"
            raise ContextError(message) from error
        raise


def open_folder(path: str | os.PathLike[str], *, file_system: FileSystem = FILE_SYSTEM) -> Descriptor:
    """Open the context at `path`; the caller closes it. It stays on this context if the path is replaced.

    Raises `ContextError` if there is no context: nothing, a file, a link, or a directory without a manifest;
    `StoreError`.
    """
    place = str(Path(path))  # without a slash at the end, which would lead through a link
    with reported(f"opening the context {place!r}"):
        for _ in range(ATTEMPTS):
            folder = open_existing(file_system, place)
            try:
                if _manifest(file_system, folder.fd) is not None:
                    return folder
                replaced = not leads_to(file_system, place, None, folder.fd)  # then this is the old one, being removed
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
    """The result of `read` for the descriptor of the context at `path`, which is closed afterwards.

    Other processes may replace the context at any time. Its files are then removed one by one, but processes that have
    them open keep them. If `read` raises an `OSError` or a `ContextError` and the context was replaced meanwhile,
    `read` is called again for the new one. Raises the errors of `open_folder` and `read`.
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
    """Paths of the contexts directly in `folder`, sorted, without links, temporary folders and unreadable ones.

    Raises `ContextError` if `folder` is not a directory, and `StoreError` if it cannot be read.
    """
    place = os.fspath(folder)
    contexts = []
    try:
        with os.scandir(place) as listed:
            for entry in listed:
                if not is_temporary(entry.name) and entry.is_dir(follow_symlinks=False) and _is_context(entry.path):
                    contexts.append(Path(entry.path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ContextError(f"{place!r} is not a folder: give one that exists, with contexts in it") from error
    return sorted(contexts)


def _is_context(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(os.path.join(path, MANIFEST_NAME), follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False


def _manifest(file_system: FileSystem, fd: int) -> tuple[int, ...] | None:
    """Numbers that distinguish the present manifest from any other; None without a manifest."""
    try:
        status = file_system.stat(MANIFEST_NAME, fd)
    except FileNotFoundError:
        return None
    regular = stat.S_ISREG(status.st_mode)
    return (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size) if regular else None


# ------------------------------------------------------------------------------------------------------- files

def open_file(folder_fd: int, name: str, *, file_system: FileSystem = FILE_SYSTEM) -> Descriptor:
    """Open a file for reading in the context that `folder_fd` is open on; the caller closes it. Never blocks.

    Raises `ContextError` if a context has no files with such a name, or if it is not a regular file (a link, a
    pipe...); `FileNotFoundError` if it is missing; `StoreError` if it cannot be opened.
    """
    _check_name(name)
    not_regular = f"{name!r} in a context must be a regular file, and is not: someone else put it there; remove it"
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would block
        descriptor = file_system.open(name, flags, folder_fd)
        try:
            if not stat.S_ISREG(file_system.fstat(descriptor.fd).st_mode):
                raise ContextError(not_regular)
            os.set_blocking(descriptor.fd, True)
        except BaseException:
            descriptor.close()
            raise
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):  # a link, on BSD too; a socket
            raise ContextError(not_regular) from error
        raise failure(f"opening {name!r} of a context", error) from error
    return descriptor


def read_small(folder_fd: int, name: str, most_bytes: int, *, file_system: FileSystem = FILE_SYSTEM) -> bytes:
    """The content of a file in the context that `folder_fd` is open on.

    Raises the errors of `open_file`; `ContextError`, before anything is allocated, if the file has more than
    `most_bytes`, or is large and mostly holes; `StoreError` if it cannot be read up to its size when opened.
    """
    with open_file(folder_fd, name, file_system=file_system) as fd, reported(f"reading {name!r} of a context"):
        status = file_system.fstat(fd)
        size, taken = status.st_size, status.st_blocks * 512
        if size > most_bytes:
            raise ContextError(f"{name!r} of a context may have {most_bytes:,} bytes at most, and has {size:,}")
        if size > _LARGE and 0 < taken < size // _MOST_HOLES:  # 0: the file system does not say
            raise ContextError(
                f"{name!r} of a context has {size:,} bytes, of which {taken:,} are on the disk: it was not written "
                "by `save`; save the context anew"
            )
        pieces, missing = [], size
        while missing:
            piece = file_system.read(fd, missing)
            if not piece:
                raise OSError(errno.EIO, f"it ends at byte {size - missing:,} of {size:,}")
            pieces.append(piece)
            missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write_file(folder_fd: int, name: str, pieces: Iterable[Any], *, file_system: FileSystem = FILE_SYSTEM) -> None:
    """Write the file `name` (0600 whatever the umask) from contiguous buffers, and force it to the disk.

    Raises `ContextError` if a context has no files with such a name; `FileExistsError`; `StoreFullError` with numbers,
    and other `StoreError`s. After any exception the file is removed.
    """
    _check_name(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with reported(f"making {name!r} of a context"):
        descriptor = file_system.open(name, flags, folder_fd)
    written = 0
    try:
        try:
            with reported(f"writing {name!r} of a context"):
                file_system.fchmod(descriptor.fd, 0o600)
                for piece in pieces:
                    data = memoryview(piece)
                    if not data.nbytes:  # an empty buffer cannot be cast
                        continue
                    data = data.cast("B")
                    written += len(data)
                    while data:
                        count = file_system.write(descriptor.fd, data)
                        if count == 0:
                            raise OSError(errno.EIO, "the device takes no more bytes")
                        data = data[count:]
                file_system.fsync(descriptor.fd)
        except BaseException:
            descriptor.close()
            raise
        with reported(f"closing {name!r} of a context"):
            file_system.close(descriptor)
    except BaseException as error:
        try:
            file_system.unlink(name, folder_fd)
        except OSError as left:
            error.add_note(f"what was written of {name!r} could not be removed: {left}")
        if isinstance(error, StoreFullError):
            free = free_disk(folder_fd)
            known = "" if free is None else f", and its disk has {free:,} bytes free"
            raise StoreFullError(error.errno, f"{error.strerror}; it has {written:,} bytes or more{known}") from error
        raise


def _check_name(name: str) -> None:
    if not is_ours(name):
        raise ContextError(
            f"a file of a context is named {MANIFEST_NAME!r}, or with 32 hexadecimal digits and .records, .state or "
            f".damaged, not {name!r}"
        )
