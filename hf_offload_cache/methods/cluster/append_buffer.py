"""Entries that have left the tail and are buffered until their cluster's pages are read (DynaKV, algorithm 1,
Buf_j)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from ...history.records import RecordFormat
from ...history.state import Array, State, Table
from ...kernels.on_a_device import to_device
from ...memory.account import MemoryAccount


class AppendBuffer:
    """A buffer of at most `most` entries a row, with room for `joining` new ones. The paper's B_max is `most`.

    Rows may contain different numbers of entries. On the layer's device, in the account as "append buffer". For the
    thread that runs the model.
    """

    STATE: ClassVar[State] = State(
        "append buffer", "append buffer", entries=Array("rows places width"), places=Table("rows places", torch.int64)
    )

    def __init__(
        self, form: RecordFormat, rows: int, most: int, joining: int, device: torch.device, account: MemoryAccount
    ) -> None:
        self.form, self.most, self.joining, self._account, self._device = form, most, joining, account, device
        self.places = np.full((rows, most + joining), -1, dtype=np.int64)
        """(rows, most + joining) int64: the token of each entry; -1: empty."""
        shape = rows, most + joining, form.entry_width
        self.entries = account.empty("append buffer", *shape, dtype=form.dtype, device=device).zero_()
        """(rows, most + joining, entry width); empty places are zeros."""

    @property
    def counts(self) -> np.ndarray:
        """Entries of each row, (rows,)."""
        return (self.places >= 0).sum(1)

    def add(self, rows: np.ndarray, entries: torch.Tensor, first: int) -> None:
        """Add entries (r, t, width) of the tokens from `first` on of `rows` (r,). There must be room for them."""
        count = entries.shape[1]
        free = np.argsort(self.places[rows] >= 0, axis=1, kind="stable")[:, :count]  # the first empty places
        self.places[rows[:, None], free] = first + np.arange(count)
        row, column = self._at(np.repeat(rows, count), free.reshape(-1))
        self.entries[row, column] = entries.flatten(0, 1)

    def _at(self, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
        """Rows and columns (n,) as an index (2, n) on the device, which nothing waits for."""
        return to_device(np.stack([rows, columns]), self._device)

    def at(self, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
        """Copy the entries (n, width) at these rows and columns, (n,) each."""
        row, column = self._at(rows, columns)
        return self.entries[row, column]

    def free(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Empty the places at these rows and columns, (n,) each."""
        self.places[rows, columns] = -1
        row, column = self._at(rows, columns)
        self.entries[row, column] = 0

    def truncate(self, tokens: int) -> None:
        """Keep only entries of the first `tokens` tokens."""
        self.free(*(self.places >= tokens).nonzero())

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i the current row `rows[i]`."""
        self.STATE.select_rows(self, rows)

    def close(self) -> None:
        self.STATE.close(self)
