"""The remainder of a step: what attention over the clusters that were not selected would have added, estimated from
their centroids. It goes beyond the paper, whose steps drop these clusters."""

from __future__ import annotations

import functools
import operator

import numpy as np
import torch

from ...fetch.choice import Estimates
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...kernels.clusters import score
from ...kernels.fits import POINTS, unselected, weigh
from ...kernels.on_a_device import has_step, plans_step, to_device
from ...kernels.ranking import BLOCK
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.value_maps import QUERIES, LeastSquares, ValueMaps, asked, placed, token_weights

_TOKENS = 2048
"""Most tokens that maps are fitted to, evenly among a call's."""
_SCORES = 1 << 16
"""Scores in a piece of a fit, where no kernel computes them."""
_TOGETHER = 4 << 20
"""Bytes for the rows that a device's plan fits together."""


def rehearse_maps(run: DryRun, form: RecordFormat, rows: int, heads: int, clusters: int) -> None:
    """Declare the memory of maps and of fitting them, for at most `clusters` a row, in a dry run."""
    ValueMaps.rehearse(run, form, (rows, form.key_width, heads))
    alone = plans_step(run.device_type, form.key_width, form.value_dim)
    each = fit_bytes(form, heads, clusters, 1, alone)
    together = max(1, min(rows, _TOGETHER // each)) if alone else 1
    run.passes("fitting", prefill=fit_bytes(form, heads, clusters, together, alone))


def rows_together(rows: int, device: torch.device, form: RecordFormat) -> tuple[list[int], bool]:
    """How many of so many rows `fit_maps` may fit together on `device`, the best first, and whether kernels score their
    tokens. Without these it fits one after the other: the scores of all would take too much memory."""
    if not has_step(device, form.key_width, form.value_dim):
        return [1], False
    return [-(-rows >> times) for times in range(max(0, rows - 1).bit_length() + 1)], True


def fit_bytes(form: RecordFormat, heads: int, clusters: int, rows: int = 1, alone: bool = False) -> int:
    """Bytes that `fit_maps` uses while it runs, for so many rows together: their samples, sums, and scores of
    `QUERIES` queries. `alone`: by kernels, which have no scores of tokens in memory."""
    inputs, lines = form.key_width + 1, QUERIES * heads
    sums = 4 * 3 * inputs * (inputs + form.value_dim)
    sample = _TOKENS * (form.entry_bytes + 5 + 3 * 4)  # with labels and weights
    of_queries = lines * form.key_width * form.dtype.itemsize + clusters * (2 * form.key_width + 4)
    if alone:
        parts = -(-clusters // BLOCK) + -(-_TOKENS // POINTS)
        return rows * (sample + sums + of_queries + 4 * lines * (clusters + 2 * parts + 1) + 5 * QUERIES * clusters)
    scored = 4 * form.key_width * (_TOKENS + clusters) + 30 * max(_SCORES, heads * max(_TOKENS, clusters))
    return sample + sums + of_queries + max(scored, 4 * _TOKENS * (form.entry_width + 2 * inputs))


def fit_maps(
    sealed: Sealed,
    form: RecordFormat,
    labels: np.ndarray,
    centroids: np.ndarray,
    sizes: np.ndarray,
    queries: torch.Tensor,
    scaling: float,
    wanted: int,
    visible: torch.Tensor | None,
    account: MemoryAccount,
    together: int = 1,
) -> ValueMaps:
    """Fit maps from keys to values to the tokens that were just `sealed`: weighted least squares. A mean of keys,
    mapped, is the mean of their mapped values, so the same maps take centroids. A token's weight is the attention that
    the latest of `queries` (rows, H, q, D) pay it while its cluster is not selected, for `wanted` tokens.

    Args:
        labels: (rows, tokens), each token's cluster.
        centroids, sizes: (rows, clusters, D) and (rows, clusters) of all clusters.
        visible: (rows, tokens) bool, excludes padding.
        together: rows that are fitted together: of `rows_together`.
    """
    (rows, heads), before = queries.shape[:2], sealed.tokens - sealed.fresh
    states, behind = asked(queries)
    made = ValueMaps(form, (rows, form.key_width, heads), account)
    every, device = -(-sealed.fresh // _TOKENS), states.device
    at_once, apart = len(behind), (behind[1] if len(behind) > 1 else 1)
    if not has_step(device, form.key_width, form.value_dim):
        at_once = max(1, _SCORES // (heads * max(_TOKENS, sizes.shape[1])))
    for first in range(0, rows, together):
        some = slice(first, min(rows, first + together))
        keys, values = _sample(sealed.parts, some, every)
        labels_there = to_device(labels[some, before : sealed.tokens : every].astype(np.int32), device)
        seen = None if visible is None else visible[some, before : sealed.tokens : every].contiguous()
        if seen is not None:  # padding may be NaN
            keys.masked_fill_(~seen[..., None], 0)
            values.masked_fill_(~seen[:, None, :, None], 0)
        means, members = (to_device(part, device) for part in (centroids[some], sizes[some].astype(np.int32)))
        weighed = list[tuple[torch.Tensor, torch.Tensor]]()
        for begin in range(0, len(behind), at_once):
            part = states[some, :, begin : begin + at_once].transpose(1, 2).flatten(1, 2)  # (rows, n H, D)
            scored = score(part, means, members[None], means[:, :0], scaling)
            left, total = unselected(*scored, members, heads, wanted)
            ends = every, sealed.fresh - apart * begin, apart
            found, parts = weigh(part, keys, labels_there, left, total, scored[0], seen, scaling, ends)
            weighed.append((found, parts.unflatten(2, (-1, heads)).sum((2, 4))))
        weights, mass = (functools.reduce(operator.add, one) for one in zip(*weighed, strict=True))
        sums = LeastSquares(len(keys), form.key_width + 1, form, device)
        sums.add(keys.mT, values, token_weights(weights[:, None], form, seen), seen)
        made.set(some, sums.solved(), *mass)
    return made


def _sample(
    parts: list[tuple[torch.Tensor, torch.Tensor]], rows: slice, every: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (r, n, D) and values (r, 1, n, Dv) of the first token of `parts` and each `every` tokens later: new."""
    begin, found = 0, []
    for part in parts:
        found.append([one[rows, :, -begin % every :: every] for one in part])
        begin += part[0].shape[2]
    keys, values = (torch.cat(own, 2) for own in zip(*found, strict=True))
    return keys[:, 0], values


def estimates(
    maps: ValueMaps, form: RecordFormat, centroids: np.ndarray, sizes: np.ndarray, states: list[np.ndarray],
    units: list[np.ndarray], batch: int, device: torch.device,
) -> Estimates:  # fmt: skip
    """Estimated entries for each query's clusters `units` (rows, n; -1: none): one for each query and head. `batch`
    sequences have the rows.

    `centroids` (rows, clusters, D) float32; `sizes` (rows, clusters), their entries; `states`: scaled queries (rows, H,
    D) float32."""
    (rows, heads, _), count = states[0].shape, len(states)
    mass = np.full((rows, heads, count), -np.inf, dtype=np.float32)
    values = np.zeros((rows, heads, count, form.value_dim), dtype=np.float32)
    for at, (query, left) in enumerate(zip(states, units, strict=True)):
        for row in range(rows):
            there = left[row][left[row] >= 0]
            if not there.size:
                continue
            means = centroids[row, there]
            scores = query[row] @ means.T + np.log(sizes[row, there], dtype=np.float32)
            top = scores.max(1, keepdims=True)
            weights = np.exp(np.maximum(scores - top, -80, dtype=np.float32))
            total = weights.sum(1, keepdims=True)
            mass[row, :, at] = (top + np.log(total))[:, 0]
            values[row, :, at] = maps.values(row, weights @ means / total)
    return placed(mass, maps.log_ratio, values, form, batch, device)
