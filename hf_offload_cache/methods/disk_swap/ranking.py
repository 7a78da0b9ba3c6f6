"""Importance of groups to a query, by compact keys (KVSwap, section 3.3, scoring and selection)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...predictors.sinks import largest
from .compact_keys import CompactKeys, Scored

CANDIDATES = 4
"""Candidates for each selected group: a rough pass hands so many to the precise one, and a guess ranks only so many."""
_FEW, SOME = 8, 2
"""Groups for each candidate from which on a rough pass comes first, and from which on steps rank in turns if they score
candidates anyway, to estimate the others; see `few_of_many`."""
STEPS = 4
"""Steps from one ranking of all groups to the next, if few of many are selected. Steps in between rank candidates."""
_NOTHING = np.float32(-1e30)
"""Score of a group that must not count."""


@dataclass(frozen=True)
class Ranking:
    """Importance of each group to one query a row. Arrays on the host, owned by the caller."""

    importance: np.ndarray
    """(B, groups) float32, comparable within a row: the softmax weight of the group's best token, summed over heads."""
    beyond: np.ndarray | None = None
    """(B, H) float32: each head's softmax sum over all groups and exact tokens, divided by the sum over only candidates
    and exact tokens. None: all groups were scored with all components, and the next step will do so, too."""


def few_of_many(wanted: int, groups: int, times: int | None = None) -> bool:
    """True if there are at least `times` as many `groups` as candidates for `wanted` groups; None: eight times."""
    return (_FEW if times is None else times) * CANDIDATES * wanted <= groups


def rank_units(
    keys: CompactKeys,
    query: torch.Tensor,
    scaling: float,
    group_size: int,
    wanted: int,
    visible: torch.Tensor | None = None,
    exact: np.ndarray | None = None,
    apart: np.ndarray | None = None,
    in_turns: bool = False,
) -> Ranking:
    """Rank all groups for query (B, H, D) by the compact `keys` of B rows. The order of the `wanted` best is right.

    A group's best token represents it, as in KVSwap, section 3.3. The paper sums each token's raw scores over heads and
    then takes the group's maximum. Here each head takes its own maximum, then a softmax over all groups and the exact
    tokens, and importance sums that over heads. So heads with large raw scores do not drown the others.

    If few of many groups are selected, a rough pass finds `CANDIDATES` times as many, and only these are scored with
    all components. An estimate of the mass of all a group's tokens was hardly better on text, and made a step 1/10
    slower.

    The keys' device computes scores and their maxima, a row at a time. The rest is small, so numpy does it on the host,
    where each of ten operations costs a few microseconds instead of waking torch's threads.

    Args:
        visible: (·, tokens), excludes padding.
        exact: (B, H, t) float32, scaled exact scores of the sinks and the tail, which share the softmax but are not
            ranked.
        apart: (B, n), groups that contain sinks: they rank below all others, and their other tokens do not count.
        in_turns: the next steps rank candidates only, so `Ranking.beyond` is needed.
    """
    low = keys.low_rank_query(query)
    low *= np.float32(scaling)
    rows, groups = low.shape[0], keys.tokens // group_size
    count = min(CANDIDATES * wanted, groups - (0 if apart is None else apart.shape[1]))
    rough = few_of_many(wanted, groups) and keys.has_rough_form
    importance = np.empty((rows, groups), dtype=np.float32)
    beyond = np.empty((rows, low.shape[1]), dtype=np.float32) if rough or in_turns else None
    for row in range(rows):
        best = keys.best_of_units(low[row], row, group_size, visible, rough)
        excluded, last = None if apart is None else apart[row], None if exact is None else exact[row]
        if excluded is not None:
            best[:, excluded] = _NOTHING
        if rough:
            chosen = largest(_shares(*_weights(best, last), excluded)[None], count)[0]
            best[:, chosen] = keys.best_of_units(low[row], row, group_size, visible, units=chosen)
        weights, total = _weights(best, last)
        importance[row] = _shares(weights, total, excluded)
        if beyond is not None:
            if not rough:
                chosen = largest(importance[row][None], count)[0]
            scored = total - _sum(weights) + _sum(weights[:, chosen])
            beyond[row] = (total / np.maximum(scored, 1e-6 * total))[:, 0]
    return Ranking(importance, beyond)


def _weights(best: np.ndarray, last: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """exp of each head's `best` scores (h, groups) less its largest score, and the sum (h, 1) of exp over `best` and
    the exact scores `last` (h, t)."""
    both = best if last is None else np.concatenate([best, last], 1)
    weights = _exp(both - np.maximum.reduce(both, 1, keepdims=True))
    return weights[:, : best.shape[1]], _sum(weights)


def _shares(weights: np.ndarray, total: np.ndarray, excluded: np.ndarray | None = None) -> np.ndarray:
    """Importance (groups,): `weights` (h, groups) over each head's `total` (h, 1), summed over heads; -1 for the groups
    `excluded`."""
    shares: np.ndarray = (1 / total[:, 0]) @ weights
    if excluded is not None:
        shares[excluded] = -1
    return shares


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
) -> tuple[np.ndarray, tuple[Scored, np.ndarray] | None]:
    """Importance (B, n) float32 of only the groups `candidates` (B, n), on the scale of `rank_units`.

    Each head's softmax sum over all groups is estimated as `beyond` (B, H) times the sum over the candidates. This
    reads a small part of the bytes that `rank_units` reads. With `keep`, also returns the scores of the last row, and
    the largest (h, 1) of each head.
    """
    low = keys.low_rank_query(query)
    low *= np.float32(scaling)
    importance, kept = np.empty(candidates.shape, dtype=np.float32), None
    for row, chosen in enumerate(candidates):
        if keep:
            scored = keys.scored(low[row], row, chosen, group_size, visible)
            best = np.maximum.reduce(scored.by_unit, 1)
            kept = scored, np.maximum.reduce(best, 1, keepdims=True)
        else:
            best = keys.best_of_units(low[row], row, group_size, visible, units=chosen)
        if apart is not None:
            best[:, (chosen[:, None] == apart[row]).any(1)] = _NOTHING
        weights, total = _weights(best, None if exact is None else exact[row])
        importance[row] = _shares(weights, total if beyond is None else total * beyond[row][:, None])
    return importance, kept


_sum = partial(np.add.reduce, axis=-1, keepdims=True)
"""Sum over the last axis, (..., 1): two calls fewer than `ndarray.sum`."""


def _exp(values: np.ndarray) -> np.ndarray:
    """exp of values at most 0, clamped at -80: denormal results would be negligible, and many times slower."""
    return np.exp(np.maximum(values, -80.0, dtype=np.float32))
