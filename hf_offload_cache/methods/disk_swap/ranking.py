"""How much units matter to a query, by compact keys (KVSwap, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...predictors.sinks import largest
from .compact_keys import CompactKeys

CANDIDATES = 4
"""Times the groups wanted: of how many what was found roughly is found again with all that is known; and from how many
a guess may choose."""
_FEW = 8
"""Where candidates are at most one group in so many, all are first ranked roughly."""
STEPS = 4
"""There all are ranked once in so many steps; in between, those that mattered most when each was last looked at."""
_NOTHING = np.float32(-1e30)
"""The score of what counts for nothing."""


@dataclass(frozen=True)
class Ranking:
    """How much each group matters to one query a row. Arrays of the host, the caller's own."""

    importance: np.ndarray
    """(B, groups) float32, to be compared in a row: the weight of the group's best token in softmax, summed over heads,
    which count equally."""
    beyond: np.ndarray | None = None
    """(B, h) by how many times the sum of each head's softmax is larger than over those groups alone that were looked
    at closely, and the exact tokens; None: all were."""


def few_of_many(wanted: int, groups: int) -> bool:
    """Whether candidates for `wanted` of so many groups are few of them."""
    return _FEW * CANDIDATES * wanted <= groups


def rank_units(
    keys: CompactKeys,
    query: torch.Tensor,
    scaling: float,
    group_size: int,
    wanted: int,
    visible: torch.Tensor | None = None,
    exact: np.ndarray | None = None,
    apart: np.ndarray | None = None,
) -> Ranking:
    """How much each group matters to query (B, H, D), by the compact `keys` of B rows: the order is right among the
    `wanted` best.

    A group counts as its best token does: as the share of its head's softmax over the best tokens of all groups and
    the tokens that are compared exactly, summed over heads. Heads count equally: those with large raw scores do not
    drown the others. Where few of many groups are wanted, a rough pass over all finds `CANDIDATES` times as many,
    which are then looked at closely. The mass of all a group's tokens, by estimate, chooses hardly better on text,
    and a step took a tenth longer.

    `visible` (·, tokens) leaves padding out of all of it. `exact` (B, H, t) float32: scaled scores of tokens that share
    the softmax and are not ranked: the tail, and the sinks, whose groups `apart` (B, n) come out below all others; what
    else is in those counts for nothing.

    The keys' device makes the scores and their maxima, a row at a time; the rest is small, and done by numpy on
    the host, where each of ten operations costs a few microseconds instead of waking torch's threads.
    """
    low = keys.low_rank_query(query)
    low *= np.float32(scaling)
    rows, groups = low.shape[0], keys.tokens // group_size
    count = min(CANDIDATES * wanted, groups - (0 if apart is None else apart.shape[1]))
    rough = few_of_many(wanted, groups) and keys.has_rough_form
    importance = np.empty((rows, groups), dtype=np.float32)
    beyond = np.empty((rows, low.shape[1]), dtype=np.float32) if rough else None
    for row in range(rows):
        best = keys.best_of_units(low[row], row, group_size, visible, rough)
        others, last = None if apart is None else apart[row], None if exact is None else exact[row]
        if others is not None:
            best[:, others] = _NOTHING
        if rough:
            chosen = largest(_shares(*_weights(best, last), others)[None], count)[0]
            best[:, chosen] = keys.best_of_units(low[row], row, group_size, visible, units=chosen)
        weights, total = _weights(best, last)
        importance[row] = _shares(weights, total, others)
        if beyond is not None:
            looked_at = total - _sum(weights) + _sum(weights[:, chosen])
            beyond[row] = (total / np.maximum(looked_at, 1e-6 * total))[:, 0]
    return Ranking(importance, beyond)


def _weights(best: np.ndarray, last: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """exp of each head's `best` scores (h, groups), less the largest, and the sum (h, 1) of these and of as much of the
    scores `last` (h, t)."""
    both = best if last is None else np.concatenate([best, last], 1)
    weights = _exp(both - np.maximum.reduce(both, 1, keepdims=True))
    return weights[:, : best.shape[1]], _sum(weights)


def _shares(weights: np.ndarray, total: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """(groups,): `weights` (h, groups) over each head's `total` (h, 1), summed over heads; below 0 for `others`."""
    shares: np.ndarray = (1 / total[:, 0]) @ weights
    if others is not None:
        shares[others] = -1
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
) -> np.ndarray:
    """How much groups `candidates` (B, n) matter, (B, n) float32: as `rank_units` has it, where the sum of each head's
    softmax is `beyond` (B, h) times what it is over these. A small part of the bytes that it reads."""
    low = keys.low_rank_query(query)
    low *= np.float32(scaling)
    importance = np.empty(candidates.shape, dtype=np.float32)
    for row, chosen in enumerate(candidates):
        best = keys.best_of_units(low[row], row, group_size, visible, units=chosen)
        if apart is not None:
            best[:, np.isin(chosen, apart[row])] = _NOTHING
        weights, total = _weights(best, None if exact is None else exact[row])
        importance[row] = _shares(weights, total if beyond is None else total * beyond[row][:, None])
    return importance


_sum = partial(np.add.reduce, axis=-1, keepdims=True)
"""Over the last axis, (..., 1): `ndarray.sum` is two calls more."""


def _exp(values: np.ndarray) -> np.ndarray:
    """exp of values at most 0; those too small for a normal number take many times longer and count for nothing."""
    return np.exp(np.maximum(values, -80.0, dtype=np.float32))
