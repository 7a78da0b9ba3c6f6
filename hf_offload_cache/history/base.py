"""The contract of histories, which hold a layer's tokens in any order, for its layer, predictor and fetcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..fetch.choice import DeviceChoice, Extents, Numbered
from ..fetch.storage import Storage
from ..kernels.on_a_device import to_device
from ..memory.dry_run import DryRun
from ..stores.base import FreezableStore, Store, require_freezable
from ..stores.layered import LayeredStore
from .records import RecordFormat

# A store that grows, made immutable for contexts and forks

def frozen(
    storage: Storage, store: Store, name: str, named: Callable[[int], np.ndarray], moved: Callable[[Store], None]
) -> LayeredStore:
    """Freeze all records of `store` and merge its latest parts; returns the layered store that replaces it.

    `moved` is called with that store if it is new. `named(count)`: which of the first `count` records are in use,
    (count,) bool. Blocks until all writes are done. Raises the error of a failed write, with nothing changed, while a
    record lost that way is in use. Raises as `LayeredStore.merge` does, with all records frozen and readable as before.
    Raises `TypeError` for a store that cannot be frozen.
    """
    freezable = require_freezable(store)
    storage.prefetcher.flush(freezable)
    storage.prefetcher.check_written(freezable, named(freezable.capacity).nonzero()[0])
    freezable.freeze()
    if not isinstance(freezable, LayeredStore):
        layered = storage.layer_store([freezable], freezable.record_bytes, name)
        moved(layered)
        storage.stores.remove(freezable)
        assert isinstance(layered, LayeredStore)
        freezable = layered
    freezable.merge(named(freezable.capacity))
    return freezable


@dataclass(frozen=True)
class Block:
    """A history's entries in the form that attention takes. The history owns the memory; valid until the next block."""

    keys: torch.Tensor
    """(rows, Hk, t, Dk)"""
    values: torch.Tensor
    """(rows, Hv, t, Dv)"""
    positions: np.ndarray | None = None
    """(rows, t) int64 positions in the sequence, -1 for no entry; None: they continue the block before."""


@dataclass(frozen=True)
class Sealed:
    """Units that left the tail in a call of `append`. Tensors are valid as long as that call's arguments."""

    units: int
    """Number of sealed units now, these included."""
    tokens: int
    """Number of tokens a row in sealed units now."""
    parts: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys (rows, Hk, ·, Dk) and values (rows, Hv, ·, Dv) of the new units, in order, each part non-empty."""
    stored: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    """Reads the keys and values of all sealed units, in order, in parts as above that are valid until the next. A
    predictor that has to start again calls it, so that it never reads by itself."""

    def stored_keys(self) -> Iterator[torch.Tensor]:
        """The keys of `stored`."""
        return (keys for keys, _ in self.stored())

    def complete(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of all sealed units, as `stored`, but not read if all are new."""
        return iter(self.parts) if self.fresh == self.tokens else self.stored()

    def complete_keys(self) -> Iterator[torch.Tensor]:
        """The keys of `complete`."""
        return (keys for keys, _ in self.complete())

    @property
    def keys(self) -> list[torch.Tensor]:
        """The keys in `parts`; empty if no unit is new."""
        return [keys for keys, _ in self.parts]

    @property
    def fresh(self) -> int:
        """Number of new tokens a row."""
        return sum(keys.shape[2] for keys, _ in self.parts)


