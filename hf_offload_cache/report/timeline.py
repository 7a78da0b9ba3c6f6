"""What a cache says about when it does what. Without `trace` nobody listens, and saying it costs next to nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NOTHING = nullcontext()  # keeps no state: one serves every span


class Timeline:
    """Told of spans of work and of waiting; this one forgets them. `Trace` writes them to a file.

    Times are `time.perf_counter()` seconds. `add` is for any thread; all else is for the thread that runs the model.
    A span on the decode path is one line, `with shared.timeline.span("rank", layer_idx):`; without a trace it takes
    0.2 microseconds.

    The seams on the model tell the steps: `begin_step`, for each block `enter_block`, `enter_attention`,
    `leave_attention`, `enter_rest`, and `end_step`.
    """

    on = False
    """Somebody listens: what takes time only to be told about can be left out otherwise."""

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        """A span called `name` on the line `track` ("compute", "reads", "writes"), with JSON-able `details`, such as
        `bytes`. Spans of "compute" nest; those of another track may overlap, and get lines beside each other then."""

    def span(self, name: str, layer_idx: int | None = None) -> AbstractContextManager[None]:
        """A span on the line "compute" for as long as the block under it runs, also when that raises."""
        return _NOTHING

    def count(self, name: str, **values: float) -> None:
        """Curves of `values`, which hold from now on."""

    # --- the steps ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A forward of the whole model begins. One that has not ended was interrupted."""

    def describe_step(self, name: str, **details: Any) -> None:
        """What the step under way is to be called, "prefill" or "decode", and what to say about it."""

    def enter_block(self, layer_idx: int) -> None:
        """A decoder block begins; it lasts until the next one begins or the step ends."""

    def enter_attention(self, layer_idx: int) -> None:
        """Its attention begins."""

    def leave_attention(self, layer_idx: int) -> None:
        """Its attention has ended; the cache looks ahead now, if it does."""

    def enter_rest(self, layer_idx: int) -> None:
        """The cache is done; the block goes on."""

    def end_step(self) -> None:
        """The forward has ended."""

    # --- the file ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The cache is constructed: from now on an earlier trace of that name is gone."""

    @property
    def failure(self) -> OSError | None:
        """Why nothing is recorded any more, if so."""
        return None

    def flush(self) -> None:
        """Hand over what is held back."""

    def close(self) -> None:
        """The end; what is told from now on is forgotten. Idempotent."""


NO_TIMELINE = Timeline()
"""For those who were given none."""
