"""The mask of a step's gathered entries, taken column by column from the model's own; a gather of single tokens; and a
choice of tokens by approximate scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..fetch.choice import Choice, Estimates, Fetched
from ..fetch.fetcher import Fetcher
from ..history.base import History
from ..model.attention_call import AttentionCall
from ..report.trace import NOTHING


def gathered_mask(call: AttentionCall, history: History, choice: Choice, fetched: Fetched) -> torch.Tensor:
    """The mask (B, 1 or H, q, N + t) of the fetched entries; for each query head if key heads have their own rows.

    Contains columns of the model's mask (None: causal, aligned at the lower right); missing entries are hidden.
    """
    batch, length, device = call.query.shape[0], history.length, history.device
    if call.mask is None and call.query.shape[2] == 1 and fetched.valid is not None:  # all entries are visible
        seen = np.pad(fetched.valid, ((0, 0), (0, history.recent.shape[1])), constant_values=True)
        return _of_query_heads(call, torch.from_numpy(seen).to(device).unflatten(0, (batch, -1))[:, :, None])
    places = fetched.of_chosen(history.positions(choice.units))
    recent = np.arange(length - history.recent.shape[1], length)
    valid = places >= 0 if fetched.valid is None else fetched.valid & (places >= 0)
    places = np.concatenate([places.clip(min=0), np.broadcast_to(recent, (len(places), len(recent)))], 1)
    columns = torch.from_numpy(places).to(device).unflatten(0, (batch, -1))[:, :, None]
    mask = call.mask
    if mask is None:
        mask = torch.ones(1, 1, call.num_queries, length, dtype=torch.bool, device=device)
        mask = mask.tril(length - call.num_queries)
    mask = mask.expand(batch, columns.shape[1], -1, -1)
    mask = mask.gather(-1, columns.expand(-1, -1, mask.shape[2], -1))
    if not valid.all():
        least = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        hidden = ~torch.from_numpy(valid).to(device).unflatten(0, (batch, -1))[:, :, None]
        mask[..., : valid.shape[1]] = mask[..., : valid.shape[1]].masked_fill(hidden, least)
    return _of_query_heads(call, mask)


def biased_mask(call: AttentionCall, mask: torch.Tensor | None, estimates: Estimates, entries: int) -> torch.Tensor:
    """An additive mask (B, H, q, entries) in the query's type: that of other entries, the boolean or additive `mask`
    (B, 1 or H, q, ·), None if all are visible; then the bias of `estimates`."""
    bias, dtype = estimates.bias, call.query.dtype
    count, least = bias.shape[3], torch.finfo(dtype).min
    result = torch.zeros(*bias.shape[:3], entries, dtype=dtype, device=bias.device)
    result[..., entries - count :].copy_(bias).clamp_min_(least)
    if mask is not None and mask.dtype == torch.bool:
        result[..., : entries - count].masked_fill_(~mask, least)
    elif mask is not None:
        result[..., : entries - count] = mask
    return result


def millionths(call: AttentionCall, scaling: float, keys: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Share of the attention mass on the last `count` of the keys (B, Hk, n, D), mean over rows, heads and queries, for
    the additive mask (B, H, q, n): () int64, in millionths, on their device; 0 if scores are not finite."""
    (rows, heads, queries, dim), shared = call.query.shape, keys.shape[1]
    states = call.query.reshape(rows, shared, -1, dim).to(keys.dtype)
    scores = torch.matmul(states, keys.transpose(2, 3)).view(rows, heads, queries, -1).float() * scaling
    return (scores.add_(mask).softmax(3)[..., -count:].sum(3).mean().nan_to_num() * 1e6).long()


def _of_query_heads(call: AttentionCall, mask: torch.Tensor) -> torch.Tensor:
    """A mask (B, 1 or key heads, q, n), repeated for each query head."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(call.query.shape[1] // mask.shape[1], 1)


# Single tokens of a history

def units_of(history: History, seen: np.ndarray) -> np.ndarray:
    """Units with any token that is `seen` (B, n): (B, units) bool."""
    group, units = history.form.group_size, history.units
    stored = np.zeros((len(seen), units * group), dtype=bool)
    count = min(units * group, seen.shape[1])
    stored[:, :count] = seen[:, :count]
    return cast(np.ndarray, stored.reshape(len(seen), units, group).any(2))


def choice_of(history: History, seen: np.ndarray) -> Choice:
    """The units of the tokens that are `seen` (B, n) and lie in units, and these tokens of them."""
    group, (batch, stop) = history.form.group_size, seen.shape
    units = units_of(history, seen)
    rows = np.arange(batch)[:, None]
    several = np.argsort(~units, axis=1, kind="stable") if batch > 1 else units[0].nonzero()[0][None]
    order = several[:, : int(units.sum(1).max(initial=0))]  # those of each row first, ascending
    keep = np.zeros((batch, history.units * group), dtype=bool)
    keep[:, : min(stop, keep.shape[1])] = seen[:, : keep.shape[1]]
    keep = keep.reshape(batch, -1, group)[rows, order]
    return Choice(np.where(units[rows, order], order, -1), None if keep.all() else keep)


def gather_tokens(
    history: History, fetcher: Fetcher, seen: np.ndarray, span: Any = NOTHING
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """The entries (B, N, width) of the tokens that are `seen` (B, n), the latest ones among the first n included; their
    positions (B, N), and which of them are seen, (B, N) bool. Valid until the next gather. `span`: context of reads."""
    (batch, stop), recent, choice = seen.shape, history.recent, choice_of(history, seen)
    first = history.length - recent.shape[1]
    latest = np.arange(first, max(first, stop))
    at_end = np.broadcast_to(latest, (batch, latest.size)), seen[:, first:]
    if not choice.units.size:
        return recent[:, : latest.size], *at_end
    with span:
        fetched = fetcher.gather(history, choice)
    places = fetched.of_chosen(history.positions(choice.units))
    valid = np.ones(places.shape, dtype=bool) if fetched.valid is None else fetched.valid
    entries = fetched.entries[:, : fetched.chosen + latest.size]
    return entries, np.concatenate([places, at_end[0]], 1), np.concatenate([valid, at_end[1]], 1)


# Tokens that an indexer chose

def complete_mask(call: AttentionCall, chosen: torch.Tensor | None, length: int) -> torch.Tensor:
    """A mask (B, 1, q, T) of all `length` stored tokens, of the kind of the call's own, that hides those that are not
    `chosen` (B, q, K); None: the call's mask says it."""
    mask, least = call.mask, torch.finfo(call.query.dtype).min
    if chosen is None:
        assert mask is not None and mask.shape[-1] == length
        return mask.expand(call.query.shape[0], -1, -1, -1)
    hidden = torch.ones(*chosen.shape[:2], length + 1, dtype=torch.bool, device=chosen.device)
    places = chosen.long()
    hidden.scatter_(2, places.masked_fill(places < 0, length), False)
    hidden = hidden[..., :length].unsqueeze(1)
    if mask is None or mask.dtype == torch.bool:
        return ~hidden if mask is None or mask.shape[-1] != length else mask & ~hidden
    if mask.shape[-1] != length:
        mask = torch.zeros(1, dtype=mask.dtype, device=mask.device)
    return mask.masked_fill(hidden, least)


