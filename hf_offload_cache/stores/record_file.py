"""An open file of records: whole reads and writes, past the page cache where that works."""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator

from ..errors import StoreError
from ..memory.machine import free_disk
from .atomic_file import Descriptor, open_descriptor
from .base import DEVICE_BLOCK

MOST_PARTS = 1024
"""Of a `write_parts`: as many as Linux takes."""
BOUNCE_BYTES = 2**20
"""Host memory that a write of unaligned or encrypted data borrows while it runs, and a copy."""

SYNC_BYTES = 2**20
"""Bytes written through the page cache before they are forced to the disk and dropped from it."""


REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
"""What a system call fails with that a sandbox forbids, or that this kernel or file system does not have."""


def drop_pages(fd: int, offset: int = 0, length: int = 0) -> str | None:
    """Drop a range of a file (`length` 0: to its end) from the page cache. Returns None, or the reason why that is not
    possible here.

    Only the page cache's size depends on it, so a failure is not an error.
    """
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
    """The file ends before the bytes that were asked for."""


class _Known:
    """Knowledge about a file, shared by everyone who shares its descriptor.

    Attributes:
        vouched: `_state_of` the file when it was known to be as it was written; None: it is not.
        on_damage: called once, in any thread, with the reason why it is not; None: no callback.
    """

    def __init__(self) -> None:
        self.vouched: tuple[int, int] | None = None
        self.on_damage: Callable[[str], object] | None = None


class RecordFile:
    """An open file. `read` and `write` may run in several threads, on different bytes.

    Calls that a signal interrupts are taken up again by Python (PEP 475). The descriptor is given back by `close`, or
    with the object; where it is shared, with the last of them.

    Attributes:
        fd: the descriptor, -1 once closed.
        place: how errors say where it is.
        direct: transfers bypass the page cache; offsets, lengths and read buffers must be aligned.
        unsynced: bytes written that the page cache may still hold.
        doubtful: what was written before may be lost already: `check` says so.
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
        """Another object over the same descriptor, to be closed on its own. For a file that is not written any more."""
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
        """Declare the file as it was written: nothing writes to it from now on, and `unchanged` checks this."""
        self._known.vouched = _state_of(self.fd)

    def doubt(self, why: str) -> None:
        """Note that damage was found in the file: it is no longer `unchanged`."""
        self._known.vouched = None
        told, self._known.on_damage = self._known.on_damage, None
        if told is not None:
            told(why)

    def on_damage(self, told: Callable[[str], object]) -> None:
        """Register `told` to be called, once, when damage is found in the file, also by others who share it. Any thread
        may call it; it must not raise."""
        self._known.on_damage = told

    @property
    def unchanged(self) -> bool:
        """Whether nothing has written to the file since `vouch`, as far as its size and its date tell."""
        return self._known.vouched == _state_of(self.fd)

    def try_direct(self) -> str | None:
        """Bypass the page cache from now on where that works: None, or the reason why it does not."""
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
        """Raise `OSError` when what was written before may be lost already."""
        if self.doubtful:
            self._check_synced()

    def _check_synced(self) -> None:
        if self._sync_error is not None:
            raise OSError(self._sync_error.errno, "earlier writes may be lost") from self._sync_error

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (bytes) from `offset`. Raises `OSError`: `ShortReadError` when the file ends too early."""
        self.check()
        done = 0
        while done < len(buffer):
            count = os.preadv(self.fd, [buffer[done:]], offset + done)
            if count == 0:
                raise ShortReadError(errno.EIO, f"short read: the file ends at byte {offset + done}")
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

    def write_parts(self, parts: list[memoryview], offset: int) -> None:
        """`write` for `parts` (bytes) one behind the other, no more than `MOST_PARTS`; one request, unless cut
        short."""
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
        """`write` for data at any address, by way of `BOUNCE_BYTES` of aligned memory."""
        bounce = memoryview(mmap.mmap(-1, min(len(data), BOUNCE_BYTES)))  # anonymous memory starts on a page
        for start in range(0, len(data), BOUNCE_BYTES):
            piece = data[start : start + BOUNCE_BYTES]
            bounce[: len(piece)] = piece
            self.write(bounce[: len(piece)], offset + start)

    def wipe(self, start: int, stop: int) -> None:
        """Make the bytes [start, stop) zeros, both multiples of `DEVICE_BLOCK`; what is a hole there stays one."""
        zeros = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
        for first, end in self._data(start, stop):
            for offset in range(first, end, BOUNCE_BYTES):
                self.write(zeros[: min(BOUNCE_BYTES, end - offset)], offset)

    def _data(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of whole blocks in [start, stop) that are no holes; all of it where the platform does not tell."""
        if not hasattr(os, "SEEK_DATA"):
            yield start, stop
            return
        while start < stop:
            try:
                first = os.lseek(self.fd, start, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole up to the file's end
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
        """All that was written, and the file's size, is on the device when this returns. Raises `OSError`."""
        self._check_synced()
        with self._lock:
            doubtful, self.unsynced = self.unsynced > 0, 0
        self._force(os.fsync, doubtful)

    def _force(self, sync: Callable[[int], None], doubtful: bool) -> None:
        """`doubtful`: some of what was written is in the page cache alone."""
        try:
            sync(self.fd)
        except OSError as error:
            self._sync_error = error  # the kernel says it once: a second try must not find all well
            self.doubtful = self.doubtful or doubtful  # which pages failed is forgotten: any may be read as it was
            raise
        self.drop(0, 0)

    def drop(self, offset: int, length: int) -> None:
        """Let go of the page cache of a range (`length` 0: to the end), where the platform can."""
        drop_pages(self.fd, offset, length)

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
        available, here = free_disk(self.fd), os.fstat(self.fd)
        return None if available is None else available - max(0, here.st_size - here.st_blocks * 512)

    def close(self) -> None:
        """Give the descriptor back, and with the last one the space of a file without a name. Idempotent."""
        self.fd = -1
        self._sharers.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and not self._sharers:
            descriptor.close()


def _state_of(fd: int) -> tuple[int, int]:
    """What any write to a file changes: its date, and its size."""
    there = os.fstat(fd)
    return there.st_mtime_ns, there.st_size


# A file without a name: it takes disk space as long as its descriptor is open, and leaves nothing behind

class ScratchFile(RecordFile):
    """A new unnamed file in `directory`: see `open_scratch`.

    Where the file system can, a name can be given to it later (`os.link` of its place under /proc).
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
    return StoreError(
        error.errno, f"{name}: no scratch file can be made in {place!r} ({error.strerror}); {advice}"
    )


def _open_unnamed(directory: str) -> Descriptor:
    """A new file that only its owner may use and that no name leads to."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return open_descriptor(directory, os.O_TMPFILE | os.O_RDWR)
        except OSError:
            pass  # not every file system can: the named way below works, or says what is wrong
    path = os.path.join(directory, f".hf_offload_cache-{secrets.token_hex(16)}")
    try:
        descriptor = open_descriptor(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR)
    except FileExistsError:
        raise
    except BaseException:
        with contextlib.suppress(OSError):  # an interrupt may have come when it was made
            os.unlink(path)
        raise
    try:
        os.unlink(path)
    except OSError:
        descriptor.close()
        raise
    return descriptor


def _make_private(fd: int) -> None:
    """Give the file mode 0600: a umask may have taken the owner's rights too, which a name would need."""
    try:
        if os.fstat(fd).st_mode & 0o777 != 0o600:
            os.fchmod(fd, 0o600)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise  # a file system without modes (vfat): no name leads to this file, and an export checks its own
