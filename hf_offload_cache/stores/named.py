"""Record files with a name in a folder: opened to be read, linked, copied."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence

from ..errors import CorruptRecordError, StoreError, StoreFullError
from ..memory.machine import free_disk
from .atomic_file import open_descriptor
from .base import DEVICE_BLOCK
from .record_file import BOUNCE_BYTES, RecordFile

_NEEDS_A_COPY = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOENT, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What linking fails with on another file system, one without links, a file that lost its last name, too many links."""


_NOT_THERE = {
    errno.ENOENT: "",
    errno.ELOOP: "it is a symbolic link, which is not followed",
    errno.ENXIO: "it is no regular file",  # a socket
}
"""What opening fails with where there is no file of ours, and what that means; empty: as the system says it."""


class NamedFile(RecordFile):
    """The file `file_name` in the open directory `folder_fd`, to be read only. Its size has to be `size`.

    Raises `CorruptRecordError` (naming `name`) when it is missing, a link, no regular file, or of another size, and
    `StoreError` when it cannot be opened; `ValueError` for a name that leads out of the folder.
    """

    def __init__(self, folder_fd: int, file_name: str, size: int, name: str) -> None:
        place = place_of(folder_fd, file_name)
        # Without O_NONBLOCK the open of a pipe would wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = open_descriptor(file_name, flags, folder_fd=folder_fd)
        except OSError as error:
            kind = CorruptRecordError if error.errno in _NOT_THERE else StoreError
            reason = _NOT_THERE.get(error.errno or 0) or error.strerror
            raise kind(error.errno, f"{name}: {place!r} cannot be opened: {reason}") from error
        super().__init__(descriptor, place)
        status = os.fstat(self.fd)
        wrong = None
        if not stat.S_ISREG(status.st_mode):
            wrong = "it is no regular file"
        elif status.st_size != size:
            wrong = f"it has {status.st_size:,} bytes and was written with {size:,}"
        if wrong:
            self.close()
            raise CorruptRecordError(errno.EIO, f"{name}: {place!r} is not what was written: {wrong}")
        self.vouch()

    def _probe(self, view: memoryview) -> None:
        if self.size:
            self.read(view[:DEVICE_BLOCK], 0)


def link(file: RecordFile, folder_fd: int, name: str) -> bool:
    """Give `file` the new name `name` in `folder_fd`; False where that cannot be, or where others than its owner may
    use it: a link has the same rights. Raises `OSError`, e.g. `EEXIST`."""
    place_of(folder_fd, name)
    if stat.S_IMODE(os.fstat(file.fd).st_mode) & 0o077:
        return False
    try:
        os.link(f"/proc/self/fd/{file.fd}", name, dst_dir_fd=folder_fd, follow_symlinks=True)
    except OSError as error:
        if error.errno in _NEEDS_A_COPY:
            return False
        raise
    return True


@contextlib.contextmanager
def new_file(folder_fd: int, name: str, size: int, taken: int) -> Iterator[RecordFile]:
    """A new file `name` of `size` bytes in `folder_fd`, mode 0600, to be written inside; on the device after it.

    `taken` of the bytes are written, the others are holes. Raises `StoreFullError` with the numbers, before anything is
    made, when those would not fit; other `OSError` as they come. Whatever is raised, in here or inside, the name is
    gone then.
    """
    place = place_of(folder_fd, name)
    available = free_disk(folder_fd)
    if available is not None and available < taken:
        raise StoreFullError(
            errno.ENOSPC,
            f"{place!r} needs {taken:,} bytes and its disk has {available:,} free; make room there",
        )
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR
    file = RecordFile(open_descriptor(name, flags, folder_fd=folder_fd), place)
    try:
        os.fchmod(file.fd, 0o600)  # the umask may have taken more
        if os.fstat(file.fd).st_mode & 0o077:
            raise OSError(errno.EPERM, "this file system cannot keep a file from other users")
        file.try_direct()  # so that a copy does not fill the page cache; without it, pages are dropped as they go
        yield file
        file.resize(size)
        file.sync()
    except BaseException as error:
        undo_name(folder_fd, name, error)
        raise
    finally:
        file.close()


def pieces(
    file: RecordFile, ranges: Sequence[tuple[int, int]], record_bytes: int
) -> Iterator[tuple[int, memoryview]]:
    """The bytes of `file` in the half-open `ranges` of complete records, several records at a time: the start of each
    piece, and a view that is valid until the next. Raises `OSError`; `ShortReadError` if `file` is shorter."""
    step = max(1, BOUNCE_BYTES // record_bytes) * record_bytes
    buffer = memoryview(mmap.mmap(-1, step))  # anonymous memory starts on a page
    for first, end in ranges:
        for start in range(first, end, step):
            piece = buffer[: min(step, end - start)]
            file.read(piece, start)
            yield start, piece
            if not file.direct:
                file.drop(start, len(piece))


def copy(
    file: RecordFile, size: int, ranges: Sequence[tuple[int, int]], folder_fd: int, name: str, record_bytes: int,
    check: Callable[[int, memoryview], object],
) -> None:  # fmt: skip
    """Create a file `name` of `size` bytes with those of `file` in the half-open `ranges`, and holes elsewhere.

    `check` gets each piece of `pieces` before it is written, and raises if it must not be. Raises the errors of
    `new_file`, `pieces` and `check`; then no file of that name exists.
    """
    with new_file(folder_fd, name, size, sum(end - first for first, end in ranges)) as target:
        for start, piece in pieces(file, ranges, record_bytes):
            check(start, piece)
            target.write(piece, start)


def undo_name(folder_fd: int, name: str, error: BaseException) -> None:
    """Remove a new name because of `error`, which is unchanged, with a note if the removal fails."""
    try:
        os.unlink(name, dir_fd=folder_fd)
    except OSError as left:
        error.add_note(f"{name!r} could not be removed: {left}")


def place_of(folder_fd: int, name: str) -> str:
    """The path of `name` in the open directory, for messages. `ValueError` unless it is a plain name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"a file name must be a plain name in its folder, got {name!r}")
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}"), name)
    except OSError:  # a platform that does not tell
        return name


