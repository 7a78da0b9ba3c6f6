"""The adaptive tree: what it finds where bounds are attained, what it judges for that, and what limits leave out."""

from __future__ import annotations

import numpy as np
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

    def find(self, sizes: tuple[int, ...], wanted: int | np.ndarray):
        chunks = self.of.shape[1] // sizes[0]
        upper, lower = self.bounds(np.broadcast_to(np.arange(chunks), (len(self.of), chunks)), sizes[0])
        return important_tokens(upper, lower, sizes, np.broadcast_to(wanted, len(self.of)), self)


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


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 3), tokens=st.integers(1, 40), wanted=st.integers(1, 50), seed=st.integers(0, 2**16))
def test_the_best_tokens_and_of_equal_ones_the_first(rows: int, tokens: int, wanted: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 9, (rows, tokens)).astype(np.float32)
    scores[generator.random((rows, tokens)) < 0.2] = -np.inf
    scores[generator.random((rows, tokens)) < 0.1] = np.inf
    for own, keep in zip(scores, best_tokens(scores, wanted), strict=True):
        best = np.argsort(-own, kind="stable")[:wanted]
        assert keep.nonzero()[0].tolist() == sorted(best[own[best] > -np.inf].tolist())
