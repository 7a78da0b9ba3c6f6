"""Selects chunks by their abstracts, and tokens in them by their keys (LeoAM, sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...config import SelectiveConfig
from ...fetch.choice import Choice, DeviceChoice, DeviceDecision, Extents, InSlots, kept_entries
from ...history.base import Sealed, in_units
from ...history.records import RecordFormat, sealed_groups
from ...kernels import bounds as kernels
from ...kernels.ranking import MOST_UNITS
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.base import Decision, Query
from ...predictors.sinks import largest, mark_largest, sink_units, with_sinks
from ...predictors.summaries import SummaryPredictor
from .history import AbstractPages

# The most important tokens, found by evaluating chunks of them (LeoAM, section 4.2)

@dataclass(frozen=True)
class Front:
    """The chunks chosen from one priority queue, (rows, n) bool each. A chunk in neither part is an attention
    desert."""

    sure: np.ndarray
    """All its tokens are important: no more than the wanted number can score above its lower bound."""
    unsure: np.ndarray
    """Some of its tokens may be important: its tokens are examined, which the paper does by splitting it."""


def front(
    upper: np.ndarray, lower: np.ndarray | None, size: int, wanted: np.ndarray, most: int | None = None
) -> Front:
    """Take chunks from the front of the priority queue, the highest upper bounds first, until they contain `wanted`
    important tokens (LeoAM, section 4.2).

    A chunk counts with all tokens if its lower bound is at least the upper bound of the best chunk left in the queue.
    Else it counts with one token, the one that its upper bound stands for. So no important token is lost if upper
    bounds are attained, as those of single tokens are.

    Args:
        upper, lower: (rows, n) float32 bounds of the chunks; -inf: no chunk. `lower` None: below all upper bounds.
        size: tokens a chunk.
        wanted: (rows,) tokens a row.
        most: upper bound on the chunks taken for a row; None: no bound.
    """
    rows, chunks = upper.shape
    if lower is None:
        count = np.minimum(wanted, chunks if most is None else most)
        return Front(np.zeros(upper.shape, dtype=bool), _first(upper, count))
    order = np.argsort(-upper, 1, kind="stable")
    queue, least = np.take_along_axis(upper, order, 1), np.take_along_axis(lower, order, 1)
    rank = np.arange(chunks)
    # chunks that must be in the front until no upper bound outside is above each chunk's lower bound
    whole_from = np.maximum(above(queue, least), rank + 1)
    counted = np.ones((rows, chunks + 2), dtype=np.int64)  # [m]: tokens that a front of m chunks counts with
    counted[:, 0] = 0
    np.add.at(counted, (np.arange(rows)[:, None], whole_from), size - 1)
    enough = np.cumsum(counted, 1)[:, : chunks + 1] >= wanted[:, None]
    length = np.where(enough.any(1), enough.argmax(1), chunks)
    length = np.minimum(length, chunks if most is None else min(most, chunks))
    inside = (rank < length[:, None]) & (queue > -np.inf)
    sure = inside & (whole_from * size <= wanted[:, None]) & (least > -np.inf)
    parts = [np.empty_like(inside) for _ in range(2)]
    for flags, part in zip(parts, (sure, inside & ~sure), strict=True):
        np.put_along_axis(flags, order, part, 1)
    return Front(*parts)


def _first(upper: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Mark the `count` (rows,) highest of each row of (rows, n); of equal ones the first, of -inf none."""
    if (count >= upper.shape[1]).all():
        return upper > -np.inf
    order = np.argsort(-upper, 1, kind="stable")
    mask = np.zeros(upper.shape, dtype=bool)
    np.put_along_axis(mask, order, np.arange(upper.shape[1]) < count[:, None], 1)
    return mask & (upper > -np.inf)


