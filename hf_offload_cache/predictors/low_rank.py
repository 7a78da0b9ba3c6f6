"""KVSwap's predictor: units are ranked by compact keys in memory (paper, sections 3.2 and 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ContextError
from ..fetch.choice import Choice
from ..history.base import Sealed
from ..history.record_format import RecordFormat
from ..memory.account import MemoryAccount
from ..memory.buffers import Workspace
from ..memory.plan import LayerPlan, Planned
from ..report.counters import Counters
from .base import Query
from .directions import LEAST_QUERIES, Directions, fitting_bytes
from .layer_budgets import LATEST_QUERIES, SPACING
from .low_rank_keys import LowRankKeys, default_rank
from .ranking import rank_among, rank_units
from .sinks import largest, with_sinks

_REFIT = 8
"""An adapter from the prompt, and the 8-bit scale, are remade when the length has grown this many times."""
_MEASURE_AGAIN = 2
"""Density is measured anew when the length has grown this many times."""


@dataclass(frozen=True)
class Rules:
    """What of a configuration decides how units are ranked and chosen."""

    rank: int | None
    dtype: torch.dtype
    num_sinks: int
    selection: str = "default"
    """"default": heads normalised before they are summed; "paper": raw sums; "random": a floor to compare with."""
    target_mass: float | None = None
    measures_density: bool = False
    reserve: int = 0
    """Tokens to make room for at once."""


class LowRankShared(NamedTuple):
    """What the predictors of a cache have in common."""

    account: MemoryAccount
    workspace: Workspace
    generator: torch.Generator
    counters: Callable[[], Counters]


class LowRankPredictor:
    """Of one layer whose rows are sequences, with units of `form.group_size` consecutive tokens.

    Args:
        adapter: calibrated projection (Hk D, r) float32 of this layer; None: made of the prompt's own keys, in the
            metric of its queries.
    """

    def __init__(
        self,
        form: RecordFormat,
        rows: int,
        rules: Rules,
        shared: LowRankShared,
        name: str,
        adapter: torch.Tensor | None = None,
    ) -> None:
        self.form, self.rows, self.rules = form, rows, rules
        self.adapter = adapter
        self.keys: LowRankKeys | None = None
        self.latest_queries: torch.Tensor | None = None
        self._shared, self._name = shared, name
        self._fitted_at = self._measured_at = 0
        self._candidates: np.ndarray | None = None

    @staticmethod
    def planned(form: RecordFormat, rules: Rules, rank: int | None, heads: int, context: int, rows: int) -> LayerPlan:
        """What one layer of `heads` query heads takes; `rank` is the rules', or the adapter's."""
        rank = min(form.key_width, rank or default_rank(form.key_width))
        plan = LowRankKeys.planned(form.key_width, rank, rules.dtype, context, rows, heads, form.group_size)
        queries = rows * LATEST_QUERIES * heads * form.key_dim * form.dtype.itemsize if rules.measures_density else 0
        fitting = Planned({"fitting": fitting_bytes(form.key_width, rows)})
        return plan + LayerPlan(Planned({"tables": queries}), fitting)

    # --- learning ----------------------------------------------------------------------------------------------

    def ready(self, units: int) -> bool:
        return self.keys is not None and self.keys.tokens == units * self.form.group_size

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """As `Predictor.learn`. Keys are projected; where there is no projection yet, or the history has grown much,
        one is made of all of them: two passes."""
        rank, grown = self.rules.rank or default_rank(self.form.key_width), sealed.tokens >= _REFIT * self._fitted_at
        if self.keys is not None and not grown and self.keys.tokens + sealed.fresh == sealed.tokens:
            for part in sealed.keys:
                self.keys.append(part)
        elif self.adapter is not None or sealed.tokens >= max(4 * rank, 512):
            keys = (lambda: iter(sealed.keys)) if sealed.fresh == sealed.tokens else sealed.stored
            seen = queries if queries.shape[2] >= LEAST_QUERIES and self.rules.selection == "default" else None
            with self._shared.account.holding("fitting", fitting_bytes(self.form.key_width, self.rows)):
                found = Directions.of(
                    keys(), self.form.key_width, self.form.num_key_heads, visible, rank, self.adapter, seen
                )
            self.close_keys()
            self.keys = LowRankKeys(
                found.adapter, found.deviation, self.rules.dtype, self.form.num_key_heads, self.rows,
                self._shared.account, self._shared.workspace, found.queries,
            )  # fmt: skip
            self.keys.reserve(max(sealed.tokens, self.rules.reserve))
            for part in keys():
                self.keys.append(part)
            self._fitted_at = sealed.tokens

    def watch(self, queries: torch.Tensor, length: int) -> None:
        """Keep some of a prompt's latest queries (B, H, q, D), if density is to be measured with them."""
        if self.rules.measures_density and queries.shape[2] > 1 and length >= _MEASURE_AGAIN * self._measured_at:
            self.latest_queries = queries[:, :, -LATEST_QUERIES * SPACING :][:, :, ::SPACING].detach().clone()

    # --- choosing ----------------------------------------------------------------------------------------------

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        """As `Predictor.select`. A guess looks only at what was a candidate in the last step."""
        keys, group, rules = self.keys, self.form.group_size, self.rules
        assert keys is not None
        count = keys.tokens // group
        if guess and self._candidates is not None and rules.selection == "default":
            among = rank_among(keys, query.states, query.scaling, group, self._candidates)
            best = largest(among, min(budget, among.shape[1]))
            return Choice(np.sort(np.take_along_axis(self._candidates, best, 1), 1))
        seen = None if query.visible is None else query.visible[:, : count * group].expand(self.rows, -1)
        if rules.selection == "random":
            importance = torch.rand(self.rows, count, generator=self._shared.generator).numpy()
            return _best(with_sinks(importance, rules.num_sinks, group, seen), budget)
        tail = None if rules.target_mass is None else self._recent_scores(query)
        ranking = rank_units(keys, query.states, query.scaling, group, budget, rules.selection, seen, tail)
        self._candidates = ranking.candidates
        if rules.target_mass is None or rules.selection != "default":
            return _best(with_sinks(ranking.importance, rules.num_sinks, group, seen), budget)
        mass = ranking.importance.copy()
        importance = with_sinks(ranking.importance, rules.num_sinks, group, seen)
        enough = self._enough(largest(importance, budget), importance, mass, ranking.rest, query.states.shape[1])
        return Choice(np.sort(enough, 1))

    def _enough(
        self, chosen: np.ndarray, importance: np.ndarray, mass: np.ndarray, rest: np.ndarray, heads: int
    ) -> np.ndarray:
        """As many of the units `chosen` (B, M), most important first, as every row needs for `target_mass`."""
        assert self.rules.target_mass is not None
        order = np.argsort(-np.take_along_axis(importance, chosen, 1), 1, kind="stable")
        chosen = np.take_along_axis(chosen, order, 1)
        captured = rest[:, None] + np.cumsum(np.take_along_axis(mass, chosen, 1).clip(min=0), 1)
        reached = captured >= self.rules.target_mass * heads
        needed = np.where(reached.any(1), reached.argmax(1) + 1, chosen.shape[1]).max()
        counters = self._shared.counters()
        counters.mass_captured += float(captured[:, needed - 1].sum()) / heads
        counters.mass_steps += len(chosen)
        return chosen[:, :needed]

    def _recent_scores(self, query: Query) -> np.ndarray:
        """Scaled scores (B, H, t), float32, of the query against the latest tokens' keys."""
        keys = query.recent()
        grouped = query.states.unflatten(1, (keys.shape[1], -1)).to(keys.dtype)
        scores = (grouped @ keys.transpose(-1, -2)).float().flatten(1, 2) * query.scaling
        if query.visible is not None:
            scores = scores.masked_fill(~query.visible[:, query.visible.shape[1] - keys.shape[2] :][:, None], -1e30)
        return scores.cpu().numpy()

    def density(self, most: int, query_of: Callable[[torch.Tensor], Query], length: int) -> np.ndarray | None:
        """(most + 1,): the share of attention mass that the tail and the m best units capture, by the prompt's latest
        queries and the compact keys, mean over queries, heads and rows. None where there is nothing to tell by.

        Forgets those queries. `query_of` makes a `Query` of states (B, H, D).
        """
        queries, self.latest_queries = self.latest_queries, None
        if queries is None or self.keys is None or queries.shape[0] != self.rows:
            return None
        self._measured_at = length
        group, curves = self.form.group_size, []
        count = self.keys.tokens // group
        for states in queries.unbind(2):
            query = query_of(states)
            tail = self._recent_scores(query)
            seen = None if query.visible is None else query.visible[:, : count * group].expand(self.rows, -1)
            ranking = rank_units(self.keys, states, query.scaling, group, min(most, count), "default", seen, tail)
            mass = -np.sort(-np.take_along_axis(ranking.importance, ranking.candidates, 1), 1)[:, :most]
            captured = (ranking.rest[:, None] + np.cumsum(mass, 1)).mean(0) / states.shape[1]
            captured = np.concatenate([[ranking.rest.mean() / states.shape[1]], captured])
            curves.append(np.pad(captured, (0, most + 1 - len(captured)), "edge"))
        return np.mean(curves, 0)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> None:
        self._candidates = None
        if self.keys is not None:
            self.keys.truncate(units * self.form.group_size)

    def select_rows(self, rows: torch.Tensor) -> None:
        self._candidates = None
        self.rows = len(rows)
        if self.latest_queries is not None:
            self.latest_queries = self.latest_queries[rows.to(self.latest_queries.device)]
        if self.keys is not None:
            self.keys.select_rows(rows)

    @property
    def tables_nbytes(self) -> int:
        return 0 if self.latest_queries is None else self.latest_queries.nbytes

    def close(self) -> None:
        self.close_keys()
        self._fitted_at = self._measured_at = 0
        self.latest_queries = self._candidates = None

    def close_keys(self) -> None:
        """Give the compact keys back."""
        if self.keys is not None:
            self.keys.close()
            self.keys = None

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        return {
            "summary": None if self.keys is None else self.keys.capture(),
            "adapter": self.adapter,
            "fitted_at": self._fitted_at,
            "measured_at": self._measured_at,
            "latest_queries": self.latest_queries,
        }

    def restore(self, tree: dict[str, Any]) -> None:
        """As `Predictor.restore`; `tree` also has "units", how many the history holds."""
        summary, heads, dim = tree["summary"], self.form.num_key_heads, self.form.key_dim
        if summary is not None:
            keys, adapter, sealed = summary["keys"], summary["adapter"], tree["units"] * self.form.group_size
            if keys.shape != (self.rows, sealed, keys.shape[-1]) or adapter.shape != (heads, dim, keys.shape[-1]):
                raise self._wrong(
                    f"its compact keys are {tuple(keys.shape)}, by an adapter of {tuple(adapter.shape)}, for "
                    f"{self.rows} x {sealed} tokens"
                )
        adapter, queries = tree["adapter"], tree["latest_queries"]
        right = adapter is None or (adapter.ndim == 2 and adapter.shape[0] == heads * dim)
        if queries is not None:
            right = right and queries.ndim == 4 and (queries.shape[0], queries.shape[3]) == (self.rows, dim)
            right = right and queries.shape[1] % heads == 0
        if not right:
            shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (adapter, queries)]
            raise self._wrong(
                f"adapter and latest queries are {shapes}, for {self.rows} sequences and {heads} key heads of {dim}"
            )
        if summary is not None:
            self.keys = LowRankKeys.restore(summary, self._shared.account, self._shared.workspace)
            self.keys.reserve(self.rules.reserve)
        self.adapter = adapter
        self.latest_queries = queries if self.rules.measures_density else None  # the configuration decides
        self._fitted_at, self._measured_at = tree["fitted_at"], tree["measured_at"]

    def _wrong(self, what: str) -> ContextError:
        return ContextError(f"{self._name} of the context does not hold together: {what}")


def _best(importance: np.ndarray, budget: int) -> Choice:
    """The `budget` most important units of each row."""
    rows, count = importance.shape
    units = largest(importance, budget if budget < count else count)
    units.sort(1)
    return Choice(units, importance=importance[np.arange(rows)[:, None], units])
