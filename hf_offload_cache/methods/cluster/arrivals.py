"""Tokens that leave the tail together."""

from __future__ import annotations

import numpy as np
import torch

from ...history.records import RecordFormat


class Arrivals:
    """The first `count` tokens of the tail's entries (rows, t, width), followed by keys (rows, Hk, n, Dk) and values
    (rows, Hv, n, Dv). Copies nothing; valid as long as these are."""

    def __init__(
        self, form: RecordFormat, held: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int
    ) -> None:
        self.count, self.rows = count, len(held)
        self._form, self._held, self._keys, self._values = form, held, keys, values

    def entries(self, row: int, tokens: np.ndarray) -> torch.Tensor:
        """Entries (n, width) of `tokens` (n,) of a row, new."""
        tail, index = self._held, torch.from_numpy(tokens).to(self._held.device)
        out = tail.new_empty(len(tokens), tail.shape[2])
        new_index = (index - tail.shape[1]).clamp_(min=0)
        if self._keys.shape[2]:
            keys, values = (part[row : row + 1].index_select(2, new_index) for part in (self._keys, self._values))
            self._form.entries(keys, values, out[None])
        in_tail = index < tail.shape[1]
        out[in_tail] = tail[row, index[in_tail]]
        return out

    def points(self, row: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The vectors that are clustered: keys (stop - start, key width) float32 of a row's tokens, on the host."""
        stop, width = self.count if stop is None else min(stop, self.count), self._form.key_width
        first_new = min(max(self._held.shape[1], start), stop)  # later tokens are new
        out = torch.empty(stop - start, width, dtype=torch.float32, device="cpu")
        new = slice(first_new - self._held.shape[1], stop - self._held.shape[1])
        out[: first_new - start] = self._held[row, start:first_new, :width]
        if first_new < stop:
            out[first_new - start :] = self._keys[row, :, new].transpose(0, 1).flatten(1)
        return out.numpy()
