"""Which combinations of parameters the default run takes. The others are slow: `make test-all` runs every one.

The choice is the same in every run and on every machine: it follows from the values and their order alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest

Factor = Iterable[Any] | Mapping[str, Any]
"""The values of one parameter. A mapping names them for the tests' ids."""


def combinations(
    *factors: Factor, strength: int = 1, times: int = 1, always: Callable[..., bool] = lambda *values: False,
) -> list[Any]:  # fmt: skip
    """Parameters for every combination of the factors' values, slow unless the default run takes it.

    With strength 1 every value occurs in the default run, `times` times or more; with strength 2 every pair of values
    of different factors does. Combinations for which `always(*values)` is true are in the default run too.
    """
    named = [list(one.items()) if isinstance(one, Mapping) else [(named_as(value), value) for value in one]
             for one in factors]  # fmt: skip
    grid = list(itertools.product(*(range(len(one)) for one in named)))
    values = {place: [named[factor][at][1] for factor, at in enumerate(place)] for place in grid}
    chosen = choose(grid, [place for place in grid if always(*values[place])], strength, times)
    return [
        pytest.param(
            *values[place],
            id="-".join(named[factor][at][0] for factor, at in enumerate(place)),
            marks=[] if place in chosen else pytest.mark.slow,
        )
        for place in grid
    ]


def named_as(value: Any) -> str:
    """A class's or function's name, or else the value, as the tests' ids have it."""
    return str(getattr(value, "__name__", value))


def in_full(*factors: Factor) -> list[Any]:
    """Parameters for every combination, all of them slow."""
    return [pytest.param(*one.values, id=one.id, marks=pytest.mark.slow) for one in combinations(*factors)]


def choose(
    grid: Collection[tuple[int, ...]], given: Iterable[tuple[int, ...]], strength: int, times: int
) -> set[tuple[int, ...]]:
    """Greedy: again and again the place with the most that still has to occur, the least used and first of those."""

    def parts(place: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
        return list(itertools.combinations(enumerate(place), strength))

    possible = Counter(part for place in grid for part in parts(place))
    chosen, used = set(given), Counter[Any]()
    for place in chosen:
        used.update(parts(place))

    def missing(part: tuple[tuple[int, int], ...]) -> int:
        return max(0, min(times, possible[part]) - used[part])

    while any(map(missing, possible)):
        best = max(
            (place for place in grid if place not in chosen),
            key=lambda place: (sum(map(missing, parts(place))), -sum(used[part] for part in parts(place))),
        )
        chosen.add(best)
        used.update(parts(best))
    return chosen
