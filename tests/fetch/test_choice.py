"""The union of choices: what any names, cut to those that most name."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.fetch import Choice


def of(*rows: list[int], importance: list[list[float]] | None = None) -> Choice:
    units = np.array(rows, dtype=np.int64)
    weights = None if importance is None else np.array(importance, dtype=np.float32)
    return Choice(units, importance=weights)


def test_all_of_names_every_unit_of_every_row() -> None:
    choice = Choice.all_of(3, 2)
    assert choice.units.tolist() == [[0, 1]] * 3
    assert (choice.keep, choice.importance) == (None, None)
    assert Choice.all_of(2, 0).units.shape == (2, 0)


def test_one_choice_is_its_own_union() -> None:
    choice = of([1, 5, 9])
    assert Choice.union([choice], 1) is choice


def test_what_any_names_ascending_and_once() -> None:
    union = Choice.union([of([1, 4], [0, 2]), of([0, 4], [0, 2]), of([4, 7], [0, 3])], 10)
    assert union.units.tolist() == [[0, 1, 4, 7], [0, 2, 3, -1]]
    assert (union.units < 0).any()
    assert (Choice.union([of([1, 2]), of([2, 3])], 3).units >= 0).all()


def test_cut_to_what_most_name_then_to_what_matters_most() -> None:
    """Unit 4 is named thrice; of those named once or twice the votes decide, then the sum of importance."""
    three = [
        of([1, 4, 8], importance=[[0.1, 0.5, 0.3]]),
        of([2, 4, 8], importance=[[0.9, 0.1, 0.1]]),
        of([3, 4, 9], importance=[[0.2, 0.1, 0.8]]),
    ]
    assert Choice.union(three, 1).units.tolist() == [[4]]
    assert Choice.union(three, 2).units.tolist() == [[4, 8]]
    assert Choice.union(three, 3).units.tolist() == [[2, 4, 8]]
    assert Choice.union(three, 4).units.tolist() == [[2, 4, 8, 9]]


def test_units_that_lie_in_several_records_are_as_many() -> None:
    records = np.array([[3, 1, 1]])
    matters = np.array([[0.9, 0.3, 0.5]], dtype=np.float32)
    two = [Choice(np.array([[1, other, 8]]), None, matters * other, records) for other in (4, 2)]
    assert Choice.union(two, 5).units.tolist() == [[1, 4, 8]]
    assert Choice.union(two, 4).units.tolist() == [[1, 8]]
    assert Choice.union(two, 2).units.tolist() == [[1]]


def test_sinks_outlast_every_cut_and_padding_none() -> None:
    """An importance of infinity, as sinks have it, and of minus infinity, as units of padding have it."""
    inf = float("inf")
    two = [of([0, 3, 5], importance=[[-inf, 4.0, inf]]), of([1, 2, 5], importance=[[9.0, 0.0, inf]])]
    assert Choice.union(two, 3).units.tolist() == [[1, 3, 5]]
    assert Choice.union(two, 4).units.tolist() == [[1, 2, 3, 5]]


def test_choices_of_units_that_are_missing() -> None:
    union = Choice.union([of([2, -1], [3, 4]), of([-1, -1], [4, 5])], 2)
    assert union.units[0].tolist() == [2, -1]
    assert union.units[1, 0] == 3 or union.units[1].tolist() == [4, 5]
    assert 4 in union.units[1]
    assert (union.units < 0).any()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), rows=st.integers(1, 3), queries=st.integers(2, 4), most=st.integers(1, 12))
def test_a_union_is_within_what_was_named_and_its_limit(
    data: st.DataObject, rows: int, queries: int, most: int
) -> None:
    wanted = st.lists(st.integers(0, 9), min_size=3, max_size=3, unique=True).map(sorted)
    choices = [of(*[data.draw(wanted) for _ in range(rows)]) for _ in range(queries)]
    union = Choice.union(choices, most)
    widths = []
    for row in range(rows):
        votes = np.bincount(np.concatenate([choice.units[row] for choice in choices]), minlength=10)
        got = union.units[row][union.units[row] >= 0]
        assert (np.diff(got) > 0).all()
        assert (union.units[row, len(got) :] == -1).all()
        assert len(got) == min(most, np.count_nonzero(votes))
        assert (votes[got] > 0).all()
        left = np.setdiff1d(np.flatnonzero(votes), got)
        assert not len(left) or votes[left].max() <= votes[got].min()
        widths.append(len(got))
    assert (union.units < 0).any() == (min(widths) < max(widths))
