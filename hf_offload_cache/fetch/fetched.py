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
    def units(self) -> int: ...

    def extents(self, units: np.ndarray) -> Extents: ...

    @property
    def recent(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Fetched:
    """Entries of a choice, and behind them the latest ones. Valid until the next gather of any fetcher of the cache."""

    entries: torch.Tensor
    """(rows, N + t, entry width) on the history's device, as the store has them."""
    chosen: int
    """N: entries a row that come of the choice; each unit takes as many as a record holds, or its `count`."""
    valid: np.ndarray | None
    """(rows, N) bool: entries to attend to; None: all. The others are undefined, and finite where they were stored, or
    zeros where there is no record."""


def valid_entries(choice: Choice, extents: Extents, group_size: int, there: int) -> np.ndarray | None:
    """Which entries of the units are there, and are to be attended; `there`: extents that are a record."""
    rows, width = extents.records.shape
    valid: np.ndarray | None = None
    if there < extents.records.size or extents.count is not None or extents.first is not None:
        offset = np.arange(group_size)
        first = np.zeros_like(extents.records) if extents.first is None else extents.first
        count = np.full_like(extents.records, group_size) if extents.count is None else extents.count
        valid = (offset >= first[..., None]) & (offset < (first + count)[..., None])
        valid &= extents.records[..., None] >= 0
    if choice.keep is not None:
        keep = choice.keep if extents.unit is None else np.take_along_axis(choice.keep, extents.unit[..., None], 1)
        valid = keep if valid is None else valid & keep
    return None if valid is None else valid.reshape(rows, -1)
