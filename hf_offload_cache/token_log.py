"""The token ids that a cache was fed, so that a prompt which does not continue them is told."""

from __future__ import annotations

import torch

from .buffers import lasting_empty
from .report import MemoryAccount


class TokenLog:
    """Ids (B, length), int64, in host memory; `UNKNOWN` where the model was given embeddings."""

    UNKNOWN = -1

    def __init__(self, account: MemoryAccount) -> None:
        self._account = account
        self._ids = torch.empty(0, 0, dtype=torch.int64)
        self.length = 0

    @property
    def batch(self) -> int:
        return self._ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held, room to grow included."""
        return self._ids.nbytes

    def _hold(self, ids: torch.Tensor) -> None:
        self._account.hold("token ids", ids.nbytes - self._ids.nbytes)
        self._ids = ids

    def append(self, ids: torch.Tensor, at: int) -> None:
        """Add ids (B, t) of a step that began at position `at`; what is missing before it is unknown."""
        stop = at + ids.shape[1]
        self.length = min(self.length, at)
        if stop > self._ids.shape[1] or ids.shape[0] != self.batch:
            grown = lasting_empty(ids.shape[0], stop + stop // 8 + 64, dtype=torch.int64)
            self.length = self.length if ids.shape[0] == self.batch else 0
            if self.length:
                grown[:, : self.length] = self._ids[:, : self.length]
            self._hold(grown)
        self._ids[:, self.length : at] = self.UNKNOWN
        self._ids[:, at:stop] = ids.detach()
        self.length = stop

    def truncate(self, length: int) -> None:
        """Keep the first `length` ids of every row."""
        self.length = min(self.length, length)
        if not self.length:
            self._hold(self._ids[:0, :0])

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        if self.length:
            old = self._ids[rows.cpu()]
            ids = lasting_empty(*old.shape, dtype=torch.int64)
            self._hold(ids.copy_(old))

    def first_difference(self, ids: torch.Tensor) -> int | None:
        """The first position where ids (B, t) differ from what is known of the first t, or None."""
        if self.batch != ids.shape[0]:
            return None
        known = self._ids[:, : min(self.length, ids.shape[1])]
        ids = ids[:, : known.shape[1]].to("cpu")
        wrong = ((known != ids) & (known != self.UNKNOWN)).any(0).nonzero()
        return int(wrong[0]) if len(wrong) else None
