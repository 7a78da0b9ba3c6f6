"""`AbstractTreeCache` with one part as in the paper, where ours is another: what that part is worth."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hf_offload_cache.fetch import Choice
from hf_offload_cache.methods.abstract_tree import (
    AbstractTreeCache,
    AbstractTreeLayer,
    AbstractTreePredictor,
    bounds,
    important_tokens,
)
from hf_offload_cache.predictors import Query

from .all_keys import FixedChunksCache


class BoundsPredictor(AbstractTreePredictor):
    """Chunks stand by their upper bounds, not by what is likely."""

    judges_by = staticmethod(bounds)


@dataclass(frozen=True)
class Halves:
    """The judge of parts of chunks: keys (rows, n, D) that scaled queries (rows, heads, D) are held against, both
    float32, for shares of attention that has `whole` (rows, heads), the sum of its exponentials."""

    states: torch.Tensor
    keys: torch.Tensor
    whole: torch.Tensor
    always: np.ndarray
    """(rows, n) bool: sinks."""

    def bounds(self, nodes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Judge`."""
        parts = self.keys.unflatten(1, (-1, size))
        parts = parts[torch.arange(len(parts))[:, None], torch.from_numpy(np.maximum(nodes, 0))]
        ends = bounds(self.states, parts.amin(2)[:, None], parts.amax(2)[:, None])
        upper, lower = ((one.exp() / self.whole[:, :, None]).sum(1).numpy() for one in ends)
        return np.where(self._of(self.always, nodes, size).any(2), np.inf, upper), lower

    def scores(self, nodes: np.ndarray, size: int) -> np.ndarray:
        """See `Judge`."""
        share = ((self.states @ self.keys.transpose(1, 2)).exp() / self.whole[:, :, None]).sum(1).numpy()
        return self._of(np.where(self.always, np.inf, share), nodes, size)

    @staticmethod
    def _of(tokens: np.ndarray, nodes: np.ndarray, size: int) -> np.ndarray:
        return np.take_along_axis(tokens.reshape(len(tokens), -1, size), np.maximum(nodes, 0)[:, :, None], 1)


class DescendingPredictor(AbstractTreePredictor):
    """What is brought is judged by bounds of its halves, and token by token where these do not decide (section 4.2).

    The sum of exponentials that shares are of is taken as known: what that takes is not counted, to the tree's favour.
    For a CPU, rows without padding, and a key head a row.
    """

    parts: ClassVar[tuple[int, ...]] = (32, 2)

    def look_into(
        self, query: Query, states: torch.Tensor, units: np.ndarray, most: np.ndarray, wanted: int
    ) -> Generator[Choice, torch.Tensor, Choice]:
        """As `AbstractTreePredictor.look_into`. Raises `ValueError` for rows with padding."""
        if query.visible is not None:
            raise ValueError("a baseline takes rows of one length: leave padding out")
        entries, group = (yield Choice(units, importance=most)), self.form.group_size
        keys, states = entries[..., : self.form.key_width].flatten(1, 2).float(), states.float()
        recent = query.recent().flatten(0, 1).float()
        whole = torch.cat([states @ part.transpose(1, 2) for part in (keys, recent)], 2).exp().sum(2)
        always = np.zeros(keys.shape[:2], dtype=bool)
        always[:, : self.config.num_sinks] = True
        judge, nodes = Halves(states, keys, whole, always), np.broadcast_to(np.arange(units.shape[1]), units.shape)
        sizes = (group, *(part for part in self.parts if part < group))
        found = important_tokens(*judge.bounds(nodes, group), sizes, np.full(len(units), wanted), judge)
        self.evaluations += found.evaluations - units.size  # chunks were counted when they were ranked
        return Choice(units, found.keep.reshape(*units.shape, group), most)


class AllHalvesPredictor(DescendingPredictor):
    """As that, through all halves."""

    parts = (32, 16, 8, 4, 2)


def _variant(predictor: type[AbstractTreePredictor]) -> type[AbstractTreeLayer]:
    """A layer class with this predictor."""

    def make_predictor(self: AbstractTreeLayer) -> AbstractTreePredictor:
        return predictor(self.history.form, self.history.rows, self.config, self.shared.storage.account)

    return type("Variant", (AbstractTreeLayer,), {"predictor_class": predictor, "make_predictor": make_predictor})


class BoundsTreeCache(AbstractTreeCache):
    """See `BoundsPredictor`."""

    layer_class = _variant(BoundsPredictor)


class BoundsChunksCache(FixedChunksCache):
    """Quest as it is written: fixed chunks, by their upper bounds."""

    layer_class = _variant(BoundsPredictor)


class DescendingTreeCache(AbstractTreeCache):
    """See `DescendingPredictor`."""

    layer_class = _variant(DescendingPredictor)


class AllHalvesTreeCache(AbstractTreeCache):
    """See `AllHalvesPredictor`."""

    layer_class = _variant(AllHalvesPredictor)
