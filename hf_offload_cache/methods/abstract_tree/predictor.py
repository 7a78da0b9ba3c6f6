"""Chunks judged by abstracts of their keys, and their tokens by the keys themselves (LeoAM, sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...config import SelectiveConfig
from ...fetch.choice import Choice, Extents, kept_entries
from ...history.base import Sealed, in_units
from ...history.records import RecordFormat, sealed_groups
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.base import Decision, Query
from ...predictors.sinks import largest, sink_units, with_sinks
from ...predictors.summaries import SummaryPredictor
from .history import AbstractPages

# The adaptive tree (LeoAM, section 4.2): the most important tokens, found by judging chunks of them, and parts of

@dataclass(frozen=True)
class Front:
    """What was made of the nodes of one level, (rows, n) bool each; what is in neither is a desert."""

    sure: np.ndarray
    """All tokens are important: no more than are wanted can be more so than the least of them."""
    unsure: np.ndarray
    """Some tokens may be: to be split."""


def front(
    upper: np.ndarray, lower: np.ndarray | None, size: int, wanted: np.ndarray, most: int | None = None
) -> Front:
    """The front of the queue: as many nodes, the highest upper bounds first, as hold `wanted` important tokens.

    How many a node holds is counted by what its bounds say of the best node that is left out: all where the lower
    bound is no lower than that one's upper bound, else one, which the upper bound stands for. So where upper bounds
    are attained, as those of single numbers are, no important token is left out.

    Args:
        upper, lower: (rows, n) float32 bounds of the nodes; -inf: no node. `lower` None: below all upper bounds.
        wanted: (rows,) tokens a row.
        most: nodes a row that may be in the front; None: all.
    """
    rows, nodes = upper.shape
    if lower is None:
        count = np.minimum(wanted, nodes if most is None else most)
        return Front(np.zeros(upper.shape, dtype=bool), _first(upper, count))
    order = np.argsort(-upper, 1, kind="stable")
    queue, least = np.take_along_axis(upper, order, 1), np.take_along_axis(lower, order, 1)
    place = np.arange(nodes)
    # how many nodes have to be in the front until no upper bound outside is above each node's lower bound
    whole_from = np.maximum(above(queue, least), place + 1)
    counted = np.ones((rows, nodes + 2), dtype=np.int64)  # [m]: tokens that a front of m nodes is counted with
    counted[:, 0] = 0
    np.add.at(counted, (np.arange(rows)[:, None], whole_from), size - 1)
    enough = np.cumsum(counted, 1)[:, : nodes + 1] >= wanted[:, None]
    length = np.where(enough.any(1), enough.argmax(1), nodes)
    length = np.minimum(length, nodes if most is None else min(most, nodes))
    inside = (place < length[:, None]) & (queue > -np.inf)
    sure = inside & (whole_from * size <= wanted[:, None]) & (least > -np.inf)
    found = [np.empty_like(inside) for _ in range(2)]
    for flags, part in zip(found, (sure, inside & ~sure), strict=True):
        np.put_along_axis(flags, order, part, 1)
    return Front(*found)


def _first(upper: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Which of (rows, n) are the `count` (rows,) highest of a row, of equal ones the first ones; of -inf none."""
    if (count >= upper.shape[1]).all():
        return upper > -np.inf
    order = np.argsort(-upper, 1, kind="stable")
    found = np.zeros(upper.shape, dtype=bool)
    np.put_along_axis(found, order, np.arange(upper.shape[1]) < count[:, None], 1)
    return found & (upper > -np.inf)


def above(queue: np.ndarray, least: np.ndarray) -> np.ndarray:
    """How many of `queue` (..., n) are above each of `least` (..., n): of one shape, int64."""
    count = queue.shape[-1]
    both = np.argsort(np.concatenate([-least, -queue], -1), -1, kind="stable")  # of equal ones, those of `least` first
    passed = np.empty(both.shape, dtype=np.int64)
    np.put_along_axis(passed, both, np.cumsum(both >= count, -1), -1)
    return passed[..., :count]


def best_tokens(scores: np.ndarray, wanted: int) -> np.ndarray:
    """Which tokens of (rows, n) have the `wanted` highest scores of a row: (rows, n) bool; of -inf none."""
    keep = scores > -np.inf
    count = scores.shape[1] - wanted
    if count > 0:
        np.put_along_axis(keep, scores.argpartition(count - 1, 1)[:, :count], False, 1)
    return keep


_APART = 1024
"""Chunks whose ends are held against each other at a time."""


