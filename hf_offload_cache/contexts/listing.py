"""Contexts in a folder: what they take on the disk, when they were used last, and taking the oldest away. No torch."""

from __future__ import annotations

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
from .data_files import MANIFEST_NAME, open_file, read_small, survey, write_file
from .file_system import FILE_SYSTEM, sync_folder
from .folder import entries, open_folder, reading
from .manifest import MOST_MANIFEST_BYTES, Manifest
from .removal import remove

Inode = tuple[int, int]

_MOST_MARK_BYTES = 4096


@dataclass(frozen=True)
class File:
    """A file of a context: bytes of disk, and names that it has anywhere."""

    disk_bytes: int
    links: int


@dataclass(frozen=True)
class Entry:
    """A context in a folder, as of when it was looked at.

    `damage` describes damage as far as manifest, sizes and earlier reads show it; None: none. `manifest` is None if it
    cannot be read, or was not read. `files` lists the context's files; a file shared by two contexts is in both lists.
    `note` says why a library never opens it although it is not damaged.
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
        """Bytes of disk that its files take, those that other contexts share included."""
        return sum(file.disk_bytes for file in self.files.values())

    @property
    def freed_bytes(self) -> int:
        """Bytes of disk that removing it frees: those of files that have no other name."""
        return sum(file.disk_bytes for file in self.files.values() if file.links == 1)

    @property
    def cache(self) -> str | None:
        """Name of the class."""
        return None if self.manifest is None else self.manifest.cache

    @property
    def tokens(self) -> int | None:
        """Tokens a sequence."""
        return None if self.manifest is None else self.manifest.tokens

    @property
    def batch(self) -> int | None:
        return None if self.manifest is None else self.manifest.batch

    @property
    def encrypted(self) -> bool | None:
        return None if self.manifest is None else self.manifest.key_check is not None

    @property
    def digest(self) -> str | None:
        """The digest that `save` returned: 64 hex digits that distinguish this context from any other, older ones
        included."""
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
    """What `evict` did: what is gone, with the bytes of disk that each freed, and what would not go."""

    removed: list[tuple[Entry, int]]
    refused: list[tuple[Entry, Exception]]
    held_bytes: int
    """What the contexts that stay take together."""


def look(path: str | os.PathLike[str], *, sizes_only: bool = False) -> Entry | None:
    """What there is at `path`; None when there is no context, or no longer. Never raises for a damaged one.

    `sizes_only`: the manifest is not read, so that `manifest` and `damage` are None whatever it is like.
    """
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
    """The contexts that lie directly in `folder`, those used last first; each as `look` has it.

    Raises `ContextError`, `StoreError` for the folder.
    """
    found = [entry for path in entries(folder) if (entry := look(path, sizes_only=sizes_only)) is not None]
    return sorted(found, key=_by_use, reverse=True)


def touch(path: str | os.PathLike[str], when_ns: int | None = None) -> bool:
    """Note that the context at `path` is used, now or at `when_ns`; False where this user may not write that down, or
    there is no context any more."""
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
    """Mark the context at `path`, for all processes, as found damaged by a read; `look` reports this from then on.

    Does so only if the context still has that `digest`, because another has no damage. Returns False if this user
    cannot write the mark, or the context no longer exists.
    """
    try:
        with open_folder(path) as folder_fd:
            manifest = Manifest.parse(read_small(folder_fd, MANIFEST_NAME, MOST_MANIFEST_BYTES), str(path))
            if manifest.digest != digest:
                return False
            write_file(folder_fd, manifest.mark_name, [why.encode()[:_MOST_MARK_BYTES]])
            sync_folder(FILE_SYSTEM, folder_fd)
    except FileExistsError:
        return True
    except (ContextError, OSError):  # whatever the disk has against it: the context is damaged
        return False
    return True


def marked(folder_fd: int, name: str) -> str:
    """The text of the mark `name` in an open context; it may be half written."""
    try:
        told = read_small(folder_fd, name, _MOST_MARK_BYTES).decode(errors="replace")
    except (ContextError, OSError):
        told = ""
    return f"a read found damage: {' '.join(told.split()) or 'it was not noted which'}"


def total_bytes(held: Iterable[Entry]) -> int:
    """Bytes of disk that the contexts take together: what several of them share counts once."""
    return sum({inode: file.disk_bytes for entry in held for inode, file in entry.files.items()}.values())


def evict(
    folder: str | os.PathLike[str],
    most_bytes: int,
    among: Callable[[Entry], bool] = lambda entry: True,
    *,
    wipe: bool = False,
) -> Eviction:
    """Remove least recently used contexts (of those that `among` takes) until these take `most_bytes` at most.

    What is shared with a context that stays is not freed, and does not count as such. Of several processes that do this
    at once each removes the same ones; the one used last goes last, for all of them. One that cannot be removed stays,
    and is reported. Raises `ContextError`, `StoreError` when `folder` cannot be read.
    """
    held = [entry for entry in listing(folder, sizes_only=True) if among(entry)]
    links = Counter(inode for entry in held for inode in entry.files)
    total = total_bytes(held)
    removed: list[tuple[Entry, int]] = []
    refused: list[tuple[Entry, Exception]] = []
    while held and total > most_bytes:
        oldest = held.pop()
        gone = look(oldest.path) or oldest
        if gone.last_used_ns > oldest.last_used_ns:  # by another process, since it was listed
            held.append(dataclasses.replace(oldest, last_used_ns=gone.last_used_ns))
            held.sort(key=_by_use, reverse=True)
            continue
        try:
            freed = remove(oldest.path, wipe=wipe)
        except (ContextError, StoreError) as error:
            if isinstance(error, StoreError) or look(oldest.path) is not None:  # what lost its name still takes room
                refused.append((gone, error))
                continue
        else:
            removed.append((gone, freed))
        for inode, file in oldest.files.items():
            links[inode] -= 1
            total -= file.disk_bytes if links[inode] == 0 else 0
    return Eviction(removed, refused, total)


def _by_use(entry: Entry) -> tuple[int, str]:
    return entry.last_used_ns, entry.name


def _look(path: Path, folder_fd: int) -> Entry:
    manifest = Manifest.parse(read_small(folder_fd, MANIFEST_NAME, MOST_MANIFEST_BYTES), str(path))
    files, foreign = survey(FILE_SYSTEM, folder_fd)
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
        manifest = Manifest.parse(read_small(folder_fd, MANIFEST_NAME, MOST_MANIFEST_BYTES), str(path))
    except ContextError:
        manifest = None
    return _entry(path, manifest, survey(FILE_SYSTEM, folder_fd)[0], damage)


def _entry(path: Path, manifest: Manifest | None, files: Mapping[str, os.stat_result], damage: str | None) -> Entry:
    if MANIFEST_NAME not in files:
        raise FileNotFoundError(errno.ENOENT, f"{MANIFEST_NAME} is gone")
    inodes = {(found.st_dev, found.st_ino): File(found.st_blocks * 512, found.st_nlink) for found in files.values()}
    return Entry(path, manifest, files[MANIFEST_NAME].st_mtime_ns, damage, inodes)


def expected_sizes(manifest: Manifest) -> dict[str, int]:
    """Bytes of each data file."""
    states = [manifest.state, *(layer.state for layer in manifest.layers)]
    records = {part.file: part.records * layer.size_of(part) for layer in manifest.layers for part in layer.parts}
    return {**{state.file: state.bytes for state in states}, **records}
