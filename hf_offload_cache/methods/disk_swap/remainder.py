"""The remainder of a step: what attention over the best units that were not selected would have added, estimated from
compact keys. It goes beyond the paper, whose steps drop these units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Self

import numpy as np
import torch

from ...history.records import RecordFormat
from ...history.state import Array, State
from ...kernels.fits import weigh
from ...kernels.on_a_device import has_step, plans_step, to_device
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.value_maps import QUERIES, LeastSquares, ValueMaps, asked, token_weights
from .coding import APART, PART, QUERIES_SEEN
from .compact_keys import HIDDEN, CompactKeys, Scored

_TOKENS = 4096
"""Tokens that maps are fitted to, in units that lie evenly among all."""
_SCORES, _SCORED = 512, 3
"""Scores that are in memory at a time, each query's best of all units included, and tokens that are scored at a time,
for each token of a fit's part."""
_ENTRIES = 640 * PART
"""Elements of keys and values that a processor compares and adds at a time, unless `PART` tokens have more."""
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
    count, alone = min(units * form.group_size, tokens), plans_step(run.device_type, form.key_dim, form.value_dim)
    run.passes("scores", decode=4 * (3 * heads * count + _COMPONENTS) + count * rank)
    run.passes("fitting", prefill=fit_bytes(form, rows, rank, heads, tokens, part, alone))


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

