"""KVSwap's predictor: units are ranked by compact keys in memory (paper, sections 3.2 and 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...errors import not_whole, shown
from ...fetch.choice import Choice
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...history.state import DTYPES, is_tensor
from ...memory.plan import LayerPlan, Planned
from ...predictors.base import Query
from ...predictors.sinks import largest, with_sinks
from .kept_choice import KeptChoice
from .layer_budgets import LATEST_QUERIES, SPACING
from .learnt_keys import LearntKeys, LowRankShared, Rules
from .ranking import CANDIDATES, STEPS, Ranking, few_of_many

# How much of the attention mass units capture, by estimate: where a step may stop, and how dense a layer is

def enough(
    chosen: np.ndarray, importance: np.ndarray, ranking: Ranking, target: float, heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """As many of the units `chosen` (B, M) as every row needs for the share `target` of its mass, most important first;
    and the share that they capture, (B,). `importance` (B, units) orders them, `ranking` has their mass."""
    assert ranking.rest is not None
    order = np.argsort(-np.take_along_axis(importance, chosen, 1), 1, kind="stable")
    chosen = np.take_along_axis(chosen, order, 1)
    mass = np.take_along_axis(ranking.importance, chosen, 1).clip(min=0)
    captured = (ranking.rest[:, None] + np.cumsum(mass, 1)) / heads
    reached = captured >= target
    needed = np.where(reached.any(1), reached.argmax(1) + 1, chosen.shape[1]).max()
    return chosen[:, :needed], captured[:, needed - 1]


def curve(ranking: Ranking, most: int, heads: int) -> np.ndarray:
    """(most + 1,): the share of the mass that what is compared exactly and the m best units capture, mean of rows."""
    assert ranking.candidates is not None and ranking.rest is not None
    mass = -np.sort(-np.take_along_axis(ranking.importance, ranking.candidates, 1), 1)[:, :most]
    captured = (ranking.rest[:, None] + np.cumsum(mass, 1)).mean(0) / heads
    captured = np.concatenate([[ranking.rest.mean() / heads], captured])
    return np.pad(captured, (0, most + 1 - len(captured)), "edge")


_MEASURE_AGAIN = 2
"""Density is measured anew when the length has grown this many times."""


class LowRankPredictor:
    """Of one layer whose rows are sequences, with units of `form.group_size` consecutive tokens.

    In a long context, where few of many units are wanted, all are ranked at every fourth step alone. In between the
    query chooses among those that mattered most when each was last ranked, four times as many as it wants, and those
    that were sealed since: beyond the paper, whose step ranks all.

    Args:
        adapter: calibrated projection (Hk D, r) float32 of this layer; None: made of the prompt's own keys.
        phase: in which of those steps all are ranked, so that not all layers do it in the same.
    """

    def __init__(
        self,
        form: RecordFormat,
        rows: int,
        rules: Rules,
        shared: LowRankShared,
        name: str,
        adapter: torch.Tensor | None = None,
        phase: int = 0,
    ) -> None:
        self.form, self.rows, self.rules = form, rows, rules
        self.learnt = LearntKeys(form, rows, rules, shared, adapter)
        self.latest_queries: torch.Tensor | None = None
        self._shared, self._name = shared, name
        self._measured_at = 0
        self._latest: np.ndarray | None = None  # importance of the units, by the latest query that ranked each
        self._beyond: np.ndarray | None = None  # see `Ranking`; of the latest query that ranked all
        self._phase, self._since = phase, 0  # steps since then
        self._kept = KeptChoice(rules.steps_per_selection if rules.estimates else 1)

    @staticmethod
    def planned(
        form: RecordFormat, rules: Rules, rank: int | None, heads: int, context: int, rows: int, wanted: int
    ) -> LayerPlan:
        """See `LearntKeys.planned`; and the importance of all units."""
        tables = Planned(decode={"tables": 4 * rows * (context // form.group_size + heads)})
        return LearntKeys.planned(form, rules, rank, heads, context, rows, wanted) + LayerPlan(tables)

    # --- learning ----------------------------------------------------------------------------------------------

    def ready(self, units: int) -> bool:
        return self.learnt.keys is not None and self.learnt.units == units

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        self._kept.drop()
        self.learnt.learn(sealed, queries, visible)

    def watch(self, queries: torch.Tensor, length: int) -> None:
        """A prompt's queries (B, H, q, D) come: what mattered before it tells nothing of what will. Keep some of the
        latest, if density is to be measured with them."""
        self._latest = self._beyond = None
        self._kept.watch(queries)
        if self.rules.measures_density and queries.shape[2] > 1 and length >= _MEASURE_AGAIN * self._measured_at:
            self.latest_queries = queries[:, :, -LATEST_QUERIES * SPACING :][:, :, ::SPACING].detach().clone()

    # --- choosing ----------------------------------------------------------------------------------------------

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        """As `Predictor.select`. Rows whose query has hardly moved go on with what they chose. A guess looks only at
        what mattered most to the latest query."""
        rules = self.rules
        kept, moved = self._kept.moved(query.states, budget)
        if kept is not None and not moved:
            if not guess:
                self._kept.went_on()
            return kept
        if guess and self._latest is not None and rules.estimates:
            return self._among_latest(query, budget, self._latest.copy())
        if rules.selection == "random":
            of: dict[str, Any] = {"generator": self._shared.generator, "dtype": torch.float32, "device": "cpu"}
            importance = torch.rand(self.rows, self.learnt.units, **of).numpy()
            return _best(with_sinks(importance, rules.num_sinks, self.form.group_size, self.learnt.seen(query)), budget)
        as_wide = kept is not None and kept.units.shape[1] == min(budget, self.learnt.units)
        if kept is None or not as_wide or rules.target_mass is not None:
            choice, rows = self._chosen(query, budget, list(range(self.rows))), None
        else:
            choice, rows = kept.with_rows(moved, self._chosen(query, budget, moved)), moved
        if not guess:
            self._kept.keep(choice, query.states, budget, rows)
        return choice

    def _chosen(self, query: Query, budget: int, rows: list[int]) -> Choice:
        """What the query of each of `rows` chooses, one row of the choice for each."""
        rules, seen = self.rules, self.learnt.seen(query)
        whole = rules.target_mass is not None and rules.estimates
        if not whole and len(rows) == self.rows and self._may_go_by_latest(budget, query.states.shape[1]):
            assert self._latest is not None
            self._since += 1
            return self._among_latest(query, budget, self._latest)
        ranking = self.learnt.rank(query, budget, rows, mass=whole)
        seen = None if seen is None else seen[rows]
        importance = ranking.importance.copy() if whole else ranking.importance
        importance = with_sinks(importance, rules.num_sinks, self.form.group_size, seen)
        if len(rows) == self.rows:
            self._since = self._phase % STEPS if self._latest is None else 0
            self._latest, self._beyond = importance, ranking.beyond
        elif self._latest is not None:
            self._latest[rows] = importance
        if not whole:
            return _best(importance, budget)
        assert rules.target_mass is not None
        heads = query.states.shape[1]
        chosen, captured = enough(largest(importance, budget), importance, ranking, rules.target_mass, heads)
        counters = self._shared.counters()
        counters.mass_captured += float(captured.sum())
        counters.mass_steps += len(captured)
        return Choice(np.sort(chosen, 1))

    def _may_go_by_latest(self, budget: int, heads: int) -> bool:
        """Few of many are wanted, and all were ranked not long ago; what was sealed since is made to be looked at."""
        latest, units = self._latest, self.learnt.units
        if self._beyond is not None and self._beyond.shape[1] != heads:
            self._beyond = None  # of a context, and not of this model's heads
        if latest is None or self._beyond is None or not few_of_many(budget, units) or self._since >= STEPS - 1:
            return False
        if latest.shape[1] < units:
            fresh = np.full((self.rows, units - latest.shape[1]), np.inf, dtype=np.float32)
            self._latest = np.concatenate([latest, fresh], 1)
        return True

    def _among_latest(self, query: Query, budget: int, latest: np.ndarray) -> Choice:
        """What the query chooses of the units that mattered most when each was last ranked; `latest`, how much each
        did, has it from then on."""
        seen = self.learnt.seen(query)
        candidates = largest(latest, min(CANDIDATES * budget, latest.shape[1]))
        candidates.sort(1)
        np.put_along_axis(latest, candidates, self.learnt.rank_among(query, candidates, self._beyond), 1)
        with_sinks(latest, self.rules.num_sinks, self.form.group_size, seen)
        best = _best(np.take_along_axis(latest, candidates, 1), budget)
        return Choice(np.take_along_axis(candidates, best.units, 1), importance=best.importance)

    def density(self, most: int, query_of: Callable[[torch.Tensor], Query], length: int) -> np.ndarray | None:
        """(most + 1,): share of attention mass that the tail, the sinks and the m best other units capture, by the
        prompt's latest queries and the compact keys; mean over queries, heads and rows. None without data for it, or if
        the result is not a number.

        Drops those queries. `query_of` makes a `Query` of states (B, H, D).
        """
        queries, self.latest_queries = self.latest_queries, None
        if queries is None or queries.shape[0] != self.rows or not self.learnt.others:
            return None
        self._measured_at = length
        wanted, heads = min(most, self.learnt.units), queries.shape[1]
        rankings = [self.learnt.rank(query_of(states), wanted, mass=True) for states in queries.unbind(2)]
        found = np.mean([curve(ranking, most, heads) for ranking in rankings], 0)
        return found if np.isfinite(found).all() else None

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> None:
        if not units:
            self._latest = self._beyond = None
        elif self._latest is not None:
            self._latest = self._latest[:, :units].copy()
        self._kept.drop()
        self.learnt.truncate(units)

    def select_rows(self, rows: torch.Tensor) -> None:
        if self._latest is not None:
            self._latest = self._latest[rows.numpy(force=True)]
        if self._beyond is not None:
            self._beyond = self._beyond[rows.numpy(force=True)]
        self._kept.select_rows(rows)
        self.rows = len(rows)
        if self.latest_queries is not None:
            self.latest_queries = self.latest_queries[rows.to(self.latest_queries.device)]
        self.learnt.select_rows(rows)

    @property
    def tables_nbytes(self) -> int:
        held = sum([part.nbytes for part in (self._latest, self._beyond, self.latest_queries) if part is not None])
        return self._kept.nbytes + held

    def close(self) -> None:
        self.learnt.close()
        self._measured_at = 0
        self.latest_queries = self._latest = self._beyond = None
        self._kept = KeptChoice(self._kept.steps)

    # --- contexts ----------------------------------------------------------------------------------------------

    def lesson(self) -> dict[str, Any] | None:
        learnt = self.learnt.lesson()
        if learnt is None:
            return None
        queries = {"measured_at": self._measured_at, "latest_queries": self.latest_queries}
        kept = KeptChoice(self._kept.steps).capture()
        return {**learnt, **queries, "latest": None, "beyond": None, "since": 0, "kept": kept}

    def capture(self) -> dict[str, Any]:
        queries = {"measured_at": self._measured_at, "latest_queries": self.latest_queries}
        latest, beyond = (
            None if part is None else torch.from_numpy(part.copy()) for part in (self._latest, self._beyond)
        )
        ranked = {"latest": latest, "beyond": beyond, "since": self._since}
        return {**self.learnt.capture(), **queries, **ranked, "kept": self._kept.capture()}

    def restore(self, tree: dict[str, Any]) -> None:
        """As `Predictor.restore`; `tree` also has "units", how many the history holds."""
        queries, form = tree["latest_queries"], self.form
        if queries is not None:
            right = is_tensor(queries, (self.rows, None, None, form.key_dim), *DTYPES)
            if not right or queries.shape[1] % form.num_key_heads or not 0 < queries.shape[2] <= LATEST_QUERIES:
                raise not_whole(
                    self._name, f"its latest queries are {shown(queries)}, for {self.rows} sequences and "
                    f"{form.num_key_heads} key heads of {form.key_dim}"
                )  # fmt: skip
        if type(tree["measured_at"]) is not int or tree["measured_at"] < 0:
            raise not_whole(self._name, f"measured_at is {tree['measured_at']!r:.80}")
        self._restore_latest(tree)
        self.learnt.restore(tree)
        self.latest_queries = queries if self.rules.measures_density else None  # the configuration decides
        self._measured_at = tree["measured_at"]
        self._kept.restore(tree["kept"], self.rows, tree["units"])

    def _restore_latest(self, tree: dict[str, Any]) -> None:
        latest, beyond, since = tree["latest"], tree["beyond"], tree["since"]
        right = all(part is None or is_tensor(part, (self.rows, None), torch.float32) for part in (latest, beyond))
        right = right and type(since) is int and since in range(STEPS)
        right = right and (latest is None or latest.shape[1] <= tree["units"])
        if not right or (beyond is not None and (latest is None or beyond.shape[1] % self.form.num_key_heads)):
            raise not_whole(self._name, "importance of its groups")
        self._latest, self._beyond = (
            None if part is None else part.numpy(force=True).copy() for part in (latest, beyond)
        )
        self._since = since


def _best(importance: np.ndarray, budget: int) -> Choice:
    """The `budget` most important units of each row."""
    rows, count = importance.shape
    units = largest(importance, budget if budget < count else count)
    units.sort(1)
    return Choice(units, importance=importance[np.arange(rows)[:, None], units])
