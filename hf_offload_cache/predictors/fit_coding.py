"""How a coding is found: which components keys have, how many bits each gets, and with which steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from .coding import CLASSES, MOST_WIDE, Coding, most_components
from .directions import PART, identity_roots, parts, query_moment, roots_of, scaled_directions

_SAMPLE = 1536
"""Tokens that errors are measured on, and queries are fitted to: with 512, single layers come out much worse."""
_MEASURED = 8
"""Components whose errors are measured at a time."""
_SINKS = 16
"""First tokens, whose keys are unlike all others: they are no part of the mean, nor of what is approximated."""
_OTHER_QUERIES_OF_CODES = 1.0
"""See `roots_of`."""
_GAUSSIAN_STEPS = {8: 0.0308, 4: 0.3352, 2: 0.9957}
"""Uniform steps of least error for a normal distribution of deviation 1."""
_STEPS = (0.8, 1.0, 1.3, 1.7, 2.2, 3.2)
"""Times those: what is tried. Some layers have components of kurtosis 25."""


def coding_bytes(width: int, itemsize: int, rows: int, tokens: int) -> int:
    """What `fit_coding` takes meanwhile, of `tokens` tokens a row whose keys are of `width` elements."""
    sample = min(_SAMPLE, rows * tokens)
    solved = max(4 * 4 * width * width, 4 * 4 * _MEASURED * sample)
    return solved + sample * width * itemsize + 2 * 4 * max(rows, PART) * width


def fit_coding(
    keys: Iterable[torch.Tensor],
    tokens: int,
    num_key_heads: int,
    visible: torch.Tensor | None,
    nbytes: int,
    seen: torch.Tensor | None,
) -> Coding:
    """Of `keys`, parts (B, Hk, t, D) in order, `tokens` tokens a row in all, one pass: codes of `nbytes` bytes.

    `visible` (B or 1, tokens) leaves padding out. `seen` are queries (B, H, q, D) in whose metric the components are
    chosen; None: all directions count alike.
    """
    total, moment, count, sample = _statistics(keys, tokens, visible)
    mean = total / max(1, count)
    moment -= count * torch.outer(mean, mean)
    width = len(mean)
    roots = identity_roots(num_key_heads, width // num_key_heads, mean.device)
    if seen is not None:
        roots = roots_of(query_moment(seen, num_key_heads), _OTHER_QUERIES_OF_CODES)
    directions = scaled_directions(moment, roots, most_components(width))
    del moment
    measured = [_measured(sample, mean, some) for some in directions.split(_MEASURED, 1)]
    errors = {bits: torch.cat([each[0][bits] for each in measured]).numpy(force=True) for bits in (0, *CLASSES)}
    chosen = allocate(errors, nbytes)
    steps = []
    for bits, part in zip(CLASSES, chosen, strict=True):
        steps.append(torch.cat([each[1][bits] for each in measured])[torch.from_numpy(part).to(mean.device)])
    order = torch.from_numpy(np.concatenate(chosen)).to(mean.device)
    projection, scale = _in_8_bits(directions[:, order] / torch.cat(steps))
    counts = (len(chosen[0]), len(chosen[1]), len(chosen[2]))
    blind = Coding(mean, projection, scale, projection.cpu(), scale.cpu(), counts)
    queries, query_scale = _in_8_bits(_regression(blind, sample))
    return Coding(mean, projection, scale, queries.cpu(), query_scale.cpu(), counts)


def allocate(errors: dict[int, np.ndarray], nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which components get 8, 4 and 2 bits, so that codes have `nbytes` bytes at most and the sum of errors is least.

    `errors`: by bits (0: nothing is kept) the mean squared error of each component, (r,). Components of 4 bits come in
    pairs and those of 2 in fours, so that classes lie apart in whole bytes.
    """
    count = len(errors[0])
    by_wide = np.argsort(errors[8] - errors[4], kind="stable")  # those that gain most come first
    best: tuple[float, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
    for wide in range(min(nbytes, count, MOST_WIDE) + 1):
        first, rest = by_wide[:wide], by_wide[wide:]
        by_four = rest[np.argsort((errors[4] - errors[2])[rest], kind="stable")]
        for four in range(0, min(len(rest), 2 * (nbytes - wide)) + 1, 2):
            second, others = by_four[:four], by_four[four:]
            two = min(4 * (nbytes - wide - four // 2), len(others) // 4 * 4)
            by_two = others[np.argsort((errors[2] - errors[0])[others], kind="stable")]
            third, none = by_two[:two], by_two[two:]
            parts_of = zip((8, 4, 2, 0), (first, second, third, none), strict=True)
            error = float(sum(errors[bits][part].sum() for bits, part in parts_of))
            if best is None or error < best[0]:
                best = error, (first, second, third)
    assert best is not None
    return best[1]


def _statistics(
    keys: Iterable[torch.Tensor], tokens: int, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The sum (W,) and the second moment (W, W), float32, of keys behind the sinks, how many they are, and a sample
    (n, W) of them in their own type."""
    position, count = 0, 0
    total = moment = torch.zeros(0, dtype=torch.float32, device="cpu")
    sample: list[torch.Tensor] = []
    behind = None if visible is None else visible[:, :tokens] & (visible[:, :tokens].cumsum(1) > _SINKS)
    for part in (piece for block in keys for piece in parts(block)):
        stop, rows = position + part.shape[2], part.shape[0]
        joined = part.transpose(1, 2).flatten(2)
        if not position:
            total = torch.zeros(joined.shape[2], device=part.device, dtype=torch.float32)
            moment = torch.zeros(joined.shape[2], joined.shape[2], device=part.device, dtype=torch.float32)
        if behind is None:
            flat = joined[:, max(0, _SINKS - position) :].flatten(0, 1)
        else:
            flat = joined[behind[:, position:stop].expand(rows, -1)]
        places, all_of = torch.arange(count, count + len(flat), device="cpu"), max(rows * tokens, _SAMPLE)
        evenly = places * _SAMPLE // all_of != (places - 1) * _SAMPLE // all_of
        sample.append(flat[evenly.to(flat.device)])
        wide = flat.float()
        total += wide.sum(0)
        moment.addmm_(wide.t(), wide)
        position, count = stop, count + len(flat)
    return total, moment, count, torch.cat(sample)


def _measured(
    sample: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """By bits: the least mean squared error (r,) of the components of a sample (n, W) along directions (W, r), and with
    which step."""
    values = torch.cat([(part.float() - mean) @ directions for part in sample.split(PART)])
    deviation = values.std(0, correction=0).clamp_min(1e-12)
    errors, steps = {0: values.square().mean(0)}, {}
    for bits in CLASSES:
        limit = 2 ** (bits - 1)
        for times in _STEPS:
            step = deviation * (_GAUSSIAN_STEPS[bits] * times)
            coded = (values / step).floor_().clamp_(-limit, limit - 1).add_(0.5).mul_(step)
            error = coded.sub_(values).square_().mean(0)
            if times == _STEPS[0]:
                errors[bits], steps[bits] = error, step
                continue
            better = error < errors[bits]
            errors[bits] = torch.where(better, error, errors[bits])
            steps[bits] = torch.where(better, step, steps[bits])
    return errors, steps


def _regression(coding: Coding, sample: torch.Tensor) -> torch.Tensor:
    """(W, r): what the codes of a sample (n, W) of keys are multiplied by, its transpose, to come nearest to the sample
    less the mean."""
    device = sample.device
    gram = torch.zeros(coding.rank, coding.rank, device=device, dtype=torch.float32)
    product = torch.zeros(coding.rank, sample.shape[1], device=device, dtype=torch.float32)
    offsets = torch.from_numpy(coding.offsets).to(device)
    for part in sample.split(PART):
        values = coding.unpacked(coding.encode(part)).t().float() + offsets
        gram.addmm_(values.t(), values)
        product.addmm_(values.t(), part.float() - coding.mean)
    level = 1e-4 * gram.diagonal().mean().clamp_min(1e-30)
    gram += level * torch.eye(len(gram), device=device, dtype=torch.float32)
    return torch.linalg.solve(gram, product).t()


def _in_8_bits(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(W, r) int8 and scales (r,) whose product comes nearest to `matrix` (W, r)."""
    scale = matrix.abs().amax(0).clamp_min(1e-30) / 127
    return (matrix / scale).round_().to(torch.int8), scale


