"""The progress bar of tuning: what is being measured, and about how long it will take yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self


class Progress:
    """A bar on stderr for parts whose shares of the whole add up to 1, and the clock that they share.

    No bar where `shown` is False or stderr is no terminal. For the thread that tunes; leaving removes the bar, also
    after an exception.
    """

    def __init__(self, seconds: float, shown: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar: Any = Bar(
            *columns, console=console, transient=True, redirect_stdout=False,
            disable=not (shown and console.is_terminal),
        )  # fmt: skip
        self._task = self._bar.add_task("tuning", total=1.0)
        self._seconds = seconds
        self._before = self._share = 0.0
        self._name, self._deadline = "tuning", 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def begin(self, name: str, share: float) -> None:
        """The next part begins, which may take `share` of the time; `name` says what is measured."""
        self._before += self._share
        self._name, self._share = name, share
        self._deadline = time.perf_counter() + share * self._seconds
        self.done(0.0, "")

    def done(self, fraction: float, detail: str) -> None:
        """So much of the part is done, from 0 to 1, and `detail` is being measured."""
        self._bar.update(
            self._task, completed=self._before + fraction * self._share, description=f"{self._name}{detail}"
        )

    def within(self, index: int, count: int) -> Callable[[float, str], None]:
        """As `done`, of one of `count` samples."""
        return lambda fraction, detail: self.done((index + fraction) / count, f"{index + 1} of {count}, {detail}")

    @property
    def seconds_left(self) -> float:
        """Of the part; negative when it took more than its share."""
        return self._deadline - time.perf_counter()
