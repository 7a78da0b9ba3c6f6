"""The remainder of a step: what attention over the best units that were not selected would have added, estimated from
compact keys. It goes beyond the paper, whose steps drop these units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Self

import numpy as np
import torch

from ...history.records import RecordFormat
from ...history.state import Array, State
from ...kernels.on_a_device import to_device
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.value_maps import QUERIES, LeastSquares, ValueMaps, asked
from .coding import APART, PART, QUERIES_SEEN
from .compact_keys import HIDDEN, CompactKeys, Scored

_TOKENS = 2048
"""Tokens that maps are fitted to, in units that lie evenly among all."""
_SCORES, _SCORED = 256, 4
"""Scores that are held at a time, and tokens that are scored at a time, for each token of a fit's part."""
_COMPONENTS = 1 << 15
"""Components converted to float32 at a time."""

Stored = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]


def rehearse_maps(
    run: DryRun, form: RecordFormat, sizes: tuple[int, int, int], tokens: int, units: int, part: int = PART
) -> None:
    """Declare the memory of maps and estimates for rows, components and query heads `sizes`, in a dry run.

    `tokens`: tokens a row; `units`: maximum units whose entries a step estimates; `part`: one of `part_sizes`."""
    rows, rank, heads = sizes
    ValueMaps.rehearse(run, form, sizes)
    count = min(units * form.group_size, tokens)
    run.passes("scores", decode=4 * (3 * heads * count + _COMPONENTS) + count * rank)
    run.passes("fitting", prefill=fit_bytes(form, rows, rank, heads, tokens, part))


# The queries of a prompt that a fit at its end needs

_OWNER = "compact keys"
KEPT, _FEWEST = QUERIES_SEEN // APART, 8
"""Most queries that are kept, and fewest: the memory of short codes of a short context has no room for more."""


