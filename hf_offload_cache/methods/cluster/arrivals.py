"""Tokens that leave the tail together, and their entries until their cluster's pages are read."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from ...history.records import RecordFormat
from ...history.state import Array, State, Table
from ...kernels import clusters as kernels
from ...kernels.on_a_device import MOST_CHANNELS, to_device
from ...memory.account import MemoryAccount


def clusters_there(device_type: str, form: RecordFormat) -> bool:
    """Whether a device makes clusters of such entries, by kernels; a processor does otherwise, row by row."""
    return device_type == "cuda" and form.key_width <= MOST_CHANNELS


class Arrivals:
    """The first `count` tokens of the tail's entries (rows, t, width), followed by keys (rows, Hk, n, Dk) and values
    (rows, Hv, n, Dv). Copies nothing; valid as long as these are."""

    def __init__(
        self, form: RecordFormat, held: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int
    ) -> None:
        self.count, self.rows = count, len(held)
        self._form, self._held, self._keys, self._values = form, held, keys, values

    @property
    def device(self) -> torch.device:
        return self._held.device

    @property
    def there(self) -> bool:
        """Whether their device makes clusters of them."""
        return clusters_there(self.device.type, self._form)

    def between(self, start: int, stop: int) -> torch.Tensor:
        """Entries (rows, stop - start, width) of all rows' tokens from `start` to `stop` - 1, which may lie behind
        `count`: new."""
        held = self._held.shape[1]
        out = self._held.new_empty(self.rows, stop - start, self._held.shape[2])
        split, new = min(max(held - start, 0), stop - start), slice(max(start - held, 0), max(stop - held, 0))
        out[:, :split] = self._held[:, start : start + split]
        self._form.entries(self._keys[:, :, new], self._values[:, :, new], out[:, split:])
        return out

    def entries(self, row: int, tokens: np.ndarray) -> torch.Tensor:
        """Entries (n, width) of `tokens` (n,) of a row, new."""
        tail, index = self._held, torch.from_numpy(tokens).to(self._held.device)
        out = tail.new_empty(len(tokens), tail.shape[2])
        new_index = (index - tail.shape[1]).clamp_(min=0)
        if self._keys.shape[2]:
            keys, values = (part[row : row + 1].index_select(2, new_index) for part in (self._keys, self._values))
            self._form.entries(keys, values, out[None])
        in_tail = index < tail.shape[1]
        out[in_tail] = tail[row, index[in_tail]]
        return out

    def put(self, rows: slice, targets: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """Write the entries of the first tokens of adjacent `rows` to the places `targets` (rows, count) int64, all
        different, from `first` on, as far as `out` (n, width) has these. All on the entries' device, which nothing
        waits for."""
        keys, values = self._keys[rows], self._values[rows]
        if keys.stride(-1) != 1 or values.stride(-1) != 1:  # which the kernel relies on
            keys, values = keys.contiguous(), values.contiguous()
        kernels.put(self._held[rows], keys, values, targets, first, out)

    def points_of(self, rows: np.ndarray, start: int, stop: int) -> torch.Tensor:
        """The vectors that are clustered, of several `rows` (r,), ascending: keys (r, stop - start, key width) of their
        type and on their device, new or views."""
        first_new = min(max(self._held.shape[1], start), stop)  # later tokens are new
        held = self._held[:, start:first_new, : self._form.key_width]
        parts = [held] if first_new > start else []
        if first_new < stop:
            new = self._keys[:, :, first_new - self._held.shape[1] : stop - self._held.shape[1]]
            parts.append(new.transpose(1, 2).flatten(2))
        if rows[-1] - rows[0] == len(rows) - 1:
            some = [part[rows[0] : rows[-1] + 1] for part in parts]
        else:
            some = [part.index_select(0, to_device(rows, self.device)) for part in parts]
        return some[0] if len(some) == 1 else torch.cat(some, 1)

    def points(self, row: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The vectors that are clustered: keys (stop - start, key width) float32 of a row's tokens, on the host."""
        stop, width = self.count if stop is None else min(stop, self.count), self._form.key_width
        first_new = min(max(self._held.shape[1], start), stop)  # later tokens are new
        out = torch.empty(stop - start, width, dtype=torch.float32, device="cpu")
        new = slice(first_new - self._held.shape[1], stop - self._held.shape[1])
        out[: first_new - start] = self._held[row, start:first_new, :width]
        if first_new < stop:
            out[first_new - start :] = self._keys[row, :, new].transpose(0, 1).flatten(1)
        return out.numpy()


class AppendBuffer:
    """Entries that have left the tail and are buffered until their cluster's pages are read (DynaKV, algorithm 1,
    Buf_j).

    At most `most` a row, with room for `joining` new ones. The paper's B_max is `most`.

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
