"""All tokens of one layer: whole groups in the store, the latest ones in the tail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..config import parse_size
from ..core.shared import Shared
from ..errors import ContextError
from ..stores.base import Store, aligned_empty
from ..stores.freezable import FreezableStore, require_freezable
from ..stores.layered import LayeredStore
from .block_table import BlockTable
from .record_format import RecordFormat
from .rolling_tail import RollingTail

PIECE_BYTES = 1 << 20
"""Bytes that are packed and handed to the writer at a time: no more than this, nor than half the write queue."""


def piece_groups(form: RecordFormat, batch: int, write_queue: int) -> int:
    """Groups a row that `History.append` packs at a time."""
    return max(1, min(PIECE_BYTES, write_queue // 2) // (batch * form.record_bytes))


def packing_bytes(form: RecordFormat, batch: int, num_recent: int, groups: int) -> int:
    """What `History.append` holds while it packs `groups` groups a row: entries, their records, and a new tail."""
    group_bytes = form.payload_width * form.dtype.itemsize + form.record_bytes
    return batch * (groups * group_bytes + (num_recent + form.group_size) * form.entry_bytes)


def check_captured(
    form: RecordFormat, ids: np.ndarray, tail: torch.Tensor, length: int, records: int, layer_idx: int
) -> None:
    """Raises `ContextError` unless a captured history of `length` tokens holds together with its `records`."""
    sizes = [form.num_key_heads, form.key_dim, form.num_value_heads, form.value_dim, form.group_size]
    wrong = None
    if not all(isinstance(size, int) and 0 < size < 2**20 for size in sizes) or not isinstance(form.dtype, torch.dtype):
        wrong = f"its entries have the form {form}"
    elif tail.ndim != 3 or tail.shape[2] != form.entry_width or tail.dtype != form.dtype:
        wrong = f"its tail is {tuple(tail.shape)} {tail.dtype} and an entry has {form.entry_width} of {form.dtype}"
    elif ids.ndim != 2 or ids.dtype != np.int32 or len(ids) != tail.shape[0]:
        wrong = f"its table is {ids.shape} {ids.dtype} for {tail.shape[0]} sequences"
    elif ids.size and not (ids.min() >= 0 and ids.max() < records):
        wrong = f"its table names records {ids.min()} to {ids.max()} and there are {records}"
    elif length != ids.shape[1] * form.group_size + tail.shape[1]:
        wrong = f"its length is {length}, its groups and its tail hold {ids.shape[1] * form.group_size + tail.shape[1]}"
    if wrong:
        raise ContextError(f"layer {layer_idx} of the context does not hold together: {wrong}")


class History:
    """Tokens in, blocks of tokens out, for `batch` sequences of one layer. Owns the layer's store, table and tail.

    What comes in is copied. Used by the thread that runs the model; the store is written and read in the background.
    """

    def __init__(
        self,
        shared: Shared,
        form: RecordFormat,
        batch: int,
        device: torch.device,
        layer_idx: int,
        store: Store | None = None,
    ) -> None:
        self.form = form
        self.batch = batch
        self.device = device
        self.length = 0
        self._shared = shared
        self._num_recent = shared.config.num_recent
        self._step = max(1, shared.config.block_tokens // form.group_size)
        self._write_queue = parse_size(shared.config.write_queue)
        self._layer_idx = layer_idx
        self.store = shared.open_store(form.record_bytes, layer_idx) if store is None else store
        self.table = BlockTable(self.store, batch)
        self.tail = RollingTail(form, batch, self._num_recent, device, shared.account)

    @property
    def num_groups(self) -> int:
        """Groups sealed: the first `num_groups * group_size` tokens."""
        return self.table.num_groups

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        """All that is stored is immutable from now on; what comes goes to a store of its own. Returns the frozen ones.

        Ids stay what they are. Blocks until all writes are done; raises what one failed with, with nothing changed, as
        long as a record that was lost so is held; and as `LayeredStore.merge`, with all frozen and readable as before.
        Raises `TypeError` for a store that cannot be frozen.
        """
        store = require_freezable(self.store)
        self._shared.prefetcher.flush(store)
        self._shared.prefetcher.check_written(self.store, np.unique(self.table.ids).astype(np.int64))
        store.freeze()
        if not isinstance(store, LayeredStore):
            self.store = self._shared.layer_store([store], self.form.record_bytes, self._layer_idx)
            self.table.move(self.store)
            self._shared.stores.remove(store)
        assert isinstance(self.store, LayeredStore)
        self.store.merge(self.table.named(self.store.capacity))
        return self.store.parts

    def live(self, parts: Sequence[Store]) -> list[np.ndarray]:
        """Of each of the frozen `parts`, as `freeze` gave them, which records some row names: (capacity,), bool."""
        edges = np.cumsum([part.capacity for part in parts])
        return np.split(self.table.named(self.store.capacity), edges[:-1])

    def capture(self) -> dict[str, Any]:
        """What is held beside the records, as a tree for `restore`: views, valid until the next change."""
        return {
            "form": dataclasses.asdict(self.form),
            "length": self.length,
            "table": torch.from_numpy(self.table.ids),
            "tail": self.tail.entries,
        }

    @classmethod
    def restore(
        cls, shared: Shared, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device, layer_idx: int
    ) -> History:
        """The history that `tree` was captured of, over the frozen stores `parts`, which it owns then. Reads nothing.

        Raises `ContextError` where the tree does not hold together; `parts` are the caller's then.
        """
        form, ids, tail = RecordFormat(**tree["form"]), tree["table"].cpu().numpy(), tree["tail"]
        check_captured(form, ids, tail, tree["length"], sum(part.capacity for part in parts), layer_idx)
        store = shared.layer_store(parts, form.record_bytes, layer_idx)
        history = cls(shared, form, tail.shape[0], device, layer_idx, store)
        history.table = BlockTable.of(store, ids)
        if tail.shape[1] > history.tail.capacity:  # it was captured with a larger `num_recent`
            history.tail.close()
            recent = shared.config.num_recent
            history.tail = RollingTail(form, tail.shape[0], recent, device, shared.account, tail.shape[1])
        history.tail.replace(tail)
        history.length = tree["length"]
        return history

    # --- in ----------------------------------------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Put keys (B, Hk, t, Dk) and values (B, Hv, t, Dv) behind the tail; seal old groups beyond `num_recent`.

        Returns the keys of the groups sealed by that, in order, as parts (B, Hk, ·, Dk): valid as long as the
        arguments. Raises `StoreFullError`, or an earlier write's `StoreError`, with nothing changed. After a signal's
        exception (Ctrl-C), which can come anywhere, the cache is broken.
        """
        groups, held = self.num_groups, self.tail.length
        self._moved = False
        count = max(0, held + keys.shape[2] - self._num_recent) // self.form.group_size
        count = min(count, piece_groups(self.form, self.batch, self._write_queue))
        packing = packing_bytes(self.form, self.batch, self._num_recent, count) if count else 0
        try:
            with self._shared.account.holding("packing", packing):
                sealed = self._append(keys, values)
            self.length += keys.shape[2]
        except BaseException as error:
            if self._moved or not isinstance(error, Exception):
                self._shared.broken = True  # what was half done cannot be told from what was not begun
                raise
            self.table.drop_last(self.num_groups - groups)
            self.tail.length = held
            raise
        return [part for part in sealed if part.shape[2]]

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        group, old = self.form.group_size, self.tail.entries
        total = old.shape[1] + keys.shape[2]
        count = max(0, total - self._num_recent) // group
        sealed: list[torch.Tensor] = []
        if count:
            ids = self.table.append(count)
            held = old[:, : count * group].clone()
            sealed = [self.form.split(held)[0], keys[:, :, : count * group - held.shape[1]]]
        if total <= self.tail.capacity:
            self.tail.append(keys, values)
            if count:
                self._write(ids, self.tail.entries[:, : count * group])
                self._moved = True
                self.tail.drop_first(count * group)
        else:
            piece = piece_groups(self.form, self.batch, self._write_queue)
            for start in range(0, count, piece):
                stop = min(start + piece, count)
                self._write(ids[:, start:stop], self._join(old, keys, values, start * group, stop * group))
            rest = self._join(old, keys, values, count * group, total)
            self._moved = True
            self.tail.replace(rest)
        return sealed

    def _join(
        self, old: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Entries [start, stop) of old entries followed by new keys and values, as a new tensor."""
        held = old.shape[1]
        joined = torch.empty(self.batch, stop - start, self.form.entry_width, dtype=self.form.dtype, device=self.device)
        split = min(max(held - start, 0), stop - start)
        joined[:, :split] = old[:, start : start + split]
        rest = slice(max(start - held, 0), max(stop - held, 0))
        self.form.entries(keys[:, :, rest], values[:, :, rest], joined[:, split:])
        return joined

    def _write(self, ids: np.ndarray, entries: torch.Tensor) -> None:
        """Hand entries (B, n G, entry_width) to the writer as records `ids` (B, n); the padding is zeros."""
        records = aligned_empty(ids.size, self.form.record_bytes)
        typed = records.view(self.form.dtype)
        typed[:, self.form.payload_width :] = 0
        shape = (self.batch, ids.shape[1], self.form.group_size, self.form.entry_width)
        typed[:, : self.form.payload_width].view(shape).copy_(entries.reshape(shape))
        self._shared.prefetcher.write(self.store, ids.reshape(-1), records)

    # --- out ---------------------------------------------------------------------------------------------------

    def blocks(
        self, num_groups: int, tail: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the first `num_groups` groups in blocks of `block_tokens`, then of `tail` entries.

        Each block is valid until the next; the following one is read meanwhile.
        """
        edges = range(0, num_groups, self._step)
        ids = [self.table.ids[:, start : min(start + self._step, num_groups)].reshape(-1) for start in edges]
        flat = np.concatenate(ids, dtype=np.int64) if ids else np.empty(0, dtype=np.int64)
        for records in self._shared.stream(self.store, flat, self._step * self.batch, self.device):
            yield self.form.split(self._entries(records))
        if tail is not None and tail.shape[1]:
            yield self.form.split(tail)

    def _entries(self, records: torch.Tensor) -> torch.Tensor:
        """Entries (B, n G, entry_width) of raw records that lie row after row of the batch."""
        return self.form.payload(records).reshape(self.batch, -1, self.form.entry_width)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything as new contiguous keys (B, Hk, T, Dk) and values (B, Hv, T, Dv): bitwise what came in."""
        form, like = self.form, self.tail.entries
        keys = like.new_empty(self.batch, form.num_key_heads, self.length, form.key_dim)
        values = like.new_empty(self.batch, form.num_value_heads, self.length, form.value_dim)
        start = 0
        for block_keys, block_values in self.blocks(self.num_groups, self.tail.entries):
            stop = start + block_keys.shape[2]
            keys[:, :, start:stop] = block_keys
            values[:, :, start:stop] = block_values
            start = stop
        return keys, values

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> np.ndarray | None:
        """Keep the first `length` tokens. Returns the records freed, or None where no sealed group was touched.

        Groups are read back until the tail holds `num_recent` tokens again, or all that remain. Raises `StoreError`
        with nothing changed.
        """
        group = self.form.group_size
        if length >= self.num_groups * group:
            self.tail.drop_last(self.length - length)
            self.length = length
            return None
        keep = max(0, length - self._num_recent) // group
        ids = self.table.ids[:, keep : -(-length // group)].reshape(-1).astype(np.int64)
        entries = self.tail.entries[:, :0]
        for records in self._shared.stream(self.store, ids, max(1, len(ids)), self.device):
            entries = self._entries(records)[:, : length - keep * group]
        self.tail.replace(entries)
        self.length = length
        return self.table.truncate(keep)

    def sweep(self) -> np.ndarray | None:
        """Give back records that no row names, when they may be more than those that are named; returns them."""
        return self.table.sweep() if self.table.garbage > self.table.ids.size else None

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now. Moves no stored data: rows share records."""
        self.table.select_rows(rows.cpu().numpy())
        self.tail.select_rows(rows)
        self.batch = len(rows)

    def close(self) -> None:
        """Give back the file and the buffers."""
        self._shared.close_store(self.store)
        self.tail.close()
