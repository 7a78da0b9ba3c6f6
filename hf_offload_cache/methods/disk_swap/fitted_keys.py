"""State fitted to one layer's keys, when it is fitted, and the ranking of units by it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ...core.step import MOST_CANDIDATES
from ...errors import not_whole, shown
from ...fetch.choice import DeviceChoice, Estimates
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...history.state import LARGEST, Array, Number, State
from ...kernels.on_a_device import has_step, plans_step
from ...kernels.ranking import pick, project, ranking_bytes, rest, score, share
from ...memory.account import MemoryAccount, Workspace
from ...memory.dry_run import DryRun
from ...predictors.base import Query
from ...predictors.sinks import SinkKeys
from ...predictors.value_maps import LEAST_TOKENS, ValueMaps, placed
from .coding import (
    APART,
    LEAST_QUERIES,
    PART,
    Directions,
    coding_bytes,
    default_summary_bytes,
    fit_coding,
    fitting_bytes,
    most_components,
    part_sizes,
    parts,
)
from .compact_keys import HIDDEN, CodedKeys, CompactKeys, encoding_bytes, leading
from .low_rank_keys import LowRankKeys, default_rank
from .ranking import CANDIDATES, Candidates, Ranking, few_of_many, most_kept, rank_among, rank_units
from .remainder import KEPT, PromptQueries, fit_bytes, fit_maps, mean_components, rehearse_maps

_REFIT, _REFIT_LATER = 1.25, 8
"""Growth of the history, by prompts and by generated tokens, after which all that is fitted is fitted again."""
_AT_ONCE, _SCORES_SHARE = 9 * 1024, 16
"""Tokens whose scores are always kept, and the share of a budget that the scores of more may take, as a divisor."""
_LEAST = 512
"""Fewest tokens for which compact keys are fitted. A calibrated adapter needs none."""


@dataclass(frozen=True)
class Rules:
    """The configuration fields that decide how units are ranked and selected."""

    dtype: torch.dtype | None
    """Type of compact keys truncated to `rank`. None: compact keys are coded in `summary_bytes`."""
    num_sinks: int
    rank: int | None = None
    summary_bytes: int | None = None
    reserve: int = 0
    """Tokens a row to allocate at once."""
    remainder: bool = False
    """Estimate what units that were not selected would have added."""
    memory: int | None = None
    """Bytes of the budget; None: there is none."""
    block_tokens: int = 0
    """Tokens a row in a block of a streamed history, within a budget. A plan has room for a fit in parts that are
    shorter than these blocks."""


class LowRankShared(NamedTuple):
    """Objects that all predictors of a cache share."""

    account: MemoryAccount
    workspace: Workspace
    postponed: Callable[[], bool] = lambda: False  # fitting waits
    rest: Callable[[], None] = lambda: None  # frees the memory that only selecting needs
    wanted: Callable[[int], int] = lambda tokens: 0  # units a row that a step selects of so many tokens
    streaming: Callable[[], int] = lambda: 0  # bytes of a device that streaming the stored keys takes during a fit


class FittedKeys:
    """Compact keys of sequences, in units of `form.group_size` consecutive tokens, and the keys of the sinks. Sinks and
    the latest tokens get exact scores.

    One compact key of a token is for all its key heads. If these choose apart, rankings and estimates have a row for
    each key head of each sequence.

    Args:
        form, rows: of the history. The attributes of these names are those of sequences.
        heads: rows of a sequence, the key heads that choose apart; 1: one choice serves all.
        adapter: calibrated projection (Hk D, r) float32 of this layer. None: it is fitted to the prompt's keys, in the
            metric of the prompt's queries.
    """

    STATE: ClassVar[State] = State(
        "fitted state",
        adapter=Array("width rank", torch.float32, low=-LARGEST, high=LARGEST, optional=True),
        fitted_at=Number(),
    )

    def __init__(
        self, form: RecordFormat, rows: int, rules: Rules, shared: LowRankShared, adapter: torch.Tensor | None,
        heads: int = 1,
    ) -> None:  # fmt: skip
        self.form, self.rows, self._form_of_rows = form.joined(heads), rows // heads, form
        self.rules, self.adapter, self.heads = rules, adapter, heads
        self.keys: CompactKeys | None = None
        self.sinks: SinkKeys | None = None
        self.maps: ValueMaps | None = None
        """Estimates the remainder of steps; None: it is dropped."""
        self.scaling = 0.0
        """Factor of the scores, from the prompt; 0: unknown yet."""
        self.fitted_at = 0
        """Tokens of the history at the latest fit; 0 before the first."""
        self.waiting: PromptQueries | None = None
        """What the fit at the prompt's end needs; None: no fit waits. While one waits, nothing is fitted."""
        self._most_waiting = 0  # queries that a waiting fit keeps; 0: unknown yet
        self._shared, self._device = shared, torch.device("cpu")  # the keys' device, since `learn`
        self._scored: tuple[Query, Candidates] | None = None  # by the latest ranking, for `estimates`

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """As `Learner.rehearse`."""
        form, rules, rows = self.form, self.rules, self.rows
        estimates = rules.remainder and context >= LEAST_TOKENS
        units, before = context // form.group_size, run.on_device
        most = most_kept(wanted, units, self._at_once(heads) if estimates else 0, self.heads)
        width, sizes = form.key_width, (context, rows, heads, form.group_size, most)
        planned, limited = part_sizes(run.device_type), rules.memory is not None
        part = next((size for size in planned if not limited or size < rules.block_tokens), PART)  # there may be more
        if rules.dtype is None:
            CodedKeys.rehearse(run, width, self._code_bytes, *sizes)
            run.passes("fitting", prefill=coding_bytes(width, form.dtype.itemsize, rows, context, part))
            rank = most_components(width, self._code_bytes)
            last = encoding_bytes(width, rank, rows * context, part)
        else:
            rank = rules.rank or (default_rank(width) if self.adapter is None else self.adapter.shape[1])
            LowRankKeys.rehearse(run, width, min(width, rank), rules.dtype, *sizes)
            rank = min(width, rank)
            run.passes("fitting", prefill=fitting_bytes(width, rows, rank, context, part))
            last = 4 * min(rows * context, part) * (width + 2 * rank)  # `CompactKeys.appending_bytes`
        if estimates:
            sizes_of_maps = rows, leading(rank), heads
            rehearse_maps(run, form, sizes_of_maps, context, CANDIDATES * wanted, part)
            alone = plans_step(run.device_type, form.key_dim, form.value_dim)
            last = max(last, fit_bytes(form, *sizes_of_maps, context, part, alone))
        if rules.num_sinks:
            SinkKeys(form, rows, rules.num_sinks, torch.device("cpu"), run, np.zeros(rows, dtype=np.int64))
        waiting, replaced = 0, run.on_device - before
        if context >= self._least or self.adapter is not None:
            self._most_waiting, waiting = PromptQueries.planned(form, rows, heads, context, replaced)
            run.waits("compact keys", max(0, waiting - replaced))
        run.passes("fitting", prefill=last + waiting)  # both, until the layer is fitted

    @property
    def units(self) -> int:
        """Units a row that can be ranked."""
        return 0 if self.keys is None else self.keys.tokens // self.form.group_size

    @property
    def others(self) -> int:
        """Units a row that can be ranked, without the sinks' units."""
        return max(0, self.units - (0 if self.sinks is None else self.sinks.units.shape[1]))

    # --- learning ----------------------------------------------------------------------------------------------

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """As `Predictor.learn`. Add the new units' compact keys. If nothing is fitted yet or the history has grown
        much, fit to all keys and make all compact, in two passes, or three for codes.

        A fit to a prompt's keys that are no longer in memory waits for `end_prompt`, because each piece but the last
        would be fitted for nothing. So does one to the first piece of a prompt on a device, if the context that is
        planned for is so long that it would be fitted again. While fitting is postponed each one waits. Only queries
        are kept until then.
        """
        piece, self._device = queries.shape[2], queries.device
        of_prompt, postponed = piece > MOST_CANDIDATES, self._shared.postponed()
        grown = sealed.tokens >= self.fitted_at * (_REFIT if of_prompt else _REFIT_LATER)
        if self.waiting is not None:
            if piece:
                self._wait(sealed, queries, visible)
        elif self.keys is not None and not grown and self.keys.tokens + sealed.fresh == sealed.tokens:
            for block in sealed.keys:
                self._append(block)
            self._find_sinks(sealed, visible)
        elif self._enough(sealed) and of_prompt and grown and (
            postponed or sealed.fresh < sealed.tokens or self._goes_on(sealed)
        ):
            self._wait(sealed, queries, visible)
        elif self._enough(sealed) and not postponed:
            self._fit_all(sealed, queries, visible)

    def end_prompt(self, sealed: Sealed) -> None:
        """As `Predictor.end_prompt`: the fit that waits, to all keys of `sealed`."""
        if (waiting := self.waiting) is None or self._shared.postponed():
            return
        if self._enough(sealed):  # not if the history was cut
            self._device = waiting.states.device
            self._fit_all(sealed, waiting.states, waiting.visible)
        waiting.close()
        self.waiting = None

    def _enough(self, sealed: Sealed) -> bool:
        """True if compact keys are made of so many tokens."""
        return self.adapter is not None or sealed.tokens >= self._least

    def _goes_on(self, sealed: Sealed) -> bool:
        """True if a prompt on a device probably has further pieces. There a fit costs hundreds of launches."""
        return self._device.type == "cuda" and sealed.tokens * _REFIT < self.rules.reserve

    def _wait(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Keep queries (B, H, q, D) for the fit at the prompt's end, in the place of what it replaces."""
        self._free()
        if not self._most_waiting:
            self._most_waiting = KEPT
            if self.rules.reserve:
                self.rehearse(DryRun(queries.device.type), self.rules.reserve, queries.shape[1], 0)
        kept_in = self._most_waiting, self.form, self._shared.account
        self.waiting = PromptQueries.after(self.waiting, queries, sealed.tokens, visible, *kept_in)

    def _fit_all(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Fit everything to all keys of `sealed` and to queries (B, H, q, D)."""
        ratio = None if self.maps is None else self.maps.ratio.clone()
        are_sample = self.waiting is not None or queries.shape[2] >= LEAST_QUERIES
        finite = self.fit(sealed.complete_keys, sealed, queries if are_sample else None, visible)
        if self.rules.remainder and sealed.tokens >= LEAST_TOKENS:
            self._fit_maps(sealed, queries, finite, ratio, are_sample)
        self._find_sinks(sealed, visible)

    def _find_sinks(self, sealed: Sealed, visible: torch.Tensor | None) -> None:
        """Copy the sinks from all keys of `sealed`, unless that is done."""
        if self.keys is not None and self.sinks is None and self.rules.num_sinks:
            seen_tokens = None if visible is None else visible[:, : sealed.tokens].expand(self.rows, -1)
            sizes = self.form, self.rows, self.rules.num_sinks, self.keys.device
            self.sinks = SinkKeys.of(sealed.complete_keys, sealed.tokens, seen_tokens, *sizes, self._shared.account)

    @property
    def _code_bytes(self) -> int:
        """Most bytes of a coded compact key."""
        return self.rules.summary_bytes or default_summary_bytes(self.form.key_width)

    def _part(self, device: torch.device, nbytes: Callable[[int], int]) -> int:
        """The best part for a fit that takes `nbytes(part)` bytes, of those there is room for."""
        has_room, streaming = self._shared.account.has_room, self._shared.streaming()
        return next((part for part in part_sizes(device) if has_room(nbytes(part) + streaming)), PART)

    def _append(self, block: torch.Tensor) -> None:
        """Make keys (B, Hk, t, D) compact."""
        keys, tokens = self.keys, block.shape[2]
        assert keys is not None

        def nbytes(part: int) -> int:
            return keys.appending_bytes(self.form.key_width, self.rows * tokens, part)

        part, account = self._part(block.device, nbytes), self._shared.account
        with account.holding("fitting", nbytes(part)) if self.rows * tokens > PART else nullcontext():
            keys.append(block, part)

    @property
    def _least(self) -> int:
        """Fewest tokens for which compact keys are fitted."""
        rank = self.rules.rank or default_rank(self.form.key_width)
        return _LEAST if self.rules.dtype is None else max(4 * rank, _LEAST)

    def fit(
        self, keys: Callable[[], Any], sealed: Sealed, seen: torch.Tensor | None, visible: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Fit to all `keys()`, blocks (B, Hk, t, D) in order, and replace the compact keys. Queries `seen` (B, H, q, D)
        define the metric. Returns the tokens that it was fitted to, as `visible`. Raises `BudgetError`.

        Keys that are not finite count as padding: they would spoil those of other tokens and rows."""
        with suppress(torch.linalg.LinAlgError):
            self._fit_to(keys, sealed, seen, visible)
            return visible
        with self._shared.account.holding("fitting", self.rows * sealed.tokens + 2 * PART * self.form.key_width):
            pieces = (piece for block in keys() for piece in parts(block, PART))
            finite = torch.cat([piece.isfinite().all(3).all(1) for piece in pieces], 1)
            if visible is not None:
                finite &= visible[:, : sealed.tokens]
        self._fit_to(keys, sealed, seen, finite)
        return finite

    def _fit_to(
        self, keys: Callable[[], Any], sealed: Sealed, seen: torch.Tensor | None, visible: torch.Tensor | None
    ) -> None:
        """As `fit`, but raises `LinAlgError` if keys are not finite."""
        self._shared.rest()  # a decoding step may fit, which needs as much memory as selecting
        shared, form, rules = self._shared, self.form, self.rules
        heads, made_of = form.num_key_heads, (shared.account, shared.workspace)
        apart = APART if self.waiting is None else 1  # those that waited are apart already
        if rules.dtype is None:
            room = partial(coding_bytes, form.key_width, form.dtype.itemsize, self.rows, sealed.tokens)
            part = self._part(self._device, room)
            with shared.account.holding("fitting", room(part)):
                coding = fit_coding(keys, sealed.tokens, heads, visible, self._code_bytes, seen, part, apart)
            self._free()
            self.keys = CodedKeys(coding, heads, self.rows, *made_of, form.group_size)
        else:
            rank = rules.rank or default_rank(form.key_width)
            room = partial(fitting_bytes, form.key_width, self.rows, rank, sealed.tokens)
            part = self._part(self._device, room)
            with shared.account.holding("fitting", room(part)):
                of_width = keys(), form.key_width, heads, visible, rank
                fitted = Directions.of(*of_width, self.adapter, seen, part, apart)
            self._free()
            self.keys = LowRankKeys(
                fitted.adapter, fitted.deviation, rules.dtype, heads, self.rows, *made_of, fitted.queries
            )
        self.keys.reserve(max(sealed.tokens, rules.reserve))
        for block in keys():
            self._append(block)
        self.fitted_at = sealed.tokens

    def _fit_maps(
        self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None, ratio: torch.Tensor | None,
        are_sample: bool,
    ) -> None:  # fmt: skip
        """Fit the maps of the remainder to all tokens and these queries. So few queries that they are not a sample
        keep the `ratio` of the maps before. Without queries there are no maps. Raises `BudgetError`."""
        if not queries.shape[2] or not self.scaling or not (are_sample or ratio is not None):
            return
        shared, form, keys = self._shared, self.form, self.keys
        assert keys is not None
        wanted, sizes = shared.wanted(sealed.tokens), (self.rows, keys.leading, queries.shape[1])
        alone = has_step(keys.device, form.key_dim, form.value_dim)
        room = partial(fit_bytes, form, *sizes, sealed.tokens, alone=alone)
        part = self._part(keys.device, room)
        with shared.account.holding("fitting", room(part)):
            chosen = wanted, CANDIDATES * wanted
            made_of = keys, sealed.complete, form, queries, self.scaling, chosen, visible
            ends = None if self.waiting is None else self.waiting.ends
            self.maps = fit_maps(*made_of, shared.account, self.heads, part, ends)
        if self.maps is not None and not are_sample and ratio is not None:
            self.maps.ratio.copy_(ratio)
            self.maps.changed()

    # --- ranking -----------------------------------------------------------------------------------------------

    def in_turns(self, wanted: int) -> bool:
        """True if only some steps rank all units, because `wanted` are few of them."""
        return few_of_many(wanted, self.units)

    def _at_once(self, heads: int) -> int:
        """Units whose scores of `heads` query heads, with their components, take no more than their share of a
        budget."""
        if self.rules.memory is None:
            return 1 << 62
        each = self.form.group_size * (most_components(self.form.key_width, self._code_bytes) + 4 * heads)
        return max(_AT_ONCE // self.form.group_size, self.rules.memory // _SCORES_SHARE // each)

    def rank(self, query: Query, wanted: int, keep: bool = False) -> Ranking:
        """Rank all units for a query. The order of the `wanted` best is right. See `ranking.rank_units`. `keep`: the
        candidates' scores are for `estimates`, which follows."""
        keys, seen = self.keys, self.seen(query)
        assert keys is not None
        exact, apart = self._exact_scores(query, seen), None if self.sinks is None else self.sinks.units
        sizes, keep = (self.form.group_size, wanted), keep and self.maps is not None
        at_once = 1 << 62 if self.rules.memory is None else self._at_once(query.states.shape[1])
        asked = query.states, query.scaling, *sizes, seen, exact, apart, keep, at_once, self.heads
        ranking = rank_units(keys, *asked)
        self._scored = None if ranking.candidates is None else (query, ranking.candidates)
        return ranking

    def rank_among(
        self, query: Query, candidates: np.ndarray, beyond: np.ndarray | None = None, keep: bool = False
    ) -> np.ndarray:
        """Rank only `candidates` (rows, n), ascending. See `ranking.rank_among`. `keep`: the scores are for
        `estimates`, which follows."""
        keys, seen = self.keys, self.seen(query)
        assert keys is not None
        exact, apart = self._exact_scores(query, seen), None if self.sinks is None else self.sinks.units
        keep = keep and self.maps is not None
        asked = query.states, query.scaling, self.form.group_size, candidates, seen, exact, apart, beyond, keep
        importance, kept = rank_among(keys, *asked, self.heads)
        self._scored = None if kept is None else (query, kept)
        return importance

    def estimates(self, queries: list[Query], units: list[np.ndarray]) -> Estimates | None:
        """Estimated entries for the attention of each query to `units` (rows, n; -1: none) that a step does not read,
        one for each query head and query."""
        keys, maps, form = self.keys, self.maps, self.form
        latest, self._scored = self._scored, None
        if keys is None or maps is None or maps.ratio.shape[1] != queries[0].states.shape[1]:
            return None
        (batch, query_heads), count = queries[0].states.shape[:2], len(queries)
        rows, each = batch * self.heads, query_heads // self.heads
        mass = np.full((rows, each, count), -np.inf, dtype=np.float32)
        values = np.zeros((rows, each, count, form.value_dim), dtype=np.float32)
        offsets = keys.offsets[: keys.leading]
        kept = latest[1] if latest is not None and latest[0] is queries[0] and count == 1 else None
        for at, (query, left) in enumerate(zip(queries, units, strict=True)):
            low = None
            for row, there in enumerate(left):
                if not (there := there[there >= 0]).size:
                    continue
                sequence, head = divmod(row, self.heads)
                asking = slice(head * each, (head + 1) * each)
                if kept is not None:
                    places = there if kept.groups is None else kept.groups.searchsorted(there)
                    scored = kept.scored.of_units(places, None if self.heads == 1 else asking)
                    top = kept.top[asking]
                else:
                    if low is None:
                        low, seen = keys.low_rank_query(query.states), self.seen(query)
                        low *= np.float32(query.scaling)
                    scored, top = keys.scored(low[sequence, asking], sequence, there, form.group_size, seen), None
                mass[row, :, at], components = mean_components(scored, offsets, top)
                values[row, :, at] = maps.values(sequence, components, None if self.heads == 1 else head)
        device, ratio = queries[0].states.device, maps.log_ratio.reshape(rows, each)
        return placed(mass, ratio, values, self._form_of_rows, batch, device)

    @property
    def chooses_on_device(self) -> bool:
        """As `LowRankPredictor.chooses_on_device`."""
        return isinstance(self.keys, CodedKeys) and (self.sinks is not None or not self.rules.num_sinks)

    @property
    def room(self) -> int:
        """As `LowRankPredictor.room`."""
        return self.keys.memory.shape[2] if isinstance(self.keys, CodedKeys) else 0

    def graph_parts(self) -> list[Any]:
        """As `LowRankPredictor.graph_parts`."""
        keys, sinks, maps = self.keys, self.sinks, self.maps
        assert isinstance(keys, CodedKeys)
        first = [] if sinks is None else [sinks.keys, sinks.units.shape[1]]
        return [keys.memory, *keys.asks, keys.coding.counts, *first, *([] if maps is None else maps.on(keys.device))]

    def device_bytes(self, context: int, heads: int, wanted: int, recent: int) -> dict[str, int] | None:
        """As `LowRankPredictor.device_bytes`, for `heads` query heads a sequence."""
        form, rules, units = self.form, self.rules, context // self.form.group_size
        if rules.dtype is not None:
            return None
        most = min(CANDIDATES * wanted, units) if rules.remainder and context >= LEAST_TOKENS else wanted
        near, rank = rules.num_sinks + recent, most_components(form.key_width, self._code_bytes)
        others = (most - wanted) * form.group_size
        rows = self.rows * self.heads
        return {"scores": ranking_bytes(self.rows, heads, rows, units, rank, near, most, others, form.value_dim)}

    def choose_on_device(self, query: Query, wanted: int, looks: bool) -> DeviceChoice:
        """The `wanted` best units of each row for a query, by all components, and an estimate of those that follow, on
        the keys' device; `looks`: with the lost mass."""
        keys, form, sinks, sizes = self.keys, self.form, self.sinks, query.sizes
        assert isinstance(keys, CodedKeys)
        codes, exist, there = keys.codes, None, None
        if sizes is not None:  # as many units as there is room for, some of which may not exist yet
            codes, exist, there = keys.memory[:, :, : sizes.room], sizes.units, sizes.recent
        asks, counts, group, latest = keys.asks, keys.coding.counts, form.group_size, query.recent()
        recent = latest.view(self.rows, form.num_key_heads, *latest.shape[2:])
        first, apart = (recent[:, :, :0], 0) if sinks is None else (sinks.keys, sinks.units.shape[1])
        maps, units, rows, heads = self.maps, codes.shape[2], self.rows * self.heads, query.states.shape[1]
        if maps is not None and maps.ratio.shape[1] != query.states.shape[1]:
            maps = None
        most, value, weight = wanted if maps is None else min(CANDIDATES * wanted, units), None, None
        on = maps.on(keys.device) if maps is not None and most > wanted else None
        near_keys, others_of = first.shape[2] + recent.shape[2], 0 if on is None else (most - wanted) * group
        nbytes = ranking_bytes(self.rows, heads, rows, units, keys.rank, near_keys, most, others_of, form.value_dim)
        with self._shared.account.holding("scores", nbytes):
            low, constant, near = project(query.states, *asks, first, recent, query.scaling, there)
            best, tops, sums = score(low, constant, codes, counts, group, apart, exist)
            importance = share(best, tops, sums, near, rows, apart, exist)
            chosen, others, left = pick(importance, wanted, most)
            if on is not None:
                value, weight = rest(low, constant, codes, counts, group, others, *on, asks.offsets, exist)
        lost = left if looks else None
        return DeviceChoice(chosen, value=value, weight=weight, lost=lost, nbytes=nbytes)

    def seen(self, query: Query) -> torch.Tensor | None:
        """(B, tokens) bool: the ranked tokens that are not padding; None: all."""
        assert self.keys is not None
        return None if query.visible is None else query.visible[:, : self.keys.tokens].expand(self.rows, -1)

    def _exact_scores(self, query: Query, seen: torch.Tensor | None) -> np.ndarray:
        """Scaled scores (B, H, t), float32, of the query against the keys of the sinks and the latest tokens."""
        latest = query.recent()
        keys = latest = latest.view(self.rows, self.form.num_key_heads, *latest.shape[2:])
        if self.sinks is not None:
            keys = torch.cat([self.sinks.keys, keys], 2)
        # numpy finishes products this small before torch's threads wake
        exact = keys.float().numpy(force=True)
        states = query.states.float().numpy(force=True).reshape(*exact.shape[:2], -1, exact.shape[3])
        scores = np.matmul(states, exact.swapaxes(2, 3)).reshape(len(exact), query.states.shape[1], exact.shape[2])
        scores *= np.float32(query.scaling)
        if query.visible is not None:
            visible = query.visible[:, query.visible.shape[1] - latest.shape[2] :].expand(self.rows, -1)
            if self.sinks is not None and seen is not None:
                visible = torch.cat([self.sinks.visible(seen), visible], 1)
            scores = np.where(visible[:, None].numpy(force=True), scores, HIDDEN)
        return scores

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> None:
        """Keep the first `units` units of every row."""
        if self.sinks is not None and units * self.form.group_size < self.sinks.end:
            self.close()  # other first tokens may replace the sinks
        if self.keys is not None:
            self.keys.truncate(units * self.form.group_size)
            self.fitted_at = min(self.fitted_at, units * self.form.group_size)  # another text may follow

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.rows = len(rows)
        for part in (self.keys, self.sinks, self.maps, self.waiting):
            if part is not None:
                part.select_rows(rows)

    def close(self) -> None:
        """Free the memory. Later calls of `learn` may fit anew."""
        self._free()
        if self.waiting is not None:
            self.waiting.close()
            self.waiting = None

    def _free(self) -> None:
        """Free what is fitted."""
        for part in (self.keys, self.sinks, self.maps):
            if part is not None:
                part.close()
        self.keys = self.sinks = self.maps = self._scored = None
        self.fitted_at = 0

    # --- contexts ----------------------------------------------------------------------------------------------

    def fitted_state(self) -> dict[str, Any] | None:
        """As `Learner.fitted_state`."""
        keys = self.keys
        if keys is None:
            return None
        maps = None if self.maps is None else self.maps.capture()
        return {"summary": keys.fitted_state(), "sinks": None, "maps": maps, **self.STATE.capture(self)}

    def capture(self) -> dict[str, Any]:
        """As `Predictor.capture`."""
        parts = {"summary": self.keys, "sinks": self.sinks, "maps": self.maps}
        captured = {name: None if part is None else part.capture() for name, part in parts.items()}
        return {**captured, **self.STATE.capture(self)}

    def restore(self, tree: dict[str, Any]) -> None:
        """As `Predictor.restore`; "units" of `tree` is the history's number of units. Raises `ContextError`."""
        summary, shared, form, units = tree["summary"], self._shared, self.form, tree["units"]
        sizes = {"rows": self.rows, "width": form.key_width}
        if not 0 < self.STATE.check(self.STATE.own(tree), "a layer", **sizes).get("rank", 1) <= form.key_width:
            raise not_whole("a layer", f"adapter of its fitted state is {shown(tree['adapter'])}")
        if not isinstance(summary, dict | None):
            raise not_whole("a layer", f"its compact keys are {shown(summary)}")
        if summary is not None and "coding" in summary:
            made_of = form.num_key_heads, shared.account, shared.workspace, form.group_size
            self.keys = CodedKeys.restore(summary, *made_of, **sizes, places=units)
        elif summary is not None:
            sizes |= {"heads": form.num_key_heads, "dim": form.key_dim, "tokens": units * form.group_size}
            self.keys = LowRankKeys.restore(summary, shared.account, shared.workspace, **sizes)
        if self.keys is not None:
            self.keys.reserve(self.rules.reserve)
        if tree["sinks"] is not None:
            self.sinks = SinkKeys.restore(
                tree["sinks"], form, self.rows, units * form.group_size, shared.account
            )
        if self.keys is not None and tree["maps"] is not None and self.rules.remainder:
            self.maps = ValueMaps.restore(tree["maps"], form, self.rows, self.keys.leading, shared.account)
        self.adapter, self.fitted_at = (tree[name] for name in self.STATE.entries)
