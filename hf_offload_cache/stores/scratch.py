"""A file without a name: it takes disk space as long as its descriptor is open, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

from ..errors import StoreError
from .descriptor import Descriptor, open_descriptor
from .record_file import REFUSALS, RecordFile


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
