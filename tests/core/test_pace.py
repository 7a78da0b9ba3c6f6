"""Trying two ways and keeping the faster one."""

from __future__ import annotations

import pytest

from hf_offload_cache.core.pace import Pace


def drive(pace: Pace, steps: int, seconds: dict[bool, float]) -> list[bool]:
    ways = []
    for _ in range(steps):
        ways.append(pace.first)
        pace.took(seconds[ways[-1]])
    return ways


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_kept_and_tried_again(faster: bool) -> None:
    pace = Pace()
    ways = drive(pace, 2 * Pace.TRIAL, {faster: 1.0, not faster: 2.0})
    assert ways == [True] * Pace.TRIAL + [False] * Pace.TRIAL
    assert drive(pace, Pace.AGAIN, {faster: 1.0, not faster: 2.0}) == [faster] * Pace.AGAIN
    ways = drive(pace, 2 * Pace.TRIAL, {faster: 2.0, not faster: 1.0})
    assert ways == [True] * Pace.TRIAL + [False] * Pace.TRIAL
    assert pace.first is not faster


def test_one_slow_step_does_not_decide() -> None:
    """The first step of a trial pays for what the change of ways costs."""
    pace = Pace()
    for seconds in [9.0] + [1.0] * (Pace.TRIAL - 1) + [2.0] * Pace.TRIAL:
        pace.took(seconds)
    assert pace.first


@pytest.mark.parametrize("forced", [True, False])
def test_forced(forced: bool) -> None:
    assert drive(Pace(forced), 40, {True: 1.0, False: 1.0}) == [forced] * 40
