"""What a fetcher needs of a history, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..stores.base import Store
from .choice import Choice, Extents


class Source(Protocol):
    """What a fetcher needs of a history: where units lie, and how entries lie in a record."""

    store: Store
    form: Any
    device: torch.device
    rows: int

    @property
    def records(self) -> int: ...

    def extents(self, units: np.ndarray) -> Extents: ...

    @property
    def recent(self) -> torch.Tensor: ...

    @property
    def beside(self) -> tuple[torch.Tensor, np.ndarray] | None: ...


@dataclass(frozen=True)
class Fetched:
    """Entries of a choice, and behind them the latest ones. Valid until the next gather of any fetcher of the cache."""

    entries: torch.Tensor
    """(rows, N + t, entry width) on the history's device, as the store has them."""
    chosen: int
    """N: entries a row that come of the choice: as many as the records of its units hold, or where it keeps some
    alone, as many as the row that keeps most."""
    valid: np.ndarray | None
    """(rows, N) bool: entries to attend to; None: all. The others are undefined, and finite where they were stored, or
    zeros where there is no record."""
    kept: np.ndarray | None = None
    """(rows, N) int64: which entry each is of those that the units' records hold, one after the other; None: these are
    they. Anything where it is not valid."""

    records: torch.Tensor | None = None
    """(rows, E, entries a record, entry width): what the records of the choice's extents hold, whatever is attended to
    of it; valid as `entries` are."""

    def of_chosen(self, entries: np.ndarray) -> np.ndarray:
        """What is said of all entries of the units, (rows, entries), as (rows, N)."""
        return entries if self.kept is None else np.take_along_axis(entries, self.kept, 1)


def kept_entries(valid: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Which of the entries `valid` (rows, n) bool are to be attended to: their places (rows, N), N being the most that
    a row has, and which of these are some (rows, N) bool; None: all."""
    counts = valid.sum(1)
    most = int(counts.max(initial=0))
    if (counts == most).all():
        return valid.nonzero()[1].reshape(len(valid), most), None
    places, there = np.zeros((len(valid), most), dtype=np.int64), np.arange(most) < counts[:, None]
    places[there] = valid.nonzero()[1]
    return places, there


def valid_entries(choice: Choice, extents: Extents, group_size: int, there: int) -> np.ndarray | None:
    """Which entries of the units are there, and are to be attended; `there`: extents that are a record."""
    rows, width = extents.records.shape
    valid: np.ndarray | None = None
    offset = np.arange(group_size)
    first = np.zeros_like(extents.records) if extents.first is None else extents.first
    count = np.full_like(extents.records, group_size) if extents.count is None else extents.count
    if there < extents.records.size or extents.count is not None or extents.first is not None:
        valid = (offset >= first[..., None]) & (offset < (first + count)[..., None])
        valid &= extents.records[..., None] >= 0
    if choice.keep is not None:
        keep = choice.keep
        if extents.unit is not None or extents.first is not None:
            unit = np.broadcast_to(np.arange(width), (rows, width)) if extents.unit is None else extents.unit
            before = np.cumsum(count, 1) - count  # entries of the row in earlier runs, and so of the unit, by its first
            begins = np.diff(unit, axis=1, prepend=-1) != 0
            before -= np.maximum.accumulate(np.where(begins, before, 0), 1)
            entry = (before - first)[..., None] + offset
            keep = keep[np.arange(rows)[:, None, None], unit[..., None], entry.clip(0, keep.shape[2] - 1)]
        valid = keep if valid is None else valid & keep
    return None if valid is None else valid.reshape(rows, -1)
