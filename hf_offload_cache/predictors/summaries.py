"""The base of predictors that keep one summary of each unit and rank units by it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from ..config import SelectiveConfig
from ..fetch.choice import Choice
from ..history.base import Sealed, in_units
from ..history.records import RecordFormat, sealed_groups
from ..history.state import Array, State
from ..memory.account import MemoryAccount
from ..memory.dry_run import DryRun
from .base import Decision, Predictor, Query
from .sinks import largest, with_sinks

_GROWTH, _ROOM = 8, 16
"""Without a reservation, room grows by an eighth, and by 16 units at least."""


class SummaryPredictor(Predictor):
    """Summaries (rows, units, *shape) in memory, on the keys' device. `Predictor` has the contract.

    A method implements `summarise` and `importance`. The summaries are booked in the account as "summaries".

    Args:
        rows: rows of the history.
        config: with `max_context`, room for that many tokens is allocated at once.
    """

    STATE: ClassVar[State] = State(
        "predictor", "summaries", {"units": "units"}, summaries=Array("rows units *shape", at="_held", optional=True)
    )

    def __init__(self, form: RecordFormat, rows: int, config: SelectiveConfig, account: MemoryAccount) -> None:
        self.form, self.rows, self.config = form, rows, config
        self.units = 0
        self._account, self._reserve = account, sealed_groups(form, config, config.max_context or 0)
        self._held: torch.Tensor | None = None

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        """Summaries (rows, n, *shape) of units with keys (rows, Hk, n, G, Dk); always of the same shape and type."""
        raise NotImplementedError(f"{type(self).__name__} does not summarise a unit: give it `summarise`")

    def importance(self, query: Query, summaries: torch.Tensor) -> torch.Tensor:
        """Each unit's importance to a query, (rows, units), comparable within a row. `summaries` is a view of what
        `summarise` made."""
        raise NotImplementedError(f"{type(self).__name__} does not rank units: give it `importance`")

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """As `Learner.rehearse`."""
        units = sealed_groups(self.form, self.config, context)
        self._room(units, self._example("cpu"))  # a method may look at its zeros
        assert self._held is not None
        if self.rows > 1:
            run.moves(self._held.nbytes)
        run.passes("scores", decode=score_bytes(self.rows, heads, units))

    def _example(self, device: torch.device | str) -> torch.Tensor:
        """Summaries of one unit of zeros in each row."""
        form = self.form
        unit = torch.zeros(1, form.num_key_heads, 1, form.group_size, form.key_dim, dtype=form.dtype, device=device)
        return self.summarise(unit.expand(self.rows, -1, -1, -1, -1))

    # --- learning ----------------------------------------------------------------------------------------------

    def ready(self, units: int) -> bool:
        return self.units == units

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """As `Predictor.learn`. Adds the new units; if earlier ones were missed, reads all of them again."""
        parts = iter(sealed.keys)
        if self.units + sealed.fresh // self.form.group_size != sealed.units:
            parts, self.units = sealed.stored_keys(), 0
        for keys in in_units(parts, self.form.group_size):
            made = self.summarise(keys)
            stop = self.units + made.shape[1]
            self._room(max(stop, sealed.units), made)
            assert self._held is not None
            self._held[:, self.units : stop] = made
            self.units = stop

    def _room(self, units: int, like: torch.Tensor) -> None:
        """Make room for `units` summaries like those in `like`. Raises `BudgetError` with nothing changed."""
        if self._held is None:
            units = max(units, self._reserve)
            shape = self.rows, 0, *like.shape[2:]
            self._held = self._account.empty("summaries", *shape, dtype=like.dtype, device=like.device)
        elif units > self._held.shape[1]:
            units = max(units + max(_ROOM, units // _GROWTH), self._reserve)
        if units > self._held.shape[1]:
            self.STATE.remake(self, units=units)

    # --- choosing ----------------------------------------------------------------------------------------------

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        """The `budget` most important units of each row, those with sinks included."""
        assert self._held is not None
        sequences, heads = query.states.shape[:2]
        with self._account.holding("scores", score_bytes(self.rows, heads, self.units)):
            importance = self.importance(query, self._held[:, : self.units]).float().cpu().numpy()
        importance = with_sinks(importance, self.config.num_sinks, self.form.group_size, query.visible)
        units = largest(importance, min(budget, self.units))
        return Choice(units, importance=np.take_along_axis(importance, units, 1))

    # --- changes and contexts ----------------------------------------------------------------------------------

    def truncate(self, units: int) -> None:
        self.STATE.truncate(self, units=units)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.STATE.select_rows(self, rows)
        self.rows = len(rows)

    def capture(self) -> dict[str, Any]:
        """As `Predictor.capture`; valid until the next change."""
        return self.STATE.capture(self)

    def restore(self, tree: dict[str, Any]) -> None:
        """As `Predictor.restore`; `tree["units"]` is the number of units in the history. Copies."""
        if (held := tree["summaries"]) is None:
            return
        like, units = self._example(held.device), tree["units"]
        self.STATE.check(self.STATE.own(tree), "a layer", like.dtype, rows=self.rows, units=units, shape=like.shape[2:])
        if units:
            self._room(units, held)
            self.units = units
            self.STATE.restore(self, tree)

    def close(self) -> None:
        self.STATE.close(self)
        self._held, self.units = None, 0


def score_bytes(rows: int, heads: int, units: int) -> int:
    """Bytes of every query head's scores and their reduction, in 32 bits."""
    return 2 * rows * heads * units * 4
