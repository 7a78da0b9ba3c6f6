"""The remainder of a step: what attention over the best units that were not selected would have added, estimated from
compact keys. It goes beyond the paper, whose steps drop these units."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from ...history.records import RecordFormat
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.sinks import largest
from ...predictors.value_maps import QUERIES, LeastSquares, ValueMaps, asked
from .compact_keys import HIDDEN, CompactKeys, Scored

_TOKENS = 2048
"""Tokens that maps are fitted to, in units that lie evenly among all."""
_SCORES, _PIECE = 1 << 15, 128
"""Scores, and tokens, in a piece of a fit."""
_COMPONENTS = 1 << 15
"""Components converted to float32 at a time."""

Stored = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]


def rehearse_maps(run: DryRun, form: RecordFormat, sizes: tuple[int, int, int], tokens: int, units: int) -> None:
    """Declare the memory of maps and estimates for rows, components and query heads `sizes`, in a dry run.

    `tokens`: tokens a row; `units`: maximum units whose entries a step estimates."""
    rows, rank, heads = sizes
    ValueMaps.rehearse(run, form, sizes)
    count = min(units * form.group_size, tokens)
    run.passes("scores", decode=4 * (3 * heads * count + _COMPONENTS) + count * rank)
    run.passes("fitting", prefill=fit_bytes(form, rows, rank, heads, tokens))


# A step's estimate

def mean_components(
    scored: Scored, offsets: np.ndarray, top: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm (h,) float32 of the sum of exp(score) over all tokens that are `scored`, and the mean of their
    leading components (h, leading) float32, by weights exp(score).

    `top` (h, 1): the largest score of each head; what is below it by 80 is negligible. Without it, and if there is no
    token but padding, the logarithm is -inf."""
    weights = scored.scores(less=top)
    if top is None:
        top = np.maximum.reduce(weights, 1, keepdims=True)
        weights -= top
    np.exp(np.maximum(weights, np.float32(-80), out=weights), out=weights)
    total = np.add.reduce(weights, 1, keepdims=True)
    mean = _weighted(scored.components, weights)
    mean /= total
    mean += offsets
    logarithm = np.log(total)
    logarithm += top
    if np.minimum.reduce(top, None) <= -1e29:
        logarithm[top <= -1e29] = -np.inf
    return logarithm[:, 0], mean


