"""A step's choice of units, their extents, and the fetched entries: shared by predictors, histories and fetchers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..stores.base import Store


@dataclass(frozen=True)
class Estimates:
    """Estimated entries that a step attends to as to stored ones, in place of entries that it does not read."""

    entries: torch.Tensor
    """(rows, E, entry width): keys and values, as stored, on the history's device."""
    bias: torch.Tensor
    """(B, H, q, E) float32, on the same device: added to the scaled scores of these keys; -inf where an entry is not
    for that query. With keys of zeros it is the logarithm of the mass that an entry stands for."""


Estimate = Callable[[], Estimates | None]
"""Computes a step's estimates, or finds that there are none."""


@dataclass(frozen=True)
class Choice:
    """The units of one history that a step attends to besides its latest entries. Host arrays, not to be changed.

    Rows are the history's: sequences, or sequences times key heads. Rows with fewer units than others end in -1. A step
    attends to all entries of a unit, or to those in `keep`.
    """

    units: np.ndarray
    """(rows, M) int64, ascending in each row up to the first -1."""
    keep: np.ndarray | None = None
    """(rows, M, entries a unit) bool: the entries of the units to attend to, in the order of each unit's runs; None:
    all."""
    importance: np.ndarray | None = None
    """(rows, M) float32: each unit's importance, for cutting a union of choices; None: all are equally important."""
    records: np.ndarray | None = None
    """(rows, M): number of records that each unit lies in, for the same purpose; None: one each."""
    next: np.ndarray | None = None
    """(rows, n) int64: the units of highest importance that were not chosen, whose entries can be estimated; None: none
    are."""

    @classmethod
    def all_of(cls, rows: int, count: int) -> Choice:
        """Units 0 to `count` - 1 in every row."""
        return cls(np.broadcast_to(np.arange(count), (rows, count)))

    @classmethod
    def union(cls, choices: list[Choice], most: int) -> Choice:
        """The units in any of several choices of the same rows, complete, limited to `most` records a row.

        Units in the most choices stay, among equals those with the largest sum of importance; at least one stays."""
        if len(choices) == 1:
            return choices[0]
        rows = len(choices[0].units)
        picked: list[np.ndarray] = []
        for row in range(rows):
            units = np.concatenate([choice.units[row] for choice in choices])
            weight = np.concatenate([
                np.zeros(choice.units.shape[1]) if choice.importance is None else choice.importance[row]
                for choice in choices
            ])  # fmt: skip
            records = np.concatenate([
                np.ones_like(choice.units[row]) if choice.records is None else choice.records[row] for choice in choices
            ])  # fmt: skip
            present = units >= 0
            weight = np.nan_to_num(weight[present], posinf=1e9, neginf=-1e9)
            named, at, which, votes = np.unique(
                units[present], return_index=True, return_inverse=True, return_counts=True
            )
            each = records[present][at]
            if each.sum() > most:
                order = np.lexsort((-np.bincount(which, weight, len(named)), -votes))
                fits = np.cumsum(each[order]) <= most
                fits[:1] = True
                named = np.sort(named[order[fits]])
            picked.append(named)
        width = max(len(named) for named in picked)
        union = np.full((rows, width), -1, dtype=np.int64)
        for row, named in enumerate(picked):
            union[row, : len(named)] = named
        return cls(union)


@dataclass(frozen=True)
class DeviceChoice:
    """A `Choice` whose tensors are new, on the history's device, and whose estimates are known."""

    units: torch.Tensor
    """(rows, M) int32, ascending in each row up to the first -1: the numbers of records, see `Source.numbers`."""
    keep: torch.Tensor | None = None
    """(rows, M, entries a record) bool, contiguous: the entries to attend to; None: all."""
    attended: int | None = None
    """Entries that a row keeps at most, for the report; None: all of M units."""
    value: torch.Tensor | None = None
    """(B, H, Dv) float32: an entry of each query head that stands for what was not chosen; None: it is dropped."""
    weight: torch.Tensor | None = None
    """(B, H) float32: that entry's score."""
    lost: torch.Tensor | None = None
    """(rows,) float32: the attention mass that is on neither, summed over a row's heads; None: not asked for."""
    nbytes: int = 0
    """Upper bound on the device memory that it took."""


class InSlots(NamedTuple):
    """The units of a `DeviceChoice` after they were read, until the next step of any layer."""

    data: torch.Tensor
    """(rows, slots, payload width)."""
    slots: torch.Tensor
    """(rows, M) int32: the slot of each unit; -1: none."""


