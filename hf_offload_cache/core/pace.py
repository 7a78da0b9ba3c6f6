"""Which of two ways of doing the same work is faster here, found by doing both in turns."""

from __future__ import annotations

import statistics


class Pace:
    """Says before each step whether to take the first way (`first`), and is told after it how long it took.

    Both ways must give the same results. Tries `TRIAL` steps of each, goes on with the one whose median was smaller,
    and tries again after `AGAIN` steps, since the length of the context and other work on the machine change.
    """

    TRIAL, AGAIN = 8, 512

    def __init__(self, forced: bool | None = None) -> None:
        self._forced = forced
        self._taken: dict[bool, list[float]] = {True: [], False: []}
        self._chosen: bool | None = None
        self._since = 0

    @property
    def first(self) -> bool:
        """The way of the coming step."""
        if self._forced is not None:
            return self._forced
        return self._chosen if self._chosen is not None else len(self._taken[True]) < self.TRIAL

    def took(self, seconds: float) -> None:
        """A step the way of `first` took so long."""
        if self._forced is not None:
            return
        if self._chosen is not None:
            self._since += 1
            if self._since >= self.AGAIN:
                self._chosen, self._since, self._taken = None, 0, {True: [], False: []}
            return
        self._taken[self.first].append(seconds)
        if len(self._taken[False]) >= self.TRIAL:
            medians = {way: statistics.median(taken[1:]) for way, taken in self._taken.items()}
            self._chosen = medians[True] <= medians[False]