def above(queue: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Count the elements of `queue` (..., n) above each of `least` (..., n): int64 of the same shape."""
    count = queue.shape[-1]
    merged = np.argsort(np.concatenate([-least, -queue], -1), -1, kind="stable")  # `least` first among equal ones
    passed = np.empty(merged.shape, dtype=np.int64)
    np.put_along_axis(passed, merged, np.cumsum(merged >= count, -1), -1)
    return passed[..., :count]


def best_tokens(scores: np.ndarray, wanted: int) -> np.ndarray:
    """Mark the `wanted` highest scores of each row of (rows, n): bool. The first of equal scores are taken, but no
    -inf. A NaN counts as infinite: of `shares`, where all of a row are NaN if one is, the first are then taken, as on a
    device."""
    possible: np.ndarray = scores != -np.inf
    return possible & mark_largest(scores, wanted) if wanted < scores.shape[1] else possible


_APART = 1024
"""Chunks whose abstracts are subtracted at a time."""


def bounds(states: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower bounds (B, H, n) float32 of the products of queries (B, H, D) with a chunk's keys (LeoAM, section
    4.2). The abstracts `least` and `most` (B, Hk, n, D) are the minimum and maximum of each key component."""
    grouped = states.unflatten(1, (least.shape[1], -1))
    signs = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], 2)  # positive parts, negative parts
    high, low = ((signs @ ends.transpose(2, 3)).float().chunk(2, 2) for ends in (most, least))
    return (high[0] + low[1]).flatten(1, 2), (low[0] + high[1]).flatten(1, 2)


