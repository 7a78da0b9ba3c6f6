"""What a step wants of a history, and where that lies: the words between predictors, histories and fetchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Choice:
    """The units of one history that a step attends to beside its latest entries. Arrays of the host, not to be changed.

    Rows are the history's: sequences, or sequences times key heads. Rows that want fewer units than others have -1 at
    their end. What is attended of a unit is all that it holds, or what `keep` says.
    """

    units: np.ndarray
    """(rows, M) int64, ascending in each row up to the first -1."""
    keep: np.ndarray | None = None
    """(rows, M, entries a unit) bool: which entries of the units are attended, in the order of each unit's runs; None:
    all."""
    importance: np.ndarray | None = None
    """(rows, M) float32: how much each unit matters, for who has to cut a union of choices; None: all alike."""
    records: np.ndarray | None = None
    """(rows, M): in how many records each unit lies, for the same; None: in one."""

    @classmethod
    def all_of(cls, rows: int, count: int) -> Choice:
        """Units 0 to `count` - 1 in every row."""
        return cls(np.broadcast_to(np.arange(count), (rows, count)))

    def of_rows(self, rows: np.ndarray) -> Choice:
        """Row i is what row `rows[i]` is here."""
        others = (None if one is None else one[rows] for one in (self.keep, self.importance, self.records))
        return Choice(self.units[rows], *others)

    def with_rows(self, rows: Sequence[int], anew: Choice) -> Choice:
        """Row `rows[i]` is row i of `anew`, which is as wide, and of whole units as this one; the others stay."""
        units, importance = self.units.copy(), None
        units[rows] = anew.units
        if self.importance is not None and anew.importance is not None:
            importance = self.importance.copy()
            importance[rows] = anew.importance
        return Choice(units, importance=importance)

    @classmethod
    def union(cls, choices: list[Choice], most: int) -> Choice:
        """What any of several choices of the same rows names, cut to the units of no more than `most` records a row
        that most of them name, among equals those of the largest sum of importance; at least one. Whole units."""
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
            there = units >= 0
            weight = np.nan_to_num(weight[there], posinf=1e9, neginf=-1e9)
            named, at, which, votes = np.unique(
                units[there], return_index=True, return_inverse=True, return_counts=True
            )
            each = records[there][at]
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
class Extents:
    """Where units lie: extent e of a row is a run of entries in one record. Arrays of the host, not to be changed."""

    records: np.ndarray
    """(rows, E) int64 ids in the history's store; -1: none."""
    first: np.ndarray | None = None
    """(rows, E): the first entry of the run in its record; None: the record's first."""
    count: np.ndarray | None = None
    """(rows, E): entries in the run; None: as many as a record holds."""
    unit: np.ndarray | None = None
    """(rows, E): which of the units that were asked for the run belongs to, ascending; None: one extent a unit."""
