"""Which of the gathered entries are attended to."""

from __future__ import annotations

import numpy as np

from hf_offload_cache.fetch import Choice, Extents, valid_entries


def test_what_is_kept_of_a_unit_counts_through_its_runs() -> None:
    """`keep` names a unit's entries in the order of its runs: units of six entries in records of four."""
    extents = Extents(
        np.array([[7, 8, 9]]), np.array([[2, 0, 1]]), np.array([[2, 4, 3]]), np.array([[0, 0, 1]])
    )
    keep = np.array([[[True, False, True, True, False, True], [False, True, True, False, False, False]]])
    found = valid_entries(Choice(np.array([[0, 1]]), keep=keep), extents, 4, there=3)
    assert found is not None
    assert found.astype(int).tolist() == [[0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1]]
    whole = valid_entries(Choice(np.array([[0, 1]])), extents, 4, there=3)
    assert whole is not None
    assert whole.astype(int).tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]]


def test_each_row_counts_for_itself() -> None:
    """Rows whose units have other runs: an entry of one says nothing of the other's; a missing record has none."""
    extents = Extents(
        np.array([[4, 5, 6], [7, 8, -1]]), None, np.array([[2, 2, 1], [2, 1, 2]]), np.array([[0, 0, 1], [0, 1, 2]])
    )
    keep = np.zeros((2, 3, 4), dtype=bool)
    keep[0, 0, 3] = keep[0, 1, 0] = keep[1, 0, 1] = keep[1, 1, 0] = keep[1, 2, :] = True
    found = valid_entries(Choice(np.array([[0, 1, -1], [0, 1, 2]]), keep=keep), extents, 2, there=5)
    assert found is not None
    assert found.astype(int).tolist() == [[0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]]
