"""Compact keys of one layer: what all kinds of them have in common, and what a ranking asks them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch

from .token_rows import TokenRows

BLOCK = 4096
"""Tokens that are scored at a time: what is made of them stays in the processor's cache. Twice as many of more than
four times as many: there the calls cost more than the memory does."""
HIDDEN = np.float32(-1e30)
"""The score of padding."""


class Asked(NamedTuple):
    """Low-rank queries on their way to scores."""

    queries: torch.Tensor
    """(h, components), as they are multiplied: in 8 bits where products are whole numbers."""
    factor: np.ndarray
    """(h, 1) float32: products times `factor`, plus `constant`, are scores."""
    constant: np.ndarray


def scored_at_once(tokens: int) -> int:
    """How many of so many tokens are scored at a time at most."""
    return min(tokens, BLOCK if tokens <= 4 * BLOCK else 2 * BLOCK)


class CompactKeys(ABC):
    """Something small of every key of every row, which tells about what a query's product with it is.

    For the thread that runs the model. What it holds is in the account. Scores are not scaled yet.
    """

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows

    @property
    def tokens(self) -> int:
        """Tokens a row that are held."""
        return self._rows.tokens

    @property
    def device(self) -> torch.device:
        return self._rows.data.device

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row. Raises `BudgetError`."""
        self._rows.reserve(tokens)

    @abstractmethod
    def append(self, keys: torch.Tensor) -> None:
        """Add keys (B, Hk, t, D). Raises `BudgetError`."""

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self._rows.truncate(tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        self._rows.select_rows(rows)

    @abstractmethod
    def fits(self, rows: int, tokens: int, num_key_heads: int, key_dim: int) -> bool:
        """Whether this is of such keys."""

    @abstractmethod
    def low_rank_query(self, query: torch.Tensor) -> np.ndarray:
        """(B, H, ·) float32, linear in query (B, H, D): what the scores are asked with, row by row."""

    @property
    def has_rough_form(self) -> bool:
        """Some of what is held says roughly what scores are, in less time."""
        return False

    @abstractmethod
    def _asked(self, low: np.ndarray, roughly: bool) -> Asked:
        """Low-rank queries (h, ·); `roughly`: those components that say most are enough."""

    @abstractmethod
    def _products(self, asked: Asked, some: torch.Tensor) -> torch.Tensor:
        """(h, n), of any type, with what is held of n tokens of a row: valid until the next. Where units lie side by
        side, the first tokens of all come first, then the second."""

    def best_of_units(
        self,
        low: np.ndarray,
        row: int,
        unit_size: int,
        visible: torch.Tensor | None,
        roughly: bool = False,
        units: np.ndarray | None = None,
    ) -> np.ndarray:
        """(h, n) float32: the largest score in each of `units` (n,) of `row`, None: of all, for low-rank queries
        (h, ·). `visible` (·, tokens) puts padding below everything. `roughly`: by those components that say most, if
        that is faster."""
        rows, asked = self._rows, self._asked(low, roughly)
        held = rows.data[row] if units is None else rows.of_units(row, units, unit_size)
        axis, heads, each = rows.axis - 1, len(low), rows.each
        tokens, found = held.shape[axis] * each, []
        seen = None if visible is None else self._seen(visible, row, units, unit_size)
        block = (scored_at_once(tokens) // unit_size or 1) * unit_size
        for first in range(0, tokens, block):
            count = block if first + block <= tokens else tokens - first
            raw = self._products(asked, held if count == tokens else held.narrow(axis, first // each, count // each))
            if seen is not None:
                least = -(2**30) if asked.queries.dtype == torch.int8 else torch.finfo(raw.dtype).min / 2
                raw.masked_fill_(~self._in_order(seen[first : first + count]), least)
            found.append(raw.view(heads, -1, unit_size).amax(2) if each == 1 else _largest(raw.view(heads, each, -1)))
        best: np.ndarray = (found[0] if len(found) == 1 else torch.cat(found, 1)).float().numpy(force=True)
        best *= asked.factor
        best += asked.constant
        return best

    def of_units(
        self, low: np.ndarray, row: int, units: np.ndarray, unit_size: int, visible: torch.Tensor | None
    ) -> np.ndarray:
        """(h, n, unit_size) float32: the scores of all tokens of `units` (n,) of `row`; `visible` as above."""
        some = self._rows.of_units(row, units, unit_size)
        asked = self._asked(low, False)
        scores: np.ndarray = self._products(asked, some).float().numpy(force=True) * asked.factor  # not in their memory
        scores += asked.constant
        if visible is not None:
            seen = self._in_order(self._seen(visible, row, units, unit_size))
            scores = np.where(seen.numpy(force=True), scores, HIDDEN)
        if self._rows.each == 1:
            return scores.reshape(len(low), -1, unit_size)
        return scores.reshape(len(low), unit_size, -1).swapaxes(1, 2)

    def _seen(self, visible: torch.Tensor, row: int, units: np.ndarray | None, unit_size: int) -> torch.Tensor:
        """What of the tokens of `units` of a row is no padding, one after the other."""
        seen = visible[min(row, len(visible) - 1), : self.tokens]
        if units is None:
            return seen
        return seen.unflatten(0, (-1, unit_size))[torch.from_numpy(units).to(seen.device)].flatten()

    def _in_order(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n,) of tokens one after the other, in the order in which products come."""
        return tokens if self._rows.each == 1 else tokens.view(-1, self._rows.each).t().flatten()

    @abstractmethod
    def lesson(self) -> dict[str, Any]:
        """As `capture`, of no tokens: how keys are made compact."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """All that is held, as a tree to restore: no copies, not to be changed. Who holds it sees no later change."""

    def close(self) -> None:
        """Give the memory back."""
        self._rows.close()


def _largest(products: torch.Tensor) -> torch.Tensor:
    """(h, n) of (h, tokens of a unit, n): over the tokens."""
    if products.device.type != "cpu" or products.dtype == torch.bfloat16:
        return products.amax(1)
    return torch.from_numpy(np.maximum.reduce(products.numpy(), 1))
