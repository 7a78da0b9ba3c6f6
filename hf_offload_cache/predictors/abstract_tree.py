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


def standing(upper: np.ndarray, lower: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """How well chunks stand with the heads of a row, at most and at least: two of (rows, n) float32.

    Each head has a queue of chunks, by their `upper` bounds (rows, heads, n). First in some head's queue is `places`,
    and a little more where others have it among their first `places` too; 0 is in none of these. At least: as if the
    chunk stood where its `lower` bound does. So no head drowns the others, whatever the size of its scores and however
    loose its bounds: one that looks for a single thing is heard by its first places, where a sum over heads of what
    bounds allow loses it.
    """
    rows, heads, count = upper.shape
    places = min(places, count)
    first = upper.argpartition(count - places, 2)[:, :, count - places :] if places < count else np.broadcast_to(
        np.arange(count), upper.shape
    )  # fmt: skip
    values = np.take_along_axis(upper, first, 2)
    order = np.argsort(-values, 2, kind="stable")
    first, values = np.take_along_axis(first, order, 2), np.take_along_axis(values, order, 2)
    beaten = values[:, :, None] > np.take_along_axis(lower, first, 2)[:, :, :, None]
    points = np.arange(places, 0, -1, dtype=np.float32)
    most, least, all_points = (np.zeros((rows, count), dtype=np.float32) for _ in range(3))
    row = np.arange(rows)[:, None]
    for head in range(heads):
        here = first[:, head]
        most[row, here] = np.maximum(most[row, here], points)
        least[row, here] = np.maximum(least[row, here], places - beaten[:, head].sum(2))
        all_points[row, here] += points
    return most + all_points / (heads * places + 1), least


@dataclass(frozen=True)
class Weights:
    """How much tokens matter to queries (rows, heads, D), by their scores: the sum over heads of shares of each head's
    attention, of which `total` (rows, heads, 1) is the logarithm of the whole."""

    states: torch.Tensor
    scaling: float
    total: torch.Tensor

    @classmethod
    def of(cls, states: torch.Tensor, scaling: float, *keys: torch.Tensor) -> Weights:
        """Shares of the attention to keys (rows, Hk, ·, D) of several places."""
        scores = torch.cat([_products(states, part) for part in keys], -1)
        return cls(states, scaling, (scores * scaling).logsumexp(-1, keepdim=True))

    def importance(self, products: torch.Tensor) -> np.ndarray:
        """Of tokens with these products (rows, heads, n) float32: (rows, n) float32."""
        return (products * self.scaling - self.total).exp_().sum(1).cpu().numpy()

    def of_keys(self, keys: torch.Tensor) -> np.ndarray:
        """Of tokens with these keys (rows, Hk, n, D)."""
        return self.importance(_products(self.states, keys))


def _products(states: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of queries (rows, heads, D) with keys (rows, Hk, n, D): (rows, heads, n) float32."""
    return (states.unflatten(1, (keys.shape[1], -1)) @ keys.transpose(2, 3)).flatten(1, 2).float()


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

    Rows are sequences times key heads, or sequences with all key heads. The chunks that stand first by their upper
    bounds are brought; which of their tokens are attended to is found by their keys: by the sum over the row's heads of
    shares of the attention to all that is there.
    """

    evaluations = 0
    """Chunks, parts of chunks and tokens that were judged for steps, since it was made; two tokens are one."""
    judged = 0
    """Tokens that were chosen among for that."""

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([keys.amin(3), keys.amax(3)], 1).permute(0, 3, 1, 2, 4)

    @classmethod
    def plan(cls, form: RecordFormat, config: SelectiveConfig, chunks: int, rows: int, heads: int) -> LayerPlan:
        """What one layer takes for `chunks` chunks a row, with `heads` query heads a row."""
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
        states = query.states.to(self._held.dtype).reshape(self.rows, -1, query.states.shape[2])
        with self._account.holding("scores", score_bytes(self.rows, states.shape[1], self.units)):
            abstracts = self._held[:, : self.units].permute(2, 0, 3, 1, 4)
            upper, lower = (bound.cpu().numpy() for bound in bounds(states, abstracts[0], abstracts[1]))
            most, least = standing(upper, lower, min(budget, self.units))
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
        return self._look(query, states, units, most, wanted)

    def _look(
        self, query: Query, states: torch.Tensor, units: np.ndarray, most: np.ndarray, wanted: int
    ) -> Generator[Choice, torch.Tensor, Choice]:
        """Bring the chunks `units` (rows, E), and keep the best of their tokens, judged by their keys."""
        entries, form = (yield Choice(units)), self.form
        keys = entries[..., : form.key_width].unflatten(-1, (form.num_key_heads, form.key_dim))
        always, hidden = self._marks(units, query.visible)
        tokens = units.shape[1] * form.group_size
        with self._account.holding("judging", _look_bytes(form, self.rows, states.shape[1], tokens)):
            weights = Weights.of(states, query.scaling, keys.flatten(1, 2).transpose(1, 2), query.recent())
            keep = best_tokens(LookedAt(weights, keys, always, hidden).all_scores(), wanted)
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
