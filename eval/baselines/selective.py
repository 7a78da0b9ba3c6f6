"""What the selective baselines share: how compact keys are made of a prompt's keys, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from hf_offload_cache.caches.disk_swap import DiskSwapCache, DiskSwapLayer

from .compact_keys import CompactKeys

_PIECE = 4096
"""Tokens that are projected at a time: what bounds float32 copies."""


class SelectiveLayer(DiskSwapLayer):
    """A layer whose compact keys and choice are its own, and whose records, reads and buffers are `DiskSwapCache`'s.

    A method implements `directions`, says whether heads are `joint`, and may override `importance`. `config.rank` is
    the width of one projection. All rows of a batch must be of one length.
    """

    joint: ClassVar[bool] = False
    """One projection of all key heads joined, instead of one a head."""
    fold = 1
    """Key heads that each have rows and records of their own."""

    def directions(self, moment: torch.Tensor, magnitude: torch.Tensor, rank: int) -> torch.Tensor:
        """Projections (P, W, rank) float32, from second moments (P, W, W) and mean absolute values (P, W) of keys."""
        raise NotImplementedError

    def fit(self, keys: Callable[[], Iterator[torch.Tensor]], visible: torch.Tensor | None, tokens: int) -> None:
        """Make the compact keys from all sealed keys: two passes over `keys`, which are (B, Hk, t, D) parts."""
        if visible is not None and not bool(visible[:, :tokens].all()):
            raise ValueError("a baseline takes rows of one length: leave padding out")
        if self.summary is not None:
            self.summary.close()
        moment: Any = 0.0
        magnitude: Any = 0.0
        for flat in self._pieces(keys()):
            moment = moment + torch.einsum("tpw,tpv->pwv", flat, flat)
            magnitude = magnitude + flat.abs().sum(0)
        rows = self._sequences * tokens
        width = moment.shape[-1]
        projection = self.directions(moment, magnitude / rows, min(width, self.settings.rank or width // 8))
        deviation = torch.einsum("pwr,pwv,pvr->pr", projection, moment, projection).div(rows).clamp_min(0).sqrt()
        dtype = getattr(torch, self.settings.summary_dtype)
        heads, account = self._key_heads, self.shared.storage.account
        self.summary: Any = CompactKeys(projection, deviation, dtype, heads, self._sequences, account)
        self.summary.reserve(tokens)
        for part in keys():
            for start in range(0, part.shape[2], _PIECE):
                self.summary.append(part[:, :, start : start + _PIECE])
        self._fitted_at = tokens

    @property
    def _sequences(self) -> int:
        return self.history.batch // self.fold

    @property
    def _key_heads(self) -> int:
        return self.history.form.num_key_heads * self.fold

    def _pieces(self, keys: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Keys as float32 (t, P, W)."""
        for part in keys:
            for own in part.reshape(self._sequences, -1, *part.shape[2:]):
                for start in range(0, own.shape[1], _PIECE):
                    flat = own[:, start : start + _PIECE].transpose(0, 1).float()
                    yield flat.flatten(1)[:, None] if self.joint else flat

    def importance(self, weights: torch.Tensor) -> torch.Tensor:
        """How much tokens matter, (rows, T), from attention weights (H, T) of one sequence: here one row, the sum."""
        return weights.sum(0, keepdim=True)

    def select(self, query: torch.Tensor, buffer: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """The groups (rows, M), ascending, of query (B, H, 1, D): sinks, and those with the most important token."""
        group, count = self.history.form.group_size, self.history.num_groups
        sinks = -(-self.settings.num_sinks // group)
        wanted = -(-self.settings.num_selected // group) + sinks
        if count <= wanted or self.summary is None:
            return np.broadcast_to(np.arange(count), (self.history.batch, count))
        queries = query[:, :, 0].reshape(self._sequences, -1, query.shape[-1])
        rows = []
        for row, own in enumerate(queries):
            weights = torch.softmax(self.summary.scores(own, row) * self.scaling, -1)
            rows.append(self.importance(weights).unflatten(1, (count, group)).amax(2))
        best = torch.cat(rows)
        best[:, :sinks] = float("inf")
        return np.sort(best.topk(wanted, 1)[1].cpu().numpy(), 1)


class SelectiveCache(DiskSwapCache):
    """`DiskSwapCache` with another layer; every layer has the same share, as the papers' methods have it."""

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        if config is None:
            fields.setdefault("layer_budgets", "uniform")
        super().__init__(model, path, config, **fields)
