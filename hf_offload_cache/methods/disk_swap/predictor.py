"""KVSwap's predictor: units are ranked by compact keys in memory (paper, sections 3.2 and 3.3)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import not_whole
from ...fetch.choice import Choice
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...history.state import Number, State, Table
from ...memory.dry_run import DryRun
from ...predictors.base import Query
from ...predictors.sinks import largest, with_sinks
from .learnt_keys import LearntKeys, LowRankShared, Rules
from .ranking import CANDIDATES, STEPS, few_of_many


class LowRankPredictor:
    """Of one layer whose rows are sequences, with units of `form.group_size` consecutive tokens.

    In a long context, where few of many units are wanted, all are ranked at every fourth step alone. In between the
    query chooses among those that mattered most when each was last ranked, four times as many as it wants, and those
    that were sealed since: beyond the paper, whose step ranks all.

    Args:
        adapter: calibrated projection (Hk D, r) float32 of this layer; None: made of the prompt's own keys.
        phase: in which of those steps all are ranked, so that not all layers do it in the same.
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
    ) -> None:
        self.form, self.rows, self.rules = form, rows, rules
        self.learnt = LearntKeys(form, rows, rules, shared, adapter)
        self._name = name
        self._latest: np.ndarray | None = None  # importance of the units, by the latest query that ranked each
        self._beyond: np.ndarray | None = None  # see `Ranking`; of the latest query that ranked all
        self._phase, self._since = phase, 0  # steps since then

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """As `Predictor.rehearse`."""
        self.learnt.rehearse(run, context, heads, wanted)
        self._latest = np.empty((self.rows, context // self.form.group_size), dtype=np.float32)
        self._beyond = np.empty((self.rows, heads), dtype=np.float32)

    # --- learning ----------------------------------------------------------------------------------------------

    def ready(self, units: int) -> bool:
        return self.learnt.keys is not None and self.learnt.units == units

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        self.learnt.learn(sealed, queries, visible)

    def prompted(self) -> None:
        """A prompt comes: what mattered before it tells nothing of what will."""
        self._latest = self._beyond = None

    # --- choosing ----------------------------------------------------------------------------------------------

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        """As `Predictor.select`. A guess looks only at what mattered most to the latest query."""
        if guess and self._latest is not None:
            return self._among_latest(query, budget, self._latest.copy())
        if self._may_go_by_latest(budget, query.states.shape[1]):
            assert self._latest is not None
            self._since += 1
            return self._among_latest(query, budget, self._latest)
        ranking, seen = self.learnt.rank(query, budget), self.learnt.seen(query)
        importance = with_sinks(ranking.importance, self.rules.num_sinks, self.form.group_size, seen)
        self._since = self._phase % STEPS if self._latest is None else 0
        self._latest, self._beyond = importance, ranking.beyond
        return _best(importance, budget)

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

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> None:
        if not units:
            self._latest = self._beyond = None
        self.STATE.truncate(self, ranked=units)
        self.learnt.truncate(units)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.STATE.select_rows(self, rows)
        self.rows = len(rows)
        self.learnt.select_rows(rows)

    @property
    def tables_nbytes(self) -> int:
        return sum([part.nbytes for part in (self._latest, self._beyond) if part is not None])

    def close(self) -> None:
        self.learnt.close()
        self._latest = self._beyond = None

    # --- contexts ----------------------------------------------------------------------------------------------

    def lesson(self) -> dict[str, Any] | None:
        learnt = self.learnt.lesson()
        return None if learnt is None else {**learnt, "latest": None, "beyond": None, "since": 0}

    def capture(self) -> dict[str, Any]:
        return {**self.learnt.capture(), **self.STATE.capture(self)}

    def restore(self, tree: dict[str, Any]) -> None:
        """As `Predictor.restore`; `tree` also has "units", how many the history holds."""
        sizes = self.STATE.check(self.STATE.own(tree), self._name, rows=self.rows)
        if sizes.get("ranked", 0) > tree["units"] or sizes.get("heads", 0) % self.form.num_key_heads:
            raise not_whole(self._name, f"its ranking is of {sizes}, and it holds {tree['units']} groups")
        if tree["latest"] is None and tree["beyond"] is not None:
            raise not_whole(self._name, "beyond of its ranking is there, and latest is None")
        self.STATE.restore(self, tree)
        self.learnt.restore(tree)


def _best(importance: np.ndarray, budget: int) -> Choice:
    """The `budget` most important units of each row."""
    rows, count = importance.shape
    units = largest(importance, budget if budget < count else count)
    units.sort(1)
    return Choice(units, importance=importance[np.arange(rows)[:, None], units])
