"""A file without a name: it takes disk space as long as its descriptor is open, and leaves nothing behind."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
import weakref

from hf_offload_cache.errors import StoreError
from hf_offload_cache.stores.base import DEVICE_BLOCK

BOUNCE_BYTES = 2**20
"""Host memory that a direct write of unaligned data borrows while it runs."""

SYNC_BYTES = 2**20
"""Bytes written through the page cache before they are forced to the disk and dropped from it."""


class ScratchFile:
    """An unnamed file in `directory`. `read` and `write` may run in several threads, on different bytes.

    Raises `StoreError` that names `directory` when no file can be made there. Calls that a signal interrupts are
    taken up again by Python (PEP 475). The descriptor is given back by `close`, or with the object.

    Attributes:
        fd: the descriptor, -1 once closed.
        direct: transfers bypass the page cache; offsets, lengths and read buffers must be aligned.
        unsynced: bytes written that the page cache may still hold.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        self.directory = os.fspath(directory)
        self.direct = False
        self.unsynced = 0
        self._sync_error: OSError | None = None
        self._lock = threading.Lock()
        try:
            self.fd = _open_unnamed(self.directory)
        except OSError as error:
            raise StoreError(
                error.errno,
                f"{name}: no scratch file can be made in {self.directory!r} ({error.strerror}); "
                f"give `path` a folder that exists and that you may write to",
            ) from error
        self._close = weakref.finalize(self, os.close, self.fd)

    def try_direct(self) -> str | None:
        """Bypass the page cache from now on where that works: None, or the reason why it does not.

        Writes and reads back one block of the file, which must be empty, and is empty again afterwards.
        """
        if not hasattr(os, "O_DIRECT"):
            return "this platform has no O_DIRECT"
        import fcntl

        before = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, before | os.O_DIRECT)
            view = memoryview(mmap.mmap(-1, 2 * DEVICE_BLOCK))
            view[:DEVICE_BLOCK] = b"\xa5" * DEVICE_BLOCK
            self.direct = True
            self.write(view[:DEVICE_BLOCK], 0)
            self.read(view[DEVICE_BLOCK:], 0)
            if view[:DEVICE_BLOCK] != view[DEVICE_BLOCK:]:
                raise OSError(errno.EIO, "a block read back differs from what was written")
        except OSError as error:
            self.direct = False
            fcntl.fcntl(self.fd, fcntl.F_SETFL, before)
            return f"O_DIRECT refused in {self.directory!r}: {error.strerror}"
        finally:
            os.ftruncate(self.fd, 0)
        return None

    def check(self) -> None:
        """Raise `OSError` when what was written before may be lost."""
        if self._sync_error is not None:
            raise OSError(self._sync_error.errno, "earlier writes may be lost") from self._sync_error

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (bytes) from `offset`. Raises `OSError`, also when the file ends too early."""
        self.check()
        done = 0
        while done < len(buffer):
            count = os.preadv(self.fd, [buffer[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"short read: the file ends at byte {offset + done}")
            done += count

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` (bytes) at `offset`; raises `OSError`, and part of it may be written then."""
        done = 0
        while done < len(data):
            count = os.pwrite(self.fd, data[done:], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"short write at byte {offset + done}")
            done += count
        if not self.direct:
            self._sync(len(data))

    def write_unaligned(self, data: memoryview, offset: int) -> None:
        """`write` for data at any address, by way of `BOUNCE_BYTES` of aligned memory."""
        bounce = memoryview(mmap.mmap(-1, min(len(data), BOUNCE_BYTES)))  # anonymous memory starts on a page
        for start in range(0, len(data), BOUNCE_BYTES):
            piece = data[start : start + BOUNCE_BYTES]
            bounce[: len(piece)] = piece
            self.write(bounce[: len(piece)], offset + start)

    def _sync(self, written: int) -> None:
        with self._lock:
            self.unsynced += written
            if self.unsynced < SYNC_BYTES:
                return
            self.unsynced = 0
        try:
            getattr(os, "fdatasync", os.fsync)(self.fd)
        except OSError as error:
            self._sync_error = error  # the kernel forgets which pages failed: what was written before is doubtful too
            raise
        self.drop(0, 0)

    def drop(self, offset: int, length: int) -> None:
        """Let go of the page cache of a range (`length` 0: to the end), where the platform can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)

    def resize(self, size: int) -> None:
        """Make the file `size` bytes long; space is taken as it is written."""
        os.ftruncate(self.fd, size)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def disk_bytes(self) -> int:
        """Bytes that the file takes on the disk now; 0 once closed."""
        return 0 if self.fd < 0 else os.fstat(self.fd).st_blocks * 512

    def free_bytes(self) -> int | None:
        """Bytes that the file may still grow by: what its disk has, less what it was promised; None when unknown."""
        disk = os.fstatvfs(self.fd)
        if disk.f_blocks == 0:
            return None
        here = os.fstat(self.fd)
        return disk.f_bavail * disk.f_frsize - max(0, here.st_size - here.st_blocks * 512)

    def close(self) -> None:
        """Give the descriptor and the disk space back. Idempotent."""
        self.fd = -1
        self._close()


def _open_unnamed(directory: str) -> int:
    """A descriptor of a new file that only its owner may use and that no name leads to."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            pass  # not every file system can: the named way below works, or says what is wrong
    path = os.path.join(directory, f".hf_offload_cache-{secrets.token_hex(16)}")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
    except OSError:
        os.close(fd)
        raise
    return fd
