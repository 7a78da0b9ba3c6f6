"""Judging by all keys, which each step reads: LeoAM's baselines (section 6) on the parts of `AbstractTreeCache`, so
that nothing else differs; and FlexGen, which judges nothing."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import numpy as np
import torch

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.fetch import Choice
from hf_offload_cache.history import Sealed
from hf_offload_cache.memory import DryRun
from hf_offload_cache.methods.abstract_tree import AbstractTreeCache, AbstractTreeLayer, AbstractTreePredictor, shares
from hf_offload_cache.predictors import Decision, Query, largest


class AllKeysPredictor(AbstractTreePredictor):
    """Brings all chunks for each query, and judges each token by its key. Holds nothing."""

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """As `Predictor.rehearse`: it judges, and keeps no summaries."""
        self.rehearse_judging(run, context, heads)

    def ready(self, units: int) -> bool:
        self.units = units
        return True

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        self.units = sealed.units

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        """As `Predictor.select`. Raises `ValueError` for rows with padding."""
        if query.visible is not None:
            raise ValueError("a baseline takes rows of one length: leave padding out")
        units = np.broadcast_to(np.arange(self.units), (self.rows, self.units))
        if guess:
            return Choice(units)
        states = (query.states * query.scaling).to(self.form.dtype).reshape(self.rows, -1, query.states.shape[2])
        self.judged += self.rows * self.units * self.form.group_size
        wanted = self.config.attended(self.units * self.form.group_size) + self.config.num_sinks
        return self.decide(query, states, units, wanted)

    def decide(
        self, query: Query, states: torch.Tensor, units: np.ndarray, wanted: int
    ) -> Generator[Choice, torch.Tensor, Choice]:
        """The best tokens, by their share of the attention."""
        return self.look_into(query, states, units, np.ones(units.shape, dtype=np.float32), wanted)


class AllKeysByChunkPredictor(AllKeysPredictor):
    """As that, but chunks are chosen, and attended to whole: by their best token."""

    def decide(
        self, query: Query, states: torch.Tensor, units: np.ndarray, wanted: int
    ) -> Generator[Choice, torch.Tensor, Choice]:
        form = self.form
        entries = yield Choice(units)
        keys = entries[..., : form.key_width].unflatten(-1, (form.num_key_heads, form.key_dim))
        found = shares(states, keys.flatten(1, 2).transpose(1, 2), query.recent())
        best = found.reshape(self.rows, self.units, form.group_size).max(2)
        best[:, : -(-self.config.num_sinks // form.group_size)] = np.inf
        self.evaluations += units.size * form.group_size // 2
        chosen = largest(best, min(-(-wanted // form.group_size), self.units))
        keep = np.zeros((*units.shape, form.group_size), dtype=bool)
        np.put_along_axis(keep, chosen[:, :, None], True, 1)
        return Choice(units, keep, best)


class PredictedLayer(AbstractTreeLayer):
    """A layer that makes its `predictor_class`."""

    predictor_class: ClassVar[type[AbstractTreePredictor]]

    def make_predictor(self) -> AbstractTreePredictor:
        form, config = self.history.form, self.config
        return self.predictor_class(form, self.history.rows, config, self.shared.storage.account)


class TokenJudgedLayer(PredictedLayer):
    """H2O-like: all of a layer is read when its query is known, and each token judged."""

    predictor_class = AllKeysPredictor

    @property
    def budget(self) -> int:
        """Below what is held, so that there is something to choose."""
        return min(super().budget, max(0, self.history.units - 1))


class ChunkJudgedLayer(TokenJudgedLayer):
    """InfiniGen-like: all keys of a layer are read while the layer before it computes, and chunks are judged."""

    predictor_class = AllKeysByChunkPredictor


_ALL = 1 << 30
_SAME: dict[str, Any] = {"dense_layers": 0, "early_steps": 0, "abstracts": "memory"}


class _BaselineCache(AbstractTreeCache):
    differs: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        if config is None:
            fields = {**fields, **_SAME, **self.differs}
        super().__init__(model, path, config, **fields)


class TokenJudgedCache(_BaselineCache):
    """H2O-like: see `TokenJudgedLayer`."""

    layer_class = TokenJudgedLayer
    differs: ClassVar[dict[str, Any]] = {"num_opened": _ALL, "look_ahead": False}


class ChunkJudgedCache(_BaselineCache):
    """InfiniGen-like: see `ChunkJudgedLayer`."""

    layer_class = ChunkJudgedLayer
    differs: ClassVar[dict[str, Any]] = {"num_opened": _ALL, "look_ahead": True}


class FixedChunksCache(_BaselineCache):
    """Quest-like: chunks of one size, ranked by abstracts in memory, and attended to whole."""

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        wanted = fields.get("num_selected", getattr(config, "num_selected", 400))
        fields["num_opened"] = wanted or 1  # of a share: as many as are attended to
        super().__init__(model, path, config, **fields)


class FlexGenCache(DiskSwapCache):
    """Sheng et al. 2023 ("FlexGen"); KVSwap, section 4.2: "the full KV cache is restored layer by layer into memory for
    full attention computation". The next block is read while this one is copied. Not bound by the memory that the
    others have: one layer is in memory at a time, which the account does not count."""

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        if config is None:
            fields = {"exact": "bitwise", **fields}
        super().__init__(model, path, config, **fields)
