"""What decides which units a step attends to: tensors in, choice out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..fetch.choice import Choice, Extents
from ..history.base import Sealed
from ..memory.dry_run import DryRun

Decision = Choice | Generator[Extents | Choice, torch.Tensor, Choice]
"""A choice; or a generator that yields what it wants to look at, is sent the entries (rows, E, entries a record, entry
width; -1: zeros), and returns the choice. Units, as a `Choice`, are fetched as those that are attended to, and kept as
they are: a choice of the same units, which says what to `keep` of them, is gathered from them. Extents are read for the
look alone."""


@dataclass(frozen=True)
class Query:
    """One query of every sequence, and what it sees. Valid for the call."""

    states: torch.Tensor
    """(B, H, D), as the model's attention gets them."""
    scaling: float
    visible: torch.Tensor | None
    """(B or 1, T) bool: what of the tokens held is no padding; None: all."""
    recent: Callable[[], torch.Tensor]
    """Keys (rows, Hk, t, D) of the latest tokens, which are attended to anyhow: a view."""


class Learner(Protocol):
    """What a layer keeps of what is stored, to choose by. Never reads by itself. For the thread that runs the model.

    Rows are the history's: sequences, or sequences times key heads. What it holds is in the account. A subclass that
    holds nothing itself needs `ready` alone.
    """

    def ready(self, units: int) -> bool:
        """It has learned of the first `units` units, so that it can choose among them."""

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Units were sealed. `queries` (B, H, q, D) are those of the call that added them; `visible` as in `Query`.
        What it raises leaves it as it was, or not `ready`."""
        return

    def truncate(self, units: int) -> None:
        """Only the first `units` units stay."""
        return

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        return

    def lesson(self) -> dict[str, Any] | None:
        """State fitted to queries, as `capture` gives it without units, for a predictor that is given the same keys
        without queries; None: nothing is fitted to queries, or not yet."""
        return None

    def capture(self) -> dict[str, Any]:
        """All that is held, as a tree of values and tensors for `restore`: not to be changed, no copies."""
        return {}

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured; for a new predictor. Computes nothing. Raises `ContextError` where the tree does not
        hold together."""
        return

    @property
    def tables_nbytes(self) -> int:
        """Bytes of what it holds that is not in the account."""
        return 0

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """Be as large as `context` tokens a row make it, and declare what is held for a while. `heads`: query heads a
        row; `wanted`: units a row that a step selects at most. Only in a dry run, right after construction."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it holds: give it `rehearse`")

    def close(self) -> None:
        """Give the memory back; it may learn anew."""
        return


class Predictor(Learner, Protocol):
    """A learner that names the units a step attends to."""

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        """At most `budget` of the units it is ready for, in each row, sinks among them.

        `guess`: the query is one, what comes of it is only read ahead; cheaper is better than right.
        """
