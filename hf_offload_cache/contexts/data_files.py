"""The files of a context: how they are named, and how they are read and written without ever leaving its directory."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from typing import Any

from ..errors import ContextError, StoreFullError
from ..memory.machine import free_disk
from ..stores.atomic_file import Descriptor
from .file_system import FILE_SYSTEM, FileSystem, failure, reported

MANIFEST_NAME = "manifest.json"
_LARGE, _MOST_HOLES = 16 * 2**20, 64
"""A file that is read as a whole, and is larger than this, takes its size on the disk, over so much where that
compresses. `save` leaves no holes in it; a file of holes would take memory that nobody wrote a byte for."""
_DATA = re.compile(r"[0-9a-f]{32}\.(records|state|damaged)")


def is_ours(name: str) -> bool:
    """Whether a file of a context may have this name."""
    return name == MANIFEST_NAME or _DATA.fullmatch(name) is not None


def survey(file_system: FileSystem, folder_fd: int) -> tuple[dict[str, os.stat_result], list[str]]:
    """What lies in an open directory: the files that a context may have, and the names of all else, sorted."""
    ours, foreign = {}, []
    for name in sorted(file_system.names(folder_fd)):
        try:
            there = file_system.stat(name, folder_fd)
        except FileNotFoundError:  # removed since
            continue
        if is_ours(name) and stat.S_ISREG(there.st_mode):
            ours[name] = there
        else:
            foreign.append(name)
    return ours, foreign


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
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):  # a link, on BSD too; a socket
            raise ContextError(not_regular) from error
        raise failure(f"opening {name!r} of a context", error) from error
    try:
        if not stat.S_ISREG(file_system.fstat(descriptor.fd).st_mode):
            raise ContextError(not_regular)
        os.set_blocking(descriptor.fd, True)
    except OSError as error:
        descriptor.close()
        raise failure(f"opening {name!r} of a context", error) from error
    except BaseException:
        descriptor.close()
        raise
    return descriptor


def read_small(folder_fd: int, name: str, most_bytes: int, *, file_system: FileSystem = FILE_SYSTEM) -> bytes:
    """The content of a file in the context that `folder_fd` is open on.

    Raises the errors of `open_file`; `ContextError`, before anything is allocated, if the file has more than
    `most_bytes`, or is large and mostly holes; `StoreError` if it cannot be read to the end that it had when it was
    opened.
    """
    with open_file(folder_fd, name, file_system=file_system) as fd, reported(f"reading {name!r} of a context"):
        there = file_system.fstat(fd)
        size, taken = there.st_size, there.st_blocks * 512
        if size > most_bytes:
            raise ContextError(f"{name!r} of a context may have {most_bytes:,} bytes at most, and has {size:,}")
        if size > _LARGE and 0 < taken < size // _MOST_HOLES:  # 0: a file system that does not tell
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
    """Make the file `name` (0600 whatever the umask) of `pieces`, contiguous buffers, one after another.

    It is on the disk when this returns.

    Raises `ContextError` when a context has no files of such a name; `FileExistsError`; `StoreFullError` with numbers
    and other `StoreError`s: the file is gone then, as after any exception.
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
                    if not data.nbytes:  # which cannot be cast
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
