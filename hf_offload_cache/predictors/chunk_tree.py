"""The adaptive tree (LeoAM, section 4.2): the most important tokens, found by judging chunks of them, and parts of
chunks alone where what is known of a whole one does not decide.

A node of size s is tokens [j s, (j + 1) s) of a row, and is judged by two bounds of the importance of its tokens. All
rows are judged a level at a time.

Steps use the queue's `front` alone, and where no lower bound tells anything what is first in the queue. On text
(SmolLM2-135M, 400 of 1,000 tokens of 4K) bounds of a half decide nothing that those of the whole chunk did not: to
descend through halves of what was brought, 32 or 16 tokens and then pairs, took 1.06 and 1.13 times as many evaluations
as judging each token by its key, through all halves 1.84 times, and took longer. `important_tokens` is the whole of
section 4.2, exact where bounds are attained, and what that was measured with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Judge(Protocol):
    """What is known of parts of chunks: of nodes (rows, n) of `size` tokens each. What it says of -1 is not used."""

    def bounds(self, nodes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """What the importance of each node's tokens is at most, and at least: two of (rows, n) float32."""

    def scores(self, nodes: np.ndarray, size: int) -> np.ndarray:
        """The importance of each token of each node, (rows, n, size) float32; -inf: not to be chosen."""


@dataclass(frozen=True)
class Front:
    """What was made of the nodes of one level, (rows, n) bool each; what is in neither is a desert."""

    sure: np.ndarray
    """All tokens are important: no more than are wanted can be more so than the least of them."""
    unsure: np.ndarray
    """Some tokens may be: to be split."""


def front(
    upper: np.ndarray, lower: np.ndarray | None, size: int, wanted: np.ndarray, most: int | None = None
) -> Front:
    """The front of the queue: as many nodes, the highest upper bounds first, as hold `wanted` important tokens.

    How many a node holds is counted by what its bounds say of the best node that is left out: all where the lower
    bound is no lower than that one's upper bound, else one, which the upper bound stands for. So where upper bounds
    are attained, as those of single numbers are, no important token is left out.

    Args:
        upper, lower: (rows, n) float32 bounds of the nodes; -inf: no node. `lower` None: below all upper bounds.
        wanted: (rows,) tokens a row.
        most: nodes a row that may be in the front; None: all.
    """
    rows, nodes = upper.shape
    if lower is None:
        count = np.minimum(wanted, nodes if most is None else most)
        return Front(np.zeros(upper.shape, dtype=bool), _first(upper, count))
    order = np.argsort(-upper, 1, kind="stable")
    queue, least = np.take_along_axis(upper, order, 1), np.take_along_axis(lower, order, 1)
    place = np.arange(nodes)
    # how many nodes have to be in the front until no upper bound outside is above each node's lower bound
    whole_from = np.maximum(above(queue, least), place + 1)
    counted = np.ones((rows, nodes + 2), dtype=np.int64)  # [m]: tokens that a front of m nodes is counted with
    counted[:, 0] = 0
    np.add.at(counted, (np.arange(rows)[:, None], whole_from), size - 1)
    enough = np.cumsum(counted, 1)[:, : nodes + 1] >= wanted[:, None]
    length = np.where(enough.any(1), enough.argmax(1), nodes)
    length = np.minimum(length, nodes if most is None else min(most, nodes))
    inside = (place < length[:, None]) & (queue > -np.inf)
    sure = inside & (whole_from * size <= wanted[:, None]) & (least > -np.inf)
    found = [np.empty_like(inside) for _ in range(2)]
    for flags, part in zip(found, (sure, inside & ~sure), strict=True):
        np.put_along_axis(flags, order, part, 1)
    return Front(*found)