def bounds(states: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest and the lowest products (B, H, n) float32 of queries (B, H, D) with keys between `least` and `most`
    (B, Hk, n, D)."""
    grouped = states.unflatten(1, (least.shape[1], -1))
    signs = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], 2)  # above zero, below
    high, low = ((signs @ side.transpose(2, 3)).float().chunk(2, 2) for side in (most, least))
    return (high[0] + low[1]).flatten(1, 2), (low[0] + high[1]).flatten(1, 2)


def likely(states: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the highest products (B, H, n) float32 of queries (B, H, D) with keys between `least` and `most`
    (B, Hk, n, D) are likely to be, and `bounds`' lowest ones.

    The upper bound has all components of one key at their ends together, which no key of 64 is near: on text it stands
    so far above the products that those decide little. As far above the middle as here is the highest of as many keys,
    on average, as there are in the chunk, if components are independent and normal, whatever their number: the highest
    of each component is as many of its standard deviations from its mean as the highest product is of its own.
    """
    grouped = states.unflatten(1, (least.shape[1], -1))
    lowest = (grouped @ least.transpose(2, 3)).float()
    if least.dtype == torch.float16:  # squares may be beyond half precision
        grouped = grouped.float()
    highest = torch.empty_like(lowest)
    both, squares = torch.cat([grouped, grouped.clamp(max=0)], 2), grouped.square()
    for start in range(0, least.shape[2], _APART):
        part = slice(start, start + _APART)
        apart = (most[:, :, part] - least[:, :, part]).to(grouped.dtype).transpose(2, 3)
        half, below = (both @ apart).float().chunk(2, 2)
        spread = (squares @ apart.square_()).float().sqrt_()
        highest[..., part] = lowest[..., part] + (half + spread) / 2
        lowest[..., part] += below
    return highest.flatten(1, 2), lowest.flatten(1, 2)


def standing(upper: np.ndarray, lower: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray | None]:
    """How well chunks stand with the heads of a row, at most and at least: (rows, n) float32 each. None: at least, none
    of them is among the first of any head.

    Each head has a queue of chunks, by what is `upper` for it (rows, heads, n): bounds, or what is `likely`. First in
    some head's queue is `places`, and a little more where others have it among their first `places` too; 0 is in none
    of these. At least: as if the chunk stood where its `lower` bound does. So no head drowns the others, whatever the
    size of its scores and however loose its bounds: one that looks for a single thing is heard by its first places,
    where a sum over heads of what bounds allow loses it.
    """
    rows, heads, count = upper.shape
    places = min(places, count)
    queues, lowest = upper.reshape(-1, count), lower.reshape(-1, count)
    first = largest(queues, places) + np.arange(len(queues))[:, None] * count  # in all queues, one after the other
    values = queues.reshape(-1)[first]
    order = np.argsort(-values, 1, kind="stable") + np.arange(len(queues))[:, None] * places
    first, values = first.reshape(-1)[order], values.reshape(-1)[order]
    points = np.zeros(queues.shape, dtype=np.float32)
    points.reshape(-1)[first] = np.arange(places, 0, -1, dtype=np.float32)
    by_head = points.reshape(upper.shape)
    most = by_head.max(1) + by_head.sum(1) / (heads * places + 1)
    if (lowest.max(1) < values[:, -1]).all():  # the usual thing: bounds of many keys are far apart
        return most, None
    beaten = above(values, lowest.reshape(-1)[first])
    least = np.zeros(queues.shape, dtype=np.float32)
    least.reshape(-1)[first] = np.maximum(0, places - beaten)
    return most, least.reshape(upper.shape).max(1)


def shares(
    states: torch.Tensor, keys: torch.Tensor, others: torch.Tensor, hidden: np.ndarray | None = None
) -> np.ndarray:
    """What tokens with `keys` (rows, Hk, n, D) have of the attention of scaled queries (rows, heads, D) to these and to
    `others` (rows, Hk, t, D), summed over heads: (rows, n) float32. `hidden` (rows, n) bool: not seen by any."""
    grouped = states.unflatten(1, (keys.shape[1], -1))
    attention = torch.cat([grouped @ keys.transpose(2, 3), grouped @ others.transpose(2, 3)], -1).float()
    if hidden is not None:
        own = attention[..., : keys.shape[2]]
        own.masked_fill_(torch.from_numpy(hidden).to(own.device)[:, None, None], float("-inf"))
    attention = attention.softmax(-1)
    return attention[..., : keys.shape[2]].sum((1, 2)).cpu().numpy()


class AbstractTreePredictor(SummaryPredictor):
    """Abstracts (rows, chunks, 2, Hk, D) in memory: the least and the largest of each component of a chunk's keys.

    Rows are sequences times key heads, or sequences with all key heads. The chunks that stand first by their likely
    highest products are fetched; which of their tokens are attended to is found by their keys: by the sum over the
    row's heads of shares of the attention to all that is there. Products are made where the keys are, on their device;
    what stands first, and which tokens stay, is found on the host.
    """

    judges_by: ClassVar[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = staticmethod(likely)
    """What chunks stand by: see `likely` and `bounds`."""
    evaluations = 0
    """Chunks, parts of chunks and tokens that were judged for steps, since it was made; two tokens are one."""
    judged = 0
    """Tokens that were chosen among for that."""

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([keys.amin(3), keys.amax(3)], 1).permute(0, 3, 1, 2, 4)

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        super().rehearse(run, context, heads, wanted)
        self.rehearse_judging(run, context, heads)

    def rehearse_judging(self, run: DryRun, context: int, heads: int) -> None:
        """What it takes to judge chunks and the tokens of the first ones."""
        form, chunks = self.form, sealed_groups(self.form, self.config, context)
        brought = min(self._most(self.config, form, chunks), chunks)
        run.passes("scores", decode=_judge_bytes(form, self.rows, heads, chunks, brought))
        run.passes("judging", decode=_look_bytes(form, self.rows, heads, brought * form.group_size))

    @staticmethod
    def _most(config: SelectiveConfig, form: RecordFormat, chunks: int) -> int:
        group = form.group_size
        return -(-config.brought_at_most(chunks * group) // group) + sink_units(config.num_sinks, group, padded=True)

    def select(
        self, query: Query, budget: int, guess: bool, abstracts: torch.Tensor | None = None
    ) -> Decision:
        """As `Predictor.select`; what a guess would bring is not looked into. `abstracts` (rows, chunks, 2, Hk, D) are
        those that are held, if none are given."""
        if abstracts is None:
            assert self._held is not None
            abstracts = self._held[:, : self.units]
        group, config = self.form.group_size, self.config
        states = (query.states * query.scaling).to(abstracts.dtype).reshape(self.rows, -1, query.states.shape[2])
        attended = config.attended(self.units * group)
        wanted = attended + config.num_sinks
        nbytes = _judge_bytes(self.form, self.rows, states.shape[1], self.units, budget)
        self._account.hold("scores", nbytes)
        try:
            high, low = self.judges_by(states, *abstracts.permute(2, 0, 3, 1, 4))
            most, least = standing(high.cpu().numpy(), low.cpu().numpy(), min(budget, self.units))
            most = with_sinks(most, config.num_sinks, group, query.visible)
            if least is None and query.visible is None:
                units, there = np.sort(largest(most, min(budget, wanted, self.units)), 1), None
            else:
                units, there = self._front(most, least, query.visible, wanted, budget)
        finally:
            self._account.release("scores", nbytes)
        most = np.take_along_axis(most, units, 1)
        if there is not None:
            units, most = np.where(there, units, -1), np.where(there, most, -np.inf)
        if guess:
            return Choice(units, importance=most)
        self.evaluations += self.rows * self.units
        self.judged += self.rows * self.units * group
        if config.brought(self.units * group) <= attended:  # chunks are attended to whole
            return Choice(units, importance=most)
        return self.look_into(query, states, units, most, wanted)

    def _front(
        self, most: np.ndarray, least: np.ndarray | None, visible: torch.Tensor | None, wanted: int, budget: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The chunks in front of each row's queue, and which of these are some, as `kept_entries`."""
        group = self.form.group_size
        if visible is not None and least is not None:  # of a chunk with padding, not all tokens are to be had
            seen = visible[:, : self.units * group].unflatten(1, (-1, group)).all(-1).cpu().numpy()
            least[~np.repeat(seen, self.rows // seen.shape[0], 0)] = -np.inf
        found = front(most, least, group, np.full(self.rows, wanted), budget)
        return kept_entries(found.sure | found.unsure)

    def look_into(
        self, query: Query, states: torch.Tensor, units: np.ndarray, most: np.ndarray, wanted: int
    ) -> Generator[Choice, torch.Tensor, Choice]:
        """Bring the chunks `units` (rows, E), and keep the best of their tokens, judged by their keys."""
        entries, form = (yield Choice(units, importance=most)), self.form
        keys = entries[..., : form.key_width].unflatten(-1, (form.num_key_heads, form.key_dim))
        always, hidden = self._marks(units, query.visible)
        nbytes = _look_bytes(form, self.rows, states.shape[1], units.shape[1] * form.group_size)
        self._account.hold("judging", nbytes)
        try:
            found = shares(states, keys.flatten(1, 2).transpose(1, 2), query.recent(), hidden)
            found[always] = np.inf
            if hidden is not None:
                found[hidden] = -np.inf
            keep = best_tokens(found, wanted)
        finally:
            self._account.release("judging", nbytes)
        self.evaluations += int((units >= 0).sum()) * form.group_size // 2
        return Choice(units, keep.reshape(*units.shape, form.group_size), most)

    def _marks(self, units: np.ndarray, visible: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Of the tokens of chunks (rows, E): which are sinks, and which are padding or of no chunk, -1; (rows, E G)
        bool."""
        group, sinks = self.form.group_size, self.config.num_sinks
        if visible is None and units[:, -1].min() >= 0:  # the sinks' chunks are the first
            always = np.zeros((len(units), units.shape[1] * group), dtype=bool)
            always[:, :sinks] = True
            return always, None
        places = np.where(units[:, :, None] < 0, -1, units[:, :, None] * group + np.arange(group))
        places = places.reshape(len(units), -1)
        if visible is None:
            return (places >= 0) & (places < sinks), places < 0 if (units < 0).any() else None
        seen = visible.cpu().numpy()
        seen = np.repeat(seen, len(units) // len(seen), 0)
        first = seen.argmax(1)[:, None]
        hidden = ~np.take_along_axis(seen, np.maximum(places, 0), 1) | (places < 0)
        return (places >= first) & (places < first + sinks), hidden


def _judge_bytes(form: RecordFormat, rows: int, heads: int, chunks: int, places: int) -> int:
    """Bounds in 32 bits and what they are made of, and what the queues of heads and of rows are sorted by."""
    apart = min(chunks, _APART) * form.key_width * (6 if form.dtype == torch.float16 else form.dtype.itemsize)
    return rows * (24 * heads * chunks + 80 * heads * min(places, chunks) + 64 * chunks + apart)


def _look_bytes(form: RecordFormat, rows: int, heads: int, tokens: int) -> int:
    """A copy of the keys that are looked at, and their scores in 32 bits, three times."""
    return rows * tokens * (form.key_width * form.dtype.itemsize + 12 * heads)


# The adaptive tree's predictor with its abstracts on the disk (LeoAM, section 4.3)

class StoredAbstractsPredictor(AbstractTreePredictor):
    """An `AbstractTreePredictor` that puts its abstracts into a history's `pages`, which the history moves, keeps in
    contexts and closes, and asks to look at them for each query. Nothing of them is in memory but the page that is not
    full."""

    def __init__(
        self, form: RecordFormat, rows: int, config: SelectiveConfig, account: MemoryAccount, pages: AbstractPages
    ) -> None:
        super().__init__(form, rows, config, account)
        self._pages = pages

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        chunks = sealed_groups(self.form, self.config, context)
        self.rehearse_judging(run, context, heads)
        run.passes("judging", decode=_looked_bytes(self.form, self.rows, chunks))

    def ready(self, units: int) -> bool:
        return self._pages.units == units

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        parts, group = iter(sealed.keys), self.form.group_size
        if self._pages.units + sealed.fresh // group != sealed.units:
            parts = sealed.stored()
            self._pages.clear()
        for keys in in_units(parts, group):
            self._pages.append(self.summarise(keys).flatten(2))
        self.units = self._pages.units

    def select(
        self, query: Query, budget: int, guess: bool, abstracts: torch.Tensor | None = None
    ) -> Decision:
        return self._read(query, budget, guess)

    def _read(self, query: Query, budget: int, guess: bool) -> Generator[Extents | Choice, torch.Tensor, Choice]:
        pages, form = self._pages, self.form
        self.units = pages.units
        with self._account.holding("judging", _looked_bytes(form, self.rows, self.units)):
            abstracts = pages.joined((yield pages.extents()))
            abstracts = abstracts.unflatten(2, (2, form.num_key_heads, form.key_dim))
            decision = super().select(query, budget, guess, abstracts)
            del abstracts
        return decision if isinstance(decision, Choice) else (yield from decision)


def _looked_bytes(form: RecordFormat, rows: int, chunks: int) -> int:
    """All abstracts, as they are looked at and put together."""
    return 2 * rows * (chunks * 2 * form.key_width + form.payload_width) * form.dtype.itemsize
