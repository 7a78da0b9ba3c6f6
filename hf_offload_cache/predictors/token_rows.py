"""Memory for something of every token of every row, which grows along the tokens and may be looked at by others."""

from __future__ import annotations

import numpy as np
import torch

from ..memory.account import MemoryAccount
from ..memory.buffers import lasting_empty
from .directions import PART


class TokenRows:
    """A tensor with rows first and tokens along `axis`, and room for more. What it takes is in the account as
    "compact keys".

    Args:
        shape: (rows, room, n) or (rows, n, room), as `axis` says: 1 or 2.
        each: tokens of a unit; units and not tokens lie side by side along axis 2, and the tokens of each below each
            other: (rows, n * each, room). A maximum over a unit's tokens is one over whole rows then.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        axis: int,
        dtype: torch.dtype,
        device: torch.device,
        account: MemoryAccount,
        each: int = 1,
    ) -> None:
        self.axis, self.each, self.tokens = axis, each, 0
        self._account = account
        self._lent = 0  # so many first tokens are looked at by others too, and are not to be written to
        self._data = self._made(shape, dtype, device)

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        self._account.hold("compact keys", count * dtype.itemsize)
        return lasting_empty(*shape, dtype=dtype, device=device)

    @classmethod
    def shared(cls, data: torch.Tensor, axis: int, account: MemoryAccount, each: int = 1) -> TokenRows:
        """Adopt all of `data`, complete units that others also use: it is copied before it is changed. The account
        counts the complete storage behind it, which it keeps in memory."""
        rows = cls((0, 0, 0), axis, data.dtype, data.device, account, each)
        account.hold("compact keys", data.untyped_storage().nbytes())
        rows._data = data
        rows._lent = rows.tokens = data.shape[axis] * each
        return rows

    def _places(self, tokens: int) -> int:
        """Places along the axis that so many tokens take."""
        return -(-tokens // self.each)

    @property
    def data(self) -> torch.Tensor:
        """What is held, a view: valid until the next change."""
        return self._data.narrow(self.axis, 0, self._places(self.tokens))

    def of_units(self, row: int, units: np.ndarray, unit_size: int) -> torch.Tensor:
        """What is held of the tokens of `units` (n,) of a row, in their order: a copy, of one axis fewer. Units of
        `each` tokens, where that is not 1."""
        axis, held = self.axis - 1, self.data[row]
        unit_size //= self.each
        shape = [*held.shape[:axis], len(units) * unit_size, *held.shape[axis + 1 :]]
        parted = held.view(*held.shape[:axis], -1, unit_size, *held.shape[axis + 1 :])
        if held.is_cpu and held.dtype != torch.bfloat16:  # numpy is done before torch's threads are awake
            return torch.from_numpy(parted.numpy().take(units, axis).reshape(shape))
        return parted.index_select(axis, torch.from_numpy(units).to(held.device)).view(shape)

    def lend(self) -> torch.Tensor:
        """`data`, for who goes on looking at it: no later change is seen there."""
        self._lent = max(self._lent, self.tokens)
        return self.data

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row; grows by a little beyond what is asked once there is something."""
        old = self._data
        if self._places(tokens) > old.shape[self.axis] or (tokens > self.tokens and self.tokens < self._lent):
            shape = list(old.shape)
            shape[self.axis] = self._places(tokens if not self.tokens else tokens + max(128, tokens // 32))
            grown = self._made(tuple(shape), old.dtype, old.device)
            grown.narrow(self.axis, 0, self._places(self.tokens)).copy_(self.data)
            self._account.release("compact keys", old.untyped_storage().nbytes())
            self._data, self._lent = grown, 0

    def append(self, more: torch.Tensor) -> None:
        """Add what is of further tokens, side by side; room was reserved."""
        first, count, each = self.tokens, more.shape[self.axis], self.each
        if each == 1:
            self._data.narrow(self.axis, first, count).copy_(more)
        else:
            parted = self._data.unflatten(1, (-1, each))
            head = min(count, -first % each)  # what fills a unit that was begun
            whole = (count - head) // each * each
            begun, units, rest = more.split([head, whole, count - head - whole], 2)
            place = self._places(first)
            if head:
                parted[..., first % each : first % each + head, place - 1] = begun
            parted[..., place : place + whole // each] = units.unflatten(2, (-1, each)).transpose(2, 3)
            if rest.shape[2]:
                parted[..., : rest.shape[2], place + whole // each] = rest
        self.tokens += count

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self.tokens = min(self.tokens, tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now; in place where the number of rows stays."""
        old, rows = self._data, rows.to(self._data.device)
        if len(rows) == len(old) and not self._lent:
            for part in self.data.split(max(1, PART // self.each), self.axis):
                part.copy_(part.index_select(0, rows))
            return
        self._data = self._made((len(rows), *old.shape[1:]), old.dtype, old.device)
        torch.index_select(old, 0, rows, out=self._data)
        self._lent = 0
        self._account.release("compact keys", old.untyped_storage().nbytes())

    def close(self) -> None:
        """Give the memory back."""
        self._account.release("compact keys", self._data.untyped_storage().nbytes())
        self._data, self.tokens = self._data.new_empty(0, 0, 0), 0
