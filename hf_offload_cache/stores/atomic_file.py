"""Replaces a file in one step: readers see either the complete old file or the complete new one."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

# An open descriptor that has an owner from the system call on, because an interrupt in between would leave it open

_OWNED_BY_NOBODY = -1


class Descriptor:
    """The descriptor that `call(*arguments, **named)` opens, owned by its creator; closed at the latest when this
    object is deleted.

    A signal's exception (Ctrl-C) is raised between two operations of the interpreter. Here no operation lies between
    the system call and its owner: one operation calls, and appends the result to a list that a finalizer already knows.
    `call` must therefore be a C function, such as `os.open`. A `with` gives the number, and closes at its end.
    """

    def __init__(self, call: Callable[..., int], *arguments: Any, **named: Any) -> None:
        self._open: list[int] = []
        self._finalizer = weakref.finalize(self, _close, self._open)
        self._finalizer.atexit = False  # the process ends, and its descriptors with it
        self._open.extend(map(functools.partial(call, **named), *((one,) for one in arguments)))

    @property
    def fd(self) -> int:
        """The number; -1 once closed."""
        return self._open[0] if self._open else _OWNED_BY_NOBODY

    def release(self) -> int:
        """Give up the number: the caller closes it, if it is open."""
        return self._open.pop()

    def close(self) -> None:
        """Close the descriptor; idempotent. Raises the errors of `os.close`, but the descriptor is closed then too."""
        _close(self._open)
        self._finalizer.detach()

    def __enter__(self) -> int:
        return self.fd

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_descriptor(path: str, flags: int, mode: int = 0o600, folder_fd: int | None = None) -> Descriptor:
    """Call `os.open` for a descriptor that no program inherits. Raises `OSError`."""
    return Descriptor(os.open, path, flags | os.O_CLOEXEC, mode, dir_fd=folder_fd)


def _close(numbers: list[int]) -> None:
    """Close the descriptors in `numbers`; each leaves the list and is closed in one operation."""
    with contextlib.suppress(IndexError):  # another thread was faster
        while numbers:
            deque(map(os.close, map(numbers.pop, (-1,))), maxlen=0)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by the file that `write` makes at the place it is given, a temporary file in the same folder.

    The file is forced to the disk, then moved over `path`, and its name is forced to the disk. After any exception,
    which is passed on, the temporary file is gone and `path` is as before, unless forcing the name to the disk failed.
    If the process is killed, a file may remain whose name begins with a point, then that of `path`.
    """
    temporary = path.with_name(_temporary(path.name))
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name is part of the folder's content
        with open_descriptor(str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as folder:
            _sync_names(folder)


def replace_bytes(folder_fd: int, name: str, data: bytes) -> None:
    """Like `replace_file`, for `data` as the file `name` in the open directory `folder_fd`.

    The file has mode 0600 whatever the umask. A link at `name` is replaced, not followed. Raises `OSError`.
    """
    temporary = _temporary(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open_descriptor(temporary, flags, folder_fd=folder_fd) as file:
            os.fchmod(file, 0o600)  # the umask may have taken more
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is being raised
            os.unlink(temporary, dir_fd=folder_fd)
        raise
    _sync_names(folder_fd)


def _temporary(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}"


def _sync_names(folder_fd: int) -> None:
    """Force the names in an open directory to the disk, if its file system has that step."""
    try:
        os.fsync(folder_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
