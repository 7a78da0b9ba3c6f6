"""The entries that each key head of a row wants, as they were stored, beside a copy of all (SpeCache, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..memory.account import MemoryAccount
from ..memory.buffers import lasting_empty
from .choice import Choice


@dataclass(frozen=True)
class Entries:
    """Keys (rows, heads, m, Dk) and values (rows, heads, m, Dv) of `tokens` (rows, heads, m), -1: none, which are
    undefined there and finite."""

    tokens: np.ndarray
    keys: torch.Tensor
    values: torch.Tensor


def records_of(tokens: np.ndarray, group_size: int, most: int) -> list[Choice]:
    """The units of `group_size` tokens in the order of the sequence that hold `tokens` (rows, heads, m), -1: none: of
    each row the first `most`, then more."""
    wanted = np.zeros((len(tokens), int(tokens.max(initial=-1)) // group_size + 2), dtype=bool)
    wanted[np.arange(len(tokens))[:, None], (tokens // group_size).reshape(len(tokens), -1)] = True  # -1: the last one
    rows = [own.nonzero()[0] for own in wanted[:, :-1]]
    units = np.full((len(rows), max(map(len, rows), default=0)), -1, dtype=np.int64)
    for own, found in zip(units, rows, strict=True):
        own[: len(found)] = found
    return [Choice(units[:, start : start + most]) for start in range(0, units.shape[1], most)]


def picked(form: Any, records: torch.Tensor, choice: Choice, tokens: np.ndarray) -> Entries:
    """The entries of those of `tokens` (rows, heads, m) that lie in `records` (rows, M, entries a record, entry width)
    of `choice`, as `records_of` named them: a copy."""
    units, own = choice.units, tokens // form.group_size
    at, there = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
    for row, held in enumerate(units):
        held = held[held >= 0]
        if held.size:
            at[row] = np.minimum(np.searchsorted(held, own[row]), held.size - 1)
            there[row] = held[at[row]] == own[row]
    place = torch.from_numpy(at * form.group_size + tokens % form.group_size).to(records.device)
    keys, values = form.split(records.flatten(1, 2))
    of_row, of_head = (torch.arange(count, device=records.device) for count in tokens.shape[:2])
    where = of_row[:, None, None], of_head[:, None], place
    return Entries(np.where(there, tokens, -1), keys[where], values[where])


class ChosenEntries:
    """Room for `count` entries a row and key head, in the account as "chosen entries", on the history's device. What is
    wanted again stays where it lies. For the thread that runs the model."""

    def __init__(self, form: Any, rows: int, count: int, device: torch.device, account: MemoryAccount) -> None:
        self.form, self.count, self._device, self._account = form, count, device, account
        self.tokens = np.full((rows, form.num_key_heads, count), -1, dtype=np.int64)
        """Which token of its row each is, (rows, heads, count), -1: none; in no order."""
        self.wanted: np.ndarray | None = None
        """The tokens (rows, heads, m) that are to be held, -1: none; None: those that are."""
        self.absent: np.ndarray | None = None
        """Those of them that are not here, (rows, heads, n), -1: none; None as well."""
        account.hold("chosen entries", self.planned(form, rows, count))
        shape = rows, form.num_key_heads, count
        self.keys = lasting_empty(*shape, form.key_dim, dtype=form.dtype, device=device).zero_()
        self.values = lasting_empty(*shape, form.value_dim, dtype=form.dtype, device=device).zero_()

    @staticmethod
    def planned(form: Any, rows: int, count: int) -> int:
        """Bytes of so many entries a row and head; which they are, which are wanted, and which of these are absent."""
        return rows * count * (form.entry_bytes + 3 * 8 * form.num_key_heads)

    @property
    def nbytes(self) -> int:
        return 3 * self.tokens.nbytes + self.keys.nbytes + self.values.nbytes

    @property
    def entries(self) -> Entries:
        """All of them: views, valid until the next change."""
        return Entries(self.tokens, self.keys, self.values)

    @property
    def empty(self) -> bool:
        return not bool((self.tokens >= 0).any())

    def absent_of(self, tokens: np.ndarray) -> np.ndarray:
        """Those of `tokens` (rows, heads, m), -1: none, that are not here, (rows, heads, n), -1 behind them."""
        absent = np.where(_among(tokens, self.tokens), -1, tokens)
        absent = -np.sort(-absent, 2)
        return absent[:, :, : int((absent >= 0).sum(2).max(initial=0))]

    def want(self, tokens: np.ndarray) -> np.ndarray:
        """From the next `take` on these are held, (rows, heads, `count` at most), -1: none, and no others. Returns what
        is `absent`."""
        self.wanted, self.absent = tokens, self.absent_of(tokens)
        return self.absent

    def take(self, new: Sequence[Entries]) -> None:
        """Hold what is wanted; what is absent is in `new`."""
        if self.wanted is None:
            return
        self.tokens[~_among(self.tokens, self.wanted)] = -1
        for some in new:
            row, head, column = (some.tokens >= 0).nonzero()
            free = np.argsort(self.tokens >= 0, 2, kind="stable")
            rank = np.cumsum(some.tokens >= 0, 2) - 1
            slot = free[row, head, rank[row, head, column]]
            self.tokens[row, head, slot] = some.tokens[row, head, column]
            into, out = (
                tuple(torch.from_numpy(one).to(self._device) for one in (row, head, last)) for last in (slot, column)
            )
            self.keys[into], self.values[into] = some.keys[out], some.values[out]
        self.wanted = self.absent = None

    def truncate(self, tokens: int) -> None:
        """Only those of the first `tokens` tokens stay, and are wanted."""
        for held in (self.tokens, self.wanted, self.absent):
            if held is not None:
                held[held >= tokens] = -1

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        before, own = self.nbytes, rows.to(self._device)
        after = self.planned(self.form, len(rows), self.count)
        self._account.hold("chosen entries", after)
        moved = rows.cpu().numpy()
        self.tokens = self.tokens[moved]
        if self.wanted is not None and self.absent is not None:
            self.wanted, self.absent = self.wanted[moved], self.absent[moved]
        for name, old in (("keys", self.keys), ("values", self.values)):  # not of inference mode, which lasts no longer
            new = lasting_empty(len(rows), *old.shape[1:], dtype=old.dtype, device=old.device)
            setattr(self, name, torch.index_select(old, 0, own, out=new))
        self._account.release("chosen entries", before)

    def close(self) -> None:
        self._account.release("chosen entries", self.nbytes)
        self.tokens, self.keys, self.values = self.tokens[:0], self.keys[:0], self.values[:0]


def _among(these: np.ndarray, those: np.ndarray) -> np.ndarray:
    """Which of `these` tokens (rows, heads, m) are among `those` (rows, heads, n) of the same row and head; not -1."""
    most = max(int(these.max(initial=-1)), int(those.max(initial=-1)))
    rows, heads = these.shape[:2]
    held = np.zeros((rows * heads, most + 2), dtype=bool)
    row = np.arange(rows * heads)[:, None]
    held[row, those.reshape(rows * heads, -1)] = True
    held[:, -1] = False  # where -1 is
    return held[row, these.reshape(rows * heads, -1)].reshape(these.shape)
