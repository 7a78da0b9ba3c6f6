"""Files of records, without a name or with one: complete reads and writes, past the page cache if that works."""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

from ..errors import CorruptRecordError, StoreError, StoreFullError, is_full
from ..memory.machine import free_disk
from .atomic_file import Descriptor, open_descriptor
from .base import DEVICE_BLOCK

MOST_PARTS = 1024
"""The most parts of a `write_parts`: Linux takes no more."""
BOUNCE_BYTES = 2**20
"""Host memory that a copy, or a write of unaligned or encrypted data, borrows while it runs."""

SYNC_BYTES = 2**20
"""Bytes written through the page cache before they are forced to the disk and dropped from the cache."""


REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
"""Errors of a system call that a sandbox forbids, or that this kernel or file system lacks."""


def drop_pages(fd: int, offset: int = 0, length: int = 0) -> str | None:
    """Drop a range of a file (`length` 0: to its end) from the page cache. Returns None, or the reason for a failure,
    which is not an error: only the page cache's size depends on it."""
    if not hasattr(os, "posix_fadvise"):
        return "this platform has no posix_fadvise"
    try:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return f"posix_fadvise refused: {error.strerror}"
    return None


def advise_map(mapped: mmap.mmap, advice: str, start: int = 0, length: int | None = None) -> str | None:
    """Call `madvise` with an advice by its name, such as "MADV_RANDOM". Returns None, or the reason for a failure, like
    `drop_pages`."""
    if not hasattr(mmap, advice):
        return f"this platform has no {advice}"
    try:
        mapped.madvise(getattr(mmap, advice), start, len(mapped) - start if length is None else length)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return f"madvise refused: {error.strerror}"
    return None


class ShortReadError(OSError):
    """The file ends before the requested bytes."""


class _Known:
    """Knowledge about a file, shared by everyone who shares its descriptor.

    Attributes:
        vouched: `_state_of` the file when it was known to be as it was written; None: it is not.
        on_damage: called once, in any thread, with the reason if it is not; None: no callback.
    """

    def __init__(self) -> None:
        self.vouched: tuple[int, int] | None = None
        self.on_damage: Callable[[str], object] | None = None


