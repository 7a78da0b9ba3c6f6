"""What a line is compared with that tells seconds of a chunk in a layer: a roofline, and the paper's network (SparKV,
section IV-C)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Cells:
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

    def __getitem__(self, at: Any) -> Cells:
        return Cells(*(getattr(self, name)[at] for name in self.__dataclass_fields__))


class Roofline:
    """The longer of work over the machine's rate and bytes over its bandwidth, both as they fit best.

    Args:
        model: of transformers; its decoder layers are alike.
    """

    def __init__(self, model: Any) -> None:
        config, layers = model.config, model.config.num_hidden_layers
        outside = model.get_input_embeddings().weight.numel()
        self._weights = (sum(one.numel() for one in model.model.parameters()) - outside) / layers
        self._width = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
        self._entry = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
        self._hidden, self._size = config.hidden_size, next(model.parameters()).element_size()
        self._rates = (1.0, 1.0)

    def _parts(self, cells: Cells) -> tuple[np.ndarray, np.ndarray]:
        work = cells.tokens * (2 * self._weights + 4 * self._width * cells.attended)
        moved = self._weights + cells.tokens * 4 * self._hidden + self._entry * (cells.attended + cells.tokens)
        return work, moved * self._size

    def fit(self, cells: Cells, seconds: np.ndarray) -> None:
        """By least squares of the relative error, from several starts."""
        from scipy.optimize import minimize

        work, moved = self._parts(cells)
        starts = [np.log([(work / seconds).mean(), (moved / seconds).mean() * factor]) for factor in (0.5, 1.0, 8.0)]

        def error(logs: np.ndarray) -> float:
            rates = np.exp(logs)
            return float(np.mean((np.maximum(work / rates[0], moved / rates[1]) / seconds - 1) ** 2))

        found = min((minimize(error, start, method="Nelder-Mead") for start in starts), key=lambda one: one.fun)
        self._rates = tuple(np.exp(found.x))

    def seconds(self, cells: Cells) -> np.ndarray:
        work, moved = self._parts(cells)
        return np.maximum(work / self._rates[0], moved / self._rates[1])


class Network:
    """Two hidden layers of 48 and 24, of a chunk's place, its active blocks and the machine's load; mean squared error
    of what is scaled to unit variance, by stochastic gradients."""

    def __init__(self, seed: int = 0, epochs: int = 300) -> None:
        self._seed, self._epochs = seed, epochs

    @staticmethod
    def _features(cells: Cells) -> np.ndarray:
        return np.stack([cells.place, cells.blocks, cells.load], 1)

    def fit(self, cells: Cells, seconds: np.ndarray) -> None:
        found = self._features(cells)
        self._mean, self._deviation = found.mean(0), found.std(0) + 1e-9
        self._level, self._spread = seconds.mean(), seconds.std() + 1e-12
        inputs = torch.from_numpy((found - self._mean) / self._deviation).float()
        targets = torch.from_numpy((seconds - self._level) / self._spread).float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            sizes = [(3, 48), (48, 24)]
            hidden = [part for size in sizes for part in (torch.nn.Linear(*size), torch.nn.ReLU())]
            self._net = torch.nn.Sequential(*hidden, torch.nn.Linear(24, 1))
            descent = torch.optim.SGD(self._net.parameters(), lr=0.02, momentum=0.9)
            for _ in range(self._epochs):
                for batch in torch.randperm(len(inputs)).split(32):
                    descent.zero_grad()
                    torch.nn.functional.mse_loss(self._net(inputs[batch])[:, 0], targets[batch]).backward()
                    descent.step()

    def seconds(self, cells: Cells) -> np.ndarray:
        inputs = torch.from_numpy((self._features(cells) - self._mean) / self._deviation).float()
        with torch.no_grad():
            return np.asarray(self._net(inputs)[:, 0].double() * self._spread + self._level)
