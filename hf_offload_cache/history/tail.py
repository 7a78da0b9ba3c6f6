"""The rolling buffer: a layer's latest tokens, in memory until they fill groups (KVSwap, section 3.4.1)."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch

from ..kernels.slots import seal
from ..memory.account import MemoryAccount
from ..memory.dry_run import DryRun
from ..stores.base import Store
from .records import RecordFormat
from .state import Array, State

# The records of each row's sealed groups: rows may share records, so that batch operations copy no data

class BlockTable:
    """Record ids (B, num_groups), int32: group g of row b lies in record `ids[b, g]` of the layer's store.

    Records are immutable; rows selected from the same row share them. `sweep`, which the layer calls when it needs
    room, gives unused records back to the store.
    """

    def __init__(self, store: Store, batch: int) -> None:
        self._store = store
        self._ids = np.empty((batch, 0), dtype=np.int32)
        self._owned = np.empty(0, dtype=np.int32)
        self.num_groups = 0
        self.moved = False
        """Rows were selected since the last `sweep`; otherwise there is no garbage."""

    @classmethod
    def of(cls, store: Store, ids: np.ndarray) -> BlockTable:
        """A table with the records `ids` (B, num_groups) of `store`; copies them."""
        table = cls(store, len(ids))
        table._ids = np.array(ids, dtype=np.int32, order="C")
        table._owned = np.unique(table._ids)
        table.num_groups = ids.shape[1]
        return table

    def move(self, store: Store) -> None:
        """Find the same records in `store` from now on, by the same ids."""
        self._store = store

    @property
    def ids(self) -> np.ndarray:
        """A view (B, num_groups); valid until the next change."""
        return self._ids[:, : self.num_groups]

    def named(self, count: int) -> np.ndarray:
        """Mask of the store's first `count` records that some row uses: (count,), bool."""
        named = np.zeros(count, dtype=bool)
        named[self.ids.reshape(-1)] = True
        return named

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._owned.nbytes

    def append(self, count: int) -> np.ndarray:
        """Allocate `count` groups behind the last one of every row; returns their record ids (B, count), int64.

        Raises `StoreFullError` with nothing changed.
        """
        batch = self._ids.shape[0]
        records = self._store.allocate(batch * count).reshape(batch, count)
        stop = self.num_groups + count
        if stop > self._ids.shape[1]:
            grown = np.empty((batch, max(stop, self._ids.shape[1] * 5 // 4 + 16)), dtype=np.int32)
            grown[:, : self.num_groups] = self.ids
            self._ids = grown
        self._ids[:, self.num_groups : stop] = records
        self.num_groups = stop
        self._owned = np.append(self._owned, records.astype(np.int32))
        return records

    def rehearse(self, groups: int) -> None:
        """Become as large as `groups` groups a row can make it. Rows grow by a quarter; beam search leaves up to as
        many unused records as used ones."""
        rows = len(self._ids)
        self._ids = np.empty((rows, groups * 5 // 4 + 16), dtype=np.int32)
        self._owned = np.empty(rows * (2 * groups + 1) if rows > 1 else groups, dtype=np.int32)
        self.num_groups = groups

    def drop_last(self, count: int) -> None:
        """Undo the last `append`, of `count` groups: frees their records, which no other row uses."""
        if count:
            records = self.ids[:, self.num_groups - count :].reshape(-1).astype(np.int64)
            self._store.free(records)
            self._owned = self._owned[: len(self._owned) - len(records)].copy()
            self.num_groups -= count

    def records(self, groups: np.ndarray) -> np.ndarray:
        """Record ids (B, n), int64, of groups (B, n)."""
        if groups.shape[0] == 1:
            return self._ids[0][groups].astype(np.int64)
        return self._ids[np.arange(len(groups))[:, None], groups].astype(np.int64)

    def truncate(self, num_groups: int) -> np.ndarray:
        """Keep the first `num_groups` of every row; returns the freed records."""
        self.num_groups = num_groups
        return self.sweep()

    def select_rows(self, rows: np.ndarray) -> None:
        """Replace row i by the present row `rows[i]`."""
        self._ids = np.ascontiguousarray(self._ids[rows])
        self.moved = True

    def sweep(self) -> np.ndarray:
        """Free the records that no row uses; returns them."""
        live = np.unique(self.ids)
        dead = np.setdiff1d(self._owned, live, assume_unique=True)
        if len(dead):
            self._store.free(dead.astype(np.int64))
            self._owned = live
        self.moved = False
        return dead.astype(np.int64)

    @property
    def garbage(self) -> int:
        """Owned records beyond the number without sharing: a bound on what `sweep` can free."""
        return max(0, len(self._owned) - self.ids.size)


class RollingTail:
    """Entries (B, length, entry_width) of the latest tokens of one layer, on the layer's device.

    Has room for `capacity` tokens a row: histories seal the oldest groups before it overflows. The tail owns the
    buffer: views from `entries` are valid until the next change.
    """

    STATE: ClassVar[State] = State(
        "history", "rolling tail", {"recent": "length"}, tail=Array("rows recent width", at="_buffer")
    )

    def __init__(
        self,
        form: RecordFormat,
        batch: int,
        capacity: int,
        device: torch.device,
        account: MemoryAccount,
    ) -> None:
        self.form = form
        self._account = account
        shape = batch, capacity, form.entry_width
        self._hold(account.empty("rolling tail", *shape, dtype=form.dtype, device=device), 0)

    def _hold(self, buffer: torch.Tensor, length: int) -> None:
        self._buffer = buffer
        self._keys, self._values = self.form.split(buffer)
        self.capacity = buffer.shape[1]
        """Maximum tokens a row."""
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        self._length = length
        self.entries = self._buffer[:, :length]
        """The tail's tokens, oldest first: a view, made once because a step reads it many times."""

    # An attrgetter makes no Python frame, unlike a function: steps read this often.
    length: int = property(attrgetter("_length"), _set_length)  # type: ignore[assignment]
    """Tokens a row."""

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy keys (B, Hk, t, Dk) and values (B, Hv, t, Dv) behind the present entries."""
        stop = self.length + keys.shape[2]
        assert stop <= self.capacity, f"tail of {self.capacity} asked to hold {stop}"
        if keys.is_cuda and keys.shape == values.shape and keys.shape[2] == 1:  # in one launch
            torch.stack([keys[:, :, 0], values[:, :, 0]], 0, out=self.form.both(self._buffer)[:, :, :, self.length])
            self.length = stop
            return
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop

    @property
    def memory(self) -> torch.Tensor:
        """(B, capacity, entry_width): all memory. Only the first `length` entries are defined."""
        return self._buffer

    def put(self, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> None:
        """Copy a token's keys (B, Hk, 1, D) and values to a place, (1,) int64 on the tail's device. `length` stays."""
        self._keys.index_copy_(2, place, keys)
        self._values.index_copy_(2, place, values)

    def replace(self, entries: torch.Tensor, apart: bool = False) -> None:
        """Replace all entries by `entries` (B, t, entry_width), which may be a view of this tail unless they are
        `apart`."""
        self._buffer[:, : entries.shape[1]] = entries if apart else entries.clone()
        self.length = entries.shape[1]

    def seal(self, records: torch.Tensor) -> torch.Tensor:
        """Drop the oldest tokens, which fill `records`, in one launch on a CUDA device: see `slots.seal`."""
        left = seal(self._buffer, self.length, records, self.form)
        self.length -= left.shape[1]
        return left

    def take_back(self, entries: torch.Tensor) -> None:
        """Undo the latest `seal`, which returned `entries`."""
        self.replace(torch.cat([entries, self.entries], 1), apart=True)

    def drop_first(self, count: int) -> None:
        """Drop the oldest `count` tokens."""
        self.replace(self.entries[:, count:])

    def drop_last(self, count: int) -> None:
        """Drop the latest `count` tokens."""
        assert count <= self.length
        self.length -= count

    def rehearse(self, run: DryRun) -> None:
        """Become full, and declare the memory of a change of rows."""
        self.length = self.capacity
        if len(self._buffer) > 1:
            run.moves(self._buffer.nbytes)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by the present row `rows[i]`."""
        self.STATE.select_rows(self, rows)
        self._hold(self._buffer, self.length)

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a captured tail; for a new tail, which gets more room if `num_recent` was larger then. Copies."""
        rows, recent, _ = tree["tail"].shape
        if recent > self.capacity:
            self.STATE.close(self)
            self.STATE.remake(self, rows=rows, recent=recent)
            self._hold(self._buffer, 0)
        self.replace(tree["tail"])

    def close(self) -> None:
        self.STATE.close(self)
        self._hold(self._buffer, 0)
