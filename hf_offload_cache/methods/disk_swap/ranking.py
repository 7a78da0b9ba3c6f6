"""Importance of groups to a query, by compact keys (KVSwap, section 3.3, scoring and selection)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch

from ...predictors.sinks import largest
from .compact_keys import CompactKeys, Scored

CANDIDATES = 4
"""Candidates for each selected group: a rough pass hands so many to the precise one, and a guess ranks only so many."""
_FEW = 8
"""Groups for each candidate from which on a rough pass comes first."""
_ALL = 16
"""Groups for each selected one up to which all are scored with all components, if scores are kept. A rough pass, and
then one of the candidates, makes a step of 15K tokens a tenth longer."""
STEPS = 4
"""Steps from one ranking of all groups to the next, if few of many are selected. Steps in between rank candidates."""
_NOTHING = np.float32(-1e30)
"""Score of a group that must not count."""


class Candidates(NamedTuple):
    """Groups of one row, scored token by token. Valid until the keys' next product."""

    groups: np.ndarray | None
    """(n,), ascending; None: all."""
    scored: Scored
    top: np.ndarray
    """(h, 1) float32: each head's largest score of them."""

    @classmethod
    def of(
        cls, keys: CompactKeys, low: np.ndarray, row: int, groups: np.ndarray | None, group_size: int,
        visible: torch.Tensor | None,
    ) -> tuple[Self, np.ndarray]:  # fmt: skip
        """Score `groups` of a row by low-rank queries `low` (h, ·); and each one's largest score, (h, n)."""
        scored = keys.scored(low, row, groups, group_size, visible)
        best = scored.best()
        return cls(groups, scored, np.maximum.reduce(best, 1, keepdims=True)), best


@dataclass(frozen=True)
class Ranking:
    """Importance of each group to one query of each sequence. Rows are sequences, or their key heads if these choose
    apart. Arrays on the host, owned by the caller."""

    importance: np.ndarray
    """(rows, groups) float32, comparable within a row: the softmax weight of the group's best token, summed over the
    row's query heads."""
    beyond: np.ndarray | None = None
    """(rows, h) float32: each query head's softmax sum over all groups and exact tokens, divided by the sum over only
    candidates and exact tokens. None: the next step ranks all groups, too."""
    candidates: Candidates | None = None
    """The groups that were scored with all components, if `rank_units` was to keep them and there is one sequence."""


def few_of_many(wanted: int, groups: int) -> bool:
    """True if there are at least eight times as many `groups` as candidates for `wanted` groups."""
    return _FEW * CANDIDATES * wanted <= groups


def most_kept(wanted: int, groups: int, at_once: int, heads: int) -> int:
    """Upper bound on the groups whose scores `rank_units` keeps at a time, of up to `groups`; `at_once` and `heads`: as
    there."""
    return min(groups, max(heads * CANDIDATES * wanted, min(_ALL * wanted, at_once)))


def rank_units(
    keys: CompactKeys,
    query: torch.Tensor,
    scaling: float,
    group_size: int,
    wanted: int,
    visible: torch.Tensor | None = None,
    exact: np.ndarray | None = None,
    apart: np.ndarray | None = None,
    keep: bool = False,
    at_once: int = 1 << 62,
    heads: int = 1,
) -> Ranking:
    """Rank all groups for query (B, H, D) by the compact `keys` of B sequences. The order of the `wanted` best is
    right.

    A group's best token represents it, as in KVSwap, section 3.3. The paper sums each token's raw scores over heads and
    then takes the group's maximum. Here each head takes its own maximum, then a softmax over all groups and the exact
    tokens, and importance sums that over heads. So heads with large raw scores do not drown the others.

    If few of many groups are selected, a rough pass finds `CANDIDATES` times as many, and only these are scored with
    all components. If scores are to be kept, it does so from `_ALL` groups for each selected one. An estimate of the
    mass of all a group's tokens was hardly better on text, and made a step 1/10 slower.

    The keys' device computes scores and their maxima, a row at a time. The rest is small, so numpy does it on the host,
    where each of ten operations costs a few microseconds instead of waking torch's threads.

    Args:
        visible: (·, tokens), excludes padding.
        exact: (B, H, t) float32, scaled exact scores of the sinks and the tail, which share the softmax but are not
            ranked.
        apart: (B, n), groups that contain sinks: they rank below all others, and their other tokens do not count.
        keep: return the scores of a single sequence, for an estimate of what is not selected.
        at_once: the most groups of which all scores fit the memory.
        heads: number of parts of the query heads that each have their own importance of groups: all key heads, or 1.
            The rough pass finds candidates for each part; all heads are scored with the union.
    """
    low = keys.low_rank_query(query)
    low *= np.float32(scaling)
    rows, groups = low.shape[0], keys.tokens // group_size
    count = min(CANDIDATES * wanted, groups - (0 if apart is None else apart.shape[1]))
    few, keep = few_of_many(wanted, groups), keep and rows == 1
    every, candidates = keep and groups <= min(_ALL * wanted, at_once), None
    rough = keys.has_rough_form and (few or (keep and not every))
    importance = np.empty((rows, heads, groups), dtype=np.float32)
    beyond = np.empty((rows, low.shape[1]), dtype=np.float32) if rough and few else None
    for row in range(rows):
        if every and not rough:
            candidates, best = Candidates.of(keys, low[row], row, None, group_size, visible)
        else:
            best = keys.best_of_units(low[row], row, group_size, visible, rough)
        excluded, last = None if apart is None else apart[row], None if exact is None else exact[row]
        if excluded is not None:
            best[:, excluded] = _NOTHING
        if rough:
            chosen = largest(_shares(*_weights(best, last), heads, excluded), count)
            chosen = chosen[0] if heads == 1 else np.unique(chosen)
            if keep:
                candidates, best[:, chosen] = Candidates.of(keys, low[row], row, chosen, group_size, visible)
            else:
                best[:, chosen] = keys.best_of_units(low[row], row, group_size, visible, units=chosen)
        weights, total = _weights(best, last)
        importance[row] = _shares(weights, total, heads, excluded)
        if beyond is not None:
            scored = total - _sum(weights) + _sum(weights[:, chosen])
            beyond[row] = (total / np.maximum(scored, 1e-6 * total))[:, 0]
    beyond = None if beyond is None else beyond.reshape(rows * heads, -1)
    return Ranking(importance.reshape(rows * heads, groups), beyond, candidates)


