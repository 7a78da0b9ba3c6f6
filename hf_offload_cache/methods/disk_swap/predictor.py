"""KVSwap's predictor (sections 3.1 to 3.3): it selects groups by scores of compact keys in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.layer import Rows
from ...errors import not_whole
from ...fetch.choice import Choice, DeviceChoice, Estimates
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...history.state import Number, State, Table
from ...memory.dry_run import DryRun
from ...predictors.base import Predictor, Query
from ...predictors.sinks import largest, mark_largest, with_sinks
from .fitted_keys import FittedKeys, LowRankShared, Rules
from .ranking import CANDIDATES, STEPS


class LowRankPredictor(Predictor):
    """Predictor of one layer, with units of `form.group_size` consecutive tokens. Rows are sequences, or their key
    heads if these choose apart.

    In the paper every step ranks all units. Here, if a step selects few of many units, only every fourth step does. The
    steps in between rank candidates: four times as many units as selected, those with the highest latest importance.
    Units sealed since then are always candidates.

    Args:
        adapter: calibrated projection (Hk D, r) float32 of this layer. None: it is fitted to the prompt's keys.
        phase: offset of the steps that rank all units, so that layers do it in different steps.
        heads: number of rows of a sequence: key heads that choose apart, or 1.
    """

    STATE: ClassVar[State] = State(
        "ranking",
        latest=Table("rows ranked", torch.float32, at="_latest", optional=True),
        beyond=Table("rows heads", torch.float32, at="_beyond", optional=True),
        since=Number(STEPS, at="_since"),
    )

    def __init__(
        self,
        form: RecordFormat,
        rows: int,
        rules: Rules,
        shared: LowRankShared,
        name: str,
        adapter: torch.Tensor | None = None,
        phase: int = 0,
        heads: int = 1,
    ) -> None:
        self.form, self.rows, self.rules, self.heads = form, rows, rules, heads
        self.fitted = FittedKeys(form, rows, rules, shared, adapter, heads)
        self._name = name
        self._latest: np.ndarray | None = None  # (rows, units): importance, by the latest query that ranked each
        self._beyond: np.ndarray | None = None  # see `Ranking`; by the latest query that ranked all
        self._phase, self._since = phase, 0  # `_since`: steps since all were ranked

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """As `Predictor.rehearse`."""
        self.fitted.rehearse(run, context, heads * self.heads, wanted)
        self._latest = np.empty((self.rows, context // self.form.group_size), dtype=np.float32)
        self._beyond = np.empty((self.rows, heads), dtype=np.float32)

    # --- learning ----------------------------------------------------------------------------------------------

    def ready(self, units: int) -> bool:
        return self.fitted.keys is not None and self.fitted.units == units

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        self.fitted.learn(self._of_sequences(sealed), queries, visible)

    def end_prompt(self, sealed: Sealed) -> None:
        self.fitted.end_prompt(self._of_sequences(sealed))

    def _of_sequences(self, sealed: Sealed) -> Sealed:
        """Views of sealed units, with a sequence's key heads in one row."""
        if self.heads == 1:
            return sealed
        unfold = Rows(self.heads).unfold

        def joined(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return ((unfold(keys), unfold(values)) for keys, values in parts)

        return replace(sealed, parts=list(joined(sealed.parts)), stored=lambda: joined(sealed.stored()))

    def prompted(self, scaling: float) -> None:
        """Drop the ranking when a prompt arrives, because the importance before it no longer predicts anything.
        `scaling`: factor of its scores."""
        self._latest = self._beyond = None
        self.fitted.scaling = scaling

    # --- choosing ----------------------------------------------------------------------------------------------

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        """Select the most important units: scoring and TopK of KVSwap, section 3.3. As `Predictor.select`.

        A guess (section 3.3, online prediction) only ranks candidates, if there is a latest ranking. It changes
        nothing, so that choices do not depend on looking ahead.
        """
        if guess and self._latest is not None:
            return self._among_latest(query, budget, self._latest.copy(), guess)
        if self._may_go_by_latest(budget, query.states.shape[1]):
            assert self._latest is not None
            self._since += 1
            return self._among_latest(query, budget, self._latest, guess)
        ranking, seen = self.fitted.rank(query, budget, not guess), self.fitted.seen(query)
        importance = with_sinks(ranking.importance, self.rules.num_sinks, self.form.group_size, seen)
        if guess:
            return _best(importance, budget)
        self._since = self._phase % STEPS if self._latest is None else 0
        self._latest, self._beyond = importance, ranking.beyond
        candidates = None if ranking.candidates is None else ranking.candidates.groups
        if candidates is None:
            return _best(importance, budget, None if self.fitted.maps is None else CANDIDATES * budget)
        choice, left = _best(importance, budget), np.ones(importance.shape, dtype=bool)
        left[np.arange(self.rows)[:, None], choice.units] = False
        if self.heads == 1:
            return replace(choice, next=candidates[left[0, candidates]][None])
        others = np.where(left[:, candidates], importance[:, candidates], -np.inf)  # each head's own, of all heads'
        best = largest(others, min((CANDIDATES - 1) * budget, len(candidates) - budget))
        chosen = np.isneginf(np.take_along_axis(others, best, 1))
        return replace(choice, next=np.where(chosen, -1, candidates[best]))

    @property
    def chooses_on_device(self) -> bool:
        """Whether there are codes, and the keys of sinks, as `choose_on_device` needs them."""
        return self.fitted.chooses_on_device

    def graph_parts(self) -> list[Any]:
        """The tensors and numbers that `choose_on_device` uses in a captured step, which is valid while they stay."""
        return self.fitted.graph_parts()

    @property
    def room(self) -> int:
        """Units a row that `graph_parts` have room for."""
        return self.fitted.room

    def device_bytes(self, context: int, heads: int, wanted: int, recent: int) -> dict[str, int] | None:
        """Upper bounds by owner, "scores" among them, on the device memory of `choose_on_device`, of the `wanted` best
        of `context` tokens a row, for `heads` query heads a row and so many `recent` entries. None: it cannot choose
        there."""
        return self.fitted.device_bytes(context, heads * self.heads, wanted, recent)

    def choose_on_device(self, query: Query, budget: int, looks: bool) -> DeviceChoice:
        """As `select`, on the device of the keys and by all units at every step. `looks`: with the lost mass."""
        self._latest = self._beyond = None
        return self.fitted.choose_on_device(query, budget, looks)

    def estimate(self, queries: list[Query], units: list[np.ndarray]) -> Estimates | None:
        """As `Predictor.estimate`."""
        return self.fitted.estimates(queries, units)

    def lost(self, query: Query, choice: Choice, estimated: bool) -> float | None:
        """As `Predictor.lost`, by the best token of each group."""
        if self._latest is None:
            return None
        left, every = np.zeros((self.rows, self._latest.shape[1] + 1), dtype=bool), np.arange(self.rows)[:, None]
        left[:, :-1] = self._latest > 0
        left[every, choice.units] = False
        if estimated and choice.next is not None:
            left[every, choice.next] = False  # -1, for none, is behind the units
        return float(self._latest[left[:, :-1]].sum()) / query.states[..., 0].numel()

    def _may_go_by_latest(self, budget: int, heads: int) -> bool:
        """True if few of many units are selected and all were ranked recently. Newly sealed units become candidates."""
        latest, units = self._latest, self.fitted.units
        if self._beyond is not None and self._beyond.shape[1] * self.heads != heads:
            self._beyond = None  # a context's, with another number of heads than this model
        if latest is None or self._beyond is None or self._since >= STEPS - 1 or not self.fitted.in_turns(budget):
            return False
        if latest.shape[1] < units:
            fresh = np.full((self.rows, units - latest.shape[1]), np.inf, dtype=np.float32)
            self._latest = np.concatenate([latest, fresh], 1)
        return True

    def _among_latest(self, query: Query, budget: int, latest: np.ndarray, guess: bool) -> Choice:
        """Select among the units of highest `latest` importance (rows, units) float32, and update it for them in place.
        """
        seen, every = self.fitted.seen(query), np.arange(len(latest))[:, None]  # faster than take_along_axis
        candidates = largest(latest, min(CANDIDATES * budget, latest.shape[1]))
        latest[every, candidates] = self.fitted.rank_among(query, candidates, self._beyond, not guess)
        with_sinks(latest, self.rules.num_sinks, self.form.group_size, seen)
        best = _best(latest[every, candidates], budget, None if self.fitted.maps is None or guess else -1)
        others = None if best.next is None else candidates[every, best.next]
        return Choice(candidates[every, best.units], importance=best.importance, next=others)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> None:
        if not units:
            self._latest = self._beyond = None
        self.STATE.truncate(self, ranked=units)
        self.fitted.truncate(units)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.STATE.select_rows(self, rows)
        self.rows = len(rows)
        self.fitted.select_rows(rows[:: self.heads] // self.heads)

    @property
    def tables_nbytes(self) -> int:
        return sum([part.nbytes for part in (self._latest, self._beyond) if part is not None])

    def close(self) -> None:
        self.fitted.close()
        self._latest = self._beyond = None

    # --- contexts ----------------------------------------------------------------------------------------------

    def fitted_state(self) -> dict[str, Any] | None:
        state = self.fitted.fitted_state()
        return None if state is None else {**state, "latest": None, "beyond": None, "since": 0}

    def capture(self) -> dict[str, Any]:
        return {**self.fitted.capture(), **self.STATE.capture(self)}

    def restore(self, tree: dict[str, Any]) -> None:
        """As `Predictor.restore`; "units" of `tree` is the history's number of units. Raises `ContextError`."""
        sizes = self.STATE.check(self.STATE.own(tree), self._name, rows=self.rows)
        if sizes.get("ranked", 0) > tree["units"] or sizes.get("heads", 0) % self.form.num_key_heads:
            raise not_whole(self._name, f"its ranking has sizes {sizes}, but its history has {tree['units']} groups")
        if tree["latest"] is None and tree["beyond"] is not None:
            raise not_whole(self._name, "its ranking has beyond, but latest is None")
        self.STATE.restore(self, tree)
        self.fitted.restore(tree)


def _best(importance: np.ndarray, budget: int, among: int | None = None) -> Choice:
    """The `budget` most important units of each row, ascending, of equal ones the first: the TopK of KVSwap, section
    3.3. A NaN counts as infinite. `among`: the best units, these included, of which the others come in `Choice.next`;
    -1: all; None: without."""
    rows, count = importance.shape
    every = np.arange(rows)[:, None]
    if among is None or budget >= count:
        units = largest(importance, budget if budget < count else count)
        return Choice(units, importance=importance[every, units])
    best = mark_largest(importance, count if among < 0 else min(among, count)).nonzero()[1].reshape(rows, -1)
    of_best = importance[every, best]
    chosen = mark_largest(of_best, budget)
    units, others = best[chosen].reshape(rows, budget), best[~chosen].reshape(rows, -1)
    return Choice(units, importance=of_best[chosen].reshape(rows, budget), next=others)
