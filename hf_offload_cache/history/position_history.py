"""All tokens of one layer: complete groups in the store, the latest tokens in the tail."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch

from ..config import OffloadConfig
from ..errors import not_whole, shown
from ..fetch.choice import DeviceChoice, Extents, Numbered
from ..fetch.storage import Storage
from ..memory.dry_run import DryRun
from ..stores.base import FreezableStore, Store, aligned_empty
from .base import Block, Sealed, equal_parts, frozen, joined
from .records import (
    PACKED_AT_ONCE,
    PACKED_BY_A_DEVICE,
    RecordFormat,
    block_groups,
    latest_tokens,
    leaving,
    packing_bytes,
    piece_groups,
    together,
    unpacking,
)
from .state import DTYPES, Number, State, Table
from .tail import BlockTable, RollingTail

# Checks that a captured history is consistent

def check_form(form: RecordFormat, name: str) -> None:
    """Raise `ContextError` unless a captured form describes keys and values."""
    sizes = [form.num_key_heads, form.key_dim, form.num_value_heads, form.value_dim, form.group_size]
    sizes[3] += type(form.value_dim) is int and form.bits is None  # latents without positions have no second part
    known = form.dtype in DTYPES and form.bits in (None, 8)
    if not all(type(size) is int and 0 < size < 2**20 for size in sizes) or not known:
        raise not_whole(name, f"its entries have the form {shown(form, 200)}")


def check_captured(
    state: State, tree: dict[str, Any], parts: Sequence[Store], name: str, config: OffloadConfig
) -> tuple[RecordFormat, dict[str, int]]:
    """The form of a captured history, and the sizes of its tail and of its `state`.

    Raises `ContextError` unless they are consistent with the records, which are in `parts`."""
    form, tail = RecordFormat(**tree["form"]), RollingTail.STATE
    check_form(form, name)
    sizes = tail.check(tail.own(tree), name, form.dtype, width=form.entry_width)
    sizes = state.check(state.own(tree), name, **sizes, records=sum(part.capacity for part in parts))
    wrong = None
    if config.group_size not in (None, form.group_size):
        wrong = f"a record holds {form.group_size} tokens, group_size is {config.group_size}"
    elif form.bits != config.stored_bits:
        wrong = f"its entries are stored with bits={form.bits}, the configuration has bits={config.stored_bits}"
    elif (sizes_of_others := {part.record_bytes for part in parts} - {form.record_bytes}):
        wrong = f"its records need {form.record_bytes} bytes, its stores have records of {sizes_of_others}"
    elif tree["length"] < sizes["recent"] or not sizes["rows"]:
        wrong = f"its length is {tree['length']}, its tail is {shown(tree['tail'])}"
    if wrong:
        raise not_whole(name, wrong)
    return form, sizes


_MOST_RUNS = 4
"""Most runs of adjacent records, for each row, that a device fills in their store: each is a copy."""


# A bound method that does not keep its object alive

Stored = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def weak_call(method: Stored) -> Stored:
    """Call a method through a weak reference, so that an object that holds the result is not in a cycle."""
    reference = weakref.WeakMethod(method)

    def call() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        bound = reference()
        assert bound is not None, "the history is gone"
        return bound()

    return call


class PositionHistory:
    """A history in the order of the sequence: unit u is the group of tokens [u G, (u + 1) G), one record a row.

    `History` has the contract.
    """

    STATE: ClassVar[State] = State(
        "history", length=Number(), table=Table("rows groups", torch.int32, low=0, below="records", at="table.ids")
    )

    def __init__(
        self,
        storage: Storage,
        form: RecordFormat,
        rows: int,
        device: torch.device,
        config: OffloadConfig,
        name: str,
        store: Store | None = None,
    ) -> None:
        self.form = form
        self.rows = rows
        self.device = device
        self.length = 0
        self._storage = storage
        self._name = name
        self._num_recent, self._together = config.num_recent, together(form, config)
        self._latest = self._leaves_at = latest_tokens(form, config)  # tail length at which groups leave
        self._blocks = partial(block_groups, form, config, device)
        self._step = self._blocks(rows)
        self._unlimited = device.type == "cuda" and config.memory is None
        self._on_device = device.type == "cuda" and (form.bits is None or form.dtype.itemsize <= 4)
        self._packed = PACKED_BY_A_DEVICE if self._unlimited else PACKED_AT_ONCE
        self.store = storage.open_store(form.record_bytes, name) if store is None else store
        self.table = BlockTable(self.store, rows)
        self.tail = RollingTail(form, rows, self._latest, device, storage.account)
        self._weak_stored = weak_call(self._stored)
        self._nothing = Sealed(0, 0, [], self._weak_stored)

    def rehearse(self, run: DryRun, context: int) -> None:
        """As `History.rehearse`."""
        form, rows, latest = self.form, self.rows, self._latest
        groups = max(0, context - self._num_recent) // form.group_size
        self.length = context
        self.table.rehearse(groups)
        run.stores(self.store, rows * groups)
        self.tail.rehearse(run)
        filled = self._piece
        packing, decoding = (
            packing_bytes(form, rows, latest, groups, self._packed) for groups in (filled, min(filled, self._together))
        )
        run.passes("packing", prefill=packing, decode=decoding)

    extra_entries = None

    # An attrgetter makes no Python frame, unlike a function: steps read this often.
    records: int = property(attrgetter("table.num_groups"))  # type: ignore[assignment]
    units: int = property(attrgetter("table.num_groups"))  # type: ignore[assignment]
    numbers: int = property(attrgetter("table.num_groups"))  # type: ignore[assignment]
    version: int = property(attrgetter("table.num_groups"))  # type: ignore[assignment]
    recent: torch.Tensor = property(attrgetter("tail.entries"))  # type: ignore[assignment]

    @property
    def tables_nbytes(self) -> int:
        return self.table.nbytes + self.store.tables_bytes

    def extents(self, units: np.ndarray) -> Extents:
        if np.minimum.reduce(units, axis=None, initial=0) < 0:
            return Extents(np.where(units < 0, -1, self.table.records(np.maximum(units, 0))))
        return Extents(self.table.records(units))

    def numbered(self, version: int) -> Numbered:
        """As `Source.numbered`: units, none of which is written again."""
        new = np.broadcast_to(np.arange(max(0, version), self.units), (self.rows, self.units - max(0, version)))
        rows = np.repeat(np.arange(self.rows), new.shape[1])
        return Numbered(rows, new.reshape(-1), self.table.records(new).reshape(-1), False)

    def all_on_device(self) -> DeviceChoice:
        every = torch.arange(self.units, dtype=torch.int32, device=self.device)
        return DeviceChoice(every.expand(self.rows, -1))

    def unsealed(self) -> tuple[torch.Tensor, None]:
        return self.recent, None

    def positions(self, units: np.ndarray) -> np.ndarray:
        group = self.form.group_size
        places = units[:, :, None] * group + np.arange(group)
        if units.size and units.min() < 0:
            places = np.where(units[:, :, None] < 0, -1, places)
        return places.reshape(len(units), -1)

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        """As `History.freeze`, and `frozen`."""
        return frozen(self._storage, self.store, self._name, self.named, self.move).parts

    def named(self, count: int) -> np.ndarray:
        """Mask of the store's first `count` records that some row uses: (count,), bool."""
        return self.table.named(count)

    def move(self, store: Store) -> None:
        """Find the same records in `store` from now on, by the same ids."""
        self.store = store
        self.table.move(store)

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        edges = np.cumsum([part.capacity for part in parts])
        return np.split(self.named(self.store.capacity), edges[:-1])

    def capture(self) -> dict[str, Any]:
        """As `History.capture`: views, valid until the next change."""
        arrays = {**self.STATE.capture(self), **self.tail.STATE.capture(self.tail)}
        return {"form": dataclasses.asdict(self.form), **arrays}

    @classmethod
    def restore(
        cls,
        storage: Storage,
        tree: dict[str, Any],
        parts: Sequence[FreezableStore],
        device: torch.device,
        config: OffloadConfig,
        name: str,
    ) -> PositionHistory:
        """The history that `tree` was captured from, over the frozen stores `parts`, which it then owns. Reads nothing.

        Raises `ContextError` if the tree is not consistent; the caller still owns `parts` then.
        """
        form, sizes = check_captured(cls.STATE, tree, parts, name, config)
        if tree["length"] != (stored := sizes["groups"] * form.group_size + sizes["recent"]):
            raise not_whole(name, f"its length is {tree['length']}, its groups and its tail hold {stored}")
        ids = tree["table"].cpu().numpy()
        cls.check(tree, form, ids, sizes["records"], name)
        store = storage.layer_store(parts, form.record_bytes, name)
        history = cls(storage, form, sizes["rows"], device, config, name, store)
        history.table = BlockTable.of(store, ids)
        history.tail.restore(tree)
        history.length = tree["length"]
        return history

    @classmethod
    def check(cls, tree: dict[str, Any], form: RecordFormat, ids: np.ndarray, records: int, name: str) -> None:
        """Raise `ContextError` unless a subclass's captured arrays are consistent with the rest."""

    # --- in ----------------------------------------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        """As `History.append`. After a signal's exception (Ctrl-C), possible anywhere, the storage is `torn`."""
        groups, held = self.table.num_groups, self.tail.length
        if held + keys.shape[2] < self._leaves_at:
            self.tail.append(keys, values)
            self.length += keys.shape[2]
            if self._nothing.units != groups:
                self._nothing = Sealed(groups, groups * self.form.group_size, [], self._weak_stored)
            return self._nothing
        self._moved = False
        count, piece = self._leaving(held + keys.shape[2]), self._piece
        if count > piece and self._on_device:
            piece = self._longer(count, piece)
        packing = packing_bytes(self.form, self.rows, self._latest, min(count, piece), self._packed)
        try:
            with self._storage.account.holding("packing", packing):
                sealed = self._append(keys, values, piece)
            self.length += keys.shape[2]
        except BaseException as error:
            if self._moved or not isinstance(error, Exception):
                self._storage.torn = True  # half done cannot be told from not begun
                raise
            self.table.drop_last(self.units - groups)
            self.tail.length = held
            raise
        return Sealed(self.units, self.units * self.form.group_size, sealed, self._stored)

    @property
    def room(self) -> int:
        """Tokens that may be added one by one before groups leave the tail."""
        return self._leaves_at - 1 - self.tail.length

    def advance(self) -> None:
        """Count a token whose entries a captured step has put behind the tail's. There is `room` for it."""
        self.tail.length += 1
        self.length += 1

    def _stored(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((block.keys, block.values) for block in self.blocks(self.units * self.form.group_size))

    @property
    def _piece(self) -> int:
        """Number of groups a row that are packed at a time."""
        in_place = self._unlimited and self.store.in_memory
        return piece_groups(self.form, self.rows, self._storage.write_queue, in_place)

    def _longer(self, groups: int, piece: int) -> int:
        """As `piece`, or longer: a device has room to fill more of these `groups` a row at a time in their store. Each
        time costs the same launches."""
        if not self.store.in_memory:
            return piece
        most = min(groups, piece_groups(self.form, self.rows, self._storage.write_queue, True))
        sizes = self.form, self.rows, self._latest
        while most > piece and not self._storage.account.has_room(packing_bytes(*sizes, most, self._packed)):
            most = -(-most // 2)
        return max(most, piece)

    def _leaving(self, held: int) -> int:
        """Number of groups that leave a tail of `held` tokens."""
        return max(0, held - self._num_recent) // (self._together * self.form.group_size) * self._together

    def _append(
        self, keys: torch.Tensor, values: torch.Tensor, piece: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Add these, and pack `piece` groups a row at a time."""
        form, group, old = self.form, self.form.group_size, self.tail.entries
        total = old.shape[1] + keys.shape[2]
        count = self._leaving(total)
        ids = self.table.append(count)
        if self._on_device and total <= self.tail.capacity:
            return self._seal(ids, keys, values)
        sealed = leaving(form, old[:, : count * group].clone(), keys, values, count * group)
        if total <= self.tail.capacity:
            self.tail.append(keys, values)
            records, entries = self._new_records(ids.size), self.tail.entries[:, : count * group]
            form.fill(entries.reshape(-1, group, form.entry_width), records, self._packed)
            self._write(ids, records)
            self._moved = True
            self.tail.drop_first(count * group)
        else:
            stop = 0
            while stop < count:
                start, stop = stop, min(stop + piece, count)
                some = ids[:, start:stop]
                records = self._new_records(some.size)
                into = self._entries(records) if form.fills else None
                entries = self._join(old, keys, values, start * group, stop * group, into)
                if into is None:
                    form.fill(entries.view(-1, group, form.entry_width), records, self._packed)
                self._write(some, records)
            tail = self._join(old, keys, values, count * group, total)
            self._moved = True
            self.tail.replace(tail, apart=True)
        return sealed

    def _seal(
        self, ids: np.ndarray, keys: torch.Tensor, values: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As `_append`, on a CUDA device: groups leave the tail for records `ids` (rows, n)."""
        self.tail.append(keys, values)
        records = self._new_records(ids.size)
        left = self.tail.seal(records)
        self._moved = True
        try:
            self._write(ids, records)
        except Exception:
            self.tail.take_back(left)  # for which memory may be missing, too
            self._moved = False
            raise
        return [self.form.split(left)]

    def _join(
        self, old: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Entries [start, stop) of the old entries followed by the new keys and values: `into`, or a new tensor."""
        held, joined = old.shape[1], into
        if joined is None:
            shape = self.rows, stop - start, self.form.entry_width
            joined = torch.empty(shape, dtype=self.form.dtype, device=self.device)
        split = min(max(held - start, 0), stop - start)
        if split:
            joined[:, :split] = old[:, start : start + split]
        new = slice(max(start - held, 0), max(stop - held, 0))
        self.form.entries(keys[:, :, new], values[:, :, new], joined[:, split:])
        return joined

    def _new_records(self, count: int) -> torch.Tensor:
        """Memory for `count` records on the entries' device."""
        if self.device.type == "cpu":
            return aligned_empty(count, self.form.record_bytes)
        return torch.empty(count, self.form.record_bytes, dtype=torch.uint8, device=self.device)

    def _write(
        self, ids: np.ndarray, records: torch.Tensor
    ) -> list[tuple[np.ndarray, torch.Tensor, Callable[[], object] | None]]:
        """Hand `records` to the writer as records `ids` (rows, n). Returns, for each run of records that it gets at a
        time, their ids (m,); the payloads (m, payload_width) in host memory, which the writer owns: do not change them;
        and a callable that blocks until they are there; None: they are."""
        form, flat = self.form, ids.reshape(-1)
        if records.device.type == "cpu":
            self._storage.prefetcher.write(self.store, flat, records)
            return [(flat, form.payload(records), None)]
        written: list[tuple[np.ndarray, torch.Tensor, Callable[[], object] | None]] = []
        for start, stop in self._written_at_once(flat):
            some = flat[start:stop]
            host, arrived = self._storage.copied_out(records[start:stop], self.store, some)
            self._storage.prefetcher.write(self.store, some, host, arrived)
            written.append((some, form.payload(host), arrived))
        return written

    def _written_at_once(self, ids: np.ndarray) -> Iterator[tuple[int, int]]:
        """The runs of `ids` (n,) that a device copies out at a time: those that it fills in their store, unless they
        are many, or as many as the writer's queue should get."""
        pinned = self.store.pinned_runs(ids) if self.store.in_memory else None
        most = self.rows * piece_groups(self.form, self.rows, self._storage.write_queue)
        edges = [*range(0, len(ids), most), len(ids)]
        if pinned is not None and len(pinned) <= _MOST_RUNS * self.rows:
            edges = list(itertools.accumulate(map(len, pinned), initial=0))
        return itertools.pairwise(edges)

    # --- out ---------------------------------------------------------------------------------------------------

    def blocks(self, stop: int | None = None) -> Iterator[Block]:
        """As `History.blocks`, in equal blocks of at most `block_tokens`, in order."""
        group, stop = self.form.group_size, self.length if stop is None else stop
        groups = min(self.units, -(-stop // group))
        step = equal_parts(groups, self._step)
        ids = [self.table.ids[:, start : min(start + step, groups)].reshape(-1) for start in range(0, groups, step)]
        flat = np.concatenate(ids, dtype=np.int64) if ids else np.empty(0, dtype=np.int64)
        done = 0
        with unpacking(self._storage.account, self.form, min(step, groups) * self.rows):
            for records in self._storage.stream(self.store, flat, step * self.rows, self.device):
                entries = self._entries(records)[:, : stop - done]
                done += entries.shape[1]
                yield Block(*self.form.split(entries))
        if done < stop:
            yield Block(*self.form.split(self.tail.entries[:, : stop - done]))

    def _entries(self, records: torch.Tensor) -> torch.Tensor:
        """Entries (rows, n G, entry_width) of raw records, which lie row after row."""
        return self.form.unpacked(self.form.payload(records)).reshape(self.rows, -1, self.form.entry_width)

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return joined(self, self.length if stop is None else stop)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> np.ndarray | None:
        """As `History.truncate`. If groups are cut, the last are read back until the tail has `num_recent` tokens
        again, or all that remain. Raises `StoreError` with nothing changed."""
        group = self.form.group_size
        if length >= self.units * group:
            self.tail.drop_last(self.length - length)
            self.length = length
            return None
        keep = self._leaving(length)
        ids = self.table.ids[:, keep : -(-length // group)].reshape(-1).astype(np.int64)
        entries = self.tail.entries[:, :0]
        with self._storage.audited(), unpacking(self._storage.account, self.form, len(ids)):
            for records in self._storage.stream(self.store, ids, max(1, len(ids)), self.device):
                entries = self._entries(records)[:, : length - keep * group]
        self.tail.replace(entries)
        self.length = length
        return self.table.truncate(keep)

    def sweep(self, always: bool = False) -> np.ndarray | None:
        """As `History.sweep`: it pays if the unused records can outnumber the used ones."""
        return self.table.sweep() if always or (self.table.moved and self.table.garbage > self.table.ids.size) else None

    def select_rows(self, rows: torch.Tensor) -> None:
        """As `History.select_rows`. Moves no stored data, because rows share records."""
        self.table.select_rows(rows.cpu().numpy())
        self.tail.select_rows(rows)
        self.rows = len(rows)
        self._step = self._blocks(self.rows)

    def close(self) -> None:
        self._storage.close_store(self.store)
        self.tail.close()
