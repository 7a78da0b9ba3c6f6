"""A single file that is replaced in one step: whoever looks sees all of the old one or all of the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from .descriptor import open_descriptor


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Make `path` what `write` puts at the place it is given: a temporary file in the same folder.

    It is forced to the disk, then moved over `path`, and so is the new name. After any exception, which is passed on,
    the temporary file is gone and `path` as it was, unless the error came from forcing the name to the disk. Killed: a
    file may stay whose name begins with a point, then that of `path`.
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
    if hasattr(os, "O_DIRECTORY"):  # the new name is the folder's content
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
        with contextlib.suppress(OSError):  # what went wrong is on its way out
            os.unlink(temporary, dir_fd=folder_fd)
        raise
    _sync_names(folder_fd)


def _temporary(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}"


def _sync_names(folder_fd: int) -> None:
    """Force the names in an open directory to the disk, where its file system has that step."""
    try:
        os.fsync(folder_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