def likely(states: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected maximum products (B, H, n) float32 of queries (B, H, D) with a chunk's keys, and the lower ones of
    `bounds`. The abstracts `least` and `most` (B, Hk, n, D) are the minimum and maximum of each key component.

    No key of 64 is close to the upper bound, which has all components of one key at their ends. On text that bound is
    so far above the products that these decide little. This estimate assumes independent, normal components. The
    expected maximum product is then as many of its standard deviations above its mean as each component's maximum is
    above its own, for any number of keys a chunk.
    """
    grouped = states.unflatten(1, (least.shape[1], -1))
    lowest = (grouped @ least.transpose(2, 3)).float()
    if least.dtype == torch.float16:  # squares may overflow half precision
        grouped = grouped.float()
    highest = torch.empty_like(lowest)
    signed, squares = torch.cat([grouped, grouped.clamp(max=0)], 2), grouped.square()
    for start in range(0, least.shape[2], _APART):
        part = slice(start, start + _APART)
        ranges = (most[:, :, part] - least[:, :, part]).to(grouped.dtype).transpose(2, 3)
        products, below = (signed @ ranges).float().chunk(2, 2)
        spread = (squares @ ranges.square_()).float().sqrt_()
        highest[..., part] = lowest[..., part] + (products + spread) / 2
        lowest[..., part] += below
    return highest.flatten(1, 2), lowest.flatten(1, 2)


def standing(upper: np.ndarray, lower: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Rank chunks for the heads of a row, at most and at least: (rows, n) float32 each. None for the second: at least,
    no chunk ranks among the first of any head.

    Each head has a priority queue of chunks by `upper` (rows, heads, n), from `bounds` or `likely`. The first chunk of
    some head's queue gets `places` points, and a fraction more if other heads have it among their first `places` too. A
    chunk beyond all heads' first `places` gets 0. The second result uses the place that a chunk's `lower` bound would
    have.

    So no head drowns the others, whatever the size of its scores and however loose its bounds. A head that looks for a
    single token counts by its first places; a sum of bounds over heads would lose it. Bounds that are NaN are the
    lowest.
    """
    rows, heads, count = upper.shape
    places = min(places, count)
    queues, lowest = upper.reshape(-1, count), lower.reshape(-1, count)
    first = largest(queues, places) + np.arange(len(queues))[:, None] * count  # index into all queues, laid end to end
    values = queues.reshape(-1)[first]
    order = np.argsort(-values, 1, kind="stable") + np.arange(len(queues))[:, None] * places
    first, values = first.reshape(-1)[order], values.reshape(-1)[order]
    points = np.zeros(queues.shape, dtype=np.float32)
    points.reshape(-1)[first] = np.arange(places, 0, -1, dtype=np.float32)
    by_head = points.reshape(upper.shape)
    most = by_head.max(1) + by_head.sum(1) / (heads * places + 1)
    if (lowest.max(1) < values[:, -1]).all():  # the usual case: bounds of many keys are far apart
        return most, None
    if np.isnan(values[:, -1]).any() or np.isnan(lowest).any():
        least = np.where(np.isnan(lower), np.float32(-np.inf), lower)
        return standing(np.where(np.isnan(upper), np.float32(kernels.LOWEST), upper), least, places)
    beaten = above(values, lowest.reshape(-1)[first])
    least = np.zeros(queues.shape, dtype=np.float32)
    least.reshape(-1)[first] = np.maximum(0, places - beaten)
    return most, least.reshape(upper.shape).max(1)


def shares(
    states: torch.Tensor, keys: torch.Tensor, others: torch.Tensor, hidden: np.ndarray | None = None
) -> np.ndarray:
    """Shares of tokens with `keys` (rows, Hk, n, D) in the attention of scaled queries (rows, heads, D) to these and to
    `others` (rows, Hk, t, D), summed over heads: (rows, n) float32. `hidden` (rows, n) bool: tokens that no query
    sees."""
    grouped = states.unflatten(1, (keys.shape[1], -1))
    attention = torch.cat([grouped @ keys.transpose(2, 3), grouped @ others.transpose(2, 3)], -1).float()
    if hidden is not None:
        scores = attention[..., : keys.shape[2]]
        scores.masked_fill_(torch.from_numpy(hidden).to(scores.device)[:, None, None], float("-inf"))
    attention = attention.softmax(-1)
    return attention[..., : keys.shape[2]].sum((1, 2)).cpu().numpy()


class AbstractTreePredictor(SummaryPredictor):
    """Selects with abstracts (rows, chunks, 2, Hk, D) in memory: the minimum and maximum of each component of a chunk's
    keys (LeoAM, section 4.2).

    Rows are sequences times KV heads, or sequences with all KV heads. The chunks that rank first by `judges_by` are
    fetched. Their tokens are selected by their keys: by their shares of the attention to all tokens, summed over the
    row's heads. Products are computed where the keys are, on their device; ranks and selected tokens on the host.
    """

    judges_by: ClassVar[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = staticmethod(likely)
    """The bounds that rank chunks: `likely` or `bounds`."""
    evaluations = 0
    """Importance evaluations of all steps but those in a CUDA graph: chunks, parts of chunks, and pairs of tokens."""
    judged = 0
    """Tokens that these evaluations selected from."""

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([keys.amin(3), keys.amax(3)], 1).permute(0, 3, 1, 2, 4)

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        super().rehearse(run, context, heads, wanted)
        self.rehearse_judging(run, context, heads)

    def rehearse_judging(self, run: DryRun, context: int, heads: int) -> None:
        """Declare the temporary memory to evaluate chunks and the tokens of the first ones, in a dry run."""
        form, chunks = self.form, sealed_groups(self.form, self.config, context)
        opened = min(self._most(self.config, form, chunks), chunks)
        run.passes("scores", decode=_judge_bytes(form, self.rows, heads, chunks, opened))
        run.passes("judging", decode=_look_bytes(form, self.rows, heads, opened * form.group_size))

    @staticmethod
    def _most(config: SelectiveConfig, form: RecordFormat, chunks: int) -> int:
        group = form.group_size
        opened = -(-config.most_tokens_fetched(chunks * group) // group)
        return opened + sink_units(config.num_sinks, group, padded=True)

    def select(
        self, query: Query, budget: int, guess: bool, abstracts: torch.Tensor | None = None
    ) -> Decision:
        """As `Predictor.select`; a guess selects chunks without examining their tokens. `abstracts` (rows, chunks, 2,
        Hk, D) default to those in memory."""
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
                units, valid = largest(most, min(budget, wanted, self.units)), None
            else:
                units, valid = self._front(most, least, query.visible, wanted, budget)
        finally:
            self._account.release("scores", nbytes)
        most = np.take_along_axis(most, units, 1)
        if valid is not None:
            units, most = np.where(valid, units, -1), np.where(valid, most, -np.inf)
        if guess:
            return Choice(units, importance=most)
        self.evaluations += self.rows * self.units
        self.judged += self.rows * self.units * group
        if config.tokens_fetched(self.units * group) <= attended:  # complete chunks are attended to
            return Choice(units, importance=most)
        return self.look_into(query, states, units, most, wanted)

    def _front(
        self, most: np.ndarray, least: np.ndarray | None, visible: torch.Tensor | None, wanted: int, budget: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The chunks at the front of each row's queue, and which of these are valid, as `kept_entries` returns them."""
        group = self.form.group_size
        if visible is not None and least is not None:  # a chunk with padding has fewer tokens
            seen = visible[:, : self.units * group].unflatten(1, (-1, group)).all(-1).cpu().numpy()
            least[~np.repeat(seen, self.rows // seen.shape[0], 0)] = -np.inf
        chosen = front(most, least, group, np.full(self.rows, wanted), budget)
        return kept_entries(chosen.sure | chosen.unsure)

    def look_into(
        self, query: Query, states: torch.Tensor, units: np.ndarray, most: np.ndarray, wanted: int
    ) -> Generator[Choice, torch.Tensor, Choice]:
        """Fetch the chunks `units` (rows, E), and keep their best tokens by their keys."""
        entries, form = (yield Choice(units, importance=most)), self.form
        keys = entries[..., : form.key_width].unflatten(-1, (form.num_key_heads, form.key_dim))
        always, hidden = self._marks(units, query.visible)
        nbytes = _look_bytes(form, self.rows, states.shape[1], units.shape[1] * form.group_size)
        self._account.hold("judging", nbytes)
        try:
            scores = shares(states, keys.flatten(1, 2).transpose(1, 2), query.recent(), hidden)
            scores[always] = np.inf
            if hidden is not None:
                scores[hidden] = -np.inf
            keep = best_tokens(scores, wanted)
        finally:
            self._account.release("judging", nbytes)
        self.evaluations += int((units >= 0).sum()) * form.group_size // 2
        return Choice(units, keep.reshape(*units.shape, form.group_size), most)

    def _marks(self, units: np.ndarray, visible: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Mark the sinks, and the padding or tokens of no chunk (-1), among the tokens of chunks (rows, E): (rows, E G)
        bool each."""
        group, sinks = self.form.group_size, self.config.num_sinks
        if visible is None and units[:, -1].min() >= 0:  # the sinks' chunks are the first
            always = np.zeros((len(units), units.shape[1] * group), dtype=bool)
            always[:, :sinks] = True
            return always, None
        positions = np.where(units[:, :, None] < 0, -1, units[:, :, None] * group + np.arange(group))
        positions = positions.reshape(len(units), -1)
        if visible is None:
            return (positions >= 0) & (positions < sinks), positions < 0 if (units < 0).any() else None
        seen = visible.cpu().numpy()
        seen = np.repeat(seen, len(units) // len(seen), 0)
        first = seen.argmax(1)[:, None]
        hidden = ~np.take_along_axis(seen, np.maximum(positions, 0), 1) | (positions < 0)
        return (positions >= first) & (positions < first + sinks), hidden


def _judge_bytes(form: RecordFormat, rows: int, heads: int, chunks: int, places: int) -> int:
    """Bytes of bounds in 32 bits with their operands, and of the sort keys of the heads' and rows' queues."""
    apart = min(chunks, _APART) * form.key_width * (6 if form.dtype == torch.float16 else form.dtype.itemsize)
    return rows * (24 * heads * chunks + 80 * heads * min(places, chunks) + 64 * chunks + apart)


def _look_bytes(form: RecordFormat, rows: int, heads: int, tokens: int) -> int:
    """Bytes of a copy of the examined keys, and of their scores in 32 bits, three times."""
    return rows * tokens * (form.key_width * form.dtype.itemsize + 12 * heads)


# The predictor of records that a CUDA device reads by itself

class DevicePredictor(AbstractTreePredictor):
    """An `AbstractTreePredictor` that also chooses on a CUDA device, without the host.

    There it chooses what `select` does, with scores in single precision, and of equal chunks and tokens the first. That
    includes the unusual steps in which some chunks count with all their tokens, so that rows may take fewer chunks than
    others. Rows with padding, and candidates, go over the host.
    """

    @property
    def chooses_on_device(self) -> bool:
        """Whether kernels have these bounds, and the registers for as many tokens as a step examines."""
        most = self._most(self.config, self.form, self.units) * self.form.group_size
        return self.judges_by in (likely, bounds) and most <= MOST_UNITS

    @property
    def room(self) -> int:
        """Chunks a row that there is room for."""
        return 0 if self._held is None else self._held.shape[1]

    def graph_parts(self) -> list[Any]:
        """The tensors and numbers that `choose_on_device` uses in a captured step, which is valid while they stay."""
        return [self._held, *self._wants(self.units * self.form.group_size)]

    def _wants(self, tokens: int) -> tuple[int, bool]:
        """Tokens of each row's `tokens` that a step attends to, those of the sinks included; and whether to these of
        its chunks, or to complete ones."""
        config = self.config
        attended = config.attended(tokens)
        return attended + config.num_sinks, config.tokens_fetched(tokens) > attended

    def device_bytes(self, context: int, heads: int, wanted: int, recent: int) -> dict[str, int] | None:
        """Upper bounds by owner on the device memory of `choose_on_device`, of `wanted` chunks of `context` tokens a
        row, for `heads` query heads a row and so many `recent` entries. None: it cannot choose there."""
        form, chunks = self.form, sealed_groups(self.form, self.config, context)
        most = self._most(self.config, form, chunks) * form.group_size
        if self.judges_by not in (likely, bounds) or most > MOST_UNITS:
            return None
        looked = kernels.look_bytes(self.rows, heads, wanted * form.group_size, recent)
        complete = self.config.tokens_fetched(context) <= self.config.attended(context)
        return {"scores": kernels.chunk_bytes(self.rows, heads, chunks), "judging": 0 if complete else looked}

    def choose_on_device(self, query: Query, budget: int, looks: bool) -> DeviceDecision:
        """As `select`, on the device of the abstracts. The lost mass is not known."""
        assert self._held is not None
        group, rows, sizes = self.form.group_size, self.rows, query.sizes
        chunks, exist = (self.units, None) if sizes is None else (sizes.room, sizes.units)
        (wanted, some), abstracts = self._wants(self.units * group), self._held[:, :chunks]
        heads = query.states.shape[0] * query.states.shape[1] // rows
        nbytes = kernels.chunk_bytes(rows, heads, chunks)
        with self._account.holding("scores", nbytes):
            high, low = kernels.limits(query.states, abstracts, query.scaling, self.judges_by is likely, exist)
            standings = kernels.stand(high, low, min(budget, self.units), -(-self.config.num_sinks // group))
            units = kernels.front(*standings, group, wanted, budget)
        if sizes is None:
            self.evaluations += rows * chunks
            self.judged += rows * chunks * group
        if not some:
            return DeviceChoice(units, nbytes=nbytes)
        return self._look_on_device(query, units, heads, wanted, nbytes)

    def _look_on_device(
        self, query: Query, units: torch.Tensor, heads: int, wanted: int, nbytes: int
    ) -> Generator[DeviceChoice, InSlots, DeviceChoice]:
        """As `look_into`, after a choice of chunks that took `nbytes`. Chunks that a row does not have count as
        evaluated, because the host does not know them."""
        data, slots = yield DeviceChoice(units)
        form, recent, sinks, tokens = self.form, query.recent(), self.config.num_sinks, units.shape[1]
        tokens *= form.group_size
        looked, exist = kernels.look_bytes(self.rows, heads, tokens, recent.shape[2]), None
        if query.sizes is None:
            self.evaluations += units.numel() * form.group_size // 2
        else:
            exist = query.sizes.recent
        with self._account.holding("judging", looked):
            keep = kernels.look(query.states, data, slots, recent, form, query.scaling, wanted, sinks, exist)
        return DeviceChoice(units, keep, min(wanted, tokens), nbytes=nbytes + looked)


# The predictor with abstracts on disk (LeoAM, section 4.3)

class StoredAbstractsPredictor(AbstractTreePredictor):
    """An `AbstractTreePredictor` with abstracts on disk (LeoAM, section 4.3).

    It appends abstracts to a history's `pages`, and asks to read them for each query. The history moves, saves and
    closes the pages. Only a partial page is in memory.
    """

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
            parts = sealed.stored_keys()
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
    """Bytes of all abstracts as they are read and as they are joined."""
    return 2 * rows * (chunks * 2 * form.key_width * form.dtype.itemsize + form.payload_bytes)
