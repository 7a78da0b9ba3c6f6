"""Chooses the engine for a folder's scratch files, and opens stores with it."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import StoreError, StoreFullError
from ..memory.account import MemoryAccount
from .base import DEVICE_BLOCK, FreezableStore, aligned_empty
from .encryption import Encryption
from .file import DirectStore, FileStore, FrozenFile
from .guard import Checksums, RecordGuard
from .mapped import MappedStore
from .memory import MemoryStore
from .record_file import NamedFile, ScratchFile, advise_map, drop_pages
from .uring.queues import ring_bytes
from .uring.ring import DEPTH, Ring
from .uring.uring_store import UringStore

ENGINES = ("auto", "uring", "direct", "mapped", "memory")


def probe_direct(directory: str | os.PathLike[str]) -> tuple[bool, str]:
    """Whether `O_DIRECT` works in `directory`, and why not, by writing and reading one block of an unnamed file.

    Raises `StoreError` if no file can be created there at all.
    """
    scratch = ScratchFile(directory, "engine probe")
    try:
        reason = scratch.try_direct()
    finally:
        scratch.close()
    return reason is None, reason or ""


def probe_uring(directory: str | os.PathLike[str]) -> tuple[bool, str]:
    """Whether io_uring reads files in `directory`, and why not, by reading one block of an unnamed file through a ring.

    Raises `StoreError` if no file can be created there at all.
    """
    try:
        store = UringStore(directory, DEVICE_BLOCK, "engine probe")
    except StoreError:
        raise
    except OSError as error:
        return False, error.strerror or str(error)
    try:
        ids, records = store.allocate(1), aligned_empty(2, DEVICE_BLOCK)
        records[0], records[1] = 0xA5, 0
        store.write(ids, records[:1])
        store.read(ids, records[1:])
        if not torch.equal(records[0], records[1]):
            return False, "io_uring: a block read back differs from what was written"
    except StoreFullError:
        raise
    except StoreError as error:
        return False, f"io_uring cannot read here: {error.strerror}"
    finally:
        store.close()
    return True, ""


def probe_page_cache(directory: str | os.PathLike[str]) -> str:
    """The reason why this process cannot drop pages of a file in `directory` from the page cache; empty if it can.

    Raises `StoreError` if no file can be created there at all.
    """
    scratch = ScratchFile(directory, "engine probe")
    try:
        scratch.resize(DEVICE_BLOCK)
        with mmap.mmap(scratch.fd, DEVICE_BLOCK, prot=mmap.PROT_READ) as mapped:
            return advise_map(mapped, "MADV_DONTNEED") or drop_pages(scratch.fd) or ""
    except OSError as error:
        return f"files cannot be mapped here: {error.strerror}"
    finally:
        scratch.close()


def choose_engine(engine: str, directory: str | os.PathLike[str]) -> tuple[str, str]:
    """The engine for `open_store`, resolved from the user's `engine`, and a line for the report that gives the reason.

    "auto" is "uring" if the kernel allows it and O_DIRECT works, else "direct" if that works, else "mapped". Call it
    once per cache: it writes to the disk. Raises `ValueError` for an unknown engine, and `StoreError` if `directory`
    cannot be written to, or if "uring" or "direct" is requested and does not work there.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")
    if engine == "memory":
        return "memory", "memory: records stay in host memory"
    direct, reason = probe_direct(directory)
    if engine == "direct" and not direct:
        raise StoreError(errno.EINVAL, f'engine="direct": {reason}; use engine="mapped" or another `path`')
    uring, refusal = probe_uring(directory) if engine in ("auto", "uring") else (False, "")
    if engine == "uring" and not uring:
        raise StoreError(errno.ENOSYS, f'engine="uring": {refusal}; use engine="auto"')
    requested = engine != "auto"
    chosen = engine if requested else "mapped" if not direct else "uring" if uring else "direct"
    why = {
        "uring": "io_uring reads" + (", O_DIRECT" if direct else f", through the cache: {reason}"),
        "direct": "O_DIRECT reads by threads" + (", as requested" if requested else f" ({refusal})"),
        "mapped": "as requested" if requested else reason,
    }
    line = f"{chosen}: {why[chosen]}"
    kept = "" if direct and chosen != "mapped" else probe_page_cache(directory)
    if kept:
        line += f"; reads stay in the page cache ({kept})"
    kind = _file_system(os.path.realpath(directory))
    if kind in ("tmpfs", "ramfs"):
        line += f" ({os.fspath(directory)} is {kind}: this disk is memory, so nothing is saved; give another `path`)"
    return chosen, line


