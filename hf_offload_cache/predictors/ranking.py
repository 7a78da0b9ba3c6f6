"""How much units matter to a query, by compact keys (KVSwap, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .low_rank_keys import LowRankKeys
from .sinks import largest

_CANDIDATES = 4
"""Times the groups wanted: of how many the mass is estimated."""
_BELOW = 1e4
"""Puts what is no candidate below all candidates."""


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
    keys: LowRankKeys,
    query: torch.Tensor,
    scaling: float,
    group_size: int,
    wanted: int,
    rule: str = "default",
    visible: torch.Tensor | None = None,
    tail: np.ndarray | None = None,
) -> Ranking:
    """How much each group matters to query (B, H, D), by the compact `keys` of B rows: the order is right among the
    `wanted` best.

    "default": the group's estimated attention mass, summed over heads. Heads count alike: those with large raw
    scores do not drown the others. The best token of each group, a pass over integers, finds the candidates;
    exponentials are taken of these alone.
    "paper": raw scores summed over heads, then the maximum in the group (section 3.3, "Scoring and selection");
    the sum is linear, so one vector stands for all heads.

    `visible` (·, tokens) leaves padding out of all of it. `tail` (B, H, t) float32: scaled scores of tokens that
    are in no group, which share the softmax.

    The keys' device makes the scores and their maxima, a row at a time; the rest is small, and done by numpy on
    the host, where each of ten operations costs a few microseconds instead of waking torch's threads.
    """
    low = keys.low_rank_query(query)
    if rule == "paper":
        low = low.sum(1, keepdims=True)
    rows, groups = low.shape[0], keys.tokens // group_size
    count = min(_CANDIDATES * wanted, groups)
    importance = np.empty((rows, groups), dtype=np.float32)
    candidates = np.empty((rows, count), dtype=np.int64)
    rest = np.zeros(rows, dtype=np.float32)
    for row in range(rows):
        raw, unit = keys.row_scores(low[row], row, visible)
        grouped = raw.view(raw.shape[0], groups, group_size)
        best = _host(grouped.amax(2))  # (h, groups)
        if rule == "paper":
            importance[row] = best[0]
            candidates[row] = largest(best[:1], count)[0]
            continue
        factor = unit * np.float32(scaling)
        best *= factor
        top = np.maximum.reduce(best, -1, keepdims=True)
        last = None if tail is None else tail[row]
        if last is not None and last.size:
            top = np.maximum(top, last.max(-1, keepdims=True))
        peaks = _exp(best - top)
        total = of_peaks = _sum(peaks)
        if last is not None:
            rest_of_head = _sum(_exp(last - top))
            total = of_peaks + rest_of_head
        rough = (1 / total[:, 0]) @ peaks
        chosen = candidates[row] = largest(rough[None], count)[0]
        mass = _sum(_exp(_columns(grouped, chosen) * factor[..., None] - top[..., None]))[..., 0]
        total = total + _missing_mass(of_peaks, _sum(peaks[:, chosen]), _sum(mass))
        importance[row] = rough - _BELOW
        importance[row, chosen] = (1 / total[:, 0]) @ mass
        if last is not None:
            rest[row] = (rest_of_head / total).sum()
    return Ranking(importance, candidates, rest)


def _missing_mass(of_peaks: np.ndarray, of_chosen: np.ndarray, known: np.ndarray) -> np.ndarray:
    """What the sum of the peaks of all groups lacks of their mass, (h, 1), by the sum of the peaks of the chosen ones
    and their `known` mass: the others are taken to be as much larger than their best token as these."""
    others = of_peaks - of_chosen
    return known - of_chosen + others * (known / np.maximum(of_chosen, 1e-30) - 1)


def rank_among(
    keys: LowRankKeys, query: torch.Tensor, scaling: float, group_size: int, candidates: np.ndarray
) -> np.ndarray:
    """Estimated attention mass (B, n) of groups `candidates` (B, n) among themselves, summed over heads: a small
    part of the bytes that `rank_units` reads, for a query that is a guess."""
    low = keys.low_rank_query(query)
    importance = np.empty(candidates.shape, dtype=np.float32)
    for row, chosen in enumerate(torch.from_numpy(candidates).to(keys.device)):
        raw, unit = keys.scores(low[row], keys.of_units(row, chosen, group_size))
        scores = _host(raw.unflatten(1, (-1, group_size))) * (unit * np.float32(scaling))[..., None]
        mass = _exp(scores - scores.max((1, 2), keepdims=True)).sum(-1)
        importance[row] = (1 / mass.sum(-1)) @ mass
    return importance


def _columns(grouped: torch.Tensor, chosen: np.ndarray) -> np.ndarray:
    """grouped[:, chosen] as float32 on the host."""
    if grouped.device.type == "cpu" and grouped.dtype == torch.int32:
        return grouped.numpy()[:, chosen].astype(np.float32)
    return _host(grouped.index_select(1, torch.from_numpy(chosen).to(grouped.device)))


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy(force=True)


_sum = partial(np.add.reduce, axis=-1, keepdims=True)
"""Over the last axis, (..., 1): `ndarray.sum` is two calls more."""


def _exp(values: np.ndarray) -> np.ndarray:
    """exp of values at most 0; those too small for a normal number take many times longer and count for nothing."""
    return np.exp(np.maximum(values, -80.0, dtype=np.float32))
