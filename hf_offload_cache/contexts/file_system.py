"""The system calls of contexts, one method each, where tests count calls, inject failures and kill the process."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import StoreError, StoreFullError, is_full
from ..stores.atomic_file import Descriptor, open_descriptor

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags that open a directory; add `os.O_NOFOLLOW` to refuse a link."""

NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK)
"""Errors of opening with these flags if there is no directory: nothing, a file, a link (EMLINK on BSD)."""

ATTEMPTS = 1000
"""Times that another process may interfere before a loop gives up."""

_EXCHANGE = 2


class FileSystem:
    """File operations by names relative to the open directory `folder_fd`; links are not followed. Every method raises
    `OSError`.

    The class holds no state. Directories and descriptors are numbers. The caller of `open` closes the descriptor, with
    `close` if it was written to, because that may fail.
    """

    def mkdir(self, name: str, folder_fd: int) -> None:
        os.mkdir(name, 0o700, dir_fd=folder_fd)

    def open(self, name: str, flags: int, folder_fd: int | None = None) -> Descriptor:
        """Open a file; a created file has mode 0600. `folder_fd` None: `name` is a path from the current folder."""
        return open_descriptor(name, flags, folder_fd=folder_fd)

    def chmod_folder(self, name: str, folder_fd: int) -> None:
        os.chmod(name, 0o700, dir_fd=folder_fd)

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def lock(self, fd: int, *, wait: bool = False) -> None:
        """Lock an open directory until it is closed. `BlockingIOError`: another process has the lock."""
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def names(self, folder_fd: int) -> list[str]:
        return os.listdir(folder_fd)

    def stat(self, name: str, folder_fd: int | None) -> os.stat_result:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def read(self, fd: int, most: int) -> bytes:
        return os.read(fd, most)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, descriptor: Descriptor) -> None:
        """Close a descriptor that was written to. It is closed even if this fails."""
        descriptor.close()

    def rename(self, old: str, new: str, folder_fd: int, new_folder_fd: int | None = None) -> None:
        os.rename(old, new, src_dir_fd=folder_fd, dst_dir_fd=folder_fd if new_folder_fd is None else new_folder_fd)

    def exchange(self, one: str, other: str, folder_fd: int) -> None:
        """Exchange two names in one step. ENOSYS, EINVAL...: not possible here."""
        call = _renameat2()
        if call is None:
            raise OSError(errno.ENOSYS, "the kernel or the C library cannot exchange names")
        if call(folder_fd, os.fsencode(one), folder_fd, os.fsencode(other), _EXCHANGE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), one, None, other)

    def unlink(self, name: str, folder_fd: int) -> None:
        os.unlink(name, dir_fd=folder_fd)

    def rmdir(self, name: str, folder_fd: int) -> None:
        os.rmdir(name, dir_fd=folder_fd)


FILE_SYSTEM = FileSystem()


@functools.cache
def _renameat2() -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        call.restype = ctypes.c_int
    return call


def try_lock(file_system: FileSystem, fd: int, *, wait: bool = False) -> bool | None:
    """Lock an open directory. False: another process has the lock; None: the file system has no locks."""
    try:
        file_system.lock(fd, wait=wait)
    except BlockingIOError:
        return False
    except OSError:
        return None  # for any reason: callers are correct without locks too
    return True


def leads_to(file_system: FileSystem, name: str, folder_fd: int | None, fd: int) -> bool:
    """Whether `name` in the open directory `folder_fd` (None: a path) is still what `fd` was opened on."""
    try:
        return os.path.samestat(file_system.stat(name, folder_fd), file_system.fstat(fd))
    except FileNotFoundError:
        return False


def sync_folder(file_system: FileSystem, folder_fd: int) -> None:
    """Force an open directory's names to the disk, if its file system supports that."""
    try:
        file_system.fsync(folder_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def failure(doing: str, error: OSError) -> StoreError:
    """The error to raise from `error`, with what was being done and its notes; `StoreFullError` for a full disk."""
    kind = StoreFullError if is_full(error) else StoreError
    advice = "; make room or choose another folder" if kind is StoreFullError else ""
    reason = "; ".join([error.strerror or str(error), *getattr(error, "__notes__", [])])
    return kind(error.errno or errno.EIO, f"{doing}: {reason}{advice}")


@contextmanager
def reported(doing: str) -> Iterator[None]:
    """Turn system errors into `failure`s; `StoreError`s and `FileExistsError`s pass unchanged."""
    try:
        yield
    except (StoreError, FileExistsError):
        raise
    except OSError as error:
        raise failure(doing, error) from error
