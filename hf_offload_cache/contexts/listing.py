"""Contexts in a folder: their disk space, last use and damage, and evicting the oldest. Does not load torch."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ..errors import ContextError, CorruptRecordError, StoreError
from .file_system import FILE_SYSTEM, sync_folder
from .folder import MANIFEST_NAME, entries, open_file, open_folder, read_small, reading, survey, write_file
from .manifest import Manifest, manifest_in
from .removal import remove

Inode = tuple[int, int]

_MOST_MARK_BYTES = 4096
_WRITTEN = ".hf_offload_cache-written-"
"""Beginning of the name of a day's file in a library."""


@dataclass(frozen=True)
class File:
    """A context's file: its disk space, and its number of names (hard links)."""

    disk_bytes: int
    links: int


@dataclass(frozen=True)
class Entry:
    """A context in a folder, at the time of the look.

    `damage` describes damage as far as manifest, sizes and earlier reads show it; None: none. `manifest` is None if it
    cannot be read, or was not read. A file that two contexts share is in the `files` of both. `note` says why a library
    never opens it although it is not damaged.
    """

    path: Path
    manifest: Manifest | None = field(repr=False)
    last_used_ns: int
    damage: str | None
    files: Mapping[Inode, File] = field(repr=False)
    note: str | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def bytes(self) -> int:
        """Disk space of its files, including those that other contexts share."""
        return sum(file.disk_bytes for file in self.files.values())

    @property
    def freed_bytes(self) -> int:
        """Disk space that removing it frees: that of files without another name."""
        return sum(file.disk_bytes for file in self.files.values() if file.links == 1)

    @property
    def cache(self) -> str | None:
        """Name of the cache class."""
        return None if self.manifest is None else self.manifest.cache

    @property
    def tokens(self) -> int | None:
        """Tokens per sequence."""
        return None if self.manifest is None else self.manifest.tokens

    @property
    def batch(self) -> int | None:
        return None if self.manifest is None else self.manifest.batch

    @property
    def encrypted(self) -> bool | None:
        return None if self.manifest is None else self.manifest.key_check is not None

    @property
    def digest(self) -> str | None:
        """The digest that `save` returned: 64 hex digits that differ from any other context's, even an older one's."""
        return None if self.manifest is None else self.manifest.digest

    @property
    def created(self) -> str | None:
        """ISO 8601, UTC."""
        return None if self.manifest is None else self.manifest.created

    @property
    def last_used(self) -> datetime:
        return datetime.fromtimestamp(self.last_used_ns / 1e9, UTC)


@dataclass(frozen=True)
class Eviction:
    """The result of `evict`: the removed contexts, with the disk space that each freed, and the errors of others."""

    removed: list[tuple[Entry, int]]
    refused: list[tuple[Entry, Exception]]
    held_bytes: int
    """Disk space of the remaining contexts."""


def look(path: str | os.PathLike[str], *, sizes_only: bool = False) -> Entry | None:
    """The context at `path`, also a damaged one; None without one. `sizes_only`: do not read the manifest, so that
    `manifest` and `damage` are None."""
    path = Path(path)
    try:
        return reading(path, functools.partial(_measure if sizes_only else _look, path))
    except (ContextError, OSError) as error:
        try:
            return reading(path, functools.partial(_look_at_damaged, path, " ".join(str(error).split())))
        except ContextError:
            return None
        except OSError:
            return Entry(path, None, 0, str(error), {})


def listing(folder: str | os.PathLike[str], *, sizes_only: bool = False) -> list[Entry]:
    """`look` at the contexts directly in `folder`, the most recently used first. Raises `ContextError`, `StoreError`
    for the folder."""
    looks = [look(path, sizes_only=sizes_only) for path in entries(folder)]
    return sorted((entry for entry in looks if entry is not None), key=_by_use, reverse=True)


