"""Trying two ways and keeping the faster one."""

from __future__ import annotations

import pytest

from hf_offload_cache.core import Pace


def drive(pace: Pace, steps: int, seconds: dict[bool, float]) -> list[bool]:
    ways = []
    for _ in range(steps):
        ways.append(pace.first)
        pace.took(seconds[ways[-1]])
    return ways


TURNS = [True, False, False, True]


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_kept_and_tried_again(faster: bool) -> None:
    pace = Pace()
    clear = {faster: 1.0, not faster: 2.0}
    assert drive(pace, 8, clear) == 2 * TURNS
    assert drive(pace, Pace.AGAIN, clear) == [faster] * Pace.AGAIN
    assert drive(pace, 8, {faster: 2.0, not faster: 1.0}) == 2 * TURNS
    assert pace.first is not faster


@pytest.mark.parametrize("faster", [True, False])
def test_a_machine_that_gets_slower_does_not_decide(faster: bool) -> None:
    pace = Pace()
    for step in range(8):
        pace.took((1.0 if pace.first is faster else 1.3) * (1 + step / 16))
    assert [pace.first, pace.first] == [faster, faster]


@pytest.mark.parametrize("faster", [True, False])
def test_what_is_not_clear_is_tried_longer_and_decided_by_medians(faster: bool) -> None:
    """The slower way was faster once."""
    pace, ways = Pace(), []
    for step in range(2 * Pace.TRIAL):
        ways.append(pace.first)
        pace.took(1.0 if ways[-1] is faster else 0.9 if step in (4, 5) else 1.1)
    assert ways == Pace.TRIAL // 2 * TURNS
    assert [pace.first, pace.first] == [faster, faster]


def test_nearly_equal_ways_are_tried_longer() -> None:
    pace, ways = Pace(), []
    for _ in range(2 * Pace.TRIAL):
        ways.append(pace.first)
        pace.took(1.0 if ways[-1] else 1.05)
    assert ways == Pace.TRIAL // 2 * TURNS
    assert pace.first


def test_one_slow_step_does_not_decide() -> None:
    """The first step of a way pays for what the change of ways costs; and a later one may have bad luck."""
    pace, step = Pace(), {True: 0, False: 0}
    for _ in range(2 * Pace.TRIAL):
        way = pace.first
        step[way] += 1
        pace.took(9.0 if way and step[way] in (1, 3) else 1.0 if way else 2.0)
    assert pace.first


@pytest.mark.parametrize("forced", [True, False])
def test_forced(forced: bool) -> None:
    assert drive(Pace(forced), 40, {True: 1.0, False: 1.0}) == [forced] * 40
