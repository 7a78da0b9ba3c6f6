"""A choice that stays good while the query it was made for has hardly moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import ContextError
from ...fetch.choice import Choice
from ...history.state import is_tensor

CONSECUTIVE, LEAST_CONSECUTIVE = 256, 16
"""Of a prompt's latest queries, those that tell how far a query usually moves from one token to the next; and with how
few that is first told."""
NEVER = 2.0
"""No cosine is as large: every query has moved."""
_MOVED = 0.25
"""The share of a prompt's queries that moved so far from the one before as to count as moved."""


class KeptChoice:
    """The latest choice of one layer, and which of its rows a query may go on with. For the thread that runs the model.

    Beyond the paper, which chooses anew at every step. The choice keeps .99 of its attention mass that way, and yet one
    fact in nine or five is lost: the query of a head that looks for it moves without the others.

    A query has moved where its cosine to the one that the choice was made for, all heads together, is below what is
    usual: the lower quartile of the cosines of a prompt's consecutive queries. What is usual differs between layers and
    models, so the prompt says it; before there was one of `LEAST_CONSECUTIVE` tokens, every step chooses anew.

    Args:
        steps: the most steps that attend to one choice; 1: each has its own.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.usual = NEVER
        """The cosine below which a query has moved."""
        self._choice: Choice | None = None
        self._budget = 0
        self._queries = np.zeros((0, 0), dtype=np.float32)
        self._ages = np.zeros(0, dtype=np.int64)

    def watch(self, queries: torch.Tensor) -> None:
        """A prompt's queries (B, H, q, D) tell how far a query usually moves."""
        if self.steps > 1 and queries.shape[2] >= (LEAST_CONSECUTIVE if self.usual == NEVER else CONSECUTIVE):
            flat = queries[:, :, -CONSECUTIVE:].detach().float().transpose(1, 2).flatten(2)
            self.usual = float(torch.cosine_similarity(flat[:, 1:], flat[:, :-1], dim=2).flatten().quantile(_MOVED))

    def moved(self, states: torch.Tensor, budget: int) -> tuple[Choice | None, list[int]]:
        """The choice to go on with for states (B, H, D), and the rows of it that are to be chosen anew. None where
        there is none, or not for this `budget` of units a row."""
        kept = self._choice
        if kept is None or self.usual == NEVER or self._budget != budget:
            return None, []
        flat = _unit(states)
        if flat.shape != self._queries.shape:
            return None, []
        near = np.einsum("ij,ij->i", flat, self._queries) >= self.usual
        return kept, np.flatnonzero(~near | (self._ages >= self.steps)).tolist()

    def went_on(self) -> None:
        """One more step attends to it as it is."""
        self._ages += 1

    def keep(self, choice: Choice, states: torch.Tensor, budget: int, rows: list[int] | None = None) -> None:
        """`choice` is of this step, within `budget`; those `rows` of it were made anew for states (B, H, D), None: all.
        """
        if self.steps == 1:
            return
        flat = _unit(states)
        if rows is None:
            self._queries, self._ages = flat, np.ones(len(flat), dtype=np.int64)
        else:
            self._queries[rows] = flat[rows]
            self._ages += 1
            self._ages[rows] = 1
        self._choice, self._budget = choice, budget

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        kept, which = self._choice, rows.numpy(force=True)
        if kept is not None:
            self._choice = kept.of_rows(which)
            self._queries, self._ages = self._queries[which], self._ages[which]

    def drop(self) -> None:
        """Units are no longer what they were."""
        self._choice = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        kept = self._choice
        own = 0 if kept is None else sum(part.nbytes for part in (kept.units, kept.importance) if part is not None)
        return self._queries.nbytes + own

    @staticmethod
    def planned(query_elements: int, units: int) -> int:
        """Bytes of what is kept at most, of queries of so many elements in all, and so many units."""
        return 4 * query_elements + (8 + 4) * units

    def capture(self) -> dict[str, Any]:
        """As a tree for `restore`."""
        tree: dict[str, Any] = {"usual": self.usual, "choice": None}
        if self._choice is not None:
            arrays = {**vars(self._choice), "ages": self._ages, "queries": self._queries}
            held = {name: torch.from_numpy(value.copy()) for name, value in arrays.items() if value is not None}
            tree["choice"] = {"budget": self._budget, **held}
        return tree

    def restore(self, tree: dict[str, Any], rows: int, units: int) -> None:
        """Go on with what was captured, copied, over a history of `units` units a row. Raises `ContextError`."""
        usual, choice = tree["usual"], tree["choice"]
        right = isinstance(usual, float) and -1.01 <= usual <= NEVER
        if right and choice is not None:
            queries, ages, chosen = choice["queries"], choice["ages"], choice["units"]
            right = is_tensor(queries, (rows, None), torch.float32)
            right = right and is_tensor(ages, (rows,), torch.int64, low=0, high=2**31)
            right = right and is_tensor(chosen, (rows, None), torch.int64, low=0, high=units - 1)
            right = right and type(choice["budget"]) is int and 0 < chosen.shape[1] <= choice["budget"] < 2**48
            right = right and bool((chosen.diff() > 0).all())
            importance = choice.get("importance")
            right = right and (importance is None or is_tensor(importance, tuple(chosen.shape), torch.float32))
        if not right:
            raise ContextError(
                f"what a layer of the context chose last does not hold together, for {rows} rows of {units} units: "
                "save it anew"
            )
        self.usual = usual
        if choice is not None and self.steps > 1:
            importance = None if importance is None else importance.numpy(force=True).copy()
            self._choice = Choice(chosen.numpy(force=True).copy(), importance=importance)
            self._queries, self._budget = queries.numpy(force=True).copy(), choice["budget"]
            self._ages = ages.numpy(force=True).copy()


def _unit(states: torch.Tensor) -> np.ndarray:
    """States (B, H, D) as rows (B, H D) of length 1, float32, on the host: so small that numpy is done with them before
    torch's threads are awake."""
    flat: np.ndarray = states.detach().float().numpy(force=True).reshape(len(states), -1)
    length = np.sqrt(np.einsum("ij,ij->i", flat, flat))
    return flat / np.maximum(length, 1e-30)[:, None]
