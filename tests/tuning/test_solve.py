"""The solver on made-up tables and profiles whose best choice is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.methods.disk_swap.tuning import (
    CompressionTable,
    IoProfile,
    Limits,
    ModelProfile,
    ReuseTable,
    Solution,
)
from hf_offload_cache.methods.disk_swap.tuning.solve import solve

SIZES = (1, 2, 4, 8)
CAPACITIES = [0, 100, 200, 300, 400]
RATES = [0.0, 0.25, 0.5, 0.75, 0.9]
LIMITS = Limits(num_selected=400, num_sinks=0, group_sizes=SIZES, delta=100, spend_rest=False)

REUSE = ReuseTable(CAPACITIES, *({size: RATES for size in SIZES} for _ in range(4)))
COMPRESSION = CompressionTable(256, 1, [64, 32, 16, 8], [1.0, 0.9, 0.8, 0.7], [1.0, 0.9, 0.8, 0.7])  # σ 4, 8, 16, 32
IO = IoProfile({4096: [1, 1000]}, {4096: [0.001, 1.0]}, dict.fromkeys(SIZES, 4096))
"""A millisecond a record: 400, 200, 100 and 50 ms a sequence for the groups of `SIZES`."""


def block(seconds: float, a_capacity: float = 0.0) -> ModelProfile:
    """The same for every batch, context and rank, and `a_capacity` more a token of reuse."""
    extra = [a_capacity * capacity for capacity in CAPACITIES]
    return ModelProfile([1], [4096], [8], [[[seconds]]], CAPACITIES, [extra])


def memory(fields: dict[str, Any], context: int, batch: int) -> int:
    """A byte a token and component, and ten a token of reuse."""
    return batch * (context * fields["rank"] // 1000 + 10 * fields["reuse_capacity"])


def solved(
    seconds: float, budget: int = 10**9, limits: Limits = LIMITS, batch: int = 1, context: int = 100_000, **changed: Any
) -> Solution:
    tables = {"reuse": REUSE, "compression": COMPRESSION, "io": IO, "model": block(seconds), **changed}
    return solve(batch, context, budget, memory=memory, limits=limits, **tables)


def chosen(solution: Solution) -> tuple[int, int, int]:
    return solution.group_size, solution.size, solution.reuse_capacity


NOTHING = ReuseTable(CAPACITIES, *({size: [0.0] * 5 for size in SIZES} for _ in range(4)))


@pytest.mark.parametrize(
    ("seconds", "limits", "asked", "wanted"),
    [
        # the smallest group whose reads hide, but for a share of alpha
        (0.4, {}, {}, (1, 64, 0)),
        (0.1, {}, {}, (4, 64, 0)),
        (0.085, {}, {}, (4, 64, 0)),
        (0.084, {}, {}, (8, 64, 0)),
        (0.085, {"alpha": 0.1}, {}, (8, 64, 0)),
        (0.4, {}, {"batch": 2, "budget": 12800}, (2, 64, 0)),
        # the smallest sigma that fits the budget
        (1.0, {}, {"budget": 6400}, (1, 64, 0)),
        (1.0, {}, {"budget": 6399}, (1, 32, 0)),
        (1.0, {}, {"budget": 800}, (1, 8, 0)),
        (1.0, {"sigma_max": 16.0}, {"budget": 1600}, (1, 16, 0)),
        # reuse where no group hides: groups of 8 read 12.5 ms at 300, which leaves 3400 bytes for rank 32
        (0.021, {}, {"budget": 6400}, (8, 32, 300)),
        (0.0175, {"group_sizes": (2, 4)}, {}, (2, 64, 400)),  # groups of 2 read 20 ms at 400
        (0.001, {}, {}, (8, 64, 400)),
        (0.001, {}, {"reuse": NOTHING}, (8, 64, 0)),
        (0.001, {}, {"budget": 3000}, (8, 8, 200)),  # rank 8 takes 800: 220 tokens of reuse fit
        # what is left of the budget
        (0.4, {"spend_rest": True}, {"budget": 8500}, (1, 64, 200)),  # 2100 bytes over
        (0.4, {"spend_rest": True}, {"budget": 7399}, (1, 64, 0)),
        # a search that begins with reuse, as far as sigma allows
        (0.4, {"first_capacity": 300, "first_sigma": 8.0}, {}, (1, 64, 300)),
        (0.4, {"first_capacity": 300, "first_sigma": 8.0}, {"budget": 6200}, (1, 32, 300)),
        (0.4, {"first_capacity": 300, "first_sigma": 8.0}, {"budget": 6199}, (1, 32, 200)),
        (0.4, {"first_capacity": 300, "first_sigma": 8.0}, {"budget": 3200}, (1, 32, 0)),
    ],
)
def test_the_choice(
    seconds: float, limits: dict[str, Any], asked: dict[str, Any], wanted: tuple[int, int, int]
) -> None:
    assert chosen(solved(seconds, limits=dataclasses.replace(LIMITS, **limits), **asked)) == wanted


def test_a_solution_says_what_it_hides_and_takes() -> None:
    solution = solved(0.4)
    assert (solution.hidden, solution.hidden_share, solution.waiting_seconds) == (True, 1.0, 0.0)
    assert (solution.sigma, solution.groups, solution.record_bytes, solution.reuse_rate) == (4.0, 400, 4096, 0.0)
    assert (solution.planned_bytes, solution.memory) == (6400, 10**9)
    part = solved(0.085)
    assert (part.hidden_share, part.waiting_seconds) == (pytest.approx(0.85), pytest.approx(0.015))
    little = solved(0.001)
    assert (little.hidden, little.hidden_share) == (False, pytest.approx(0.001 / 0.005))
    assert little.waiting_seconds == pytest.approx(0.004) and not solved(0.001, budget=3000).hidden
    reused = solved(0.021, budget=6400)
    assert (reused.hidden, reused.reuse_rate, reused.planned_bytes) == (True, 0.75, 6200)
    assert solved(0.4, batch=2, budget=12800).io_seconds == pytest.approx(0.4)
    rest = solved(0.4, budget=8500, limits=dataclasses.replace(LIMITS, spend_rest=True))
    assert rest.io_seconds == pytest.approx(0.2)


def test_too_small_a_budget_is_told_with_the_least() -> None:
    message = r"1,599 bytes are too little for 1 sequences of 100,000 tokens.* it takes 1,600"
    with pytest.raises(BudgetError, match=message):
        solved(1.0, budget=1599, limits=dataclasses.replace(LIMITS, sigma_max=16.0))


def test_the_least_that_would_do_is_that_of_the_cheapest_group() -> None:
    def by_group(fields: dict[str, Any], context: int, batch: int) -> int:
        return 1000 + 10 * fields["group_size"]

    with pytest.raises(BudgetError, match=r"it takes 1,010: allow that"):
        solve(1, 4096, 900, REUSE, COMPRESSION, IO, block(1.0), by_group, LIMITS)


def test_sinks_are_read_too() -> None:
    assert [Limits(num_selected=400, num_sinks=4).groups(size) for size in (1, 3, 8, 16)] == [404, 136, 51, 26]


def test_limits_that_make_no_sense() -> None:
    for changed in ({"alpha": 1.0}, {"alpha": -0.1}, {"delta": 0}, {"sigma_max": 0.0}, {"group_sizes": (4, 2)}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            Limits(**changed)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.floats(0.0005, 0.5), a_capacity=st.floats(0, 0.0001), budget=st.integers(500, 12_000),
    alpha=st.sampled_from([0.0, 0.15, 0.5]), batch=st.integers(1, 3),
)  # fmt: skip
def test_it_agrees_with_trying_everything_in_order(
    seconds: float, a_capacity: float, budget: int, alpha: float, batch: int
) -> None:
    limits = dataclasses.replace(LIMITS, alpha=alpha)
    tried = []
    for capacity, rate in zip(CAPACITIES, RATES, strict=True):
        for size in SIZES:
            fits = [r for r in (64, 32, 16, 8) if batch * (100 * r + 10 * capacity) <= budget]
            if fits:
                working, reading = seconds + a_capacity * capacity, batch * 0.4 / size * (1 - rate)
                tried.append((min(1.0, working / reading), (size, fits[0], capacity)))
    arguments: dict[str, Any] = {"budget": budget, "limits": limits, "batch": batch}
    arguments["model"] = block(seconds, a_capacity)
    if not tried:
        with pytest.raises(BudgetError):
            solved(seconds, **arguments)
        return
    hidden = [choice for share, choice in tried if share >= 1 - alpha + 1e-9]
    near = any(abs(share - (1 - alpha)) < 1e-9 for share, _ in tried)  # rounding decides
    if near:
        return
    best = max(share for share, _ in tried)
    found = solved(seconds, **arguments)
    assert found.hidden == bool(hidden)
    assert chosen(found) == (hidden[0] if hidden else next(c for s, c in tried if s >= best - 1e-12))