def resolve_engine(fields: dict[str, Any], path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """`fields` of a configuration with "auto" resolved for the folder `path` (None: the temporary one), because a
    cache's memory depends on the engine."""
    if fields.get("engine", "auto") != "auto":
        return fields
    directory = tempfile.gettempdir() if path is None else path
    return {**fields, "engine": choose_engine("auto", directory)[0]}


def open_store(
    engine: str,
    directory: str | os.PathLike[str],
    record_bytes: int,
    name: str,
    ring: Ring | None = None,
    guard: RecordGuard | None = None,
    pinned_in: MemoryAccount | None = None,
) -> FreezableStore:
    """An empty store that errors call `name`; `engine` comes from `choose_engine`, as do the `StoreError`s.

    Stores of engine "uring" share `ring`, or have one each if that is None; the others ignore it. `guard` (None:
    checksums, checked at every read) has no records yet, and belongs to this store from now on. `pinned_in`:
    see `MemoryStore`; the others ignore it.
    """
    if engine == "memory":
        return MemoryStore(record_bytes, name, guard, pinned=pinned_in is not None, account=pinned_in)
    if engine == "uring":
        return UringStore(directory, record_bytes, name, ring, guard)
    if engine == "direct":
        return DirectStore(directory, record_bytes, name, guard)
    if engine == "mapped":
        return MappedStore(directory, record_bytes, name, guard)
    raise _unresolved(engine)


def open_named(
    engine: str,
    folder_fd: int,
    file_name: str,
    count: int,
    record_bytes: int,
    name: str,
    ring: Ring | None = None,
    guard: RecordGuard | None = None,
) -> FreezableStore:
    """A frozen store over the `count` records of the file `file_name` in the open directory `folder_fd`, read only.

    `guard` has their tags, and belongs to this store from now on; None trusts the file. If `engine` (resolved for the
    cache's own folder) cannot read there ("direct" without O_DIRECT, or "memory"), the next that can is used: "uring"
    with a `ring`, else "mapped".

    Raises `CorruptRecordError` if the file is missing, a link, not a regular file or not of `count` records,
    `StoreError` if it cannot be opened, and `ValueError` for a name that leads out of the folder or a wrong number of
    tags.
    """
    if engine not in ENGINES or engine == "auto":
        raise _unresolved(engine)
    if count < 0 or record_bytes <= 0 or record_bytes % DEVICE_BLOCK:
        raise ValueError(
            f"count must be at least 0 and record_bytes a positive multiple of {DEVICE_BLOCK}, "
            f"got {count} and {record_bytes}"
        )
    guard = Checksums(False, np.zeros((count, Checksums.tag_bytes), dtype=np.uint8)) if guard is None else guard
    if len(guard.tags) != count:
        raise ValueError(f"guard must have a tag for each of {count} records, it has {len(guard.tags)}")
    file = NamedFile(folder_fd, file_name, count * record_bytes, name)
    if engine != "mapped":
        file.try_direct()
    frozen = FrozenFile(file, count, guard, np.empty(0, dtype=np.int64))
    if engine == "direct" and file.direct:
        return DirectStore(frozen, record_bytes, name)
    if engine == "uring" or (engine != "mapped" and ring is not None):
        return UringStore(frozen, record_bytes, name, ring)
    return MappedStore(frozen, record_bytes, name)


@dataclass
class DryStore:
    """A store of a (resolved) `engine` in a dry run: it counts `records` as taken at once, and holds nothing.

    A mapped store also keeps pages that it was advised of and has not read yet: those of the buffers it reads into.
    """

    record_bytes: int
    engine: str
    encrypted: bool = False
    pinned: bool = False
    records: int = 0

    @property
    def in_memory(self) -> bool:
        """As `Store.in_memory`."""
        return self.engine == "memory"

    @property
    def memory_bytes(self) -> int:
        """Host memory for the records, at most."""
        return self._in_memory[0] if self.engine == "memory" else 0

    @property
    def tables_bytes(self) -> int:
        """Host memory for the books, at most."""
        if self.engine == "memory":
            return self._in_memory[1]
        kind = MappedStore if self.engine == "mapped" else FileStore
        tag_bytes = (Encryption if self.encrypted else Checksums).tag_bytes
        return kind.planned_tables(self.records, self.record_bytes, tag_bytes)

    @property
    def _in_memory(self) -> tuple[int, int]:
        return MemoryStore.planned(self.records, self.record_bytes, pinned=self.pinned)


def planned_ring(engine: str) -> int:
    """Host memory of a cache's io_uring, for the owner `IO_RING`: "auto" may become "uring"; 0 for other engines."""
    return ring_bytes(DEPTH) if engine in ("uring", "auto") else 0


def share_store(store: FreezableStore, ring: Ring | None) -> FreezableStore:
    """`store.share()`, for a cache that reads through `ring`: a `UringStore`'s share uses that ring, other shares
    ignore it."""
    return store.share(ring) if isinstance(store, UringStore) else store.share()


def _unresolved(engine: str) -> ValueError:
    return ValueError(f"engine must be uring, direct, mapped or memory; got {engine!r} (choose_engine resolves auto)")


def _file_system(path: str) -> str | None:
    """Type of the file system that holds `path`, e.g. "ext4"; None if the platform does not tell."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return None
    best, kind = "", None
    for _, place, type_name, *_ in lines:
        mount = place.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # of two mounts on one place the later one is on top
            best, kind = mount, type_name
    return kind
