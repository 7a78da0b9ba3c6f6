"""`AbstractTreeCache` with one part as in the paper, where ours is another: what that part is worth."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_offload_cache.fetch import Choice
from hf_offload_cache.methods.abstract_tree import (
    AbstractTreeCache,
    AbstractTreePredictor,
    bounds,
    front,
)
from hf_offload_cache.predictors import Query

from .all_keys import FixedChunksCache, PredictedLayer


class BoundsPredictor(AbstractTreePredictor):
    """Chunks stand by their upper bounds, not by what is likely."""

    judges_by = staticmethod(bounds)


@dataclass(frozen=True)
class Found:
    """The important tokens, and the evaluations that it took to find them."""

    keep: np.ndarray
    """(rows, tokens) bool."""
    evaluations: int
    """Nodes and tokens that were judged, of all rows. Two tokens are one evaluation: their keys are as much to compare
    with as two bounds."""


def important_tokens(
    upper: np.ndarray, lower: np.ndarray, sizes: tuple[int, ...], wanted: np.ndarray, judge: Any
) -> Found:
    """The `wanted` most important tokens of each row, by descending from nodes whose bounds `upper` and `lower` (rows,
    n) are known. `sizes`: tokens a node at each level, each divides the one before; nodes of the last size are scored
    token by token. `judge`: `Halves`, or its `bounds` and `scores` of something else."""
    rows, size = len(upper), sizes[0]
    keep = np.zeros((rows, upper.shape[1] * size), dtype=bool)
    nodes = np.broadcast_to(np.arange(upper.shape[1]), upper.shape)
    left = np.minimum(wanted, (upper > -np.inf).sum(1) * size)
    evaluations = int((upper > -np.inf).sum())
    for level in range(len(sizes)):
        decided = front(upper, lower, size, left, None)
        _mark(keep, np.where(decided.sure, nodes, -1), size)
        left = left - decided.sure.sum(1) * size
        nodes = _together(np.where(decided.unsure, nodes, -1))
        if not nodes.shape[1]:
            break
        if level + 1 < len(sizes):
            parts = size // sizes[level + 1]
            split = nodes[:, :, None] * parts + np.arange(parts)
            nodes, size = np.where(nodes[:, :, None] >= 0, split, -1).reshape(rows, -1), sizes[level + 1]
        there = nodes >= 0
        if level + 2 < len(sizes):
            upper, lower = (np.where(there, bound, -np.inf) for bound in judge.bounds(nodes, size))
            evaluations += int(there.sum())
        else:
            scores = np.where(there[:, :, None], judge.scores(nodes, size), -np.inf).reshape(rows, -1)
            _mark(keep, _best(scores, nodes, size, left), 1)
            evaluations += int(there.sum()) * -(-size // 2)
            break
    return Found(keep, evaluations)


def _together(nodes: np.ndarray) -> np.ndarray:
    """Each row's valid nodes (not -1), in order and left-aligned, padded with -1 to the longest row."""
    order = np.argsort(nodes < 0, 1, kind="stable")
    return np.take_along_axis(nodes, order, 1)[:, : int((nodes >= 0).sum(1).max(initial=0))]


def _mark(keep: np.ndarray, nodes: np.ndarray, size: int) -> None:
    """Set the tokens of nodes (rows, n), -1: none."""
    row, column = (nodes >= 0).nonzero()
    if row.size:
        keep.reshape(len(keep), -1, size)[row, nodes[row, column]] = True


def _best(scores: np.ndarray, nodes: np.ndarray, size: int, left: np.ndarray) -> np.ndarray:
    """Tokens (rows, m) with the highest `scores` (rows, n size) of `nodes`, `left` of each row, then -1."""
    count = min(int(left.max(initial=0)), scores.shape[1])
    if not count:
        return np.empty((len(scores), 0), dtype=np.int64)
    best = np.argsort(-scores, 1, kind="stable")[:, :count]
    tokens = np.take_along_axis(nodes, best // size, 1) * size + best % size
    there = (np.arange(count) < left[:, None]) & (np.take_along_axis(scores, best, 1) > -np.inf)
    return np.where(there, tokens, -1)


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
        """Upper and lower bound on the importance of each node's tokens, of `size` tokens a node: two (rows, n)."""
        parts = self.keys.unflatten(1, (-1, size))
        parts = parts[torch.arange(len(parts))[:, None], torch.from_numpy(np.maximum(nodes, 0))]
        ends = bounds(self.states, parts.amin(2)[:, None], parts.amax(2)[:, None])
        upper, lower = ((one.exp() / self.whole[:, :, None]).sum(1).numpy() for one in ends)
        return np.where(self._of(self.always, nodes, size).any(2), np.inf, upper), lower

    def scores(self, nodes: np.ndarray, size: int) -> np.ndarray:
        """The importance of each token of each node, (rows, n, size)."""
        share = ((self.states @ self.keys.transpose(1, 2)).exp() / self.whole[:, :, None]).sum(1).numpy()
        return self._of(np.where(self.always, np.inf, share), nodes, size)

    @staticmethod
    def _of(tokens: np.ndarray, nodes: np.ndarray, size: int) -> np.ndarray:
        return np.take_along_axis(tokens.reshape(len(tokens), -1, size), np.maximum(nodes, 0)[:, :, None], 1)


class DescendingPredictor(AbstractTreePredictor):
    """Judges the chunks that it reads by bounds of their halves, and token by token if these do not decide (section
    4.2). The sum of exponentials counts as known. For a CPU, rows without padding, and a key head a row."""

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


def _variant(predictor: type[AbstractTreePredictor]) -> type[PredictedLayer]:
    """A layer class with this predictor."""
    return type("Variant", (PredictedLayer,), {"predictor_class": predictor})


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