def _weighted(components: torch.Tensor, weights: np.ndarray) -> np.ndarray:
    """Sum (h, r) float32 of components (r, n), of any type, by weights (h, n)."""
    if components.device.type != "cpu" or components.dtype == torch.bfloat16:
        by_weight = torch.from_numpy(weights).to(components.device) @ components.float().t()
        return by_weight.numpy(force=True)
    stored, count = components.numpy(), components.shape[1]
    piece = max(1, _COMPONENTS // len(stored))
    total = np.zeros((len(weights), len(stored)), dtype=np.float32)
    for first in range(0, count, piece):
        part = slice(first, first + piece)
        total += weights[:, part] @ stored[:, part].astype(np.float32).T
    return total


# Fitting

def fit_bytes(form: RecordFormat, rows: int, rank: int, heads: int, tokens: int) -> int:
    """Bytes that `fit_maps` uses while it runs."""
    tokens = min(tokens, _TOKENS + 2 * form.group_size)
    scores = max(_SCORES, heads * tokens) * 4 * 5 + tokens * rank
    gram = 4 * 3 * form.num_value_heads * (rank + 1) * (rank + 1 + form.value_dim)
    pieces = 4 * _PIECE * (form.entry_width + (form.num_value_heads + 2) * (rank + 1) + 3 * heads * QUERIES)
    return max(scores, pieces) + 4 * rows * form.num_key_heads * tokens + rows * gram


def fit_maps(
    keys: CompactKeys,
    stored: Stored,
    form: RecordFormat,
    queries: torch.Tensor,
    scaling: float,
    chosen: tuple[int, int],
    visible: torch.Tensor | None,
    account: MemoryAccount,
    heads: int = 1,
) -> ValueMaps | None:
    """Fit maps to a sample of the units of `stored()`, whose compact keys are `keys`: weighted least squares of values
    on components. A token's weight is the attention that it gets from the latest of `queries` (B, H, q, D), as a part
    of their remainder, if they select as large a share of the sample as of all. None if there is no remainder.

    Args:
        chosen: units that a step selects, and the best units, these included, among which the remainder is.
        visible: (·, tokens), excludes padding.
        heads: key heads that choose apart, each with its own remainder; 1: all have the same.
    """
    rows, group, units = len(queries), form.group_size, keys.tokens // form.group_size
    every = -(-units * group // _TOKENS)
    sample = np.arange(1 + (every - 1) // 2, units, every)  # the first unit is selected, and unlike the others
    wanted, candidates = (max(1, round((count - 1) / every)) for count in chosen)
    if wanted >= min(candidates, len(sample)):
        return None
    latest = _Asked(queries, keys, form, scaling, sample, every, heads)
    shares = [latest.weigh(row, wanted, candidates, visible) for row in range(rows)]
    sums = [LeastSquares(keys.leading + 1, form, keys.device) for _ in range(rows)]
    tokens = (sample[:, None] * group + np.arange(group)).ravel()
    begin = 0
    for block_keys, block_values in stored():
        first, stop = tokens.searchsorted([begin, begin + block_keys.shape[2]])
        for start in range(first, stop, _PIECE):
            some = slice(start, min(start + _PIECE, stop))
            here = torch.from_numpy(tokens[some]).to(keys.device)
            for row in range(rows):
                latest.compare(row, some, block_keys[row].index_select(1, here - begin))
                seen = None if visible is None else visible[min(row, len(visible) - 1), here]
                there, weights = here, torch.from_numpy(shares[row][:, some]).to(keys.device)
                if seen is not None:
                    there, weights = here[seen], weights[:, seen]
                values = block_values[row].index_select(1, there - begin).float()
                sums[row].add(keys.components(row, there), values, weights)
        begin += block_keys.shape[2]
    made = ValueMaps(form, (rows, keys.leading, queries.shape[1]), account)
    for row in range(rows):
        made.set(row, sums[row], *latest.mass(row))
    return made


class _Asked:
    """The queries by which the tokens of a sample are weighed, and their estimated and true remainders.

    Args:
        sample: units (n,), ascending, without the first.
        every: number of units that one of the sample stands for.
        heads: as in `fit_maps`.
    """

    def __init__(
        self, queries: torch.Tensor, keys: CompactKeys, form: RecordFormat, scaling: float, sample: np.ndarray,
        every: int, heads: int,
    ) -> None:  # fmt: skip
        states, behind = asked(queries)
        self._states = states.transpose(1, 2).float()  # (B, q, H, D)
        ends = [max(0, keys.tokens - after) // form.group_size for after in behind]
        self._hidden = sample >= np.array(ends)[:, None]  # (q, n)
        self._keys, self._group, self._key_heads, self._scaling = keys, form.group_size, form.num_key_heads, scaling
        self._units, self._every = np.concatenate([[0], sample]), every
        rows, count, query_heads = self._states.shape[:3]
        self._rest = np.zeros((rows, count, heads, len(sample)), dtype=bool)
        self._top, self._total = (np.zeros((rows, count, query_heads), dtype=np.float32) for _ in range(2))
        self._estimated, self._true = np.zeros((rows, query_heads)), np.zeros((rows, query_heads))

    def weigh(self, row: int, wanted: int, candidates: int, visible: torch.Tensor | None) -> np.ndarray:
        """The attention (Hk, tokens of the sample) float32 of a row's queries to their remainders.

        `wanted` of the sample's `candidates` best units are selected. Each query sees the units that ended before
        it."""
        count, heads = self._top.shape[1:]
        group, units = self._group, len(self._units)
        shares = np.zeros((self._key_heads, group, units - 1), dtype=np.float32)
        piece = max(1, _SCORES // (heads * units * group))
        for first in range(0, count, piece):
            part = slice(first, min(count, first + piece))
            low = self._keys.low_rank_query(self._states[row, part]) * np.float32(self._scaling)
            low = low.reshape(-1, low.shape[-1])
            scored = self._keys.scored(low, row, self._units, group, visible, own_memory=True)
            scores = scored.by_unit(scored.scores()).reshape(-1, heads, group, units)
            hidden = self._hidden[part, None, None]
            np.copyto(scores[..., 1:], HIDDEN, where=hidden)
            top = np.maximum(scores.max((2, 3), keepdims=True), -1e29)
            scores -= top
            weights = np.exp(np.maximum(scores, -80, out=scores), out=scores)
            weights[..., 1:] *= ~hidden
            best = weights.max(2)
            share = best[..., 1:] / (best[..., :1] + self._every * best[..., 1:].sum(2, keepdims=True))
            shape = len(share), self._rest.shape[2], units - 1
            importance = share.reshape(shape[0] * shape[1], -1, shape[2]).sum(1)
            rest = _next_best(importance, wanted, candidates).reshape(shape) & ~hidden[:, 0]
            total = weights[..., 0].sum(2) + self._every * weights[..., 1:].sum((2, 3))
            left = weights[..., 1:]
            left *= rest.repeat(heads // shape[1], 1)[:, :, None]
            left /= total[..., None, None]
            shares += left.reshape(len(left), self._key_heads, -1, group, units - 1).sum((0, 2))
            self._rest[row, part] = rest
            self._top[row, part] = top[..., 0, 0]
            self._total[row, part] = total
            self._estimated[row] += left.sum((0, 2, 3))
        return shares.transpose(0, 2, 1).reshape(self._key_heads, -1)

    def compare(self, row: int, places: slice, keys: torch.Tensor) -> None:
        """Add the true remainder's mass among keys (Hk, t, D) of a row, those of the sample's tokens at `places`."""
        units = np.arange(places.start, places.stop) // self._group
        held = torch.from_numpy(self._rest[row][:, :, units]).to(keys.device)  # (q, 1 or Hk, t)
        states = self._states[row].transpose(0, 1).unflatten(0, (self._key_heads, -1)).to(keys.device)  # (Hk, R, q, D)
        top, total = (
            torch.from_numpy(part[row].T.copy()).to(keys.device).unflatten(0, (self._key_heads, -1))[..., None]
            for part in (self._top, self._total)
        )
        scores = torch.matmul(states.flatten(1, 2), keys.float().transpose(1, 2)).view(*states.shape[:3], -1)
        weights = (scores * self._scaling - top).clamp_(-80, 60).exp_() * held.transpose(0, 1)[:, None]
        weights /= total.clamp_min(1e-30)
        self._true[row] += weights.sum((2, 3)).flatten().numpy(force=True)

    def mass(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(H,) each: the true mass of a row's remainders, and the estimated one."""
        return self._true[row], self._estimated[row]


def _next_best(importance: np.ndarray, wanted: int, candidates: int) -> np.ndarray:
    """Mask (n, units) of the `candidates` most important units without the `wanted` most important ones."""
    count = importance.shape[1]
    mask = np.zeros(importance.shape, dtype=bool)
    np.put_along_axis(mask, largest(importance, min(candidates, count)), True, 1)
    np.put_along_axis(mask, largest(importance, min(wanted, count)), False, 1)
    return mask


