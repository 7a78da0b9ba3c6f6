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


def test_what_is_hidden_at_once_keeps_the_smallest_group_and_sigma_and_no_reuse() -> None:
    solution = solved(0.4)
    assert chosen(solution) == (1, 64, 0)
    assert (solution.hidden, solution.hidden_share, solution.waiting_seconds) == (True, 1.0, 0.0)
    assert (solution.sigma, solution.groups, solution.record_bytes, solution.reuse_rate) == (4.0, 400, 4096, 0.0)
    assert (solution.planned_bytes, solution.memory) == (6400, 10**9)


def test_the_smallest_group_that_hides_is_taken() -> None:
    assert chosen(solved(0.1)) == (4, 64, 0)  # 100 ms of reads
    assert chosen(solved(0.084)) == (8, 64, 0)


def test_alpha_of_the_reads_may_stick_out() -> None:
    solution = solved(0.085)
    assert chosen(solution) == (4, 64, 0)
    assert solution.hidden_share == pytest.approx(0.85)
    assert solution.waiting_seconds == pytest.approx(0.015)
    assert chosen(solved(0.085, limits=dataclasses.replace(LIMITS, alpha=0.1))) == (8, 64, 0)


def test_sigma_is_the_smallest_that_fits_the_budget() -> None:
    assert chosen(solved(1.0, budget=6400)) == (1, 64, 0)
    assert chosen(solved(1.0, budget=6399)) == (1, 32, 0)
    assert chosen(solved(1.0, budget=800)) == (1, 8, 0)


def test_budget_goes_to_reuse_where_no_group_hides_and_the_groups_begin_anew() -> None:
    solution = solved(0.021, budget=6400)
    # groups of 8 read 50 ms; with rates 0.25 and 0.5: 37.5 and 25 ms, of which 21 ms hide 0.84; with 0.75: 12.5 ms, and
    # groups of 4 read 25 ms, of which 0.84 are hidden: so groups of 8 at 300, which leaves 3400 bytes for rank 32
    assert chosen(solution) == (8, 32, 300)
    assert (solution.hidden, solution.reuse_rate, solution.planned_bytes) == (True, 0.75, 6200)


def test_a_smaller_group_is_taken_back_when_reuse_allows_it() -> None:
    # at 400 tokens of reuse groups of 2 read 20 ms; nothing hid in 17 ms before
    limits = dataclasses.replace(LIMITS, group_sizes=(2, 4))
    assert chosen(solved(0.0175, limits=limits)) == (2, 64, 400)


def test_at_the_limits_the_best_is_returned_and_says_how_much_it_hides() -> None:
    solution = solved(0.001)
    assert chosen(solution) == (8, 64, 400)
    assert (solution.hidden, solution.hidden_share) == (False, pytest.approx(0.001 / 0.005))
    assert solution.waiting_seconds == pytest.approx(0.004)


def test_of_equals_the_one_with_less_reuse_is_returned() -> None:
    nothing = ReuseTable(CAPACITIES, *({size: [0.0] * 5 for size in SIZES} for _ in range(4)))
    assert chosen(solved(0.001, reuse=nothing)) == (8, 64, 0)


def test_reuse_stops_growing_where_sigma_max_no_longer_fits() -> None:
    solution = solved(0.001, budget=3000)  # rank 8 takes 800: 220 tokens of reuse fit
    assert chosen(solution) == (8, 8, 200)
    assert not solution.hidden


def test_sigma_max_keeps_ranks_out() -> None:
    limits = dataclasses.replace(LIMITS, sigma_max=16.0)
    assert chosen(solved(1.0, budget=1600, limits=limits)) == (1, 16, 0)
    message = r"1,599 bytes are too little for 1 sequences of 100,000 tokens.* it takes 1,600"
    with pytest.raises(BudgetError, match=message):
        solved(1.0, budget=1599, limits=limits)


def test_the_least_that_would_do_is_that_of_the_cheapest_group() -> None:
    def by_group(fields: dict[str, Any], context: int, batch: int) -> int:
        return 1000 + 10 * fields["group_size"]

    with pytest.raises(BudgetError, match=r"it takes 1,010: allow that"):
        solve(1, 4096, 900, REUSE, COMPRESSION, IO, block(1.0), by_group, LIMITS)


def test_the_batch_multiplies_reads_and_memory() -> None:
    solution = solved(0.4, batch=2, budget=12800)
    assert chosen(solution) == (2, 64, 0)
    assert solution.io_seconds == pytest.approx(0.4)


def test_the_rest_of_the_budget_goes_to_reuse_without_a_change_of_sigma_or_group() -> None:
    limits = dataclasses.replace(LIMITS, spend_rest=True)
    solution = solved(0.4, budget=8500, limits=limits)
    assert chosen(solution) == (1, 64, 200)  # 2100 bytes over
    assert solution.io_seconds == pytest.approx(0.2)
    assert chosen(solved(0.4, budget=7399, limits=limits)) == (1, 64, 0)


def test_the_search_begins_with_reuse_as_far_as_sigma_allows() -> None:
    limits = dataclasses.replace(LIMITS, first_capacity=300, first_sigma=8.0)
    assert chosen(solved(0.4, limits=limits)) == (1, 64, 300)
    assert chosen(solved(0.4, budget=6200, limits=limits)) == (1, 32, 300)
    assert chosen(solved(0.4, budget=6199, limits=limits)) == (1, 32, 200)
    assert chosen(solved(0.4, budget=3200, limits=limits)) == (1, 32, 0)


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
