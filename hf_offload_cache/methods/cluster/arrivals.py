"""Tokens that leave a tail together."""

from __future__ import annotations

import numpy as np
import torch

from ...history.records import RecordFormat


class Arrivals:
    """The first `count` tokens of entries (rows, t, width) that are held, and of keys (rows, Hk, n, Dk) and values
    (rows, Hv, n, Dv) behind them. Copies nothing; valid as long as these are."""

    def __init__(
        self, form: RecordFormat, held: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int
    ) -> None:
        self.count, self.rows = count, len(held)
        self._form, self._held, self._keys, self._values = form, held, keys, values

    def entries(self, row: int, tokens: np.ndarray) -> torch.Tensor:
        """Entries (n, width) of `tokens` (n,) of a row: new."""
        held, index = self._held, torch.from_numpy(tokens).to(self._held.device)
        out = held.new_empty(len(tokens), held.shape[2])
        new = (index - held.shape[1]).clamp_(min=0)
        if self._keys.shape[2]:
            keys, values = (part[row : row + 1].index_select(2, new) for part in (self._keys, self._values))
            self._form.entries(keys, values, out[None])
        old = index < held.shape[1]
        out[old] = held[row, index[old]]
        return out

    def points(self, row: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """What is clustered of tokens of a row: their keys, (stop - start, key width) float32, on the host."""
        stop, width = self.count if stop is None else min(stop, self.count), self._form.key_width
        here = min(max(self._held.shape[1], start), stop)  # from here on they are new
        out = torch.empty(stop - start, width, dtype=torch.float32, device="cpu")
        new = slice(here - self._held.shape[1], stop - self._held.shape[1])
        out[: here - start] = self._held[row, start:here, :width]
        if here < stop:
            out[here - start :] = self._keys[row, :, new].transpose(0, 1).flatten(1)
        return out.numpy()
