"""Entries that have left the tail and wait until their cluster is at hand (DynaKV, section 4.2)."""

from __future__ import annotations

import numpy as np
import torch

from ...history.records import RecordFormat
from ...memory.account import MemoryAccount


class AppendBuffer:
    """At most `most` entries a row to wait, and room for `joining` more that have just come. Rows may hold different
    numbers of entries. On the layer's device, in the account as "append buffer". For the thread that runs the model."""

    def __init__(
        self, form: RecordFormat, rows: int, most: int, joining: int, device: torch.device, account: MemoryAccount
    ) -> None:
        self.form, self.most, self.joining, self._account, self._device = form, most, joining, account, device
        self.places = np.full((rows, most + joining), -1, dtype=np.int64)
        """Which token of its row each is, -1: none."""
        self.entries = self._empty(rows)
        """(rows, most + joining, entry width): those where there is none are zeros."""

    def _empty(self, rows: int) -> torch.Tensor:
        shape = rows, self.most + self.joining, self.form.entry_width
        return self._account.empty("append buffer", *shape, dtype=self.form.dtype, device=self._device).zero_()

    @property
    def counts(self) -> np.ndarray:
        """Entries of each row, (rows,)."""
        return (self.places >= 0).sum(1)

    def add(self, row: int, entries: torch.Tensor, first: int) -> None:
        """Tokens from `first` on of a row, entries (t, width), for which there is room."""
        free = (self.places[row] < 0).nonzero()[0][: len(entries)]
        self.places[row, free] = first + np.arange(len(entries))
        self.entries[row, torch.from_numpy(free).to(self._device)] = entries

    def at(self, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
        """The entries (n, width) at these rows and columns, (n,) each: a copy."""
        return self.entries[torch.from_numpy(rows).to(self._device), torch.from_numpy(columns).to(self._device)]

    def free(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """What is at these rows and columns, (n,) each, waits no longer."""
        self.places[rows, columns] = -1
        self.entries[torch.from_numpy(rows).to(self._device), torch.from_numpy(columns).to(self._device)] = 0

    def of(self, row: int, tokens: np.ndarray) -> torch.Tensor:
        """The entries of tokens (n,) of a row, which wait: (n, width)."""
        own = self.places[row]
        order = own.argsort()
        return self.entries[row, torch.from_numpy(order[np.searchsorted(own, tokens, sorter=order)]).to(self._device)]

    def where(self, row: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns, (n,) each, at which those of these tokens of a row are that wait."""
        (columns,) = (np.isin(self.places[row], tokens) & (self.places[row] >= 0)).nonzero()
        return np.full(columns.size, row), columns

    def truncate(self, tokens: int) -> None:
        """Only those of the first `tokens` tokens stay."""
        gone = self.places >= tokens
        self.places[gone] = -1
        self.entries[torch.from_numpy(gone).to(self._device)] = 0

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        old, self.entries = self.entries, self._empty(len(rows))
        torch.index_select(old, 0, rows.to(old.device), out=self.entries)
        self.places = self.places[rows.cpu().numpy()]
        self._account.free("append buffer", old)

    def close(self) -> None:
        self._account.free("append buffer", self.entries)
        self.entries = self.entries.new_empty(0, *self.entries.shape[1:])
