"""How much units matter to a query, by compact keys (KVSwap, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .compact_keys import CompactKeys
from .sinks import largest

CANDIDATES = 4
PEAKS = False
"""Times the groups wanted: of how many the mass is estimated."""
_BELOW = 1e4
"""Puts what is no candidate below all candidates."""
_NOTHING = np.float32(-1e30)
"""The score of what counts for nothing."""


@dataclass(frozen=True)
class Ranking:
    """How much each group matters to one query a row. Arrays of the host, the caller's own."""

    importance: np.ndarray
    """(B, groups) float32, to be compared in a row; right among `candidates`. With the default rule, there, the
    estimated attention mass summed over heads."""
    candidates: np.ndarray
    """(B, n) groups whose mass was estimated, in no order."""
    rest: np.ndarray
    """(B,) estimated mass, summed over heads, of what is no group: the tail."""


def rank_units(
    keys: CompactKeys,
    query: torch.Tensor,
    scaling: float,
    group_size: int,
    wanted: int,
    rule: str = "default",
    visible: torch.Tensor | None = None,
    exact: np.ndarray | None = None,
    apart: np.ndarray | None = None,
    only: Sequence[int] | None = None,
) -> Ranking:
    """How much each group matters to query (B, H, D), by the compact `keys` of B rows: the order is right among the
    `wanted` best.

    "default": the group's estimated attention mass, summed over heads. Heads count alike: those with large raw
    scores do not drown the others. The best token of each group, a pass over integers, finds the candidates;
    exponentials are taken of these alone.
    "paper": raw scores summed over heads, then the maximum in the group (section 3.3, "Scoring and selection");
    the sum is linear, so one vector stands for all heads.

    `visible` (·, tokens) leaves padding out of all of it. `exact` (B, H, t) float32: scaled scores of tokens that share
    the softmax and are not ranked: the tail, and the sinks, whose groups `apart` (B, n) come out below all others; what
    else is in those counts for nothing.
    `only` those rows are ranked, and in the ranking; None: all.

    The keys' device makes the scores and their maxima, a row at a time; the rest is small, and done by numpy on
    the host, where each of ten operations costs a few microseconds instead of waking torch's threads.
    """
    low = keys.low_rank_query(query)
    if rule == "paper":
        low = low.sum(1, keepdims=True)
    rows, groups = range(low.shape[0]) if only is None else only, keys.tokens // group_size
    count = min(CANDIDATES * wanted, groups - (0 if apart is None else apart.shape[1]))
    importance = np.empty((len(rows), groups), dtype=np.float32)
    candidates = np.empty((len(rows), count), dtype=np.int64)
    rest = np.zeros(len(rows), dtype=np.float32)
    for place, row in enumerate(rows):
        best = keys.best_of_units(low[row], row, group_size, visible)
        if rule == "paper":
            importance[place] = best[0]
            candidates[place] = largest(best[:1], count)[0]
            continue
        best *= np.float32(scaling)
        others = None if apart is None else apart[row]
        if others is not None:
            best[:, others] = _NOTHING
        top = np.maximum.reduce(best, -1, keepdims=True)
        last = None if exact is None else exact[row]
        if last is not None and last.size:
            top = np.maximum(top, np.maximum.reduce(last, -1, keepdims=True))
        best -= top
        peaks = _exp(best)
        total = of_peaks = _sum(peaks)
        if last is not None:
            rest_of_head = _sum(_exp(last - top))
            total = of_peaks + rest_of_head
        rough = (1 / total[:, 0]) @ peaks
        if others is not None:
            rough[others] = -1
        if PEAKS:
            importance[place] = rough
            if last is not None:
                rest[place] = (rest_of_head / total).sum()
            continue
        chosen = candidates[place] = largest(rough[None], count)[0]
        scores = keys.of_units(low[row], row, chosen, group_size, visible)
        scores *= np.float32(scaling)
        scores -= top[..., None]
        mass = _sum(_exp(scores))[..., 0]
        total = total + _missing_mass(of_peaks, _sum(peaks[:, chosen]), _sum(mass))
        importance[place] = rough - _BELOW
        importance[place, chosen] = (1 / total[:, 0]) @ mass
        if last is not None:
            rest[place] = (rest_of_head / total).sum()
    return Ranking(importance, candidates, rest)


def _missing_mass(of_peaks: np.ndarray, of_chosen: np.ndarray, known: np.ndarray) -> np.ndarray:
    """What the sum of the peaks of all groups lacks of their mass, (h, 1), by the sum of the peaks of the chosen ones
    and their `known` mass: the others are taken to be as much larger than their best token as these."""
    others = of_peaks - of_chosen
    return known - of_chosen + others * (known / np.maximum(of_chosen, 1e-30) - 1)


def rank_among(
    keys: CompactKeys, query: torch.Tensor, scaling: float, group_size: int, candidates: np.ndarray
) -> np.ndarray:
    """Estimated attention mass (B, n) of groups `candidates` (B, n) among themselves, summed over heads: a small
    part of the bytes that `rank_units` reads, for a query that is a guess."""
    low = keys.low_rank_query(query)
    importance = np.empty(candidates.shape, dtype=np.float32)
    for row, chosen in enumerate(candidates):
        scores = keys.of_units(low[row], row, chosen, group_size, None)
        scores *= np.float32(scaling)
        mass = _exp(scores - scores.max((1, 2), keepdims=True)).sum(-1)
        importance[row] = (1 / mass.sum(-1)) @ mass
    return importance


_sum = partial(np.add.reduce, axis=-1, keepdims=True)
"""Over the last axis, (..., 1): `ndarray.sum` is two calls more."""


def _exp(values: np.ndarray) -> np.ndarray:
    """exp of values at most 0; those too small for a normal number take many times longer and count for nothing."""
    return np.exp(np.maximum(values, -80.0, dtype=np.float32))
