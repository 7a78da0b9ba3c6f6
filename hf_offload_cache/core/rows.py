"""Rows of a history: sequences, or the key heads of sequences, each with records of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Key heads that are joined in one row (`heads` 1: nothing is folded), or lie in rows of their own, head after head
    of each sequence."""

    heads: int = 1

    def fold(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, Hk, t, D) as (B Hk, 1, t, D)."""
        return tensor if self.heads == 1 else tensor.flatten(0, 1).unsqueeze(1)

    def unfold(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B Hk, 1, t, D) as (B, Hk, t, D)."""
        return tensor if self.heads == 1 else tensor.squeeze(1).unflatten(0, (-1, self.heads))

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Indices of sequences as those of the rows that they have."""
        if self.heads == 1:
            return rows
        return (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).reshape(-1)
