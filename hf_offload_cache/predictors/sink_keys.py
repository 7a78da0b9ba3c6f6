"""The keys of the first tokens, whose scores are taken exactly: they are unlike all others, and low bits clip them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import torch

from ..history.record_format import RecordFormat
from ..memory.account import MemoryAccount
from ..memory.buffers import lasting_empty

_OWNER = "sinks"


class SinkKeys:
    """Keys (B, Hk, n, D) of the `n` first tokens of each row, on the device of the keys. In the account as "sinks".

    Args:
        first: (B,) int64, the token that the sinks of each row begin at.
    """

    def __init__(
        self, form: RecordFormat, rows: int, num_sinks: int, device: torch.device, account: MemoryAccount,
        first: np.ndarray,
    ) -> None:  # fmt: skip
        self._unit_size, self._account = form.group_size, account
        account.hold(_OWNER, self.planned(form, num_sinks, rows)[_OWNER])
        shape = rows, form.num_key_heads, num_sinks, form.key_dim
        self.keys = lasting_empty(*shape, dtype=form.dtype, device=device)
        self._place(first)

    @classmethod
    def of(
        cls, keys: Callable[[], Iterable[torch.Tensor]], tokens: int, visible: torch.Tensor | None, form: RecordFormat,
        rows: int, num_sinks: int, device: torch.device, account: MemoryAccount,
    ) -> Self | None:  # fmt: skip
        """Of `keys`, parts (B, Hk, t, D) in order, `tokens` tokens a row; visible (B, tokens) says what is no padding.
        None where not all sinks of every row are among them."""
        first = np.zeros(rows, dtype=np.int64)
        if visible is not None:
            there = visible.any(1).numpy(force=True)
            first = np.where(there, visible.int().argmax(1).numpy(force=True), tokens)
        if first.max() + num_sinks > tokens:
            return None
        found, position = cls(form, rows, num_sinks, device, account, first), 0
        for part in keys():
            found.see(part, position)
            position += part.shape[2]
            if position >= found.end:
                break
        return found

    def _place(self, first: np.ndarray) -> None:
        """The sinks of row i begin at token `first[i]`."""
        self._first = first
        last = (first + self.keys.shape[2] - 1) // self._unit_size
        count = int((last - first // self._unit_size).max(initial=0)) + 1
        self.units: np.ndarray = last[:, None] - np.arange(count)[::-1]
        """(B, units) that they lie in."""
        self.units.clip(min=0, out=self.units)

    @staticmethod
    def planned(form: RecordFormat, num_sinks: int, rows: int) -> dict[str, int]:
        """What is held."""
        return {_OWNER: rows * num_sinks * form.num_key_heads * form.key_dim * form.dtype.itemsize}

    def see(self, keys: torch.Tensor, position: int) -> None:
        """Keys (B, Hk, t, D) of the tokens from `position` on pass by: what is wanted of them is copied."""
        for row, first in enumerate(self._first.tolist()):
            start, stop = max(first, position), min(first + self.keys.shape[2], position + keys.shape[2])
            if start < stop:
                self.keys[row, :, start - first : stop - first] = keys[row, :, start - position : stop - position]

    @property
    def end(self) -> int:
        """Tokens that a row must have for all of this to be of it."""
        return int(self._first.max(initial=0)) + self.keys.shape[2]

    def visible(self, seen: torch.Tensor) -> torch.Tensor:
        """What of seen (B, tokens) is of these tokens: (B, n)."""
        columns = torch.from_numpy(self._first[:, None] + np.arange(self.keys.shape[2]))
        return seen.gather(1, columns.to(seen.device))

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        which, old = rows.numpy(force=True), self.keys
        self._account.hold(_OWNER, len(which) * old[:1].nbytes)
        self.keys = lasting_empty(len(which), *old.shape[1:], dtype=old.dtype, device=old.device)
        torch.index_select(old, 0, rows.to(old.device), out=self.keys)
        self._account.release(_OWNER, old.nbytes)
        self._place(self._first[which])

    def capture(self) -> dict[str, Any]:
        """As a tree for `restore`: no copies."""
        return {"keys": self.keys, "first": torch.from_numpy(self._first)}

    def restore(self, tree: dict[str, Any], held: int) -> bool:
        """Hold what was captured, copied; False, with nothing changed, where it is none of `held` tokens a row."""
        keys, first = tree["keys"], tree["first"]
        right = keys.shape == self.keys.shape and keys.dtype == self.keys.dtype
        right = right and first.dtype == torch.int64 and first.shape == keys.shape[:1]
        if not right or not 0 <= int(first.min()) <= int(first.max()) <= held - keys.shape[2]:
            return False
        self.keys.copy_(keys)
        self._place(first.numpy(force=True).copy())
        return True

    def close(self) -> None:
        """Give the memory back."""
        self._account.release(_OWNER, self.keys.nbytes)
        self.keys = self.keys.new_empty(0, *self.keys.shape[1:])
