"""Plans from costs: near the bound, right in their dependencies, without a network or a model."""

from __future__ import annotations

import numpy as np
import pytest

from eval.baselines.greedy import Schedule, attended_by_all, bound, potential_aware
from hf_offload_cache.streaming import Costs, Line, meet, staircase


def dense(chunks: int, layers: int, balance: float, slope: float = 2e-8) -> Costs:
    """Of a dense model; `balance`: seconds of streaming over those of computing."""
    line = Line(1e-4, slope)
    tokens = [1024] * chunks
    costs = Costs.of_line(line, tokens, attended_by_all(tokens, layers), np.ones((chunks, layers)), 1.0)
    scale = balance * costs.columns[:, -1].sum() / costs.rest[:, 0].sum()
    return Costs(costs.computed, costs.projected, costs.streamed * scale)


@pytest.mark.parametrize("balance", [0.05, 0.3, 1, 3, 20])
@pytest.mark.parametrize("chunks", [1, 2, 7, 20])
def test_meeting_is_near_the_bound(chunks: int, balance: float) -> None:
    costs = dense(chunks, 16, balance)
    plan = Schedule.from_the_end(meet(costs), costs)
    assert plan.seconds(costs) <= 1.05 * bound(costs)
    assert max(plan.lanes(costs)) == pytest.approx(plan.seconds(costs))  # computing waits for nothing


def test_uneven_costs_have_a_staircase() -> None:
    """Upper layers are cheap to stream, and lower ones dear: where the plan is by layers, it is much better."""
    costs = dense(8, 12, 1.0)
    streamed = costs.streamed.copy()
    streamed[:, :6] *= 20
    uneven = Costs(costs.computed, costs.projected, streamed)
    plan, meeting = (Schedule.from_the_end(make(uneven), uneven) for make in (staircase, meet))
    assert plan.seconds(uneven) <= 1.05 * bound(uneven)
    assert plan.seconds(uneven) < 0.9 * meeting.seconds(uneven)
    assert list(plan.depths) == sorted(plan.depths, reverse=True)


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_brings_every_cell_once(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = int(generator.integers(1, 6)), int(generator.integers(2, 7))
    computed = generator.random(shape) + 0.1
    costs = Costs(computed, computed * 0.2, generator.random(shape) + 0.1)
    ours = (Schedule.from_the_end(make(costs), costs) for make in (meet, staircase))
    for plan in (*ours, potential_aware(costs, 1.0)):
        cells = {(chunk, layer) for chunk, depth in enumerate(plan.depths) for layer in range(depth)}
        assert all(1 <= depth <= shape[1] for depth in plan.depths)
        assert not cells & set(plan.order) and len(set(plan.order)) == len(plan.order)
        assert cells | set(plan.order) == {(chunk, layer) for chunk in range(shape[0]) for layer in range(shape[1])}
        assert plan.seconds(costs) >= bound(costs) - 1e-6 and plan.seconds(costs) >= max(plan.lanes(costs)) - 1e-9


def test_the_greedy_plan_of_the_paper_strands_computing() -> None:
    """It streams what is cheap, low layers as well, and what lies above them cannot be computed any more."""
    costs = dense(4, 30, 3.0)
    stage = float(costs.columns[:, -1].sum()) / 20
    assert potential_aware(costs, stage).seconds(costs) > 1.3 * Schedule.from_the_end(meet(costs), costs).seconds(costs)


def test_computing_waits_for_what_it_needs() -> None:
    """Two chunks of three layers: the second can go through layer 1 only when the first one's is there."""
    ones = np.ones((2, 3))
    costs = Costs(ones, ones * 0.5, ones * 10)
    plan = Schedule((1, 3), ((0, 1), (0, 2)))
    # 0.5 for the first layer of the first; 1 for that of the second; layer 1 of the first comes at 10; 1 more, and 0.5
    assert plan.seconds(costs) == pytest.approx(20)
    assert Schedule((1, 3), ((0, 2), (0, 1))).seconds(costs) == pytest.approx(21.5)


def test_a_line_is_fitted() -> None:
    line = Line(2e-4, 3e-8)
    attended, tokens = [512.0, 2048.0, 4608.0, 9256.0], [1024, 2048, 1024, 512]
    seconds = list(line.seconds(np.array(tokens), np.array(attended)))
    assert seconds[0] == pytest.approx(1024 * (2e-4 + 512 * 3e-8))
    found = Line.fitted(tokens, attended, seconds)
    assert found.fixed == pytest.approx(line.fixed) and found.slope == pytest.approx(line.slope)
    assert Line.fitted([100], [50], [0.5]) == Line(0.005, 0.0)
    assert Line.fitted(tokens, attended, [one / (i + 1) for i, one in enumerate(seconds)]).slope >= 0
