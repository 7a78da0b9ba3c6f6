"""The rolling buffer: the latest tokens of a layer, in memory until they fill groups (KVSwap, section 3.4.1)."""

from __future__ import annotations

import torch

from ..memory.account import MemoryAccount
from ..memory.buffers import lasting_empty
from .record_format import RecordFormat


class RollingTail:
    """Entries (B, length, entry_width) of the latest tokens of one layer, on the layer's device.

    Has room for `capacity` tokens a row: histories seal the oldest groups before it would overflow. The buffer is the
    tail's own: views from `entries` are valid until the next change.
    """

    def __init__(
        self,
        form: RecordFormat,
        batch: int,
        capacity: int,
        device: torch.device,
        account: MemoryAccount,
    ) -> None:
        self.form = form
        self.length = 0
        self._account = account
        shape = (batch, capacity, form.entry_width)
        account.hold("rolling tail", shape[0] * shape[1] * shape[2] * form.dtype.itemsize)
        self._hold(lasting_empty(*shape, dtype=form.dtype, device=device))

    def _hold(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._keys, self._values = self.form.split(buffer)
        self.capacity = buffer.shape[1]
        """Tokens a row that there is room for."""

    @staticmethod
    def planned(form: RecordFormat, rows: int, capacity: int) -> int:
        """Bytes of the tail of one layer."""
        return rows * capacity * form.entry_bytes

    @property
    def entries(self) -> torch.Tensor:
        """The tokens held, oldest first, as a view."""
        return self._buffer[:, : self.length]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy keys (B, Hk, t, Dk) and values (B, Hv, t, Dv) behind what is held."""
        stop = self.length + keys.shape[2]
        assert stop <= self.capacity, f"tail of {self.capacity} asked to hold {stop}"
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop

    def replace(self, entries: torch.Tensor) -> None:
        """Hold exactly `entries` (B, t, entry_width), which may be a view of this tail."""
        self._buffer[:, : entries.shape[1]] = entries.clone()
        self.length = entries.shape[1]

    def drop_first(self, count: int) -> None:
        """Forget the oldest `count` tokens."""
        self.replace(self.entries[:, count:])

    def drop_last(self, count: int) -> None:
        """Forget the latest `count` tokens."""
        assert count <= self.length
        self.length -= count

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        old = self._buffer
        self._account.hold("rolling tail", len(rows) * old[0].nbytes)
        self._hold(lasting_empty(len(rows), *old.shape[1:], dtype=old.dtype, device=old.device))
        torch.index_select(old, 0, rows.to(old.device), out=self._buffer)
        self._account.release("rolling tail", old.nbytes)

    def close(self) -> None:
        self._account.release("rolling tail", self._buffer.nbytes)
        self._hold(self._buffer.new_empty(0, *self._buffer.shape[1:]))
        self.length = 0