def _first(upper: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Which of (rows, n) are the `count` (rows,) highest of a row, of equal ones the first ones; of -inf none."""
    if (count >= upper.shape[1]).all():
        return upper > -np.inf
    order = np.argsort(-upper, 1, kind="stable")
    found = np.zeros(upper.shape, dtype=bool)
    np.put_along_axis(found, order, np.arange(upper.shape[1]) < count[:, None], 1)
    return found & (upper > -np.inf)


def above(queue: np.ndarray, least: np.ndarray) -> np.ndarray:
    """How many of `queue` (..., n) are above each of `least` (..., n): of one shape, int64."""
    count = queue.shape[-1]
    both = np.argsort(np.concatenate([-least, -queue], -1), -1, kind="stable")  # of equal ones, those of `least` first
    passed = np.empty(both.shape, dtype=np.int64)
    np.put_along_axis(passed, both, np.cumsum(both >= count, -1), -1)
    return passed[..., :count]


@dataclass(frozen=True)
class Found:
    """Which tokens are important, and what it took."""

    keep: np.ndarray
    """(rows, tokens) bool."""
    evaluations: int
    """Nodes and tokens that were judged, of all rows. Two tokens are one evaluation: their keys are as much to compare
    with as two bounds."""


def important_tokens(
    upper: np.ndarray, lower: np.ndarray, sizes: tuple[int, ...], wanted: np.ndarray, judge: Judge,
    room: tuple[int | None, ...] = (),
) -> Found:  # fmt: skip
    """The `wanted` most important tokens of each row (fewer where there are not so many), by descending from nodes
    whose bounds `upper` and `lower` (rows, n) are known.

    Args:
        sizes: tokens a node, of each level, falling; each divides the one before. What is split down to the last one is
            judged token by token, and so are the nodes themselves where there is one size alone.
        room: of each level the most tokens a row that may be in its front, beyond those that are wanted; None, and
            beyond its end: no limit. Without limits what is left out is decided by bounds alone.
    """
    rows, size = len(upper), sizes[0]
    keep = np.zeros((rows, upper.shape[1] * size), dtype=bool)
    nodes = np.broadcast_to(np.arange(upper.shape[1]), upper.shape)
    left = np.minimum(wanted, (upper > -np.inf).sum(1) * size)
    evaluations = int((upper > -np.inf).sum())
    for level in range(len(sizes)):
        limit = room[level] if level < len(room) else None
        decided = front(upper, lower, size, left, None if limit is None else -(-(int(left.max()) + limit) // size))
        _mark(keep, np.where(decided.sure, nodes, -1), size)
        left = left - decided.sure.sum(1) * size
        nodes = _together(np.where(decided.unsure, nodes, -1))
        if not nodes.shape[1]:
            break
        if level + 1 < len(sizes):
            parts = size // sizes[level + 1]
            split = nodes[:, :, None] * parts + np.arange(parts)
            nodes, size = np.where(nodes[:, :, None] >= 0, split, -1).reshape(rows, -1), sizes[level + 1]
        there = nodes >= 0
        if level + 2 < len(sizes):
            upper, lower = (np.where(there, bound, -np.inf) for bound in judge.bounds(nodes, size))
            evaluations += int(there.sum())
        else:
            scores = np.where(there[:, :, None], judge.scores(nodes, size), -np.inf).reshape(rows, -1)
            _mark(keep, _best(scores, nodes, size, left), 1)
            evaluations += int(there.sum()) * -(-size // 2)
            break
    return Found(keep, evaluations)


def best_tokens(scores: np.ndarray, wanted: int) -> np.ndarray:
    """Which tokens of (rows, n) have the `wanted` highest scores of a row: (rows, n) bool; of -inf none."""
    keep = scores > -np.inf
    count = scores.shape[1] - wanted
    if count > 0:
        np.put_along_axis(keep, scores.argpartition(count - 1, 1)[:, :count], False, 1)
    return keep


def _together(nodes: np.ndarray) -> np.ndarray:
    """Those that are not -1, in order, at the begin of each row, as wide as the longest."""
    order = np.argsort(nodes < 0, 1, kind="stable")
    return np.take_along_axis(nodes, order, 1)[:, : int((nodes >= 0).sum(1).max(initial=0))]


def _mark(keep: np.ndarray, nodes: np.ndarray, size: int) -> None:
    """Set the tokens of nodes (rows, n), -1: none."""
    row, column = (nodes >= 0).nonzero()
    if row.size:
        keep.reshape(len(keep), -1, size)[row, nodes[row, column]] = True


def _best(scores: np.ndarray, nodes: np.ndarray, size: int, left: np.ndarray) -> np.ndarray:
    """Tokens (rows, m) with the highest `scores` (rows, n size) of `nodes`, `left` of each row, then -1."""
    count = min(int(left.max(initial=0)), scores.shape[1])
    if not count:
        return np.empty((len(scores), 0), dtype=np.int64)
    best = np.argsort(-scores, 1, kind="stable")[:, :count]
    tokens = np.take_along_axis(nodes, best // size, 1) * size + best % size
    there = (np.arange(count) < left[:, None]) & (np.take_along_axis(scores, best, 1) > -np.inf)
    return np.where(there, tokens, -1)
