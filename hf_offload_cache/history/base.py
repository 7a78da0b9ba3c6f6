"""What a layer holds, as its layer, its predictor and its fetcher see it, whatever order it is kept in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..fetch.choice import Extents
from ..fetch.storage import Storage
from ..memory.dry_run import DryRun
from ..stores.base import FreezableStore, Store, require_freezable
from ..stores.layered import LayeredStore
from .records import RecordFormat

# A store that grows, made immutable for contexts and forks

def frozen(
    storage: Storage, store: Store, name: str, named: Callable[[int], np.ndarray], moved: Callable[[Store], None]
) -> LayeredStore:
    """`store` with all its records frozen and its latest parts merged, in a layered store that takes its place: `moved`
    is told where that is new. `named(count)`: which of the first `count` records are held, (count,) bool.

    Blocks until all writes are done; raises what one failed with, with nothing changed, as long as a record that was
    lost so is held; and as `LayeredStore.merge`, with all frozen and readable as before. Raises `TypeError` for a store
    that cannot be frozen.
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
    """Entries of a history as attention takes them. Valid until the next block; the history's memory."""

    keys: torch.Tensor
    """(rows, Hk, t, Dk)"""
    values: torch.Tensor
    """(rows, Hv, t, Dv)"""
    positions: np.ndarray | None = None
    """(rows, t) int64 places in the sequence, -1 where there is no entry; None: those that follow the block before."""


@dataclass(frozen=True)
class Sealed:
    """Units that left the tail, in a call of `append`. Tensors are valid as long as the arguments of that call."""

    units: int
    """How many units are sealed now, these included."""
    tokens: int
    """How many tokens a row are in sealed units now."""
    parts: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys (rows, Hk, ·, Dk) and values (rows, Hv, ·, Dv) of the new ones, in order, none of them empty."""
    stored: Callable[[], Iterator[torch.Tensor]]
    """Keys (rows, Hk, ·, Dk) of everything sealed, in order, part by part, each valid until the next: read back when
    called. So a predictor that has to begin anew never reads by itself."""

    @property
    def keys(self) -> list[torch.Tensor]:
        """Those of `parts`; empty: nothing is new."""
        return [keys for keys, _ in self.parts]

    @property
    def fresh(self) -> int:
        """Tokens a row that are new."""
        return sum(keys.shape[2] for keys, _ in self.parts)


class History(Protocol):
    """Tokens in, entries out, for `rows` rows of one layer: sequences, or sequences times key heads.

    Owns its store and the latest entries, the tail. What comes in is copied. For the thread that runs the model; the
    store is written and read in the background. Whatever raises has changed nothing, but what a signal interrupts.
    """

    form: RecordFormat
    rows: int
    device: torch.device
    length: int
    """Tokens a row, the tail's included."""
    store: Store

    @property
    def units(self) -> int:
        """Units sealed: those that a choice can name are below it."""

    @property
    def records(self) -> int:
        """Records that the units of a row lie in, of the row that has most: what budgets and slots are counted in."""

    @property
    def recent(self) -> torch.Tensor:
        """Entries (rows, t, entry width) of the tail, oldest first: a view, valid until the next change."""

    @property
    def beside(self) -> tuple[torch.Tensor, np.ndarray] | None:
        """What has left the tail and lies in no unit's records: entries (rows, t, entry width), and which token of
        its row each is, (rows, t) int64, -1: none. It comes with every gather, behind the units. None: there never is
        any."""

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        """Put keys (rows, Hk, t, Dk) and values (rows, Hv, t, Dv) behind the tail; old units beyond `num_recent` tokens
        leave it. Raises `StoreFullError`, or an earlier write's `StoreError`."""

    def extents(self, units: np.ndarray) -> Extents:
        """Where units (rows, M) lie; -1: none."""

    def positions(self, units: np.ndarray) -> np.ndarray:
        """Places in the sequence, (rows, N) int64, of the entries that a gather of `units` gives, -1: no entry; those
        `beside` them included."""

    def blocks(self, stop: int | None = None) -> Iterator[Block]:
        """Everything before token `stop` (None: all), block by block; the next is read meanwhile."""

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything before token `stop` as new contiguous keys (rows, Hk, T, Dk) and values, in the order of the
        sequence: bitwise what came in."""

    def truncate(self, length: int) -> np.ndarray | None:
        """Keep the first `length` tokens. Returns the records freed, or None where no unit was touched."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""

    def sweep(self, always: bool = False) -> np.ndarray | None:
        """Give back records that nothing names, where that pays or `always`; returns them."""

    def freeze(self) -> Sequence[FreezableStore]:
        """All that is stored is immutable from now on; returns the frozen stores. Ids stay what they are."""

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """Of each of the frozen `parts` which records some row names: (capacity,), bool."""

    def capture(self) -> dict[str, Any]:
        """What is held beside the records, as a tree of values and tensors for `restore`."""

    @property
    def tables_nbytes(self) -> int:
        """Bytes of host memory for the books."""

    def rehearse(self, run: DryRun, context: int) -> None:
        """Be as large as `context` tokens a row may make it, and declare what is held for a while. Only on a dry run's
        storage, right after construction."""

    def close(self) -> None:
        """Give back the store and the buffers."""


def in_units(parts: Iterable[torch.Tensor], unit_size: int) -> Iterator[torch.Tensor]:
    """Keys (rows, Hk, ·, Dk) given part by part, as whole units (rows, Hk, n, unit_size, Dk), in order: views, but for
    units that two parts have in common. What is no whole unit at the end is left out."""
    rest: torch.Tensor | None = None
    for part in parts:
        if rest is not None:
            missing = unit_size - rest.shape[2]
            rest, part = torch.cat([rest, part[:, :, :missing]], 2), part[:, :, missing:]
            if rest.shape[2] < unit_size:
                continue
            yield rest.unflatten(2, (-1, unit_size))
        count = part.shape[2] // unit_size * unit_size
        if count:
            yield part[:, :, :count].unflatten(2, (-1, unit_size))
        rest = part[:, :, count:] if count < part.shape[2] else None


def equal_parts(count: int, most: int) -> int:
    """Size of the parts when `count` things are divided into the fewest parts of at most `most`, all but the last
    equal, up to a sixteenth of `most`, so that a history that grows seldom needs larger ones. The two buffers of a
    short history then hold little more than it does."""
    if not count:
        return most
    size, step = -(-count // -(-count // most)), max(1, most // 16)
    return min(most, -(-size // step) * step)


def joined(history: History, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything before token `stop`, made of a history's blocks: as `History.whole`."""
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
        places = torch.from_numpy(block.positions).to(like.device)
        for row, own in enumerate(places):
            there = (own >= 0).nonzero().reshape(-1)
            keys[row, :, own[there]] = block.keys[row][:, there]
            values[row, :, own[there]] = block.values[row][:, there]
    return keys, values
