"""The remainder of a step: what attention over the clusters that were not selected would have added, estimated from
their centroids. It goes beyond the paper, whose steps drop these clusters."""

from __future__ import annotations

import numpy as np
import torch

from ...fetch.choice import Estimates
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...kernels.on_a_device import to_device
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.value_maps import LeastSquares, ValueMaps, asked, placed, token_weights

_TOKENS = 2048
"""Tokens that maps are fitted to, evenly among a call's."""
_SCORES = 1 << 16
"""Scores in a piece of a fit."""


def rehearse_maps(run: DryRun, form: RecordFormat, rows: int, heads: int, clusters: int) -> None:
    """Declare the memory of maps and of fitting them, for at most `clusters` a row, in a dry run."""
    ValueMaps.rehearse(run, form, (rows, form.key_width, heads))
    run.passes("fitting", prefill=fit_bytes(form, heads, clusters))


def fit_bytes(form: RecordFormat, heads: int, clusters: int) -> int:
    """Bytes that `fit_maps` uses while it runs: a row's sample and its centroids in float32, and scores."""
    sums = 4 * 3 * (form.key_width + 1) * (form.key_width + 1 + form.value_dim)
    sample = 4 * _TOKENS * (2 * form.entry_width + 2 * form.key_width) + 4 * clusters * form.key_width
    return sample + sums + 4 * 4 * max(_SCORES, heads * max(_TOKENS, clusters))


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
) -> ValueMaps:
    """Fit maps from keys to values to the tokens that were just `sealed`: weighted least squares. A mean of keys,
    mapped, is the mean of their mapped values, so the same maps take centroids. A token's weight is the attention that
    the latest of `queries` (rows, H, q, D) pay it while its cluster is not selected, for `wanted` tokens.

    Args:
        labels: (rows, tokens), each token's cluster.
        centroids, sizes: (rows, clusters, D) and (rows, clusters) of all clusters.
        visible: (rows, tokens) bool, excludes padding.
    """
    (rows, heads), before = queries.shape[:2], sealed.tokens - sealed.fresh
    states, behind = asked(queries)
    made = ValueMaps(form, (rows, form.key_width, heads), account)
    every = -(-sealed.fresh // _TOKENS)
    for row in range(rows):
        places = torch.arange(before, sealed.tokens, every, device="cpu")
        if visible is not None:
            places = places[visible[row, places.to(visible.device)].cpu()]
        keys, values = _sample(sealed.parts, row, places - before)
        means, cluster, held = (
            to_device(part, keys.device) for part in (centroids[row], labels[row, places.numpy()], sizes[row])
        )
        weights, mass = (torch.zeros(*shape, dtype=torch.float32, device=keys.device)
                         for shape in ((len(keys),), (2, heads)))  # fmt: skip
        piece = max(1, _SCORES // (heads * max(len(keys), len(means), 1)))
        for first in range(0, len(behind), piece):
            part = states[row, :, first : first + piece].float().to(keys.device) * scaling  # (H, n, D)
            ends = sealed.tokens - torch.tensor(behind[first : first + piece], device="cpu")
            there = to_device((places < ends[:, None]).numpy(), keys.device)  # (n, tokens)
            scores = part @ keys.t(), part @ means.float().t()
            _add_rest(*scores, cluster.long(), there, held.float(), wanted, weights, mass)
        sums = LeastSquares(1, form.key_width + 1, form, keys.device)
        sums.add(keys.t()[None], values[None, None], token_weights(weights[None, None], form))
        made.set(slice(row, row + 1), sums.solved(), *mass[:, None])
    return made


def _sample(
    parts: list[tuple[torch.Tensor, torch.Tensor]], row: int, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (n, D) float32 of a row's tokens at `places`, counted from the first of `parts`."""
    begin, found = 0, []
    for keys, values in parts:
        own = places[(places >= begin) & (places < begin + keys.shape[2])] - begin
        of_part = to_device(own.numpy(), keys.device)
        found.append([part[row, 0, of_part].float() for part in (keys, values)])
        begin += keys.shape[2]
    keys, values = (torch.cat(own) for own in zip(*found, strict=True))
    return keys, values


def _add_rest(
    scores: torch.Tensor, by_mean: torch.Tensor, cluster: torch.Tensor, there: torch.Tensor, held: torch.Tensor,
    wanted: int, weights: torch.Tensor, mass: torch.Tensor,
) -> None:  # fmt: skip
    """Add the attention to what each of n queries does not select to `weights` (tokens,), and its true and estimated
    sums over these tokens to `mass` (2, H): by `scores` (H, n, tokens) and those of centroids `by_mean` (H, n,
    clusters), of the tokens that are `there` (n, tokens), each in a `cluster` (tokens,) of all that have `held`
    (clusters,) tokens."""
    count, clusters = by_mean.shape[1:]
    total = (by_mean + held.log()).logsumexp(2, keepdim=True)
    shares = (by_mean - total).clamp_(-80, 60).exp_()  # of one key at the centroid
    order = shares.sum(0).masked_fill(held == 0, -1).argsort(1, descending=True)
    ordered = held[order]
    rest = torch.zeros_like(ordered).scatter_(1, order, (ordered.cumsum(1) - ordered >= wanted).float())
    attention = (scores - total).clamp_(-80, 60).exp_() * (there * rest.gather(1, cluster.expand(count, -1)))
    sizes = torch.zeros(count, clusters, dtype=torch.float32, device=scores.device)
    sizes.scatter_add_(1, cluster.expand(count, -1), there.float())
    weights += attention.sum((0, 1))
    mass[0] += attention.sum((1, 2))
    mass[1] += (shares * (sizes * rest)).sum((1, 2))


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