def touch(path: str | os.PathLike[str], when_ns: int | None = None) -> bool:
    """Record a use of the context at `path`, now or at `when_ns`; False if this user may not, or it was removed."""
    now = time.time_ns() if when_ns is None else when_ns
    try:
        with open_folder(path) as folder_fd, open_file(folder_fd, MANIFEST_NAME) as fd:
            os.utime(fd, ns=(now, now))
    except (ContextError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return False
    return True


def mark(path: str | os.PathLike[str], digest: str, why: str) -> bool:
    """Mark the context at `path` as damaged for all processes, if it still has that `digest`; `look` reports this from
    then on. False if this user cannot write the mark, or the context no longer exists."""
    try:
        with open_folder(path) as folder_fd:
            manifest = manifest_in(folder_fd, str(path))
            if manifest.digest != digest:
                return False
            write_file(folder_fd, manifest.mark_name, [why.encode()[:_MOST_MARK_BYTES]])
            sync_folder(FILE_SYSTEM, folder_fd)
    except FileExistsError:
        return True
    except (ContextError, OSError):  # the caller knows of the damage anyway
        return False
    return True


def marked(folder_fd: int, name: str) -> str:
    """The text of the mark `name` in an open context, which may be half written."""
    try:
        text = read_small(folder_fd, name, _MOST_MARK_BYTES).decode(errors="replace")
    except (ContextError, OSError):
        text = ""
    return f"a read found damage: {' '.join(text.split()) or 'no details were recorded'}"


def total_bytes(contexts: Iterable[Entry]) -> int:
    """Disk space of the contexts, with shared files counted once."""
    return sum({inode: file.disk_bytes for entry in contexts for inode, file in entry.files.items()}.values())


def evict(
    folder: str | os.PathLike[str],
    most_bytes: int,
    among: Callable[[Entry], bool] = lambda entry: True,
    *,
    wipe: bool = False,
) -> Eviction:
    """Remove least recently used contexts (of those that `among` accepts) until the others take at most `most_bytes`.

    Files shared with a remaining context are not freed. Several processes may do this at once, and remove the same
    contexts. One that cannot be removed is reported. Raises `ContextError`, `StoreError` if `folder` cannot be read.
    """
    remaining = [entry for entry in listing(folder, sizes_only=True) if among(entry)]
    links = Counter(inode for entry in remaining for inode in entry.files)
    total = total_bytes(remaining)
    removed: list[tuple[Entry, int]] = []
    refused: list[tuple[Entry, Exception]] = []
    while remaining and total > most_bytes:
        oldest = remaining.pop()
        latest = look(oldest.path) or oldest
        if latest.last_used_ns > oldest.last_used_ns:  # used by another process since it was listed
            remaining.append(dataclasses.replace(oldest, last_used_ns=latest.last_used_ns))
            remaining.sort(key=_by_use, reverse=True)
            continue
        try:
            freed = remove(oldest.path, wipe=wipe)
        except (ContextError, StoreError) as error:
            # after a StoreError it may have lost its name, and still take space
            if isinstance(error, StoreError) or look(oldest.path) is not None:
                refused.append((latest, error))
                continue
        else:
            removed.append((latest, freed))
        for inode, file in oldest.files.items():
            links[inode] -= 1
            total -= file.disk_bytes if links[inode] == 0 else 0
    return Eviction(removed, refused, total)


def _by_use(entry: Entry) -> tuple[int, str]:
    return entry.last_used_ns, entry.name


def _look(path: Path, folder_fd: int) -> Entry:
    manifest = manifest_in(folder_fd, str(path))
    files, _ = survey(FILE_SYSTEM, folder_fd)
    sizes = expected_sizes(manifest)
    for name in sorted(sizes):
        if name not in files:
            raise CorruptRecordError(errno.ENOENT, f"{name} is missing")
        if files[name].st_size != sizes[name]:
            raise CorruptRecordError(errno.EIO, f"{name} has {files[name].st_size:,} bytes, not {sizes[name]:,}")
    if manifest.mark_name in files:
        raise CorruptRecordError(errno.EIO, marked(folder_fd, manifest.mark_name))
    return _entry(path, manifest, files, None)


def _measure(path: Path, folder_fd: int) -> Entry:
    return _entry(path, None, survey(FILE_SYSTEM, folder_fd)[0], None)


def _look_at_damaged(path: Path, damage: str, folder_fd: int) -> Entry:
    try:
        manifest = manifest_in(folder_fd, str(path))
    except ContextError:
        manifest = None
    return _entry(path, manifest, survey(FILE_SYSTEM, folder_fd)[0], damage)


def _entry(path: Path, manifest: Manifest | None, files: Mapping[str, os.stat_result], damage: str | None) -> Entry:
    if MANIFEST_NAME not in files:
        raise FileNotFoundError(errno.ENOENT, f"{MANIFEST_NAME} was removed")
    inodes = {(stat.st_dev, stat.st_ino): File(stat.st_blocks * 512, stat.st_nlink) for stat in files.values()}
    return Entry(path, manifest, files[MANIFEST_NAME].st_mtime_ns, damage, inodes)


def expected_sizes(manifest: Manifest) -> dict[str, int]:
    """Bytes of each data file."""
    states = [manifest.state, *(layer.state for layer in manifest.layers)]
    records = {part.file: part.records * layer.size_of(part) for layer in manifest.layers for part in layer.parts}
    return {**{state.file: state.bytes for state in states}, **records}


class WrittenToday:
    """Bytes written to a folder on the present day (UTC), by all processes, in a file of one number a line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self) -> Path:
        return self._folder / f"{_WRITTEN}{datetime.now(UTC):%Y-%m-%d}"

    def bytes(self) -> int:
        try:
            lines = self._path().read_text().split()
        except FileNotFoundError:
            return 0
        return sum(int(line) for line in lines if line.isdecimal())

    def add(self, size: int) -> None:
        """Add to the day's bytes, and remove the files of other days. Raises nothing."""
        path = self._path()
        with contextlib.suppress(OSError):  # a full disk: the context itself is saved
            if not path.exists():
                for other in self._folder.glob(f"{_WRITTEN}*"):
                    other.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(f"{size}\n")
