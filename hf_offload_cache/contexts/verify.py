"""Checking every byte of a context. Finds everything that is wrong, not only the first fault."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import ContextError, EncryptionKeyError, StoreError
from ..stores.base import aligned_empty
from ..stores.encryption import KeySource, load_key, open_guard
from ..stores.guard import RecordGuard
from ..stores.record_file import NamedFile, drop_pages
from .file_system import FILE_SYSTEM
from .folder import MANIFEST_NAME, reading, survey
from .listing import expected_sizes, marked
from .manifest import LayerEntry, Manifest, RecordsFile, StateFile, manifest_in, records_name
from .open import token_ids
from .state import ContextReader, check_key, most_of_cache

Kind = Literal["damaged", "missing", "marked", "foreign", "exposed"]


@dataclass(frozen=True)
class Finding:
    """A fault of a context.

    Attributes:
        kind: "damaged": not as it was written. "missing": no longer present. "marked": a read through a library found
            damage, which may have been repaired since. "foreign": not a file of this context. "exposed": others may
            read it.
        file: its name in the context; "." is the directory itself.
        part: the part it belongs to: "manifest", "cache", "layer 3"; empty if it belongs to none.
        records: numbers of the layer's damaged records, as in read errors; at most the first million of a file that
            cannot be checked at all.
        problem: description of the fault.
    """

    kind: Kind
    file: str
    part: str
    problem: str
    records: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerifyResult:
    """Totals and findings of `verify`, in the order of the manifest, then by name."""

    path: str
    findings: tuple[Finding, ...]
    files: int
    """Files read."""
    records: int
    """Records checked."""
    bytes: int
    """Bytes read."""

    @property
    def whole(self) -> bool:
        """Whether everything that was written is present and unchanged; the context may still be marked, exposed, or
        contain foreign files."""
        return not any(finding.kind in ("damaged", "missing") for finding in self.findings)


BLOCK_BYTES = 8 * 2**20
"""Bytes of records read and checked at once."""
_MOST_NUMBERS = 2**20
"""Records named in a file that cannot be checked. The manifest may claim any number, and holes make a file of any
size."""


def verify(
    directory: str | os.PathLike[str],
    *,
    key: KeySource | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> VerifyResult:
    """Read and check the complete context in `directory`. Needs no model, and does not change the context.

    Needs memory for one layer's state and 8 MiB of records. Reads bypass the page cache, or are dropped from it.

    Args:
        key: key of an encrypted context: a file or a callback, as `encryption_key`.
        progress: called in this thread with the bytes done and their total.

    Raises `ContextError` if there is no context; `EncryptionKeyError` for a missing or wrong key; `StoreError` if the
    directory cannot be read. Faults inside the context are findings, not errors.
    """
    loaded_key, place = None if key is None else load_key(key), os.fspath(directory)

    def check(folder_fd: int) -> VerifyResult:
        result = _Check(folder_fd, place, loaded_key, progress).run()
        if not result.whole:  # `reading` tries again if the context was replaced meanwhile
            raise _NotWhole(result)
        return result

    try:
        return reading(directory, check)
    except _NotWhole as error:
        return error.result


class _NotWhole(ContextError):
    def __init__(self, result: VerifyResult) -> None:
        super().__init__("the context is not whole")
        self.result = result


@dataclass
class _Check:
    """One check of the context that `folder_fd` is open on."""

    folder_fd: int
    place: str
    key: bytes | None
    progress: Callable[[int, int], object] | None
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    records: int = 0
    bytes: int = 0
    checked: set[str] = field(default_factory=set)
    """Files of records read so far."""
    done: int = 0
    """Bytes of `total` done, including those that could not be read."""
    total: int = 0

    def run(self) -> VerifyResult:
        files, foreign = survey(FILE_SYSTEM, self.folder_fd)
        if MANIFEST_NAME not in files:
            raise ContextError(f"{self.place!r} is not a context: it has no file {MANIFEST_NAME!r}")
        self._modes(files)
        manifest = self._manifest()
        if manifest is not None:
            self._contents(manifest, files)
            foreign += sorted(files.keys() - manifest.file_names - {MANIFEST_NAME, manifest.mark_name})
            if manifest.mark_name in files:
                problem = f"a library does not open this context: {marked(self.folder_fd, manifest.mark_name)}"
                self._find("marked", manifest.mark_name, "", f"{problem}; save it anew, or remove this file")
        for name in foreign:
            self._find("foreign", name, "", "it is not a file of this context")
        return VerifyResult(self.place, tuple(self.findings), self.files, self.records, self.bytes)

    def _find(self, kind: Kind, file: str, part: str, problem: object, records: tuple[int, ...] = ()) -> None:
        self.findings.append(Finding(kind, file, part, " ".join(str(problem).split()), records))

    def _modes(self, files: Mapping[str, os.stat_result]) -> None:
        for name, status in ((".", FILE_SYSTEM.fstat(self.folder_fd)), *files.items()):
            if mode := stat.S_IMODE(status.st_mode) & 0o077:
                self._find("exposed", name, "", f"others than its owner have the rights {mode:03o}; chmod go= it")

    def _manifest(self) -> Manifest | None:
        try:
            manifest = manifest_in(self.folder_fd, MANIFEST_NAME)
        except (ContextError, StoreError) as error:
            self._find("damaged", MANIFEST_NAME, "manifest", error)
            return None
        check_key(manifest, self.key, self.place)
        self.total = manifest.record_bytes + manifest.state_bytes
        return manifest

    def _contents(self, manifest: Manifest, files: Mapping[str, os.stat_result]) -> None:
        sizes = expected_sizes(manifest)
        tree = self._state(manifest.state, "cache", files, manifest)
        if tree is not None:
            try:
                token_ids(tree, manifest.batch, manifest.tokens)
            except ContextError as error:
                self._find("damaged", manifest.state.file, "cache", error)
        for layer_idx, layer in enumerate(manifest.layers):
            part = f"layer {layer_idx}"
            tree = self._state(layer.state, part, files)
            guards = self._guards(layer, tree, part)
            first = 0
            for entry, guard in zip(layer.parts, guards, strict=True):
                self._records(entry, guard, part, layer.size_of(entry), first, sizes[entry.file], files)
                first += entry.records

    def _state(
        self, entry: StateFile, part: str, files: Mapping[str, os.stat_result], manifest: Manifest | None = None
    ) -> Any:
        """The tree of a state; None if it cannot be read. `manifest`: only for the cache's state."""
        tree = None
        if entry.file not in files:
            self._find("missing", entry.file, part, "its state is missing")
        else:
            try:
                binding = b"" if manifest is None else manifest.binding
                most = None if manifest is None else most_of_cache(manifest.batch, manifest.tokens)
                tree = ContextReader(self.folder_fd, self.place, self.key).state(entry, part, "cpu", binding, most)
            except (ContextError, StoreError, OSError, EncryptionKeyError) as error:
                self._find("damaged", entry.file, part, error)
            self._drop(entry.file)
            self.files += 1
            self.bytes += files[entry.file].st_size
        self._advance(entry.bytes)
        return tree

    def _guards(self, layer: LayerEntry, tree: Any, part: str) -> list[RecordGuard | None]:
        """The guard of each part of a layer; None if its tags cannot be used."""
        unknown: list[RecordGuard | None] = [None] * len(layer.parts)
        if tree is None:
            return unknown
        try:
            parts = list(zip(layer.parts, tree["tags"], strict=True))
            guards = [open_guard(entry.guard, tag.numpy(), self.key, True) for entry, tag in parts]
            names = [records_name(guard, layer.size_of(entry)) for guard, (entry, _) in zip(guards, parts, strict=True)]
            for (entry, tag), name in zip(parts, names, strict=True):
                if name != entry.file or len(tag) != entry.records:
                    raise ContextError(f"the tags are not those of {entry.file}")
        except (ContextError, KeyError, TypeError, AttributeError, ValueError) as error:
            self._find("damaged", layer.state.file, part, f"its tags cannot be used: {error}")
            return unknown
        return [*guards]

    def _records(
        self, entry: RecordsFile, guard: RecordGuard | None, part: str, size: int, first: int, expected: int,
        files: Mapping[str, os.stat_result],
    ) -> None:  # fmt: skip
        """Check a file of records of `size` bytes, the layer's from number `first` on."""
        end = self.done + expected
        if entry.file not in files:
            last = first + entry.records - 1
            self._find("missing", entry.file, part, f"its records {first} to {last} are missing")
        elif guard is None:
            count = min(entry.records, -(-files[entry.file].st_size // size), _MOST_NUMBERS)
            numbers = tuple(range(first, first + count))
            self._find("damaged", entry.file, part, "it cannot be checked without its tags", numbers)
        elif entry.file not in self.checked:  # layers may share a file, which is named by its tags
            self.checked.add(entry.file)
            self.files += 1
            actual = files[entry.file].st_size
            reasons = set() if actual == expected else {f"it has {actual:,} bytes and was written with {expected:,}"}
            written = np.flatnonzero(guard.written)
            try:
                wrong = self._check_file(entry.file, actual, guard, written, part, size, reasons)
            except StoreError as error:
                wrong = written.tolist()
                reasons.add(error.strerror or str(error))
            if reasons:
                numbers = tuple(sorted(first + number for number in wrong))
                self._find("damaged", entry.file, part, "; ".join(sorted(reasons)), numbers)
        self._advance(end - self.done)

    def _check_file(
        self, name: str, actual: int, guard: RecordGuard, written: np.ndarray, part: str, size: int, reasons: set[str]
    ) -> list[int]:
        """Ids of damaged ones among the records `written`, in a file of `actual` bytes; adds to `reasons`."""
        present = written[written < actual // size]
        wrong = written[len(present) :].tolist()
        file = NamedFile(self.folder_fd, name, actual, part)
        try:
            file.try_direct()
            for ids in _blocks(present, max(1, BLOCK_BYTES // size)):
                wrong += self._block(file, guard, ids, size, reasons)
                self.records += len(ids)
                self._advance(len(ids) * size)
        finally:
            file.close()
        return wrong

    def _block(self, file: NamedFile, guard: RecordGuard, ids: np.ndarray, size: int, reasons: set[str]) -> list[int]:
        """Ids of damaged ones in a run of adjacent records; adds to `reasons`."""
        records = aligned_empty(len(ids), size)
        try:
            file.read(records.numpy().data.cast("B"), int(ids[0]) * size)
        except OSError as error:
            if len(ids) == 1:
                reasons.add(f"it cannot be read: {error.strerror or error}")
                return [int(ids[0])]
            return [bad for one in np.split(ids, len(ids)) for bad in self._block(file, guard, one, size, reasons)]
        if not file.direct:
            file.drop(int(ids[0]) * size, records.nbytes)
        self.bytes += records.nbytes
        bad = guard.check(ids, records)
        if len(bad):
            reasons.add(guard.reason)
        return [int(number) for number in ids[bad]]

    def _drop(self, name: str) -> None:
        """Drop a file from the page cache, if possible."""
        with contextlib.suppress(OSError):  # faults were found when it was read
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with FILE_SYSTEM.open(name, flags, self.folder_fd) as fd:
                drop_pages(fd)

    def _advance(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


def _blocks(ids: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Split ascending ids into runs of adjacent ones, of at most `most` each."""
    for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
        for start in range(0, len(run), most):
            yield run[start : start + most]
