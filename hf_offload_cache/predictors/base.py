"""The contract of predictors, which select the units that a step attends to: tensors in, choice out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..fetch.choice import Choice, Estimates, Extents
from ..history.base import Sealed
from ..memory.dry_run import DryRun

Decision = Choice | Generator[Extents | Choice, torch.Tensor, Choice]
"""A choice, or a generator that looks at stored records first. The generator yields a request, is sent its records (-1:
zeros), and returns the choice. For a `Choice` of units it is sent entries (rows, E, entries a record, entry width).
They are fetched and kept like selected units; a returned choice of the same units, with a mask in `keep`, is gathered
from them. For `Extents`, which are read only for the look, it is sent payloads (rows, E, payload width)."""


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes that a step in a CUDA graph reads from its device at each replay. Its tensors have room for more."""

    recent: torch.Tensor
    """() int64: latest tokens a row, the step's own among them."""
    units: torch.Tensor
    """() int64: units a row; of a copy, tokens."""
    room: int
    """Units a row that there is room for."""


@dataclass(frozen=True)
class Query:
    """One query of every sequence, and the tokens it sees. Valid during the call."""

    states: torch.Tensor
    """(B, H, D), as the model's attention gets them."""
    scaling: float
    visible: torch.Tensor | None
    """(B or 1, T) bool: which tokens are not padding; None: all."""
    recent: Callable[[], torch.Tensor]
    """Keys (rows, Hk, t, D) of the latest tokens, which every step attends to: a view."""
    sizes: DeviceSizes | None = None
    """In a step that is captured: how many of the latest tokens and of the units exist; None: all."""


class Learner(Protocol):
    """A layer's summary of the stored units, for selecting among them. It never reads. For the thread that runs the
    model.

    Rows are the history's: sequences, or sequences times key heads. Its memory is booked in the account. A subclass
    without own memory only needs `ready`.
    """

    def ready(self, units: int) -> bool:
        """Whether it knows exactly the first `units` units, so that it can select among them."""

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Add the units just sealed. `queries` (B, H, q, D) belong to the call that added them; `visible` as in
        `Query`. If it raises, it is unchanged or not `ready`."""
        return

    def end_prompt(self, sealed: Sealed) -> None:
        """Fit what waited for the end of a prompt that came in pieces, to all sealed units: `sealed`, of which none is
        new. Comes before a step selects, and before a capture. If it raises, it may be called again."""
        return

    def truncate(self, units: int) -> None:
        """Keep only the first `units` units."""
        return

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by the present row `rows[i]`."""
        return

    def fitted_state(self) -> dict[str, Any] | None:
        """State fitted to queries, as in `capture` without units, for a predictor of the same keys that sees no
        queries; None if nothing is fitted to queries, or not yet."""
        return None

    def capture(self) -> dict[str, Any]:
        """The complete state as a tree of values and tensors for `restore`: not to be changed, no copies."""
        return {}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a captured state; for a new predictor. Computes nothing. Raises `ContextError` if the tree is not
        consistent."""
        return

    @property
    def tables_nbytes(self) -> int:
        """Bytes of its memory that are not booked in the account."""
        return 0

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """Become as large as for `context` tokens a row, and declare the temporary memory. `heads`: query heads a row;
        `wanted`: maximum units a row that a step selects. Only in a dry run, right after construction."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its memory: give it `rehearse`")

    def close(self) -> None:
        """Free the memory; it may learn again."""
        return


class Predictor(Learner, Protocol):
    """A learner that selects the units a step attends to."""

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        """Select at most `budget` of the units it is ready for, in each row, sinks included.

        `guess`: the query is a guess and the choice is only prefetched; prefer cheap over exact.
        """

    def estimate(self, queries: list[Query], units: list[np.ndarray]) -> Estimates | None:
        """Entries that stand for what each of `queries` would attend to in `units` (rows, n; -1: none), which the step
        does not read. They come from `Choice.next`. None: nothing is estimated."""
        return None

    def lost(self, query: Query, choice: Choice, estimated: bool) -> float | None:
        """Share of the attention mass of `query` that is on nothing of `choice`, its latest selection, and, if they
        are `estimated`, on none of `Choice.next`: mean over rows and heads, by its own estimate. None: not known."""
        return None
