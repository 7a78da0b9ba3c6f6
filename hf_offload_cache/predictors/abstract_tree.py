"""Chunks judged by abstracts of their keys, and their tokens by the keys themselves (LeoAM, sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch

from ..config import SelectiveConfig
from ..fetch.choice import Choice
from ..fetch.fetched import kept_entries
from ..history.record_format import RecordFormat
from ..memory.plan import LayerPlan, Planned
from .base import Decision, Query
from .chunk_tree import best_tokens, front
from .sinks import sink_units, with_sinks
from .summaries import SummaryPredictor, score_bytes


def bounds(states: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest and the lowest products (B, H, n) float32 of queries (B, H, D) with keys between `least` and `most`
    (B, Hk, n, D)."""
    grouped = states.unflatten(1, (least.shape[1], -1))
    plus, minus = grouped.clamp(min=0), grouped.clamp(max=0)
    sides = torch.cat([torch.cat([minus, plus], -1), torch.cat([plus, minus], -1)], 2)
    upper, lower = (sides @ torch.cat([least, most], -1).transpose(2, 3)).float().chunk(2, 2)
    return upper.flatten(1, 2), lower.flatten(1, 2)


@dataclass(frozen=True)
class Weights:
    """How much a token matters to queries (B, H, D), by its scores."""

    states: torch.Tensor
    scaling: float
    shift: torch.Tensor
    """(B, H, 1) float32, taken from the scaled scores of each head: so all heads weigh the same."""

    @classmethod
    def of(cls, states: torch.Tensor, scaling: float, upper: torch.Tensor) -> Weights:
        """By what chunks score at most, (B, H, n)."""
        return cls(states, scaling, (upper * scaling).logsumexp(-1, keepdim=True))

    def importance(self, scores: torch.Tensor) -> np.ndarray:
        """Of tokens with products `scores` (B, H, n) float32: (B, n) float32."""
        return (scores * self.scaling - self.shift).exp_().sum(1).cpu().numpy()

    def of_keys(self, keys: torch.Tensor) -> np.ndarray:
        """Of tokens with these keys (B, Hk, n, D)."""
        products = self.states.unflatten(1, (keys.shape[1], -1)) @ keys.transpose(2, 3)
        return self.importance(products.flatten(1, 2).float())


