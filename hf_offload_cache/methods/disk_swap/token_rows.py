"""Growing memory for one entry of every token of every row, which captured trees may share."""

from __future__ import annotations

import numpy as np
import torch

from ...history.state import Array, State
from ...kernels.on_a_device import to_device
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun

_ALONG = {
    axis: State("compact keys", "compact keys", {"places": "places"}, data=Array(shape, at="_data"))
    for axis, shape in ((1, "rows places width"), (2, "rows width places"))
}


def taken(values: torch.Tensor, places: np.ndarray, axis: int) -> torch.Tensor:
    """The values at `places` (n,) along an axis: a copy."""
    if values.is_cpu and values.dtype != torch.bfloat16:  # numpy finishes before torch's threads wake
        return torch.from_numpy(values.numpy().take(places, axis))
    return values.index_select(axis, to_device(places, values.device))


class TokenRows:
    """A tensor with rows first and tokens along `axis`, with spare room. The account books it as "compact keys".

    Args:
        axis: axis of the tokens, 1 or 2.
        shape: (rows, 0, n) for axis 1, (rows, n, 0) for axis 2.
        each: tokens of a unit. Above 1, axis 2 has units instead of tokens, and a unit's tokens lie along axis 1:
            (rows, n * each, room). A maximum over a unit's tokens is then a maximum over complete rows.
        aligned: the room along `axis` is a multiple of this.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        axis: int,
        dtype: torch.dtype,
        device: torch.device,
        account: MemoryAccount,
        each: int = 1,
        aligned: int = 1,
    ) -> None:
        self.axis, self.each, self.tokens, self._aligned = axis, each, 0, aligned
        self._account = account
        self._lent = 0  # a captured tree shares this many first tokens: they must not be overwritten
        self._data = account.empty("compact keys", *shape, dtype=dtype, device=device)

    @classmethod
    def shared(
        cls, data: torch.Tensor, axis: int, account: MemoryAccount, each: int = 1, aligned: int = 1
    ) -> TokenRows:
        """Adopt all of `data`, complete units that others also use. It is copied before it is changed. The account
        books the complete storage behind `data`, because this keeps it in memory."""
        rows = cls((0, 0, 0), axis, data.dtype, data.device, account, each, aligned)
        account.hold("compact keys", data.untyped_storage().nbytes())
        rows._data = data
        rows._lent = rows.tokens = data.shape[axis] * each
        return rows

    def _places(self, tokens: int) -> int:
        """Places along the axis that `tokens` tokens use."""
        return -(-tokens // self.each)

    @property
    def places(self) -> int:
        """Places in use along the axis."""
        return self._places(self.tokens)

    @property
    def data(self) -> torch.Tensor:
        """All stored tokens, a view: valid until the next change."""
        return self._data.narrow(self.axis, 0, self._places(self.tokens))

    def of_units(self, row: int, units: np.ndarray, unit_size: int) -> torch.Tensor:
        """Entries of the tokens of `units` (n,) of a row, in that order: a copy without the rows' axis. If `each` is
        not 1, `unit_size` must be `each`."""
        axis, stored = self.axis - 1, self.data[row]
        unit_size //= self.each
        shape = [*stored.shape[:axis], len(units) * unit_size, *stored.shape[axis + 1 :]]
        parted = stored.view(*stored.shape[:axis], -1, unit_size, *stored.shape[axis + 1 :])
        return taken(parted, units, axis).view(shape)

    def lend(self) -> torch.Tensor:
        """`data` for a holder that keeps it: later changes do not show there."""
        self._lent = max(self._lent, self.tokens)
        return self.data

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row, plus a little more if there are tokens already. Raises `BudgetError`."""
        room = self._data.shape[self.axis]
        if self._places(tokens) > room or (tokens > self.tokens and self.tokens < self._lent):
            more = max(128, tokens // 32) if self.tokens else 0
            places = -(-self._places(tokens + more) // self._aligned) * self._aligned
            _ALONG[self.axis].remake(self, places=places)
            self._lent = 0

    def rehearse(self, run: DryRun, tokens: int) -> None:
        """Take the size for `tokens` tokens a row, in a dry run."""
        self.reserve(tokens)
        if len(self._data) > 1:
            run.moves(self._data.nbytes)

    def append(self, more: torch.Tensor) -> None:
        """Add further tokens' entries, in token order along the axis. Their room must be reserved."""
        first, count, each = self.tokens, more.shape[self.axis], self.each
        if each == 1:
            self._data.narrow(self.axis, first, count).copy_(more)
        else:
            parted = self._data.unflatten(1, (-1, each))
            head = min(count, -first % each)  # tokens that fill the last, incomplete unit
            complete = (count - head) // each * each
            begun, units, partial = more.split([head, complete, count - head - complete], 2)
            place = self._places(first)
            if head:
                parted[..., first % each : first % each + head, place - 1] = begun
            parted[..., place : place + complete // each] = units.unflatten(2, (-1, each)).transpose(2, 3)
            if partial.shape[2]:
                parted[..., : partial.shape[2], place + complete // each] = partial
        self.tokens += count

    @property
    def memory(self) -> torch.Tensor:
        """All memory, room included, in which a caller may put tokens at their places, and then call `extend`."""
        return self._data

    def extend(self, tokens: int) -> None:
        """Count as many further tokens, which are in `memory`, as stored."""
        self.tokens += tokens

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self.tokens = min(self.tokens, tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`; in place if the number of rows stays."""
        _ALONG[self.axis].select_rows(self, rows, in_place=not self._lent)
        self._lent = 0

    def close(self) -> None:
        """Free the memory."""
        self.tokens = 0
        _ALONG[self.axis].close(self)
