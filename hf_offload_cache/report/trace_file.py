"""The file of a trace: an array of JSON objects that is right at every moment but for the closing bracket."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from ..errors import ConfigError


class TraceFile:
    """A trace file, opened and reserved against other traces. Its old content stays until the first `append`. From then
    on only its owner can access it (0600), because a trace reveals how long a text is and when it was read.

    For one thread at a time. A copy of it in a forked process does nothing.

    Attributes:
        failure: the error of a write; after it nothing is written, and the file ends with the last successful `append`.

    Raises `ConfigError` if `path` cannot be written; then nothing has changed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.failure: OSError | None = None
        self._process = os.getpid()
        self._size = 0  # bytes written
        self._fd: int | None
        self._fd, self._made = _open(self.path)

    @property
    def open(self) -> bool:
        """`close` has not been called."""
        return self._fd is not None

    @property
    def started(self) -> bool:
        """Something was written."""
        return self._size > 0

    def append(self, text: str) -> None:
        """Write all of `text` or nothing; an error is kept as `failure`."""
        if self._fd is None or self.failure is not None or os.getpid() != self._process:
            return
        data = memoryview(text.encode())
        done = 0
        try:
            if not self._size:
                os.fchmod(self._fd, 0o600)  # a file that was there may be open to others
                os.ftruncate(self._fd, 0)
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._size + done)
        except OSError as error:
            self.failure = error
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
        else:
            self._size += done

    def close(self, ending: str = "") -> None:
        """Append `ending`, and let the file go; where nothing was ever written, as it was before. Idempotent."""
        if self._fd is None:
            return
        if self._size:
            failure, self.failure = self.failure, None  # a disk that was full may have room for so little
            self.append(ending)
            self.failure = failure or self.failure
        elif self._made and os.getpid() == self._process:
            self.path.unlink(missing_ok=True)
        fd, self._fd = self._fd, None
        os.close(fd)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor for writing to the file at `path`, whose content is unchanged, and whether the file is new. A new
    file has mode 0600, whatever the umask. Links are not followed, because in a folder that others can write to, one
    could lead to a file of this user."""
    flags = os.O_WRONLY | os.O_NOFOLLOW
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe without a reader: refuse
    made = True
    try:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            made = False
            fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # EMLINK: on BSD
            raise ConfigError(
                f"trace {str(path)!r} is a symbolic link, which is not followed: give `trace` a file"
            ) from error
        raise ConfigError(
            f"trace {str(path)!r} cannot be written ({error.strerror}): "
            "give `trace` a file in a folder that exists and that you may write to"
        ) from error
    try:
        _check(fd, path, made)
    except BaseException:
        os.close(fd)
        raise
    return fd, made


def _check(fd: int, path: Path, made: bool) -> None:
    """Raises `ConfigError` unless the open file may hold a trace, and lets nobody else write one there."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"trace {str(path)!r} must be a file, and is a device or a pipe: give `trace` a file")
    if not made and found.st_uid != os.geteuid():
        raise ConfigError(
            f"trace {str(path)!r} belongs to another user, who could read the trace: give `trace` a file of your own"
        )
    if not _claim(fd):
        raise ConfigError(
            f"trace {str(path)!r} is being written by another cache: give each its own file, or close the other first"
        )
    if made:
        try:
            os.fchmod(fd, 0o600)  # the umask may have taken more
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"trace {str(path)!r} cannot be kept from other users there ({error.strerror}): give `trace` a file on "
                "another file system"
            ) from error


def _claim(fd: int) -> bool:
    """Keep other traces off the file until it is closed; False where one has it. No lock where there are none."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a file system without locks
        return True
    return True
