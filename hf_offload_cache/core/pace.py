"""Which of two ways of doing the same work is faster here, found by doing both in turns."""

from __future__ import annotations

import statistics


class Pace:
    """Says before each step whether to take the first way (`first`), and is told after it how long it took.

    Both ways must give the same results. Tries both in turns, forth and back, so that other work on the machine
    meets them alike, and goes on with the faster one: as soon as each of `CLEAR` steps took less than the other way's
    step beside it, a tenth less by their medians, or else after `TRIAL` steps of each by their medians. The first step
    of each is not counted. Tries again after `AGAIN` steps, since the length of the context and other work change.
    """

    CLEAR, TRIAL, AGAIN = 3, 8, 512

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
        if self._chosen is not None:
            return self._chosen
        return (len(self._taken[True]) + len(self._taken[False])) % 4 in (0, 3)

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
        first, second = self._taken[True][1:], self._taken[False][1:]
        tried = min(len(first), len(second))
        if tried < self.CLEAR:
            return
        faster = [one < other for one, other in zip(first, second, strict=False)]
        ways = statistics.median(first), statistics.median(second)
        clear = (all(faster) or not any(faster)) and min(ways) < 0.9 * max(ways)
        if clear or tried >= self.TRIAL - 1:
            self._chosen = ways[0] <= ways[1]
