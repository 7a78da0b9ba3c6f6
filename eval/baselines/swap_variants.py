"""`DiskSwapCache` with another rule of selection: KVSwap's as it is written, and a draw at random as a floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.core import OffloadLayer, SelectiveLayer
from hf_offload_cache.fetch import Choice
from hf_offload_cache.history import Sealed
from hf_offload_cache.methods.disk_swap import (
    DiskSwapCache,
    DiskSwapConfig,
    DiskSwapLayer,
    FittedKeys,
    LowRankPredictor,
)
from hf_offload_cache.model import LookAhead
from hf_offload_cache.predictors import Query, largest, with_sinks


def _best(importance: np.ndarray, budget: int) -> Choice:
    units = largest(importance, min(budget, importance.shape[1]))
    return Choice(units, importance=np.take_along_axis(importance, units, 1))


# A floor: groups drawn at random


class RandomPredictor(LowRankPredictor):
    """Draws the groups besides the sinks'."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._generator = np.random.default_rng(given[-2])  # the layer's index

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        drawn = self._generator.random((self.rows, self.fitted.units), dtype=np.float32)
        seen = self.fitted.seen(query)
        return _best(with_sinks(drawn, self.rules.num_sinks, self.form.group_size, seen), budget)


class RandomSwapLayer(DiskSwapLayer):
    """A layer of `RandomSwapCache`. Reads nothing ahead, because nothing tells what will be drawn."""

    predictor_class = RandomPredictor

    def prefetch_again(self) -> None:
        """Reads nothing."""


class RandomSwapCache(DiskSwapCache):
    """Attends to the first tokens, the latest ones, and groups drawn at random."""

    layer_class: ClassVar[type[OffloadLayer]] = RandomSwapLayer
    goals = DiskSwapCache.goals._replace(faithful=lambda context: ())

    def read_ahead(self, layer: SelectiveLayer, output: torch.Tensor) -> None:
        """Reads nothing."""


# The paper's rule (KVSwap, section 3.3)


@dataclass(frozen=True)
class PaperSwapConfig(DiskSwapConfig):
    """Compact keys are truncated, and the look-ahead selects."""

    summary_dtype: str | None = "int8"
    look_ahead: bool | None = True
    remainder: bool = False


class PaperKeys(FittedKeys):
    """Compact keys in the keys' own metric: queries have no part in it."""

    def fit(self, keys: Callable[[], Any], sealed: Sealed, seen: Any, visible: torch.Tensor | None) -> None:
        super().fit(keys, sealed, None, visible)


class PaperPredictor(LowRankPredictor):
    """Ranks groups by raw scores, summed over heads, and then by the maximum in the group. The sum is linear, so one
    vector stands for all heads."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        form, rows, rules, shared, _, adapter, _, heads = given
        self.fitted = PaperKeys(form, rows, rules, shared, adapter, heads)

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        keys, group, seen = self.fitted.keys, self.form.group_size, self.fitted.seen(query)
        assert keys is not None
        low = keys.low_rank_query(query.states)
        low = low.reshape(len(low), self.heads, -1, low.shape[2]).sum(2)
        best = np.concatenate([keys.best_of_units(own, row, group, seen) for row, own in enumerate(low)])
        return _best(with_sinks(best, self.rules.num_sinks, group, seen), budget)


class InputLookAhead(LookAhead):
    """Guesses the next layer's query from the stream before a layer's attention."""

    def predict(self, layer_idx: int, attention_output: torch.Tensor) -> torch.Tensor | None:
        return super().predict(layer_idx, torch.zeros_like(attention_output))


class PaperSwapLayer(DiskSwapLayer):
    """A layer of `PaperSwapCache`: attends to what was read ahead, if anything was."""

    predictor_class = PaperPredictor

    def choose(self, query: Query, *, guess: bool = False, again: bool = False) -> Choice:
        decided = None if guess or self.history.records <= self.budget else self.fetcher.guess
        return super().choose(query, guess=guess, again=again) if decided is None else decided

    def prefetch_again(self) -> None:
        """Reads nothing: the first layer, which nobody looks ahead for, chooses by its own query."""


class PaperSwapCache(DiskSwapCache):
    """The look-ahead query selects, and nothing corrects it."""

    config_class: ClassVar[type[OffloadConfig]] = PaperSwapConfig
    layer_class: ClassVar[type[OffloadLayer]] = PaperSwapLayer
    goals = DiskSwapCache.goals._replace(faithful=lambda context: ())

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        if self.look_ahead is not None:
            self.look_ahead = InputLookAhead(self.storage.account)
            self.watch_queries()
