"""What a chunk takes to compute in a layer, told by a small network: the paper's, for sparse attention (SparKV, section
IV-C)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

_HIDDEN = (48, 24)


@dataclass(frozen=True)
class LayerCells:
    """Arrays (n,): of chunks in a layer, what their seconds are told by."""

    tokens: np.ndarray
    attended: np.ndarray
    """Tokens that a query attends to in the mean."""
    place: np.ndarray
    """Of the chunk in the context, in chunks."""
    blocks: np.ndarray
    """Active blocks of keys a block of queries, in the mean."""
    load: np.ndarray
    """Share of the machine that others take."""

    def __getitem__(self, at: Any) -> LayerCells:
        return LayerCells(*(getattr(self, name)[at] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: list[LayerCells]) -> LayerCells:
        return cls(*(np.concatenate([getattr(one, name) for one in parts]) for name in cls.__dataclass_fields__))


class CostNetwork:
    """Two hidden layers, of a chunk's place, its active blocks and the machine's load. It has the least mean squared
    error of what is scaled to unit variance: seconds of a token, as chunks may differ in these. Any thread, one at a
    time.

    Args:
        seconds: (n,) that these cells took.
        steps: of gradients of all cells (Adam; the paper's has momentum): some 50 ms in all.
    """

    def __init__(self, cells: LayerCells, seconds: np.ndarray, *, seed: int = 0, steps: int = 300) -> None:
        found, each = self._features(cells), seconds / cells.tokens
        self._mean, self._deviation = found.mean(0), found.std(0) + 1e-9
        self._level, self._spread = each.mean(), each.std() + 1e-12
        sizes = (found.shape[1], *_HIDDEN)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            inputs = torch.from_numpy((found - self._mean) / self._deviation).float()
            targets = torch.from_numpy((each - self._level) / self._spread).float()
            torch.manual_seed(seed)
            form: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
            hidden = [part for pair in pairwise(sizes) for part in (torch.nn.Linear(*pair, **form), torch.nn.ReLU())]
            self._net = torch.nn.Sequential(*hidden, torch.nn.Linear(sizes[-1], 1, **form))
            descent = torch.optim.Adam(self._net.parameters(), lr=0.01)
            for _ in range(steps):
                descent.zero_grad()
                torch.nn.functional.mse_loss(self._net(inputs)[:, 0], targets).backward()
                descent.step()

    @staticmethod
    def _features(cells: LayerCells) -> np.ndarray:
        return np.stack([cells.place, cells.blocks, cells.load], 1)

    def seconds(self, cells: LayerCells) -> np.ndarray:
        """(n,), at least a tenth of what cells took in the mean: it is asked of what it has not seen."""
        inputs = torch.from_numpy((self._features(cells) - self._mean) / self._deviation).float()
        with torch.no_grad():
            each = np.asarray(self._net(inputs)[:, 0].double() * self._spread + self._level)
        return np.maximum(each, self._level / 10) * cells.tokens