def seen_by(chosen: torch.Tensor, length: int) -> np.ndarray:
    """The first `length` tokens that an indexer has `chosen` for one query, (B, `length`) bool."""
    return chosen[:, 0, 0].cpu().numpy() if chosen.dtype == torch.bool else marked(chosen[:, 0].long(), length)


def marked(places: torch.Tensor, length: int) -> np.ndarray:
    """The tokens at `places` (B, K), (B, `length`) bool; a place of -1 is none."""
    marked = np.zeros((len(places), length + 1), dtype=bool)  # -1 is behind the tokens
    marked[np.arange(len(marked))[:, None], places.cpu().numpy()] = True
    return marked[:, :length]


def additive(there: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as an additive one."""
    return torch.zeros(there.shape, dtype=dtype, device=there.device).masked_fill(~there, torch.finfo(dtype).min)


# A choice by approximate scores, and by the exact ones of tokens at its edge

class ScoresOfTopK(TorchFunctionMode):
    """Keeps the tensor whose best elements the code within takes, by `topk` along the last dimension: the scores by
    which a model's indexer chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk or func is torch.topk:
            self.latest = args[0]
        return func(*args, **(kwargs or {}))

    def take(self, *shape: int) -> torch.Tensor | None:
        """The latest scores, if they have this shape."""
        scores, self.latest = self.latest, None
        return scores if scores is not None and scores.shape == shape else None


def margin_of(count: int) -> int:
    """Ranks on each side of the edge of a choice of `count` tokens that are scored exactly at first."""
    return max(16, count // 8)


Scorer = Callable[[np.ndarray, torch.Tensor], None]
"""Replaces the scores (B, q, T) of tokens (B, T) bool by exact ones."""


def chosen_at_edge(scores: torch.Tensor, count: int, make_exact: Scorer) -> torch.Tensor:
    """The `count` tokens of the highest exact scores for each query, (B, q, count) int64, in any order, of
    approximate `scores` (B, q, T), without the exact scores of all.

    Scores of the tokens next to the edge are made exact: at first `margin_of(count)` ranks on each side of it. This
    ends when every other token is farther from the edge than twice the largest error that was found, and no two tokens
    at the edge have the same score, or when all are exact. So the choice can only differ from the exact one if a token
    that was left out has more than twice this error.
    """
    margin, length, mixed = margin_of(count), scores.shape[2], scores.clone()
    known = np.zeros((scores.shape[0], length), dtype=bool)
    rows = np.arange(len(known))[:, None]
    while True:
        first, stop = max(0, count - margin), min(length, count + margin)
        ranked = scores.topk(min(length, stop + 1), dim=2)
        edge = ranked.indices[..., first:stop]
        wanted = np.zeros_like(known)
        wanted[rows, edge.flatten(1).cpu().numpy()] = True
        wanted &= ~known
        known |= wanted
        make_exact(wanted, mixed)
        if first == 0 and stop == length:
            break
        error = 2 * torch.nan_to_num((mixed - scores).abs(), nan=0.0, posinf=0.0).amax(2)
        at_edge = mixed.gather(2, edge)
        least = at_edge.topk(count - first, dim=2).values[..., -1]
        alike = (at_edge >= least.unsqueeze(2)).sum(2) > count - first  # then `topk` decides, which has to see all
        certain = ~alike | (least <= torch.finfo(least.dtype).min / 2)  # hidden tokens are alike, too
        if first:
            certain &= ranked.values[..., first - 1] - error >= least
        if stop < length:
            certain &= ranked.values[..., stop] + error <= least
        if bool(certain.all()):
            break
        margin *= 2
    return mixed.topk(count, dim=2).indices
