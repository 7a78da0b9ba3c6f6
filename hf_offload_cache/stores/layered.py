"""A store of several: immutable parts below, and its own growing store above."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..errors import StalledError, StoreError, StoreFullError
from .base import FreezableStore, LateRead, Transfer, aligned_empty, check_batch, check_range, describe
from .guard import RecordGuard
from .record_file import BOUNCE_BYTES

# The ids of each store

class IdLayout:
    """Ids of each store. Immutable.

    Attributes:
        stores: the parts, and the own store if there is one.
        firsts: the first id of each of them (int64).
        base: the first id behind the parts.
        second: the first id that is not in the first store; 2**64 if that store has all.
    """

    def __init__(self, parts: tuple[FreezableStore, ...], own: FreezableStore | None) -> None:
        self.parts, self.own = parts, own
        self.stores = parts if own is None else (*parts, own)
        ends = np.cumsum([part.capacity for part in parts], dtype=np.int64)
        self.base = int(ends[-1]) if len(ends) else 0
        self.firsts = np.concatenate([np.zeros(1, dtype=np.int64), ends])[: len(self.stores)]
        self.second = int(self.firsts[1]) if len(self.firsts) > 1 else 2**64

    def pieces(self, ids: np.ndarray) -> list[tuple[FreezableStore, np.ndarray, tuple[int, int]]]:
        """Stretches of `ids` in one store: the store, its own ids for them, and the positions in `ids`.

        The last store refuses ids that do not exist, also negative ones.
        """
        count = len(ids)
        if count == 0:
            return []
        if np.maximum.reduce(ids.view(np.uint64)) < self.second:  # the usual case; negative ids become the largest
            return [(self.stores[0], ids, (0, count))]
        index = np.searchsorted(self.firsts, ids, side="right") - 1
        cuts = np.flatnonzero(index[1:] != index[:-1]) + 1
        pieces = []
        for first, stop in pairwise([0, *cuts.tolist(), count]):
            at = int(index[first])
            pieces.append((self.stores[at], ids[first:stop] - self.firsts[at], (first, stop)))
        return pieces


# Transfers of several stores

class JointTransfer(Transfer):
    """Several transfers as one. `finish` raises the error of the first that fails, when the others have ended."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers
        self._error: Exception | None = None
        self.runs = any(transfer.runs for transfer in transfers)

    @property
    def finished_at(self) -> float | None:  # type: ignore[override]
        ends = [transfer.finished_at for transfer in self._transfers]
        return None if None in ends else max(end for end in ends if end is not None)

    def done(self) -> bool:
        return all([transfer.done() for transfer in self._transfers])  # a list, so that each is polled

    def drop(self) -> None:
        for transfer in self._transfers:
            transfer.drop()

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            for transfer in self._transfers:
                transfer.finish()
        except StalledError:  # still under way: it can be waited for again
            raise
        except Exception as error:
            cancel_all(self._transfers)
            self._error = error
            raise


def cancel_all(transfers: Sequence[Transfer]) -> None:
    """Give the transfers up: nothing is under way when this returns. Raises `StalledError` if something still is."""
    for transfer in transfers:
        transfer.drop()
    for transfer in transfers:
        transfer.wait()


# Merging frozen stores

FEW_PARTS = 4
"""Up to this many parts nothing is copied: a document, and the additions of a turn or two."""
MOST_TIMES = 2
"""A part is copied if it is at most this many times as large as everything behind it."""


def parts_that_stay(capacities: Sequence[int]) -> int:
    """Number of the parts with these `capacities` that stay; the later ones are to be merged.

    If there is nothing to merge, the result is all, or all but one. If parts are merged after each addition, the 4th is
    more than twice as large as the 5th, that more than twice as large as the 6th, and so on.
    """
    first = len(capacities) - 1
    behind = capacities[-1] if capacities else 0
    if len(capacities) <= FEW_PARTS:
        return len(capacities)
    while first > 1 and capacities[first - 1] <= MOST_TIMES * behind:
        first -= 1
        behind += capacities[first]
    return first


