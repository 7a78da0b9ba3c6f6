"""The remainder of a step: what attention over the best units that were not selected would have added, estimated from
compact keys. It goes beyond the paper, whose steps drop these units."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import torch

from ...history.records import RecordFormat
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.sinks import largest
from ...predictors.value_maps import QUERIES, LeastSquares, ValueMaps, asked
from .compact_keys import BLOCK, HIDDEN, CompactKeys, Scored

_TOKENS = 4096
"""Tokens that maps are fitted to, evenly among all."""
_SCORES, _PIECE = 1 << 16, 256
"""Scores, and stored tokens, in a piece of a fit."""
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
    scored: Scored, offsets: np.ndarray, without: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm (h,) float32 of the sum of exp(score) over all tokens that are `scored` but those of the units
    `without` (n,), and the mean of their components (h, r) float32, by weights exp(score).

    Changes the scores. If there is no token but padding, the logarithm is -inf."""
    scores = scored.scores
    if without is not None:
        scored.by_unit[:, :, without] = HIDDEN
    top = np.maximum.reduce(scores, 1, keepdims=True)
    scores -= top
    weights = np.exp(np.maximum(scores, -80.0, out=scores), out=scores)
    weights[weights < 1e-34] = 0  # padding, and what would not count
    total = np.maximum(np.add.reduce(weights, 1, keepdims=True), 1e-30)
    mean = _weighted(scored.components, weights) / total
    mean += offsets
    return np.where(top > -1e29, top + np.log(total), -np.inf)[:, 0], mean


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
    scores = 4 * 4 * max(_SCORES, heads * tokens) + BLOCK * (rank + 4 * max(heads, _SCORES // max(1, tokens)))
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
) -> ValueMaps | None:
    """Fit maps to all tokens of `stored()`, whose compact keys are `keys`: weighted least squares of values on
    components. A token's weight is the attention that it gets from the latest of `queries` (B, H, q, D), as a part of
    their remainder. None if there is none.

    Args:
        chosen: units that a step selects, and the best units, these included, among which the remainder is.
        visible: (·, tokens), excludes padding.
    """
    rows, heads = queries.shape[:2]
    group, units = form.group_size, keys.tokens // form.group_size
    wanted, candidates = chosen
    if wanted >= min(candidates, units):
        return None
    states = _Asked(queries, keys, form, scaling)
    shares = torch.zeros(rows, form.num_key_heads, group, units, dtype=torch.float32, device=keys.device)
    for row in range(rows):
        states.weigh(row, wanted, candidates, visible, shares[row])
    sums = [LeastSquares(keys.rank + 1, form, keys.device) for _ in range(rows)]
    every = -(-keys.tokens // _TOKENS)
    begin = 0
    pieces = (zip(*(part.split(_PIECE, 2) for part in parts), strict=True) for parts in stored())
    for block_keys, block_values in itertools.chain.from_iterable(pieces):
        count = block_keys.shape[2]
        places = torch.arange(-begin % every, count, every, device=keys.device)
        for row in range(rows):
            states.compare(row, begin, block_keys[row])
            tokens = places + begin
            seen = tokens >= group  # the first unit is selected, and unlike the others
            if visible is not None:
                seen &= visible[min(row, len(visible) - 1), tokens]
            there, tokens = places[seen], tokens[seen]
            weights = shares[row][:, tokens % group, tokens // group]
            components = keys.components(row, tokens)
            sums[row].add(components, block_values[row][:, there].float(), weights)
        begin += count
    made = ValueMaps(form, (rows, keys.rank, heads), account)
    for row in range(rows):
        made.set(row, sums[row], *states.mass(row))
    return made


class _Asked:
    """The queries by which tokens are weighed, and their estimated and true remainders."""

    def __init__(self, queries: torch.Tensor, keys: CompactKeys, form: RecordFormat, scaling: float) -> None:
        states, behind = asked(queries)
        self._states = states.transpose(1, 2).float()  # (B, n, H, D)
        self._ends = [max(0, keys.tokens - after) // form.group_size for after in behind]
        self._keys, self._group, self._key_heads, self._scaling = keys, form.group_size, form.num_key_heads, scaling
        rows, count, heads = self._states.shape[:3]
        self._rest = np.zeros((rows, count, keys.tokens // form.group_size), dtype=bool)
        self._top, self._total = (np.zeros((rows, count, heads), dtype=np.float32) for _ in range(2))
        self._estimated, self._true = np.zeros((rows, heads)), np.zeros((rows, heads))

    def weigh(self, row: int, wanted: int, candidates: int, visible: torch.Tensor | None, shares: torch.Tensor) -> None:
        """Add to `shares` (Hk, tokens of a unit, units) the attention of a row's queries to their remainders.

        `wanted` of the `candidates` best units are selected. Each query sees the units that ended before it."""
        count, heads = self._top.shape[1:]
        units = self._rest.shape[2]
        seen = None
        if visible is not None:
            whole = visible[min(row, len(visible) - 1), : units * self._group].view(units, self._group)
            seen = whole.t().to(shares.device)
        piece = max(1, _SCORES // (heads * units * self._group))
        for first in range(0, count, piece):
            part = slice(first, min(count, first + piece))
            low = self._keys.low_rank_query(self._states[row, part]) * np.float32(self._scaling)
            scores = self._keys.all_scores(low.reshape(-1, low.shape[-1]), row, self._group)
            scores = scores.unflatten(0, (-1, heads))  # (n, H, tokens of a unit, units)
            ends = torch.tensor(self._ends[part], device=scores.device)
            hidden = (torch.arange(units, device=scores.device) >= ends[:, None])[:, None, None]
            scores.masked_fill_(hidden if seen is None else hidden | ~seen, -1e30)
            top = scores.amax((2, 3), keepdim=True).clamp_min(-1e29)
            best = (scores.amax(2) - top[..., 0]).clamp_min_(-80).exp_()
            importance = (best / best.sum(-1, keepdim=True)).sum(1)
            importance.masked_fill_(hidden[:, 0, 0], -1)
            importance[:, 0] = torch.inf
            rest = _next_best(importance.numpy(force=True), wanted, candidates)
            rest &= ~hidden[:, 0, 0].numpy(force=True)
            weights = (scores - top).clamp_min_(-80).exp_()
            total = weights.sum((2, 3), keepdim=True)
            weights *= torch.from_numpy(rest).to(weights.device)[:, None, None]
            weights /= total
            shares += weights.unflatten(1, (self._key_heads, -1)).sum((0, 2))
            self._rest[row, part] = rest
            self._top[row, part] = top[..., 0, 0].numpy(force=True)
            self._total[row, part] = total[..., 0, 0].numpy(force=True)
            self._estimated[row] += weights.sum((0, 2, 3)).numpy(force=True)

    def compare(self, row: int, begin: int, keys: torch.Tensor) -> None:
        """Add the true remainder's mass among keys (Hk, t, D) of a row, the tokens from `begin` on."""
        count = keys.shape[1]
        units = np.arange(begin, begin + count) // self._group
        held = torch.from_numpy(self._rest[row][:, units]).to(keys.device)  # (n, t)
        states = self._states[row].transpose(0, 1).unflatten(0, (self._key_heads, -1)).to(keys.device)  # (Hk, R, n, D)
        top, total = (
            torch.from_numpy(part[row].T.copy()).to(keys.device).unflatten(0, (self._key_heads, -1))[..., None]
            for part in (self._top, self._total)
        )
        scores = torch.matmul(states.flatten(1, 2), keys.float().transpose(1, 2)).view(*states.shape[:3], count)
        weights = (scores * self._scaling - top).clamp_(-80, 60).exp_() * held / total.clamp_min(1e-30)
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