class LookedAt:
    """A `Judge` of chunks whose keys (rows, E, G, Hk, D) are there: chunk e of a row is tokens [e G, (e + 1) G).

    `always` (rows, E G) bool: before all others; `hidden`: not to be chosen, None: none.
    """

    def __init__(self, weights: Weights, keys: torch.Tensor, always: np.ndarray, hidden: np.ndarray | None) -> None:
        self._weights, self._keys = weights, keys
        self._always, self._hidden = always, hidden

    def bounds(self, nodes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        keys = self._of(nodes, size)
        weights = self._weights
        upper, lower = bounds(weights.states, keys.amin(2).transpose(1, 2), keys.amax(2).transpose(1, 2))
        most, least = weights.importance(upper), weights.importance(lower)
        always, hidden = self._flags(self._always, nodes, size), self._flags(self._hidden, nodes, size)
        most[always.any(2)] = least[always.all(2)] = np.inf
        most[hidden.all(2)] = least[hidden.any(2)] = -np.inf
        return most, least

    def all_scores(self) -> np.ndarray:
        """Of all tokens, (rows, E G)."""
        found = self._weights.of_keys(self._keys.flatten(1, 2).transpose(1, 2))
        found[self._always] = np.inf
        if self._hidden is not None:
            found[self._hidden] = -np.inf
        return found

    def scores(self, nodes: np.ndarray, size: int) -> np.ndarray:
        keys = self._of(nodes, size).flatten(1, 2).transpose(1, 2)
        found = self._weights.of_keys(keys).reshape(*nodes.shape, size)
        found[self._flags(self._always, nodes, size)] = np.inf
        found[self._flags(self._hidden, nodes, size)] = -np.inf
        return found

    def _of(self, nodes: np.ndarray, size: int) -> torch.Tensor:
        """Keys (rows, n, size, Hk, D) of nodes."""
        keys, each = self._keys, self._keys.shape[2] // size
        parts = keys.unflatten(2, (each, size))
        index = torch.from_numpy(np.maximum(nodes, 0)).to(keys.device)
        return parts[torch.arange(len(keys), device=keys.device)[:, None], index // each, index % each]

    @staticmethod
    def _flags(flags: np.ndarray | None, nodes: np.ndarray, size: int) -> np.ndarray:
        """Those of the nodes' tokens, (rows, n, size)."""
        if flags is None:
            return np.zeros((*nodes.shape, size), dtype=bool)
        return np.take_along_axis(flags.reshape(len(flags), -1, size), np.maximum(nodes, 0)[:, :, None], 1)


class AbstractTreePredictor(SummaryPredictor):
    """Abstracts (rows, chunks, 2, Hk, D) in memory: the least and the largest of each component of a chunk's keys.

    The chunks with the highest upper bounds are brought; which of their tokens are attended to is found by their keys.
    What a token matters is the sum over heads of the exponentials of its scores, of which each head's sum is the same.
    """

    evaluations = 0
    """Chunks, parts of chunks and tokens that were judged for steps, since it was made; two tokens are one."""
    judged = 0
    """Tokens that were chosen among for that."""

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([keys.amin(3), keys.amax(3)], 1).permute(0, 3, 1, 2, 4)

    @classmethod
    def plan(cls, form: RecordFormat, config: SelectiveConfig, chunks: int, rows: int, heads: int) -> LayerPlan:
        """What one layer takes for `chunks` chunks a row, with `heads` query heads a sequence."""
        plan = cls.planned(2 * form.key_width * form.dtype.itemsize, chunks, rows, heads)
        looked = _look_bytes(form, rows, heads, min(cls._most(config, form, chunks), chunks) * form.group_size)
        return plan + LayerPlan(shared=Planned(decode={"judging": looked}))

    @staticmethod
    def _most(config: SelectiveConfig, form: RecordFormat, chunks: int) -> int:
        group = form.group_size
        return -(-config.brought(chunks * group) // group) + sink_units(config.num_sinks, group, padded=True)

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        """As `Predictor.select`; what a guess would bring is not looked into."""
        assert self._held is not None
        group, config = self.form.group_size, self.config
        with self._account.holding("scores", score_bytes(self.rows, query.states.shape[1], self.units)):
            abstracts = self._held[:, : self.units].permute(2, 0, 3, 1, 4)
            states = query.states.to(abstracts.dtype)
            upper, lower = bounds(states, abstracts[0], abstracts[1])
            weights = Weights.of(states, query.scaling, upper)
            most, least = weights.importance(upper), weights.importance(lower)
        most = with_sinks(most, config.num_sinks, group, query.visible)
        if query.visible is not None:  # of a chunk with padding, not all tokens are to be had
            seen = query.visible[:, : self.units * group].unflatten(1, (-1, group)).all(-1).cpu().numpy()
            least[~np.repeat(seen, self.rows // seen.shape[0], 0)] = -np.inf
        wanted = config.attended(self.units * group) + config.num_sinks
        found = front(most, least, group, np.full(self.rows, wanted), budget)
        units, there = kept_entries(found.sure | found.unsure)
        most = np.take_along_axis(most, units, 1)
        if there is not None:
            units, most = np.where(there, units, -1), np.where(there, most, -np.inf)
        if guess:
            return Choice(units)
        self.evaluations += self.rows * self.units
        self.judged += self.rows * self.units * group
        return self._look(query, weights, units, most, wanted)

    def _look(
        self, query: Query, weights: Weights, units: np.ndarray, most: np.ndarray, wanted: int
    ) -> Generator[Choice, torch.Tensor, Choice]:
        """Bring the chunks `units` (rows, E), and keep the best of their tokens, judged by their keys."""
        entries, form = (yield Choice(units)), self.form
        keys = entries[..., : form.key_width].unflatten(-1, (form.num_key_heads, form.key_dim))
        always, hidden = self._marks(units, query.visible)
        tokens = units.shape[1] * form.group_size
        with self._account.holding("judging", _look_bytes(form, self.rows, query.states.shape[1], tokens)):
            judge = LookedAt(weights, keys, always, hidden)
            keep = best_tokens(judge.all_scores(), wanted)
        self.evaluations += int((units >= 0).sum()) * form.group_size // 2
        return Choice(units, keep.reshape(*units.shape, form.group_size), most)

    def _marks(self, units: np.ndarray, visible: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Of the tokens of chunks (rows, E): which are sinks, and which are padding; (rows, E G) bool."""
        group, sinks = self.form.group_size, self.config.num_sinks
        places = (units[:, :, None] * group + np.arange(group)).reshape(len(units), -1)
        if visible is None:
            return (places >= 0) & (places < sinks), None
        seen = visible.cpu().numpy()
        seen = np.repeat(seen, len(units) // len(seen), 0)
        first = seen.argmax(1)[:, None]
        hidden = ~np.take_along_axis(seen, np.maximum(places, 0), 1)
        return (places >= first) & (places < first + sinks), hidden


def _look_bytes(form: RecordFormat, rows: int, heads: int, tokens: int) -> int:
    """A copy of the keys that are looked at, and their scores in 32 bits, twice."""
    return rows * tokens * (form.key_width * form.dtype.itemsize + 8 * heads)