class RecordFile:
    """An open file. Several threads may `read` and `write` different bytes.

    Python resumes calls that a signal interrupts (PEP 475). `close`, or the object's end, releases the descriptor; if
    it is shared, the last owner does.

    Attributes:
        fd: the descriptor, -1 once closed.
        place: the file's place in errors.
        direct: transfers bypass the page cache; offsets, lengths and read buffers must be aligned.
        unsynced: bytes written that the page cache may still hold.
        doubtful: earlier writes may be lost; `check` raises then.
    """

    def __init__(self, descriptor: Descriptor, place: str) -> None:
        """Take ownership of `descriptor`."""
        self._descriptor: Descriptor | None = descriptor
        self._known = _Known()
        self._sharers: weakref.WeakSet[RecordFile] = weakref.WeakSet([self])
        self.fd = descriptor.fd
        self.place = place
        self.direct = False
        self.unsynced = 0
        self._sync_error: OSError | None = None
        self.doubtful = False
        self._lock = threading.Lock()

    def share(self) -> RecordFile:
        """Another object over the same descriptor, to be closed separately. For a file that is no longer written."""
        other = copy.copy(self)
        other.unsynced = 0
        other._lock = threading.Lock()
        self._sharers.add(other)
        return other

    @property
    def shared(self) -> bool:
        """Whether others use the descriptor."""
        return len(self._sharers) > 1

    def vouch(self) -> None:
        """Declare the file to be as it was written: nothing writes to it from now on, and `unchanged` checks this."""
        self._known.vouched = _state_of(self.fd)

    def doubt(self, why: str) -> None:
        """Note that damage was found in the file: it is no longer `unchanged`."""
        self._known.vouched = None
        callback, self._known.on_damage = self._known.on_damage, None
        if callback is not None:
            callback(why)

    def on_damage(self, told: Callable[[str], object]) -> None:
        """Register `told` to be called, once, when damage is found in the file, also by others who share it. Any thread
        may call it; it must not raise."""
        self._known.on_damage = told

    @property
    def unchanged(self) -> bool:
        """Whether size and date show no write to the file since `vouch`."""
        return self._known.vouched == _state_of(self.fd)

    def try_direct(self) -> str | None:
        """Bypass the page cache from now on if that works. Returns None, or the reason why it does not. Raises
        `StoreFullError`."""
        if not hasattr(os, "O_DIRECT"):
            return "this platform has no O_DIRECT"
        import fcntl

        before = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, before | os.O_DIRECT)
            self.direct = True
            self._probe(memoryview(mmap.mmap(-1, 2 * DEVICE_BLOCK)))
        except OSError as error:
            self.direct = False
            fcntl.fcntl(self.fd, fcntl.F_SETFL, before)
            if is_full(error):
                why = f"{self.place!r} has no room for a block ({error.strerror}); make room or give another `path`"
                raise StoreFullError(error.errno, why) from error
            return f"O_DIRECT refused in {self.place!r}: {error.strerror}"
        return None

    def _probe(self, view: memoryview) -> None:
        """Move a block; the file must be empty, and is empty again afterwards."""
        try:
            view[:DEVICE_BLOCK] = b"\xa5" * DEVICE_BLOCK
            self.write(view[:DEVICE_BLOCK], 0)
            self.read(view[DEVICE_BLOCK:], 0)
            if view[:DEVICE_BLOCK] != view[DEVICE_BLOCK:]:
                raise OSError(errno.EIO, "a block read back differs from what was written")
        finally:
            os.ftruncate(self.fd, 0)

    def check(self) -> None:
        """Raise `OSError` if earlier writes may be lost."""
        if self.doubtful:
            self._check_synced()

    def _check_synced(self) -> None:
        if self._sync_error is not None:
            raise OSError(self._sync_error.errno, "earlier writes may be lost") from self._sync_error

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (bytes) from `offset`. Raises `OSError`: `ShortReadError` if the file ends too early."""
        self.check()
        done = 0
        while done < len(buffer):
            count = os.preadv(self.fd, [buffer[done:]], offset + done)
            if count == 0:
                raise ShortReadError(errno.EIO, f"short read: the file ends at byte {offset + done}")
            done += count

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` (bytes) at `offset`. Raises `OSError`; part of it may be written then."""
        done = 0
        while done < len(data):
            count = os.pwrite(self.fd, data[done:], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"short write at byte {offset + done}")
            done += count
        if not self.direct:
            self._sync(len(data))

    def write_parts(self, parts: list[memoryview], offset: int) -> None:
        """Like `write`, for `parts` (bytes) end to end, at most `MOST_PARTS`; one request unless cut short."""
        left, total = list(parts), sum(len(part) for part in parts)
        done = 0
        while done < total:
            count = os.pwritev(self.fd, left, offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"short write at byte {offset + done}")
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        if not self.direct:
            self._sync(total)

    def write_unaligned(self, data: memoryview, offset: int) -> None:
        """Like `write`, for data at any address, through `BOUNCE_BYTES` of aligned memory."""
        bounce = memoryview(mmap.mmap(-1, min(len(data), BOUNCE_BYTES)))  # anonymous memory starts on a page
        for start in range(0, len(data), BOUNCE_BYTES):
            piece = data[start : start + BOUNCE_BYTES]
            bounce[: len(piece)] = piece
            self.write(bounce[: len(piece)], offset + start)

    def wipe(self, start: int, stop: int) -> None:
        """Zero the bytes [start, stop), both multiples of `DEVICE_BLOCK`; holes stay holes."""
        zeros = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
        for first, end in self._data(start, stop):
            for offset in range(first, end, BOUNCE_BYTES):
                self.write(zeros[: min(BOUNCE_BYTES, end - offset)], offset)

    def _data(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of complete blocks in [start, stop) that are not holes; all of it if the platform does not tell."""
        if not hasattr(os, "SEEK_DATA"):
            yield start, stop
            return
        while start < stop:
            try:
                first = os.lseek(self.fd, start, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole up to the file's end
                    return
                if error.errno in REFUSALS:
                    yield start, stop
                    return
                raise
            end = os.lseek(self.fd, first, os.SEEK_HOLE)
            first, end = max(start, first - first % DEVICE_BLOCK), min(stop, -(-end // DEVICE_BLOCK) * DEVICE_BLOCK)
            if first >= stop:
                return
            yield first, end
            start = end

    def _sync(self, written: int) -> None:
        with self._lock:
            self.unsynced += written
            if self.unsynced < SYNC_BYTES:
                return
            self.unsynced = 0
        self._force(getattr(os, "fdatasync", os.fsync), doubtful=True)

    def sync(self) -> None:
        """Force all writes, and the file's size, to the device. Raises `OSError`."""
        self._check_synced()
        with self._lock:
            doubtful, self.unsynced = self.unsynced > 0, 0
        self._force(os.fsync, doubtful)

    def _force(self, sync: Callable[[int], None], doubtful: bool) -> None:
        """`doubtful`: some of the written bytes are only in the page cache."""
        try:
            sync(self.fd)
        except OSError as error:
            self._sync_error = error  # the kernel reports it once; a second try must not succeed
            self.doubtful = self.doubtful or doubtful  # the failed pages are unknown: any may have its old content
            raise
        self.drop(0, 0)

    def drop(self, offset: int, length: int) -> None:
        """Drop a range (`length` 0: to the end) from the page cache, if the platform can."""
        drop_pages(self.fd, offset, length)

    def resize(self, size: int) -> None:
        """Make the file `size` bytes long; it takes space as it is written."""
        os.ftruncate(self.fd, size)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def disk_bytes(self) -> int:
        """Bytes that the file takes on the disk now; 0 once closed."""
        return 0 if self.fd < 0 else os.fstat(self.fd).st_blocks * 512

    def free_bytes(self) -> int | None:
        """Bytes that the file may still grow by: its disk's free space, less what the file was promised; None:
        unknown."""
        available, here = free_disk(self.fd), os.fstat(self.fd)
        return None if available is None else available - max(0, here.st_size - here.st_blocks * 512)

    def close(self) -> None:
        """Release the descriptor; the last owner also frees the space of a file without a name. Idempotent."""
        self.fd = -1
        self._sharers.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and not self._sharers:
            descriptor.close()


def _state_of(fd: int) -> tuple[int, int]:
    """Date and size of a file, which any write changes."""
    status = os.fstat(fd)
    return status.st_mtime_ns, status.st_size


# A file without a name: it takes disk space while its descriptor is open, and leaves nothing behind

class ScratchFile(RecordFile):
    """A new unnamed file in `directory`: see `open_scratch`.

    If the file system can, a name can be given to it later (`os.link` of its place under /proc).
    """

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        place = os.fspath(directory)
        super().__init__(open_scratch(place, name), place)


def open_scratch(directory: str | os.PathLike[str], name: str) -> Descriptor:
    """Open a new unnamed file in `directory` that only its owner can use, whatever the umask. Raises `StoreError` that
    names `directory` if no file can be created there."""
    place = os.fspath(directory)
    try:
        descriptor = _open_unnamed(place)
        _make_private(descriptor.fd)
        return descriptor
    except OSError as error:
        raise _refusal(place, name, error) from error


def _refusal(place: str, name: str, error: OSError) -> StoreError:
    advice = "give `path` a folder that exists and that you may write to"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "raise the limit of open files with `ulimit -n`, or close others"
    kind = StoreFullError if is_full(error) else StoreError
    return kind(
        error.errno, f"{name}: no scratch file can be made in {place!r} ({error.strerror}); {advice}"
    )


def _open_unnamed(directory: str) -> Descriptor:
    """A new file that only its owner may use and that no name leads to."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return open_descriptor(directory, os.O_TMPFILE | os.O_RDWR)
        except OSError:
            pass  # not every file system can; the way below works, or raises
    path = os.path.join(directory, f".hf_offload_cache-{secrets.token_hex(16)}")
    try:
        descriptor = open_descriptor(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR)
    except FileExistsError:
        raise
    except BaseException:
        with contextlib.suppress(OSError):  # an interrupt may have arrived after it was created
            os.unlink(path)
        raise
    try:
        os.unlink(path)
    except OSError:
        descriptor.close()
        raise
    return descriptor


def _make_private(fd: int) -> None:
    """Set mode 0600: a umask may have removed the owner's rights too, which a name would need."""
    try:
        if os.fstat(fd).st_mode & 0o777 != 0o600:
            os.fchmod(fd, 0o600)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise  # without modes (vfat) it is accepted: no name leads to it, and an export checks its own file


# A file with a name in a folder: opened to be read, linked, copied

_NEEDS_A_COPY = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOENT, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of linking to another file system, one without links, a file that lost its last name, and too many links."""

_NOT_THERE = {
    errno.ENOENT: "",
    errno.ELOOP: "it is a symbolic link, which is not followed",
    errno.ENXIO: "it is not a regular file",  # a socket
}
"""Errors of opening if our file is not there, and their meaning; empty: the system's text."""


class NamedFile(RecordFile):
    """The file `file_name` in the open directory `folder_fd`, read only. Its size must be `size`.

    Raises `CorruptRecordError` (naming `name`) if it is missing, a link, not a regular file, or of another size;
    `StoreError` if it cannot be opened; `ValueError` for a name that leads out of the folder.
    """

    def __init__(self, folder_fd: int, file_name: str, size: int, name: str) -> None:
        place = place_of(folder_fd, file_name)
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
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
            wrong = "it is not a regular file"
        elif status.st_size != size:
            wrong = f"it has {status.st_size:,} bytes and was written with {size:,}"
        if wrong:
            self.close()
            raise CorruptRecordError(errno.EIO, f"{name}: {place!r} is not what was written: {wrong}")
        self.vouch()

    def _probe(self, view: memoryview) -> None:
        if self.size:
            self.read(view[:DEVICE_BLOCK], 0)


def link_file(file: RecordFile, folder_fd: int, name: str) -> bool:
    """Give `file` the new name `name` in `folder_fd`. Returns False if that is not possible, or if others than its
    owner may use the file, because a link has the same rights. Raises `OSError`, e.g. `EEXIST`."""
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
    """A new file `name` of `size` bytes in `folder_fd`, mode 0600, to be written inside the `with`; it is on the device
    after it.

    `taken` bytes are written, the others are holes. If those do not fit, raises `StoreFullError` with the numbers
    before anything is created; other `OSError`s pass through. After any error, in here or inside, the name is gone.
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
        file.try_direct()  # so that a copy does not fill the page cache; without it, pages are dropped one by one
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


def copy_file(
    file: RecordFile, size: int, ranges: Sequence[tuple[int, int]], folder_fd: int, name: str, record_bytes: int,
    check: Callable[[int, memoryview], object],
) -> None:  # fmt: skip
    """Create a file `name` of `size` bytes with those of `file` in the half-open `ranges`, and holes elsewhere.

    `check` gets each piece of `pieces` before it is written, and raises to refuse it. Raises the errors of `new_file`,
    `pieces` and `check`; then no file of that name exists.
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
    """Path of `name` in the open directory, for messages. Raises `ValueError` unless `name` is a plain name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"a file name must be a plain name in its folder, got {name!r}")
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}"), name)
    except OSError:  # a platform that does not tell
        return name


