"""The token ids that a cache was fed, so that a prompt which does not continue them is told."""

from __future__ import annotations

import torch

from .report import MemoryAccount


class TokenLog:
    """Ids (B, length), int64, in host memory; `UNKNOWN` where the model was given embeddings."""

    UNKNOWN = -1

    def __init__(self, account: MemoryAccount) -> None:
        self._account = account
        self._parts: list[torch.Tensor] = []
        self.length = 0

    @property
    def batch(self) -> int:
        return self._parts[0].shape[0] if self._parts else 0

    def append(self, ids: torch.Tensor, at: int) -> None:
        """Add ids (B, t) of a step that began at position `at`; what is missing before it is unknown."""
        ids = ids.detach().to("cpu", torch.int64)
        if at > self.length:
            self._add(torch.full((ids.shape[0], at - self.length), self.UNKNOWN))
        self.truncate(at)
        self._add(ids.clone())

    def _add(self, ids: torch.Tensor) -> None:
        self._parts.append(ids)
        self.length += ids.shape[1]
        self._account.hold("token ids", ids.nbytes)

    def _joined(self) -> torch.Tensor:
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, 1)]
        return self._parts[0]

    def truncate(self, length: int) -> None:
        """Keep the first `length` ids of every row."""
        if length < self.length:
            kept = self._joined()[:, :length].clone()
            self._account.release("token ids", self._parts[0].nbytes)
            self._parts, self.length = [], 0
            if length:
                self._add(kept)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        if self._parts:
            old = self._joined()
            self._parts = [old[rows.cpu()]]
            self._account.hold("token ids", self._parts[0].nbytes - old.nbytes)

    def first_difference(self, ids: torch.Tensor) -> int | None:
        """The first position where ids (B, t) differ from what is known of the first t, or None."""
        if not self._parts or self.batch != ids.shape[0]:
            return None
        known = self._joined()[:, : ids.shape[1]]
        ids = ids[:, : known.shape[1]].to("cpu")
        wrong = ((known != ids) & (known != self.UNKNOWN)).any(0).nonzero()
        return int(wrong[0]) if len(wrong) else None
