"""Sinks are above everything, padding is below everything, wherever a row's first token lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload_cache.predictors import largest, sink_units, with_sinks


@pytest.mark.parametrize(
    ("num_sinks", "unit", "plain", "padded"),
    [(0, 4, 0, 0), (1, 4, 1, 1), (4, 4, 1, 2), (5, 4, 2, 2), (6, 4, 2, 3), (9, 1, 9, 9)],
)
def test_how_many_units_sinks_may_lie_in(num_sinks: int, unit: int, plain: int, padded: int) -> None:
    assert sink_units(num_sinks, unit, padded=False) == plain
    assert sink_units(num_sinks, unit, padded=True) == padded
    reached = {len({(start + token) // unit for token in range(num_sinks)}) for start in range(unit)}
    assert max(reached) == padded  # no row that begins anywhere needs more


def test_without_padding_the_first_units_are_above_all() -> None:
    importance = np.arange(10, dtype=np.float32).reshape(2, 5)
    found = with_sinks(importance, 6, 4)
    assert found is importance
    assert np.isinf(found[:, :2]).all()
    assert found[:, 2:].tolist() == [[2, 3, 4], [7, 8, 9]]
    assert with_sinks(np.ones((1, 3), np.float32), 0, 4).tolist() == [[1, 1, 1]]


def test_padded_rows_have_their_own_sinks() -> None:
    """The second row begins in the middle of unit 1, so that its four sinks lie in units 1 and 2."""
    visible = torch.ones(2, 23, dtype=torch.bool)  # the latest tokens' columns are there too
    visible[1, :7] = False
    found = with_sinks(np.zeros((2, 5), np.float32), 4, 4, visible)
    assert found.tolist() == [[np.inf, 0, 0, 0, 0], [-np.inf, np.inf, np.inf, 0, 0]]
    visible[1, 16:] = False  # as after a right-padded turn
    assert with_sinks(np.zeros((2, 5), np.float32), 0, 4, visible)[1].tolist() == [-np.inf, 0, 0, 0, -np.inf]


def test_a_sequence_has_as_many_rows_as_it_needs() -> None:
    """Rows are sequences times key heads: both heads of a sequence see its padding."""
    visible = torch.tensor([[False] * 4 + [True] * 8, [True] * 12])
    found = with_sinks(np.zeros((4, 3), np.float32), 2, 4, visible)
    assert found.tolist() == 2 * [[-np.inf, np.inf, 0]] + 2 * [[np.inf, 0, 0]]
    one = with_sinks(np.zeros((4, 3), np.float32), 2, 4, visible[:1])  # one mask for all
    assert one.tolist() == 4 * [[-np.inf, np.inf, 0]]


def test_sinks_at_the_very_end_stay_within() -> None:
    """All but the last token is padding: what would lie behind the units is the last one's."""
    visible = torch.zeros(1, 8, dtype=torch.bool)
    visible[0, 7] = True
    assert with_sinks(np.zeros((1, 2), np.float32), 4, 4, visible).tolist() == [[-np.inf, np.inf]]


def test_the_largest() -> None:
    values = np.array([[1.0, 9.0, 3.0, np.inf], [5.0, -np.inf, 7.0, 6.0]], dtype=np.float32)
    assert largest(values, 2).tolist() == [[1, 3], [2, 3]]
    assert largest(values, 0).shape == (2, 0)


def test_of_equal_values_the_first_are_among_the_largest() -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 6, (3, 40)).astype(np.float32)
    values[1, 7] = np.inf
    for count in (1, 9, 40):
        expected = np.sort(np.argsort(-values, 1, kind="stable")[:, :count], 1)
        assert np.array_equal(largest(values, count), expected)
    values[0, ::3], values[1] = np.nan, np.nan
    assert largest(values, 9)[:2].tolist() == [list(range(0, 27, 3)), list(range(9))]