def merge_parts(
    parts: Sequence[FreezableStore], live: np.ndarray | None, make: Callable[[], FreezableStore]
) -> FreezableStore:
    """A frozen store, the caller's, with the records of `parts` one after the other, in an empty store from `make`.

    Records that are empty, or not `live` ((sum of capacities,), bool), are empty in it. The counters of `parts` are
    added to its own. Raises `StoreError`, with nothing left behind.
    """
    merged = make()
    try:
        count = sum(part.capacity for part in parts)
        ids = merged.allocate(count)
        assert count == 0 or (ids[0] == 0 and ids[-1] == count - 1), "a new store begins at 0"
        buffer = aligned_empty(max(1, BOUNCE_BYTES // merged.record_bytes), merged.record_bytes)
        first = 0
        for part in parts:
            needed = part.written if live is None else part.written & live[first : first + part.capacity]
            wanted = np.flatnonzero(needed).astype(np.int64)
            for start in range(0, len(wanted), len(buffer)):
                ids_of_part = wanted[start : start + len(buffer)]
                records = buffer[: len(ids_of_part)]
                part.read(ids_of_part, records)
                part.verify(ids_of_part, records)  # a new tag must not vouch for an unchecked record
                merged.write(ids_of_part + first, records)
            first += part.capacity
        merged.freeze()
        for part in parts:
            merged.bytes_read += part.bytes_read
            merged.bytes_written += part.bytes_written
            merged.reads += part.reads
    except BaseException:
        merged.close()
        raise
    return merged


def _total(name: str) -> Any:
    """Sum over the stores."""
    return property(lambda store: sum(getattr(one, name) for one in store._layout.stores))


def _counter(name: str) -> Any:
    """Sum over the stores, which may be set to 0 only."""

    def put(store: LayeredStore, value: int) -> None:
        if value != 0:
            raise ValueError(f"{name} is a sum over parts: it can be set to 0 only, got {value}")
        for one in store._layout.stores:
            setattr(one, name, 0)

    return _total(name).setter(put)


class LayeredStore(FreezableStore):
    """Records of frozen `parts`, one after the other, and then those of an own store.

    Ids continue from part to part: the first record of a part follows the last of the part before, counted by
    `capacity`. New records go to the own store, which `make_own` makes when it is first needed, or at once if there are
    no parts. All of them belong to this store, which closes them. Freed records of parts stay, because others may share
    them.

    `record_bytes` and `name` are those of the first store. Raises `ValueError` if the stores' `record_bytes` differ.
    """

    bytes_read = _counter("bytes_read")
    bytes_written = _counter("bytes_written")
    reads = _counter("reads")
    capacity = _total("capacity")
    disk_bytes = _total("disk_bytes")
    memory_bytes = _total("memory_bytes")
    pageable_bytes = _total("pageable_bytes")
    tables_bytes = _total("tables_bytes")

    def __init__(self, parts: Sequence[FreezableStore], make_own: Callable[[], FreezableStore]) -> None:
        own = None if parts else make_own()
        stores = [*parts] if own is None else [own]
        if len({store.record_bytes for store in stores}) > 1:
            raise ValueError(f"parts must agree in record_bytes, got {[store.record_bytes for store in stores]}")
        self.record_bytes, self.name = stores[0].record_bytes, stores[0].name  # the base would set counters
        self._first_id = 0
        self._make_own = make_own
        self._layout: IdLayout
        self._arrange(tuple(parts), own)

    @property
    def parts(self) -> tuple[FreezableStore, ...]:
        """The frozen stores, lowest ids first."""
        return self._layout.parts

    @property
    def advises(self) -> bool:  # type: ignore[override]
        """As the parts do; usually one engine reads them all."""
        return any(store.advises for store in self._layout.stores)

    @property
    def first_id(self) -> int:
        return self._first_id

    @first_id.setter
    def first_id(self, value: int) -> None:
        self._first_id = value
        self._arrange(self._layout.parts, self._layout.own)

    def _arrange(self, parts: tuple[FreezableStore, ...], own: FreezableStore | None) -> None:
        layout = IdLayout(parts, own)
        for store, first in zip(layout.stores, layout.firsts.tolist(), strict=True):
            store.first_id = self._first_id + first
        self._layout = layout  # in one step, because other threads read it

    def allocate(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count == 0:
            return np.empty(0, dtype=np.int64)
        layout = self._layout
        if layout.own is None:
            own = self._make_own()
            if own.record_bytes != self.record_bytes:
                own.close()
                raise ValueError(f"make_own must give records of {self.record_bytes} bytes, got {own.record_bytes}")
            self._arrange(layout.parts, own)
            layout = self._layout
        assert layout.own is not None
        return layout.own.allocate(count) + layout.base

    def free(self, ids: np.ndarray) -> None:
        layout = self._layout
        mine = (ids < 0) | (ids >= layout.base)
        if not mine.any():
            return
        freed = ids if mine.all() else ids[mine]
        if layout.own is None:
            raise StoreError(errno.EINVAL, f"{self.name}: {describe(freed + self._first_id)} not allocated")
        layout.own.free(freed - layout.base)

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        check_batch(ids, records, self.record_bytes)
        layout = self._layout
        check_range(self.name, ids, layout.base + (0 if layout.own is None else layout.own.capacity), self._first_id)
        if len(ids) == 0:
            return
        frozen = ids[ids < layout.base]
        if len(frozen):
            raise StoreError(errno.EROFS, f"{self.name}: {describe(frozen + self._first_id)} frozen: read only")
        assert layout.own is not None
        layout.own.write(ids - layout.base, records)

    def pinned_runs(self, ids: np.ndarray) -> list[torch.Tensor] | None:
        pinned = [store.pinned_runs(some) for store, some, _ in self._layout.pieces(ids)]
        return None if None in pinned else [run for part in pinned if part is not None for run in part]

    def in_place(self, ids: np.ndarray) -> torch.Tensor | None:
        layout = self._layout
        if layout.own is None or not ids.size or int(ids.min()) < layout.base:
            return None
        return layout.own.in_place(ids - layout.base)

    def advise(self, ids: np.ndarray) -> None:
        for store, some, _ in self._layout.pieces(ids):
            store.advise(some)

    def start(self, ids: np.ndarray, out: torch.Tensor) -> Transfer | None:
        pieces = self._layout.pieces(ids)
        if len(pieces) == 1:
            store, some, _ = pieces[0]
            return store.start(some, out)
        begun: list[Transfer] = []
        try:
            for store, some, (first, stop) in pieces:
                transfer = store.start(some, out[first:stop])
                if transfer is None and not begun:
                    return None  # it can only block, so other threads read everything
                begun.append(transfer or LateRead(store.read, some, out[first:stop]))
        except BaseException:
            cancel_all(begun)
            raise
        return JointTransfer(begun)

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        check_batch(ids, out, self.record_bytes, aligned=True)
        for store, some, (first, stop) in self._layout.pieces(ids):
            store.read(some, out[first:stop])

    @property
    def in_memory(self) -> bool:
        return all(store.in_memory for store in self._layout.stores)

    def read_parts(self, ids: np.ndarray, first_bytes: np.ndarray, out: torch.Tensor) -> None:
        for store, some, (first, stop) in self._layout.pieces(ids):
            store.read_parts(some, first_bytes[first:stop], out[first:stop])

    def count_read(self, requests: int, nbytes: int) -> None:
        self._layout.stores[-1].count_read(requests, nbytes)

    def addresses(self, ids: np.ndarray) -> np.ndarray | None:
        found = np.empty(len(ids), dtype=np.int64)
        for store, some, (first, stop) in self._layout.pieces(ids):
            if (own := store.addresses(some)) is None:
                return None
            found[first:stop] = own
        return found

    def freeze(self) -> None:
        """Make the own store the last part, if it has records; later allocations get a new own store.

        Ids stay. Raises `StoreError`, with nothing changed.
        """
        layout = self._layout
        if layout.own is None:
            return
        layout.own.freeze()
        if layout.own.capacity or not layout.parts:
            self._arrange((*layout.parts, layout.own), None)
        else:
            self._arrange(layout.parts, None)
            layout.own.close()

    def merge(self, live: np.ndarray | None = None) -> None:
        """Merge the latest parts if there are many, so that each `freeze` does not add a file for good.

        Up to 4 parts stay. Otherwise the latest are merged as long as a part is at most twice as large as everything
        behind it. Then at most 4 + log2(records) parts remain. A record is copied once, and again each time that its
        part grows by half: about 4 times for 60 parts of one size. The first part, usually a document, is never copied.
        A part that forks or contexts still use stays on the disk next to its copy, which is why a few parts are not
        merged.

        Ids stay. `live` ((capacity,), bool; None: all) says which records are needed: others are not copied and are
        empty from then on. Nothing may be allocated since the last `freeze`, and no read under way. Takes a MiB of host
        memory meanwhile. If the disk has no room, nothing is merged. Raises `StoreError`, and `CorruptRecordError` for
        a damaged record to be copied, even if reads trust the disk; nothing has changed then.
        """
        self._check_frozen(self._layout.own is None, "merged")
        parts = self.parts
        first = parts_that_stay([part.capacity for part in parts])
        latest = parts[first:]
        if len(latest) < 2:
            return
        kept = None if live is None else live[self._layout.firsts[first] :]
        try:
            merged = merge_parts(latest, kept, self._make_own)
        except StoreFullError:
            return  # the records are unchanged, and a later call may succeed
        self._arrange((*parts[:first], merged), None)
        for part in latest:
            part.close()

    def share(self) -> FreezableStore:
        """A layered store over the same parts only. Its own store is made like this one's."""
        parts: list[FreezableStore] = []
        try:
            self._check_frozen(self._layout.own is None, "shared")
            for part in self.parts:
                parts.append(part.share())
        except BaseException:
            for part in parts:
                part.close()
            raise
        return LayeredStore(parts, self._make_own)

    def export(self, folder_fd: int, name: str, live: np.ndarray | None = None) -> RecordGuard:
        """See `FreezableStore.export`; several parts with records are several files, to be exported one by one."""
        self._check_frozen(self._layout.own is None, "exported")
        full = [part for part in self.parts if part.capacity] or list(self.parts[:1])
        if len(full) != 1:
            raise StoreError(errno.EINVAL, f"{self.name}: {len(full)} parts are files of their own: export each")
        return full[0].export(folder_fd, name, live)

    @property
    def written(self) -> np.ndarray:
        return np.concatenate([store.written for store in self._layout.stores])

    def verify(self, ids: np.ndarray, records: torch.Tensor) -> None:
        for store, some, (first, stop) in self._layout.pieces(ids):
            store.verify(some, records[first:stop])

    def on_damage(self, told: Callable[[str], object]) -> None:
        for part in self.parts:
            part.on_damage(told)

    @property
    def directory(self) -> str | None:
        return ", ".join(dict.fromkeys(store.directory for store in self._layout.stores if store.directory)) or None

    @property
    def own_disk_bytes(self) -> int:
        own = self._layout.own
        return 0 if own is None else own.own_disk_bytes

    def close(self) -> None:
        """Close all stores, even if one of them raises."""
        failure: BaseException | None = None
        for store in self._layout.stores:
            try:
                store.close()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