def _weights(best: np.ndarray, last: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """exp of each head's `best` scores (h, groups) less its largest score, and the sum (h, 1) of exp over `best` and
    the exact scores `last` (h, t). Of a head with a score that is NaN, all are 0, and their sum is 1."""
    both = best if last is None else np.concatenate([best, last], 1)
    weights = _exp(both - np.maximum.reduce(both, 1, keepdims=True))
    total = _sum(weights)
    if not np.add.reduce(total, None) > 0:
        nothing = np.isnan(total[:, 0])
        weights[nothing], total[nothing] = 0, 1
    return weights[:, : best.shape[1]], total


def _shares(weights: np.ndarray, total: np.ndarray, heads: int, excluded: np.ndarray | None = None) -> np.ndarray:
    """Importance (heads, groups): `weights` (H, groups) over each query head's `total` (H, 1), summed over the query
    heads of each of `heads` parts; -1 for the groups `excluded`."""
    shares: np.ndarray = (1 / total).reshape(heads, 1, -1) @ weights.reshape(heads, -1, weights.shape[1])
    if excluded is not None:
        shares[..., excluded] = -1
    return shares[:, 0]


def rank_among(
    keys: CompactKeys,
    query: torch.Tensor,
    scaling: float,
    group_size: int,
    candidates: np.ndarray,
    visible: torch.Tensor | None = None,
    exact: np.ndarray | None = None,
    apart: np.ndarray | None = None,
    beyond: np.ndarray | None = None,
    keep: bool = False,
    heads: int = 1,
) -> tuple[np.ndarray, Candidates | None]:
    """Importance (rows, n) float32 of only the groups `candidates` (rows, n), on the scale of `rank_units`.

    Each query head's softmax sum over all groups is estimated as `beyond` (rows, h) times the sum over the candidates
    of its sequence. This reads a small part of the bytes that `rank_units` reads. With `keep`, also returns the scores
    of a single sequence. `heads`: as in `rank_units`.
    """
    low = keys.low_rank_query(query)
    low *= np.float32(scaling)
    rows, kept = len(low), None
    beyond = None if beyond is None else beyond.reshape(rows, -1, 1)
    importance = np.empty((rows, heads, candidates.shape[1]), dtype=np.float32)
    for row, of_heads in enumerate(candidates.reshape(importance.shape)):
        chosen = of_heads[0] if heads == 1 else np.unique(of_heads)
        if keep and rows == 1:
            kept, best = Candidates.of(keys, low[row], row, chosen, group_size, visible)
        else:
            best = keys.best_of_units(low[row], row, group_size, visible, units=chosen)
        if apart is not None:
            best[:, (chosen[:, None] == apart[row]).any(1)] = _NOTHING
        weights, total = _weights(best, None if exact is None else exact[row])
        shares = _shares(weights, total if beyond is None else total * beyond[row], heads)
        importance[row] = shares if heads == 1 else shares[np.arange(heads)[:, None], chosen.searchsorted(of_heads)]
    return importance.reshape(candidates.shape), kept


_sum = partial(np.add.reduce, axis=-1, keepdims=True)
"""Sum over the last axis, (..., 1): two calls fewer than `ndarray.sum`."""


def _exp(values: np.ndarray) -> np.ndarray:
    """exp of values at most 0, clamped at -80: denormal results would be negligible, and many times slower."""
    return np.exp(np.maximum(values, -80.0, dtype=np.float32))