def fit_bytes(
    form: RecordFormat, rows: int, rank: int, heads: int, tokens: int, part: int = PART, alone: bool = False
) -> int:
    """Bytes that `fit_maps` uses while it runs. `part`: one of `part_sizes`. `alone`: kernels compare entries and add
    them, which need no memory for that."""
    group, inputs, size = form.group_size, rank + 1, form.dtype.itemsize
    tokens, key_heads, value_heads = min(tokens, _TOKENS + 2 * group), form.num_key_heads, form.num_value_heads
    units, indices = -(-tokens // group), 8 * tokens
    together, count, wide = _scored_together(rows, heads, units, group, part)
    low, scored = QUERIES * heads * inputs, wide * group * (count * heads + heads + rank)
    scored += count * heads * (units + 2 * (units // wide + 2))
    weighing = together * (rank * tokens + max(rank * tokens + 2 * indices, 24 * low, 4 * (low + scored)))
    shares = 4 * rows * max(key_heads, value_heads) * tokens
    keys = size * form.entry_width + 4 * (form.key_width + heads * QUERIES) + 5 * QUERIES * key_heads
    values = (size + 4) * value_heads * form.value_dim + 4 * inputs * (3 + value_heads) + 2 * rank + 24
    piece = min(rows * tokens, max(rows, _piece(form, part, alone)))
    gram, product = (4 * value_heads * inputs * width for width in (inputs, form.value_dim))
    sums = rows * (gram + product + 4 * inputs)
    adding = max(piece * max(keys, 2 * size * form.entry_width), piece * values + rows * max(gram, product))
    left = 0
    if alone:  # entries with copies that are joined, components, and what is added to each token's masses
        adding = piece * (2 * size * form.entry_width + 8 * inputs + 2 * heads + 4 * key_heads + 24)
        left = rows * QUERIES * (key_heads * units + 4 * heads)
    adding = max(shares, adding + left + sums) + indices
    solving = min(rows, _solved(part)) * (2 * gram + 4 * product) + sums + indices
    queries = rows * QUERIES * (heads * form.key_dim * (4 + size) + key_heads * units + 4 * heads) + QUERIES * units
    return max(weighing, adding, solving) + queries + shares + indices


def _scored_together(rows: int, heads: int, units: int, group: int, part: int) -> tuple[int, int, int]:
    """Rows, queries and units of a sample that are scored at a time."""
    wide = max(1, min(units, _SCORED * part // group))
    each = heads * (wide * group + units)  # scores of a query, and its units' best
    queries = -(-QUERIES // -(-QUERIES // max(1, min(QUERIES, _SCORES * part // each))))
    return max(1, min(rows, _SCORES * part // (each * queries))), queries, wide


def _solved(part: int) -> int:
    """Rows whose maps are solved at a time."""
    return max(1, part // PART)


def _piece(form: RecordFormat, part: int, alone: bool) -> int:
    """Tokens of the sample, of all rows together, whose entries are compared and added at a time."""
    return part if alone else max(PART, part // 2, min(2 * PART, _ENTRIES // form.entry_width))


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
    alone = has_step(keys.device, form.key_dim, form.value_dim)
    latest = _Asked(queries, ends, keys, form, scaling, sample, every, heads)
    shares = latest.weigh(wanted, candidates, visible, part)
    tokens = (sample[:, None] * group + np.arange(group)).ravel()
    places = to_device(tokens, keys.device)
    weights = token_weights(shares, form, None if visible is None else visible[:, places])
    del shares
    sums = LeastSquares(rows, keys.leading + 1, form, keys.device)
    offsets = to_device(keys.offsets[: keys.leading], keys.device)
    most = max(1, _piece(form, part, alone) // rows)
    for piece, sample_keys, sample_values in _sampled(stored(), tokens, places, most):
        here = places[piece]
        seen = None if visible is None else visible[:, here]
        if seen is not None:  # padding may be NaN
            sample_keys.masked_fill_(~seen[:, None, :, None], 0)
            sample_values.masked_fill_(~seen[:, None, :, None], 0)
        (latest.compare_there if alone else latest.compare)(piece, sample_keys, seen)
        del sample_keys
        components = keys.components(slice(None), here)[:, : keys.leading]
        sums.add(components, sample_values, weights[..., piece], seen, offsets)
        del components, sample_values
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
                yield slice(first, at), *_joined(held)
                first = at
        begin += keys.shape[2]


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values (B, H, n, D) of all `parts`, which are taken out of the list."""
    keys, values = parts[0] if len(parts) == 1 else (torch.cat(each, 2) for each in zip(*parts, strict=True))
    parts.clear()
    return keys, values


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
        self._by_head = states.unflatten(1, (form.num_key_heads, -1)).to(device)  # (B, Hk, R, q, D)
        rows, query_heads, count = states.shape[:3]
        self._queries = states.transpose(1, 2)  # (B, q, H, D)
        self._units = units = np.concatenate([[0], sample])
        seen = np.maximum(keys.tokens - np.array(behind), 0) if ends is None else ends[::-1][behind]
        self._behind = (units >= seen[:, None] // form.group_size) & (units > 0)  # (q, units)
        self._hidden = to_device(self._behind, device)
        self._rest = torch.zeros(rows, count, heads, len(sample), dtype=torch.bool, device=device)
        self._total = torch.zeros(rows, count, query_heads, dtype=torch.float32, device=device)  # logarithms
        self.mass = torch.zeros(2, rows, query_heads, dtype=torch.float32, device=device)
        """The true mass (rows, H) of the remainders, and the estimated one."""

    def weigh(self, wanted: int, candidates: int, visible: torch.Tensor | None, part: int) -> torch.Tensor:
        """The attention (B, Hk, tokens of the sample) float32 of the queries to their remainders.

        `wanted` of the sample's `candidates` best units are selected. Each query sees the units that ended before
        it. `part`: one of `part_sizes`. Scores are computed twice, because the first pass finds what the second divides
        them by, and to keep them would take more memory."""
        rows, count, query_heads = self._total.shape
        (key_heads, apart), units, group = self._heads, len(self._units), self._group
        shares = torch.zeros(rows, key_heads, group, units, dtype=torch.float32, device=self._total.device)
        together, queries, wide = _scored_together(rows, query_heads, units, group, part)
        pieces = _slices(units, wide)
        order = [self._units[piece] * group + np.arange(group)[:, None] for piece in pieces]
        tokens = to_device(np.concatenate([each.ravel() for each in order]), self._total.device)
        stands_for = np.full(units, self._every, dtype=np.float32)
        stands_for[0] = 1
        weights = to_device(stands_for, self._total.device)
        for batch in _slices(rows, together):
            components, low = self._keys.components(batch, tokens), self._low(batch)
            padding = None if visible is None else ~visible[batch if len(visible) > 1 else slice(None), tokens]
            for span in _slices(count, queries):
                asking = [each[:, span] for each in low]
                best = components.new_empty(*asking[0].shape[:3], units, dtype=torch.float32)
                tops, totals = best.new_empty(2, *best.shape[:3], len(pieces))
                for at, piece in enumerate(pieces):
                    scores = self._scores(asking, components, padding, piece)
                    if self._behind[span, piece].any():
                        scores.masked_fill_(self._hidden[span, None, None, piece], float(HIDDEN))
                    best[..., piece] = here = scores.amax(3)
                    tops[..., at] = top = here.amax(3)
                    totals[..., at] = scores.sub_(top[..., None, None]).exp_().sum(3) @ weights[piece]
                    del scores
                top = tops.amax(3, keepdim=True).clamp_min_(-1e29)
                total = totals.mul_(tops.sub_(top).exp_()).sum(3).clamp_min_(1e-30)
                best.sub_(top).clamp_min_(-80).exp_()
                best /= (best @ weights)[..., None]
                importance = best[..., 1:].unflatten(2, (apart, -1)).sum(3)
                rest = _next_best(importance, wanted, candidates) & ~self._hidden[span, None, 1:]
                self._rest[batch, span] = rest
                by_unit = best.new_zeros(*rest.shape[:3], 1, 1, units)
                by_unit[..., 0, 0, 1:] = rest
                del best, importance
                self._total[batch, span] = total = total.log_().add_(top[..., 0])
                for piece in pieces:
                    left = self._scores(asking, components, padding, piece)
                    left.sub_(total[..., None, None]).exp_()
                    left.unflatten(2, (apart, -1)).mul_(by_unit[..., piece])
                    by_head = left.sum(1)
                    self.mass[1, batch] += by_head.sum((2, 3))
                    shares[batch, ..., piece] += by_head.unflatten(1, (key_heads, -1)).sum(2)
                    del left, by_head
        return shares[..., 1:].transpose(2, 3).flatten(2)

    def _low(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Low-rank queries (b, q, H, r) float32 of some rows, and what is added to their products with components
        (b, q, H, 1)."""
        queries = self._queries[rows]
        asking = self._keys.asking(queries.flatten(0, 1), self._scaling)
        low, added = (each.unflatten(0, queries.shape[:2]) for each in asking)
        return low, added

    def _scores(
        self, queries: Sequence[torch.Tensor], components: torch.Tensor, padding: torch.Tensor | None, units: slice
    ) -> torch.Tensor:
        """Scores (b, q, H, group, n) float32 of `queries`, of `_low`, of `units` of the sample. In `components` (b, r,
        tokens) of all, the tokens of these follow one another, each unit's first token before all second ones.
        `padding` (·, tokens) is below every score."""
        (low, constant), shape = queries, (self._group, units.stop - units.start)
        here = slice(units.start * self._group, units.stop * self._group)
        scores = (low.flatten(1, 2) @ components[..., here].float()).view(*low.shape[:3], *shape)
        scores.add_(constant[..., None])
        if padding is not None:
            scores.masked_fill_(padding[:, None, None, here].unflatten(3, shape), float(HIDDEN))
        return scores

    @functools.cached_property
    def _states(self) -> torch.Tensor:
        """(B, Hk, R q, D) float32, scaled."""
        return self._by_head.flatten(2, 3).float() * self._scaling

    @functools.cached_property
    def _there(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `fits.weigh` takes, after `weigh`: of each key head of each sequence its queries, the units of their
        remainders, and the logarithms of all weights' sums."""
        rest = self._rest.transpose(1, 2).expand(-1, self._heads[0], -1, -1)  # (B, Hk, q, units)
        total = self._total.unflatten(2, (self._heads[0], -1)).transpose(1, 2)  # (B, Hk, q, R)
        states = self._by_head.transpose(2, 3).flatten(2, 3)
        return states.flatten(0, 1), rest.flatten(0, 1).contiguous(), total.flatten(2).flatten(0, 1)

    def compare_there(self, places: slice, keys: torch.Tensor, seen: torch.Tensor | None) -> None:
        """As `compare`, by a kernel."""
        (states, left, total), rows = self._there, len(self._by_head) * self._heads[0]
        units = np.arange(places.start, places.stop, dtype=np.int32) // self._group
        labels = to_device(units, keys.device).expand(rows, -1)
        if seen is not None:
            seen = seen[:, None].expand(len(keys), self._heads[0], -1).flatten(0, 1)
        _, parts = weigh(states, keys.flatten(0, 1), labels, left, total, None, seen, self._scaling, (0, 1, 0))
        self.mass[0] += parts[0].unflatten(1, (left.shape[1], -1)).sum((1, 3)).view_as(self.mass[0])

    def compare(self, places: slice, keys: torch.Tensor, seen: torch.Tensor | None) -> None:
        """Add the true remainders' mass among keys (B, Hk, t, D), those of the sample's tokens at `places`. `seen` (·,
        t) excludes padding."""
        units = torch.arange(places.start, places.stop, device=keys.device) // self._group
        held = self._rest.index_select(3, units).float().transpose(1, 2)[:, :, None]  # (B, 1 or Hk, 1, q, t)
        if seen is not None:
            held *= seen[:, None, None, None]
        total = self._total.transpose(1, 2).unflatten(1, (self._heads[0], -1))[..., None]  # (B, Hk, R, q, 1)
        scores = torch.matmul(self._states, keys.float().transpose(2, 3)).unflatten(2, total.shape[2:4])
        self.mass[0] += scores.sub_(total).clamp_(max=60).exp_().mul_(held).sum((3, 4)).flatten(1)


def _slices(count: int, most: int) -> list[slice]:
    """[0, count) in slices of at most `most`."""
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def _next_best(importance: torch.Tensor, wanted: int, candidates: int) -> torch.Tensor:
    """Mask (..., units) of the `candidates` most important units without the `wanted` most important ones."""
    best = importance.topk(min(candidates, importance.shape[-1])).indices
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best[..., wanted:], True)