class History(Protocol):
    """Tokens in, entries out, for `rows` rows of one layer: sequences, or sequences times key heads.

    Owns its store and the tail of the latest entries. Copies its input. For the thread that runs the model; the store
    is written and read in the background. A method that raises has changed nothing, unless a signal interrupted it.
    """

    form: RecordFormat
    rows: int
    device: torch.device
    length: int
    """Tokens a row, the tail's included."""
    store: Store

    @property
    def units(self) -> int:
        """Number of sealed units; a choice names units below it."""

    @property
    def records(self) -> int:
        """Number of records that the units of the longest row lie in: budgets and slots count in records."""

    @property
    def recent(self) -> torch.Tensor:
        """Entries (rows, t, entry width) of the tail, oldest first: a view, valid until the next change."""

    @property
    def extra_entries(self) -> tuple[torch.Tensor, np.ndarray] | None:
        """Entries that have left the tail but lie in no unit's record; None if the history never has any.

        Entries (rows, t, entry width), and each one's token index in its row, (rows, t) int64, -1: no entry. Every
        gather has them behind the units."""

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        """Add keys (rows, Hk, t, Dk) and values (rows, Hv, t, Dv) behind the tail; old units beyond `num_recent` tokens
        leave it. Raises `StoreFullError`, or an earlier write's `StoreError`."""

    def extents(self, units: np.ndarray) -> Extents:
        """The extents of units (rows, M); -1: no unit."""

    @property
    def numbers(self) -> int:
        """As `Source.numbers`."""

    @property
    def version(self) -> int:
        """As `Source.version`."""

    def numbered(self, version: int) -> Numbered:
        """As `Source.numbered`."""

    def all_on_device(self) -> DeviceChoice:
        """Every entry that is in a record. Does not wait."""

    def unsealed(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Entries (rows, t, entry width) that are in no record, on the history's device, and which of them are there,
        (rows, t) bool; None: all. The others are zeros. Does not wait; valid until the next change."""

    def positions(self, units: np.ndarray) -> np.ndarray:
        """Positions in the sequence, (rows, N) int64, of the entries that a gather of `units` returns, -1: no entry.
        `extra_entries` are included."""

    def blocks(self, stop: int | None = None) -> Iterator[Block]:
        """Everything before token `stop` (None: all), block by block; the next block is read meanwhile."""

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything before token `stop` as new contiguous keys (rows, Hk, T, Dk) and values, in the order of the
        sequence: to the bit what was added, unless the format has fewer bits."""

    def truncate(self, length: int) -> np.ndarray | None:
        """Keep the first `length` tokens. Returns the freed records, or None if no unit was cut."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by the present row `rows[i]`."""

    def sweep(self, always: bool = False) -> np.ndarray | None:
        """Free the records that no row uses, if that pays or `always`; returns them."""

    def freeze(self) -> Sequence[FreezableStore]:
        """Make all that is stored immutable; returns the frozen stores. Ids do not change."""

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """For each of the frozen `parts`, a mask of records that some row uses: (capacity,), bool."""

    def capture(self) -> dict[str, Any]:
        """The state besides the records, as a tree of values and tensors for `restore`."""

    @property
    def tables_nbytes(self) -> int:
        """Bytes of host memory for block tables and other indexes."""

    def rehearse(self, run: DryRun, context: int) -> None:
        """Become as large as `context` tokens a row can make it, and declare the temporary memory. Only on a dry run's
        storage, right after construction."""

    def close(self) -> None:
        """Free the store and the buffers."""


def all_sealed(history: History, units: int | None = None) -> Sealed:
    """All sealed units of a history, or the first `units`, of which none is new."""
    units = history.units if units is None else units
    tokens = units * history.form.group_size

    def stored() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((block.keys, block.values) for block in history.blocks(tokens))

    return Sealed(units, tokens, [], stored)


def in_units(parts: Iterable[torch.Tensor], unit_size: int) -> Iterator[torch.Tensor]:
    """Keys (rows, Hk, ·, Dk), given in parts, as complete units (rows, Hk, n, unit_size, Dk), in order.

    They are views, except units that span two parts. Drops an incomplete unit at the end."""
    partial: torch.Tensor | None = None
    for part in parts:
        if partial is not None:
            missing = unit_size - partial.shape[2]
            partial, part = torch.cat([partial, part[:, :, :missing]], 2), part[:, :, missing:]
            if partial.shape[2] < unit_size:
                continue
            yield partial.unflatten(2, (-1, unit_size))
        count = part.shape[2] // unit_size * unit_size
        if count:
            yield part[:, :, :count].unflatten(2, (-1, unit_size))
        partial = part[:, :, count:] if count < part.shape[2] else None


def equal_parts(count: int, most: int) -> int:
    """Part size that divides `count` items into the fewest parts of at most `most`, all but the last equal.

    It is rounded up to a multiple of `most` / 16, so that a growing history seldom needs larger parts. A short
    history's two buffers are then little larger than the history."""
    if not count:
        return most
    size, step = -(-count // -(-count // most)), max(1, most // 16)
    return min(most, -(-size // step) * step)


def joined(history: History, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything before token `stop`, joined from a history's blocks: as `History.whole`."""
    form, like = history.form, history.recent
    keys = like.new_empty(history.rows, form.num_key_heads, stop, form.key_dim)
    values = like.new_empty(history.rows, form.num_value_heads, stop, form.value_dim)
    start = 0
    for block in history.blocks(stop):
        if block.positions is None:
            end = start + block.keys.shape[2]
            keys[:, :, start:end] = block.keys
            values[:, :, start:end] = block.values
            start = end
            continue
        rows, columns = (block.positions >= 0).nonzero()
        row, place, column = to_device(np.stack([rows, block.positions[rows, columns], columns]), like.device)
        keys[row, :, place] = block.keys[row, :, column]
        values[row, :, place] = block.values[row, :, column]
    return keys, values
