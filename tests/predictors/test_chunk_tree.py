"""The adaptive tree: what it finds where bounds are attained, what it judges for that, and what limits leave out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.baselines.tree_variants import important_tokens
from hf_offload_cache.methods.abstract_tree import best_tokens, front


class Scores:
    """A judge that knows all scores (rows, tokens); `slack` widens its bounds. Counts what it is asked for."""

    def __init__(self, scores: np.ndarray, slack: float = 0.0) -> None:
        self.of, self.slack, self.asked = scores, slack, 0

    def scores(self, nodes: np.ndarray, size: int) -> np.ndarray:
        self.asked += int((nodes >= 0).sum()) * -(-size // 2)
        return self._of(nodes, size)

    def bounds(self, nodes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        self.asked += int((nodes >= 0).sum())
        found = self._of(nodes, size)
        return found.max(2) + self.slack, found.min(2) - self.slack

    def _of(self, nodes: np.ndarray, size: int) -> np.ndarray:
        parts = self.of.reshape(len(self.of), -1, size)
        return np.take_along_axis(parts, np.maximum(nodes, 0)[..., None], 1)

    def find(self, sizes: tuple[int, ...], wanted: int | np.ndarray, room: tuple[int | None, ...] = ()):
        chunks = self.of.shape[1] // sizes[0]
        upper, lower = self.bounds(np.broadcast_to(np.arange(chunks), (len(self.of), chunks)), sizes[0])
        return important_tokens(upper, lower, sizes, np.broadcast_to(wanted, len(self.of)), self, room)


def test_the_worked_example() -> None:
    """32 tokens in 8 chunks of 4, 6 of them important: a whole chunk, and one token of each of two others."""
    scores = np.full((1, 32), 0.01, dtype=np.float32)
    scores[0, [1, 6, 14, 17, 23, 26]] = [0.05, 0.1, 0.08, 0.2, 0.12, 0.15]  # some are less unimportant
    important = [0, 11, 28, 29, 30, 31]
    scores[0, important] = [0.7, 0.6, 0.95, 0.8, 0.9, 0.85]
    judge = Scores(scores)
    found = judge.find((4, 2), 6)
    assert np.flatnonzero(found.keep[0]).tolist() == important
    assert found.evaluations == judge.asked == 12


def test_the_front_of_the_queue() -> None:
    """Chunks of 4. The best one is sure; the next two stand for a token each, which makes 6; no other is looked at."""
    upper = np.array([[0.7, 0.1, 0.6, 0.95, 0.3]], dtype=np.float32)
    lower = np.array([[0.0, 0.0, 0.0, 0.80, 0.2]], dtype=np.float32)
    decided = front(upper, lower, 4, np.array([6]))
    assert decided.sure.tolist() == [[False, False, False, True, False]]
    assert decided.unsure.tolist() == [[True, False, True, False, False]]
    decided = front(upper, lower, 4, np.array([3]))  # of the best one, three are to be found out
    assert not decided.sure.any()
    assert decided.unsure.tolist() == [[False, False, False, True, False]]


def test_no_more_nodes_than_may_be() -> None:
    upper = np.array([[0.7, 0.1, 0.6, 0.95, 0.3]], dtype=np.float32)
    decided = front(upper, np.zeros_like(upper), 4, np.array([12]), most=2)
    assert decided.unsure.tolist() == [[True, False, False, True, False]]


def test_where_nothing_is_known_at_least_each_node_counts_for_one_token() -> None:
    upper = np.array([[5, 7, -np.inf, 7, 1, 7]], dtype=np.float32)
    for wanted, most, expected in ((2, None, [1, 3]), (4, 3, [1, 3, 5]), (9, None, [0, 1, 3, 4, 5])):
        decided = front(upper, None, 8, np.array([wanted]), most)
        assert not decided.sure.any() and decided.unsure[0].nonzero()[0].tolist() == expected
        plain = front(upper, np.where(upper > -np.inf, -1e9, -np.inf).astype(np.float32), 8, np.array([wanted]), most)
        assert (plain.unsure == decided.unsure).all()


def test_what_is_no_node_is_never_in_front() -> None:
    upper = np.array([[-np.inf, 0.5, -np.inf], [0.1, 0.2, 0.3]], dtype=np.float32)
    decided = front(upper, upper, 2, np.array([6, 2]))
    assert decided.sure.tolist() == [[False, True, False], [False, False, True]]
    assert not decided.unsure.any()


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 3),
    chunks=st.integers(1, 12),
    sizes=st.sampled_from([(8, 4, 2), (8, 4, 2, 1), (16, 4), (4,), (16, 8, 2), (2, 1)]),
    wanted=st.integers(0, 60),
    levels=st.integers(2, 40),
    seed=st.integers(0, 2**16),
)
def test_attained_bounds_find_exactly_the_best(
    rows: int, chunks: int, sizes: tuple[int, ...], wanted: int, levels: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    tokens = chunks * sizes[0]
    scores = generator.integers(0, levels, (rows, tokens)).astype(np.float32)
    wants = generator.integers(0, wanted + 1, rows)
    judge = Scores(scores)
    found = judge.find(sizes, wants)
    assert found.evaluations == judge.asked
    for own, keep, want in zip(scores, found.keep, wants, strict=True):
        assert keep.sum() == min(want, tokens)
        assert np.sort(own[keep]).tolist() == np.sort(own)[tokens - keep.sum() :].tolist()


def test_loose_bounds_split_more_and_still_find_what_room_allows() -> None:
    """Bounds that say little: without limits all is split; a limit is kept at each level, the rest is left out."""
    generator = np.random.default_rng(3)
    scores = generator.random((1, 256), dtype=np.float32) ** 8
    best = np.argsort(scores[0])[-16:]
    judge = Scores(scores, slack=10.0)
    found = judge.find((16, 8, 4, 2), 16)
    tight = Scores(scores).find((16, 8, 4, 2), 16)
    assert sorted(best) == np.flatnonzero(tight.keep[0]).tolist()
    assert found.keep.sum() == 16 and found.evaluations >= tight.evaluations
    limited = Scores(scores, slack=10.0)
    found = limited.find((16, 8, 4, 2), 16, room=(48, 16, 0))
    assert found.evaluations == limited.asked == 16 + 4 * 2 + 4 * 2 + 4 * 2
    assert found.keep.sum() == 16


@pytest.mark.parametrize("wanted", [0, 5, 64])
def test_rows_want_different_numbers(wanted: int) -> None:
    scores = np.random.default_rng(1).random((3, 64), dtype=np.float32)
    found = Scores(scores).find((8, 2), np.array([wanted, 7, 0]))
    assert found.keep.sum(1).tolist() == [wanted, 7, 0]


def test_tokens_that_are_not_to_be_chosen_are_not() -> None:
    scores = np.full((1, 16), -np.inf, dtype=np.float32)
    scores[0, 9:] = np.arange(7)
    found = Scores(scores).find((4, 2), 12)
    assert np.flatnonzero(found.keep[0]).tolist() == list(range(9, 16))


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 3), tokens=st.integers(1, 40), wanted=st.integers(0, 50), seed=st.integers(0, 2**16))
def test_the_best_tokens(rows: int, tokens: int, wanted: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 9, (rows, tokens)).astype(np.float32)
    scores[generator.random((rows, tokens)) < 0.2] = -np.inf
    scores[generator.random((rows, tokens)) < 0.1] = np.inf
    for own, keep in zip(scores, best_tokens(scores, wanted), strict=True):
        there = np.sort(own[own > -np.inf])
        assert np.sort(own[keep]).tolist() == there[max(0, len(there) - wanted) :].tolist()