DeviceDecision = DeviceChoice | Generator[DeviceChoice, InSlots, DeviceChoice]
"""A choice, or a generator that looks at stored entries first: it yields a choice of units, is sent these, and returns
the choice of the same units that the step attends to."""


@dataclass(frozen=True)
class Extents:
    """The places of units: extent e of a row is a run of entries in one record. Host arrays, not to be changed."""

    records: np.ndarray
    """(rows, E) int64 ids in the history's store; -1: no record."""
    first: np.ndarray | None = None
    """(rows, E): index of the run's first entry in its record; None: 0."""
    count: np.ndarray | None = None
    """(rows, E): number of entries in the run; None: the complete record."""
    unit: np.ndarray | None = None
    """(rows, E): index of the run's unit among those given to `extents`, ascending; None: one extent a unit."""


# A fetcher's input from a history, and its output

class Numbered(NamedTuple):
    """Records and their numbers in their rows, (n,) int64 each: see `Source.numbers`."""

    rows: np.ndarray
    numbers: np.ndarray
    records: np.ndarray
    again: bool
    """Whether some had their numbers before, and were written again."""


class Source(Protocol):
    """The part of a history that a fetcher uses: the extents of units, and the layout of records."""

    store: Store
    form: Any
    device: torch.device
    rows: int

    @property
    def records(self) -> int: ...

    def extents(self, units: np.ndarray) -> Extents: ...

    @property
    def numbers(self) -> int:
        """A step on a device names the records of a row by numbers below this: `DeviceChoice.units`."""

    @property
    def version(self) -> int:
        """Changes when records get numbers or are written again."""

    def numbered(self, version: int) -> Numbered:
        """The records that got numbers or were written again since that version; -1: all."""

    @property
    def recent(self) -> torch.Tensor: ...

    @property
    def extra_entries(self) -> tuple[torch.Tensor, np.ndarray] | None: ...


@dataclass
class Fetched:
    """A choice's entries followed by the latest ones. Valid until the next gather of any fetcher of the cache. Not to
    be changed."""

    entries: torch.Tensor
    """(rows, N + t, entry width) on the history's device, as stored."""
    chosen: int
    """N: entries a row from the choice. That is the number in its units' records, or, with `Choice.keep`, the largest
    number that a row keeps."""
    valid: np.ndarray | None
    """(rows, N) bool: entries to attend to; None: all. The others are undefined, but finite if they were stored, and
    zeros if there is no record."""
    kept: np.ndarray | None = None
    """(rows, N) int64: each kept entry's index in its units' records; None if all are kept. Undefined where invalid."""

    records: torch.Tensor | None = None
    """(rows, E, entries a record, entry width): complete contents of the records in the choice's extents; valid as long
    as `entries`."""
    estimates: Estimates | None = None
    """The step's estimates, whose entries are the last ones; None: there are none."""

    def of_chosen(self, entries: np.ndarray) -> np.ndarray:
        """Values for all entries of the units, (rows, entries), reduced to those of this result, (rows, N)."""
        return entries if self.kept is None else np.take_along_axis(entries, self.kept, 1)


def kept_entries(valid: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The entries to attend to among `valid` (rows, n) bool: their indices (rows, N), N being the largest number in a
    row, and which of these exist, (rows, N) bool; None: all."""
    counts = valid.sum(1)
    most = int(counts.max(initial=0))
    if (counts == most).all():
        return valid.nonzero()[1].reshape(len(valid), most), None
    places, present = np.zeros((len(valid), most), dtype=np.int64), np.arange(most) < counts[:, None]
    places[present] = valid.nonzero()[1]
    return places, present


def valid_entries(choice: Choice, extents: Extents, group_size: int, there: int) -> np.ndarray | None:
    """Mask of the units' existing, kept entries, (rows, N) bool; `there`: number of extents that have a record."""
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
            before = np.cumsum(count, 1) - count  # entries in the row's earlier runs, soon in the unit's
            begins = np.diff(unit, axis=1, prepend=-1) != 0
            before -= np.maximum.accumulate(np.where(begins, before, 0), 1)
            entry = (before - first)[..., None] + offset
            keep = keep[np.arange(rows)[:, None, None], unit[..., None], entry.clip(0, keep.shape[2] - 1)]
        valid = keep if valid is None else valid & keep
    return None if valid is None else valid.reshape(rows, -1)
