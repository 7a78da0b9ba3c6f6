"""How much of the attention mass the groups hold that coded compact keys choose, by the bytes of a code."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..memory.account import MemoryAccount, Workspace
from ..methods.disk_swap.coding import fit_coding
from ..methods.disk_swap.compact_keys import CodedKeys
from ..methods.disk_swap.config import DiskSwapConfig
from ..methods.disk_swap.ranking import rank_units
from ..predictors.sinks import largest, with_sinks

_QUERIES, _SPACING = 4, 4
"""So many of the latest queries are asked, every fourth."""


def kept_mass(
    keys: torch.Tensor,
    queries: torch.Tensor,
    scaling: float,
    sizes: list[int],
    settings: DiskSwapConfig,
    group_size: int,
) -> list[float]:
    """For each of `sizes`, bytes of a code: the attention mass of what is chosen by such codes, over that of the best
    choice; the mean over some of the latest queries, all heads together. What is always attended to counts on both
    sides.

    `keys` (1, Hk, T, D) of one layer, and the `queries` (1, H, n, D) of the last n of the same tokens.
    """
    heads, tokens = keys.shape[1], keys.shape[2]
    places = [place for place in range(tokens - 1, tokens - 1 - _QUERIES * _SPACING, -_SPACING) if place >= 0]
    units = max(0, (places[-1] + 1 - settings.num_recent) // group_size)
    budget = -(-settings.num_selected // group_size) + -(-settings.num_sinks // group_size)
    if units <= budget or queries.shape[2] < _QUERIES * _SPACING:
        return [1.0] * len(sizes)
    held, account, found = units * group_size, MemoryAccount(), []
    asked = list(_asked(keys, queries, scaling, places, held))
    apart = np.arange(-(-settings.num_sinks // group_size))[None]
    for size in sizes:
        coding = fit_coding([keys[:, :, :held]], held, heads, None, size, queries)
        compact = CodedKeys(coding, heads, 1, account, Workspace(account, "scores"))
        compact.append(keys[:, :, :held])
        shares = []
        for query, scores in asked:
            exact = np.concatenate([scores[:, : settings.num_sinks], scores[:, held:]], 1)[None]
            ranking = rank_units(compact, query, scaling, group_size, budget, exact=exact, apart=apart)
            mass = _softmax(scores)
            of_units = mass[:, :held].reshape(len(mass), units, group_size).sum((0, 2))[None]
            chosen, best = (
                largest(with_sinks(each.copy(), settings.num_sinks, group_size), budget)[0]
                for each in (ranking.importance, of_units)
            )
            always = mass[:, held:].sum()
            shares.append((of_units[0, chosen].sum() + always) / (of_units[0, best].sum() + always))
        compact.close()
        found.append(float(np.mean(shares)))
    return found


def _asked(
    keys: torch.Tensor, queries: torch.Tensor, scaling: float, places: list[int], held: int
) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """The query (1, H, D) of the token at each place, and its exact scores (H, t) of all tokens up to it."""
    heads = keys.shape[1]
    for place in places:
        query = queries[:, :, queries.shape[2] - (keys.shape[2] - place)]
        seen = keys[0, :, : place + 1].float()
        scores = query[0].float().unflatten(0, (heads, -1)) @ seen.transpose(1, 2) * scaling
        yield query, scores.flatten(0, 1).numpy(force=True)


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(1, keepdims=True))
    shares: np.ndarray = weights / weights.sum(1, keepdims=True)
    return shares
