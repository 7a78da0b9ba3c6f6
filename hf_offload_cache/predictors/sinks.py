"""Attention sinks: the first tokens of a sequence, which every step attends to whatever a predictor selects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ..errors import not_whole, shown
from ..history.records import RecordFormat
from ..history.state import Array, State, Table
from ..memory.account import MemoryAccount


def sink_units(num_sinks: int, unit_size: int, padded: bool) -> int:
    """Maximum units a row that contain sinks. A padded row's first token may lie anywhere in a unit."""
    early = unit_size - 1 if padded and num_sinks else 0
    return -(-(num_sinks + early) // unit_size)


def with_sinks(
    importance: np.ndarray, num_sinks: int, unit_size: int, visible: torch.Tensor | None = None
) -> np.ndarray:
    """`importance` (rows, units), changed in place: units with sinks rank above all, units of padding below all.

    Units are in the order of the sequence. `visible` (B or 1, at least units * unit_size) marks the tokens that are not
    padding; each sequence has the same number of rows.
    """
    if visible is None:
        importance[:, : -(-num_sinks // unit_size)] = np.inf
        return importance
    rows, units = importance.shape
    tokens = visible[:, : units * unit_size].cpu().numpy()
    tokens = np.repeat(tokens, rows // len(tokens), 0)
    importance[~tokens.reshape(rows, units, unit_size).any(-1)] = -np.inf
    positions = tokens.argmax(-1)[:, None] + np.arange(min(num_sinks, tokens.shape[1]))
    np.put_along_axis(importance, positions.clip(max=tokens.shape[1] - 1) // unit_size, np.inf, 1)
    return importance


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Positions (rows, count) of the largest of values (rows, n), ascending, in a new array. The first of equal
    values are taken. A NaN counts as infinite; importance of the predictors has none, here as on a device."""
    if not count:
        return np.empty((len(values), 0), dtype=np.int64)
    return mark_largest(values, count).nonzero()[1].reshape(len(values), count)


def mark_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Mark the `count` largest of values (rows, n), at least 1: bool. The first of equal values are taken. A NaN counts
    as infinite."""
    first, ordered = values.shape[1] - count, values.copy()
    ordered.partition(first, 1)  # faster than argpartition
    marked = ~(values < ordered[:, first, None])  # NaN included, so that no row has fewer than `count`
    if np.count_nonzero(marked) == len(values) * count:
        return marked
    values = np.where(np.isnan(values), np.inf, values)
    least = np.partition(values, -count, 1)[:, -count, None]
    marked, equal = values > least, values == least
    marked |= equal & (equal.cumsum(1) <= count - marked.sum(1, keepdims=True))
    return marked


# The first tokens' keys, which get exact scores: they differ from all others, and low bits clip them

_OWNER = "sinks"


class SinkKeys:
    """Keys (B, Hk, n, D) of each row's `n` first tokens, on the keys' device. The account books them as "sinks".

    Args:
        first: (B,) int64, each row's first token that is not padding.
    """

    STATE: ClassVar[State] = State(
        "keys of the first tokens",
        _OWNER,
        keys=Array("rows heads sinks dim"),
        first=Table("rows", torch.int64, low=0, at="_first"),
    )

    def __init__(
        self, form: RecordFormat, rows: int, num_sinks: int, device: torch.device, account: MemoryAccount,
        first: np.ndarray,
    ) -> None:  # fmt: skip
        self._unit_size, self._account = form.group_size, account
        shape = rows, form.num_key_heads, num_sinks, form.key_dim
        self.keys = account.empty(_OWNER, *shape, dtype=form.dtype, device=device)
        self._place(first)

    @classmethod
    def of(
        cls, keys: Callable[[], Iterable[torch.Tensor]], tokens: int, visible: torch.Tensor | None, form: RecordFormat,
        rows: int, num_sinks: int, device: torch.device, account: MemoryAccount,
    ) -> Self | None:  # fmt: skip
        """Copy the sinks from `keys`, parts (B, Hk, t, D) in order, `tokens` tokens a row in total. `visible` (B,
        tokens) excludes padding. None if `keys` lack a sink of any row."""
        first = np.zeros(rows, dtype=np.int64)
        if visible is not None:
            any_visible = visible.any(1).numpy(force=True)
            first = np.where(any_visible, visible.int().argmax(1).numpy(force=True), tokens)
        if first.max() + num_sinks > tokens:
            return None
        sinks, position = cls(form, rows, num_sinks, device, account, first), 0
        for part in keys():
            sinks.see(part, position)
            position += part.shape[2]
            if position >= sinks.end:
                break
        return sinks

    def _place(self, first: np.ndarray) -> None:
        """Let the sinks of row i begin at token `first[i]`."""
        self._first = first
        last = (first + self.keys.shape[2] - 1) // self._unit_size
        count = int((last - first // self._unit_size).max(initial=0)) + 1
        self.units: np.ndarray = last[:, None] - np.arange(count)[::-1]
        """(B, units) int64: the units that contain the sinks."""
        self.units.clip(min=0, out=self.units)

    def see(self, keys: torch.Tensor, position: int) -> None:
        """Copy the sinks among `keys` (B, Hk, t, D), those of the tokens from `position` on."""
        firsts = self._first.tolist()
        rows = [(slice(row, row + 1), first) for row, first in enumerate(firsts)]
        if len(set(firsts)) == 1:  # no row is padded
            rows = [(slice(None), firsts[0])]
        for row, first in rows:
            start, stop = max(first, position), min(first + self.keys.shape[2], position + keys.shape[2])
            if start < stop:
                self.keys[row, :, start - first : stop - first] = keys[row, :, start - position : stop - position]

    @property
    def end(self) -> int:
        """Tokens that a row must have so that all its sinks are stored."""
        return int(self._first.max(initial=0)) + self.keys.shape[2]

    def visible(self, seen: torch.Tensor) -> torch.Tensor:
        """Values (B, n) of `seen` (B, tokens) for the sinks."""
        columns = torch.from_numpy(self._first[:, None] + np.arange(self.keys.shape[2]))
        return seen.gather(1, columns.to(seen.device))

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.STATE.select_rows(self, rows)
        self._place(self._first)

    def capture(self) -> dict[str, Any]:
        """A tree for `restore`, without copies."""
        return self.STATE.capture(self)

    @classmethod
    def restore(cls, tree: Any, form: RecordFormat, rows: int, tokens: int, account: MemoryAccount) -> Self:
        """The sinks that `tree` was captured from, for rows of `tokens` tokens: copies. Raises `ContextError`,
        `BudgetError`."""
        sizes = {"rows": rows, "heads": form.num_key_heads, "dim": form.key_dim}
        count = cls.STATE.check(tree, "a layer", form.dtype, **sizes)["sinks"]
        if not 0 < count <= tokens - int(tree["first"].max()):
            raise not_whole("a layer", f"its keys of the first tokens are {shown(tree['keys'])}, of {tokens} tokens")
        sinks = cls(form, rows, count, tree["keys"].device, account, tree["first"].numpy(force=True))
        cls.STATE.restore(sinks, tree)
        return sinks

    def close(self) -> None:
        """Free the memory."""
        self.STATE.close(self)