class PromptQueries:
    """The latest queries of a prompt that comes in pieces, evenly apart, and which tokens are padding: copies, on their
    devices. The account books them as "compact keys": there are none while a fit waits.

    Args:
        states: (B, H, n, D) queries, oldest first.
        ends: (n,) int64: tokens a row that are in sealed units and that each query sees.
        visible: (B or 1, tokens) bool, excludes padding.
        most: maximum number of queries.
        before: those of the pieces before, which are freed.
    """

    STATE: ClassVar[State] = State(
        "queries of a prompt",
        _OWNER,
        states=Array("rows query_heads queries dim"),
        visible=Array("rows tokens", torch.bool, optional=True),
    )

    def __init__(
        self, states: torch.Tensor, ends: np.ndarray, visible: torch.Tensor | None, most: int, form: RecordFormat,
        account: MemoryAccount, before: Self | None = None,
    ) -> None:  # fmt: skip
        rows, heads, count, dim = states.shape
        self._account = account
        self.states: torch.Tensor
        self.visible: torch.Tensor | None = None
        kept = 0 if before is None else min(before.states.shape[2], most - count)
        made = account.empty(_OWNER, rows, heads, kept + count, dim, dtype=form.dtype, device=states.device)
        made[:, :, kept:] = states
        self.states, self.ends = made, ends
        if visible is not None:
            self.visible = account.empty(_OWNER, rows, visible.shape[1], dtype=torch.bool, device=visible.device)
            self.visible.copy_(visible)
        if before is not None:
            if kept:
                made[:, :, :kept] = before.states[:, :, -kept:]
                self.ends = np.concatenate([before.ends[-kept:], ends])
            before.close()

    @classmethod
    def after(
        cls, before: Self | None, queries: torch.Tensor, tokens: int, visible: torch.Tensor | None, most: int,
        form: RecordFormat, account: MemoryAccount,
    ) -> Self:  # fmt: skip
        """With some of the latest 512 `queries` (B, H, q, D) of a further piece, evenly apart. With it, sealed units
        have `tokens` tokens a row. Raises `BudgetError`, with `before` unchanged."""
        latest = queries[:, :, -QUERIES_SEEN:]
        apart = -(-(latest.shape[2] if before is None else QUERIES_SEEN) // most)
        ends = np.maximum(tokens - np.arange(latest.shape[2])[::-1][::apart], 0)
        return cls(latest[:, :, ::apart], ends, visible, most, form, account, before)

    @staticmethod
    def planned(form: RecordFormat, rows: int, heads: int, tokens: int, room: int) -> tuple[int, int]:
        """As many queries as the `room` that a fit leaves has bytes for, and the bytes of these, for `heads` query
        heads and `tokens` tokens a row."""
        each, padding = rows * heads * form.key_dim * form.dtype.itemsize, rows * tokens
        most = min(KEPT, max(_FEWEST, (room - padding) // each))
        return most, most * each + padding

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.STATE.select_rows(self, rows)

    def close(self) -> None:
        """Free the memory."""
        self.STATE.close(self)


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
        by_weight = to_device(weights, components.device) @ components.float().t()
        return by_weight.numpy(force=True)
    stored, count = components.numpy(), components.shape[1]
    piece = max(1, _COMPONENTS // len(stored))
    total = np.zeros((len(weights), len(stored)), dtype=np.float32)
    for first in range(0, count, piece):
        part = slice(first, first + piece)
        total += weights[:, part] @ stored[:, part].astype(np.float32).T
    return total


# Fitting

def fit_bytes(form: RecordFormat, rows: int, rank: int, heads: int, tokens: int, part: int = PART) -> int:
    """Bytes that `fit_maps` uses while it runs. `part`: one of `part_sizes`."""
    tokens, inputs = min(tokens, _TOKENS + 2 * form.group_size), rank + 1
    each = QUERIES * heads * tokens  # scores of a row
    together = min(rows, max(1, _SCORES * part // each))  # rows scored at a time
    scores = max(min(_SCORES * part, rows * each), heads * tokens) * 4 * 2
    scores += together * rank * (2 * tokens + 6 * min(tokens, _SCORED * part) + 6 * 4 * QUERIES * heads)
    gram, product = (4 * form.num_value_heads * inputs * width for width in (inputs, form.value_dim))
    held = max(rows, min(rows * tokens, _piece(part)))
    pieces = 4 * held * (form.entry_width + (form.num_value_heads + 2) * inputs + 3 * heads * QUERIES)
    solved = min(rows, _solved(part)) * (2 * gram + 3 * product)
    sums = rows * (2 * gram + 2 * product)
    queries = rows * QUERIES * (heads * form.key_dim * (4 + form.dtype.itemsize) + tokens // form.group_size)
    added = rows * max(gram, product)
    return max(scores, pieces + sums + added, solved + sums) + queries + 4 * rows * form.num_key_heads * tokens


def _solved(part: int) -> int:
    """Rows whose maps are solved at a time."""
    return max(1, part // PART)


def _piece(part: int) -> int:
    """Tokens of the sample, of all rows together, whose entries are compared and added at a time."""
    return max(PART, part // 2)


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
    part: int = PART,
    ends: np.ndarray | None = None,
) -> ValueMaps | None:
    """Fit maps to a sample of the units of `stored()`, whose compact keys are `keys`: weighted least squares of values
    on components. A token's weight is the attention that it gets from the latest of `queries` (B, H, q, D), as a part
    of their remainder, if they select as large a share of the sample as of all. None if there is no remainder.

    Args:
        chosen: units that a step selects, and the best units, these included, among which the remainder is.
        visible: (·, tokens), excludes padding.
        heads: key heads that choose apart, each with its own remainder; 1: all have the same.
        part: one of `part_sizes`.
        ends: (q,), tokens a row that each query sees; None: they are the latest ones, and the last sees all.
    """
    rows, group, units = len(queries), form.group_size, keys.tokens // form.group_size
    every = -(-units * group // _TOKENS)
    sample = np.arange(1 + (every - 1) // 2, units, every)  # the first unit is selected, and unlike the others
    wanted, candidates = (max(1, round((count - 1) / every)) for count in chosen)
    if wanted >= min(candidates, len(sample)):
        return None
    latest = _Asked(queries, ends, keys, form, scaling, sample, every, heads)
    shares = latest.weigh(wanted, candidates, visible, part)
    sums = LeastSquares(rows, keys.leading + 1, form, keys.device)
    tokens = (sample[:, None] * group + np.arange(group)).ravel()
    places = to_device(tokens, keys.device)
    offsets = to_device(keys.offsets[: keys.leading, None], keys.device)
    for piece, sample_keys, sample_values in _sampled(stored(), tokens, places, max(1, _piece(part) // rows)):
        here = places[piece]
        seen = None if visible is None else visible[:, here]
        if seen is not None:  # padding may be NaN
            sample_keys.masked_fill_(~seen[:, None, :, None], 0)
            sample_values.masked_fill_(~seen[:, None, :, None], 0)
        latest.compare(piece, sample_keys, seen)
        components = keys.components(slice(None), here)[:, : keys.leading] + offsets
        sums.add(components, sample_values.float(), shares[..., piece], seen)
    made = ValueMaps(form, (rows, keys.leading, queries.shape[1]), account)
    for together in _slices(rows, _solved(part)):
        made.set(together, sums.solved(together), *latest.mass[:, together])
    return made


def _sampled(
    stored: Iterable[tuple[torch.Tensor, torch.Tensor]], tokens: np.ndarray, places: torch.Tensor, piece: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Keys and values (B, H, n, D) of a sample, at most `piece` of its `tokens` at a time, and which of these they are:
    copies. `places`: the tokens on the device."""
    begin = at = first = 0
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for keys, values in stored:
        stop = int(tokens.searchsorted(begin + keys.shape[2]))
        while at < stop:
            block = slice(at, min(stop, first + piece))
            index = places[block] - begin
            held.append((keys.index_select(2, index), values.index_select(2, index)))
            at = block.stop
            if at == first + piece or at == len(tokens):
                all_keys, all_values = held[0] if len(held) == 1 else (
                    torch.cat(parts, 2) for parts in zip(*held, strict=True)
                )
                held.clear()
                yield slice(first, at), all_keys, all_values
                del all_keys, all_values
                first = at
        begin += keys.shape[2]


class _Asked:
    """The queries by which the tokens of a sample are weighed, and their estimated and true remainders.

    Args:
        sample: units (n,), ascending, without the first.
        every: number of units that one of the sample stands for.
        ends, heads: as in `fit_maps`.
    """

    def __init__(
        self, queries: torch.Tensor, ends: np.ndarray | None, keys: CompactKeys, form: RecordFormat, scaling: float,
        sample: np.ndarray, every: int, heads: int,
    ) -> None:  # fmt: skip
        states, behind = asked(queries)
        self._keys, self._group, self._heads = keys, form.group_size, (form.num_key_heads, heads)
        self._scaling, self._every, device = scaling, every, keys.device
        by_head = states.unflatten(1, (form.num_key_heads, -1)).flatten(2, 3).to(device)
        self._states = by_head.float() * scaling  # (B, Hk, R q, D)
        rows, query_heads, count = states.shape[:3]
        self._queries = states.transpose(1, 2)  # (B, q, H, D)
        units = np.concatenate([[0], sample])
        self._tokens = to_device((units[:, None] * form.group_size + np.arange(form.group_size)).ravel(), device)
        seen = np.maximum(keys.tokens - np.array(behind), 0) if ends is None else ends[::-1][behind]
        self._hidden = to_device((units >= seen[:, None] // form.group_size) & (units > 0), device)  # (q, units)
        self._rest = torch.zeros(rows, count, heads, len(sample), dtype=torch.bool, device=device)
        self._top, self._total = torch.zeros(2, rows, count, query_heads, dtype=torch.float32, device=device)
        self.mass = torch.zeros(2, rows, query_heads, dtype=torch.float32, device=device)
        """The true mass (rows, H) of the remainders, and the estimated one."""

    def weigh(self, wanted: int, candidates: int, visible: torch.Tensor | None, part: int) -> torch.Tensor:
        """The attention (B, Hk, tokens of the sample) float32 of the queries to their remainders.

        `wanted` of the sample's `candidates` best units are selected. Each query sees the units that ended before
        it. `part`: one of `part_sizes`."""
        rows, count, query_heads = self._top.shape
        (key_heads, apart), tokens, group = self._heads, len(self._tokens), self._group
        shares = torch.zeros(rows, key_heads, tokens - group, dtype=torch.float32, device=self._top.device)
        piece = max(1, _SCORES * part // (query_heads * tokens))
        queries = min(count, piece)
        for batch in _slices(rows, max(1, piece // queries)):
            components, low = self._keys.components(batch, self._tokens), self._low(batch)
            for span in _slices(count, queries):
                scores = self._scores([each[:, span] for each in low], components, part).unflatten(3, (-1, group))
                hidden = self._hidden[span, None, :, None]
                if visible is not None:
                    seen = visible[batch if len(visible) > 1 else slice(None), self._tokens]
                    hidden = hidden | ~seen.unflatten(1, (-1, group))[:, None, None]
                scores.masked_fill_(hidden, float(HIDDEN))
                top = scores.amax((3, 4), keepdim=True).clamp_min_(-1e29)
                weights = scores.sub_(top).clamp_min_(-80).exp_().masked_fill_(hidden, 0)
                best = weights.amax(4)
                share = best[..., 1:] / best[..., 1:].sum(3, keepdim=True).mul_(self._every).add_(best[..., :1])
                importance = share.unflatten(2, (apart, -1)).sum(3)
                rest = _next_best(importance, wanted, candidates) & ~self._hidden[span, None, 1:]
                left = weights[..., 1:, :]
                total = left.sum((3, 4)).mul_(self._every).add_(weights[..., 0, :].sum(3)).clamp_min_(1e-30)
                left.unflatten(2, (apart, -1)).mul_(rest[:, :, :, None, :, None])
                left /= total[..., None, None]
                shares[batch] += left.unflatten(2, (key_heads, -1)).sum((1, 3)).flatten(2)
                self.mass[1, batch] += left.sum((1, 3, 4))
                self._rest[batch, span], self._total[batch, span] = rest, total
                self._top[batch, span] = top[..., 0, 0]
                del scores, weights, left
        return shares

    def _low(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Low-rank queries (b, q, H, r) float32 of some rows, and what is added to their products with components
        (b, q, H, 1)."""
        queries = self._queries[rows]
        asking = self._keys.asking(queries.flatten(0, 1), self._scaling)
        low, added = (each.unflatten(0, queries.shape[:2]) for each in asking)
        return low, added

    def _scores(self, queries: Sequence[torch.Tensor], components: torch.Tensor, part: int) -> torch.Tensor:
        """Scores (b, q, H, tokens) float32 of `queries`, of `_low`, by the `components` (b, r, tokens) of all
        tokens."""
        low, constant = queries
        scores, flat = low.new_empty(*low.shape[:3], len(self._tokens)), low.flatten(1, 2)
        for columns in _slices(len(self._tokens), _SCORED * part):
            scores.flatten(1, 2)[..., columns] = flat @ components[..., columns].float()
        return scores.add_(constant)

    def compare(self, places: slice, keys: torch.Tensor, seen: torch.Tensor | None) -> None:
        """Add the true remainders' mass among keys (B, Hk, t, D), those of the sample's tokens at `places`. `seen` (·,
        t) excludes padding."""
        units = torch.arange(places.start, places.stop, device=keys.device) // self._group
        held = self._rest.index_select(3, units).transpose(1, 2)[:, :, None]  # (B, 1 or Hk, 1, q, t)
        if seen is not None:
            held = held & seen[:, None, None, None]
        top, total = (
            part.transpose(1, 2).unflatten(1, (self._heads[0], -1))[..., None] for part in (self._top, self._total)
        )
        scores = torch.matmul(self._states, keys.float().transpose(2, 3)).unflatten(2, top.shape[2:4])
        weights = scores.sub_(top).clamp_(-80, 60).exp_().mul_(held).div_(total)
        self.mass[0] += weights.sum((3, 4)).flatten(1)


def _slices(count: int, most: int) -> list[slice]:
    """[0, count) in slices of at most `most`."""
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def _next_best(importance: torch.Tensor, wanted: int, candidates: int) -> torch.Tensor:
    """Mask (..., units) of the `candidates` most important units without the `wanted` most important ones."""
    best = importance.topk(min(candidates, importance.shape[-1])).indices
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best[..., wanted:], True)
