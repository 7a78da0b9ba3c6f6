"""The kernels of `fits`, one launch each: see its functions. Products are in single precision. No sum depends on the
order in which programs run.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .clusters_triton import _products
from .fits import MOST, POINTS
from .low_bit_triton import wide
from .ranking import HIDDEN, LEAST

_HIDDEN, _LEAST, _MOST = tl.constexpr(HIDDEN), tl.constexpr(LEAST), tl.constexpr(MOST)
_CLUSTERS, _PARTS = 1024, 128
"""Clusters, and parts of a softmax, that a program looks at together."""
_QUERIES = 16
"""Lines of queries that a program multiplies with keys at a time."""
_CHANNELS = 64
"""Channels of a key at a time."""
_SIDE, _TOKENS = 32, 32
"""Inputs and columns of a program's sums, and tokens at a time."""


@triton.jit(do_not_specialize=["heads", "clusters", "parts", "queries", "wanted"])
def _unselected(  # type: ignore[no-untyped-def]
    scores, tops, sums, members, left, total, shares, heads, clusters, parts, queries, wanted, member_row,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    members += program // queries * member_row
    shares += program * clusters
    scores += program * heads * clusters
    for head in range(heads):
        top = tl.full((PARTS,), _HIDDEN, dtype=tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            at = (program * heads + head) * parts + part
            top = tl.maximum(top, tl.load(tops + at, mask=part < parts, other=_HIDDEN))
        most, added = tl.max(top, 0), tl.zeros((PARTS,), dtype=tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            at, there = (program * heads + head) * parts + part, part < parts
            own = tl.exp(tl.load(tops + at, mask=there, other=_HIDDEN) - most)
            added += own * tl.load(sums + at, mask=there, other=0.0)
        tl.store(total + program * heads + head, most + tl.log(tl.sum(added, 0)))
    tl.debug_barrier()  # all of them are stored
    for first in range(0, clusters, BLOCK):
        cluster = first + tl.arange(0, BLOCK)
        there, found = cluster < clusters, tl.zeros((BLOCK,), dtype=tl.float32)
        for head in range(heads):
            own = tl.load(scores + head * clusters + cluster, mask=there, other=_HIDDEN)
            share = tl.exp(own - tl.load(total + program * heads + head))
            found += tl.where((own > _HIDDEN) & (share == share), share, 0.0)
        tl.store(shares + cluster, found, mask=there)
    tl.debug_barrier()
    # bit by bit, the largest share such that the clusters with at least as much have the wanted keys
    least, bit = tl.cast(0, tl.int32), tl.cast(1 << 30, tl.int32)
    for _ in range(31):
        reached = 0
        for first in range(0, clusters, BLOCK):
            cluster = first + tl.arange(0, BLOCK)
            image = tl.load(shares + cluster, mask=cluster < clusters, other=0.0).to(tl.int32, bitcast=True)
            held = tl.load(members + cluster, mask=cluster < clusters, other=0)
            reached += tl.sum(tl.where(image >= (least | bit), held, 0), 0)
        least = tl.where(reached >= wanted, least | bit, least)
        bit = bit >> 1
    before = 0
    for first in range(0, clusters, BLOCK):
        cluster = first + tl.arange(0, BLOCK)
        image = tl.load(shares + cluster, mask=cluster < clusters, other=0.0).to(tl.int32, bitcast=True)
        held = tl.load(members + cluster, mask=cluster < clusters, other=0)
        before += tl.sum(tl.where(image > least, held, 0), 0)
    for first in range(0, clusters, BLOCK):
        cluster = first + tl.arange(0, BLOCK)
        there = cluster < clusters
        image = tl.load(shares + cluster, mask=there, other=0.0).to(tl.int32, bitcast=True)
        held = tl.load(members + cluster, mask=there, other=0)
        equal = tl.where(image == least, held, 0)
        behind = (image < least) | ((image == least) & (before + tl.cumsum(equal, 0) - equal >= wanted))
        before += tl.sum(equal, 0)
        tl.store(left + program * clusters + cluster, (behind & (held > 0)).to(tl.uint8), mask=there)


def unselected(
    scores: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, members: torch.Tensor, heads: int, wanted: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fits.unselected`. A program has one query."""
    rows, lines, clusters = scores.shape
    options: dict[str, Any] = {"dtype": torch.float32, "device": scores.device}
    shape = rows, lines // heads, clusters
    left, total = torch.empty(*shape, dtype=torch.bool, device=scores.device), torch.empty(rows, lines, **options)
    _unselected[(rows * shape[1],)](
        scores, tops, sums, members, left.view(torch.uint8), total, torch.empty(*shape, **options), heads, clusters,
        tops.shape[2], shape[1], wanted, members.stride(0), min(_CLUSTERS, wide(clusters)), _PARTS,
    )  # fmt: skip
    return left, total


@triton.jit(do_not_specialize=["lines", "heads", "count", "clusters", "step", "end", "apart"])
def _weigh(  # type: ignore[no-untyped-def]
    states, keys, labels, left, total, scores, seen, weights, mass, scaling, lines, heads, count, clusters, step, end,
    apart, state_row, state_line, key_row, key_token, label_row, seen_row, DIM: tl.constexpr, WIDE: tl.constexpr,
    CHANNELS: tl.constexpr, QUERIES: tl.constexpr, POINTS: tl.constexpr, PRECISION: tl.constexpr,
    GUESSED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    token = part * POINTS + tl.arange(0, POINTS)
    within = token < count
    there = within
    if MASKED:
        there = within & (tl.load(seen + row * seen_row + token, mask=within, other=0) != 0)
    label = tl.load(labels + row * label_row + token, mask=there, other=0)
    states += row * state_row
    keys += row * key_row
    left += row * (lines // heads) * clusters
    found = tl.zeros((POINTS,), dtype=tl.float32)
    for first in range(0, lines, QUERIES):
        line = first + tl.arange(0, QUERIES)
        asked, query, to = line < lines, line // heads, row * lines + line
        inside = asked[:, None] & there[None, :]
        is_left = tl.load(left + query[:, None] * clusters + label[None, :], mask=inside, other=0) != 0
        is_left = is_left & ((step * token)[None, :] < (end - query * apart)[:, None])
        all_keys = tl.load(total + to, mask=asked, other=0.0)[:, None]
        own = _products(
            states, keys, key_token, token, there, line, asked, state_line, scaling, DIM, WIDE, CHANNELS, QUERIES,
            POINTS, PRECISION,
        )  # fmt: skip
        own = tl.exp(tl.minimum(tl.maximum(own - all_keys, _LEAST), _MOST))
        own = tl.where(is_left, own, 0.0)
        found += tl.sum(own, 0)
        tl.store(mass + to * parts + part, tl.sum(own, 1), mask=asked)
        guess = tl.zeros((QUERIES, POINTS), dtype=tl.float32)
        if GUESSED:
            guess = tl.load(scores + to[:, None] * clusters + label[None, :], mask=is_left, other=0.0)
            guess = tl.exp(tl.minimum(tl.maximum(guess - all_keys, _LEAST), _MOST))
            guess = tl.where(is_left, guess, 0.0)
        into = (tl.num_programs(1) * lines + to) * parts + part
        tl.store(mass + into, tl.sum(guess, 1), mask=asked)
    tl.store(weights + row * count + token, found, mask=within)


def weigh(
    states: torch.Tensor, keys: torch.Tensor, labels: torch.Tensor, left: torch.Tensor, total: torch.Tensor,
    scores: torch.Tensor | None, seen: torch.Tensor | None, scaling: float, ends: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `fits.weigh`. A program has `POINTS` tokens."""
    (rows, count, dim), lines, clusters = keys.shape, states.shape[1], left.shape[2]
    parts = triton.cdiv(count, POINTS)
    options: dict[str, Any] = {"dtype": torch.float32, "device": keys.device}
    weights, mass = torch.empty(rows, count, **options), torch.empty(2, rows, lines, parts, **options)
    grid: Any = (parts, rows)
    _weigh[grid](
        states, keys, labels, left.view(torch.uint8), total, total if scores is None else scores,
        labels if seen is None else seen.view(torch.uint8), weights, mass, scaling, lines, lines // left.shape[1],
        count, clusters, *ends, *states.stride()[:2], *keys.stride()[:2], labels.stride(0),
        0 if seen is None else seen.stride(0), dim, wide(dim), min(wide(dim), _CHANNELS), _QUERIES, POINTS,
        "ieee" if keys.dtype == torch.float32 else "tf32", scores is not None, seen is not None, num_warps=4,
        num_stages=1,  # more would hold wide keys in float32 several times, in more shared memory than devices may have
    )  # fmt: skip
    return weights, mass


@triton.jit
def _inputs(  # type: ignore[no-untyped-def]
    components, offsets, at, token, there, rank, step, token_step, OFFSETS: tl.constexpr
):  # fmt: skip
    """Inputs (SIDE, TOKENS) float32 `at` some numbers: components, behind them 1, and 0 beyond; 0 for other tokens."""
    inside = at < rank
    own = tl.load(
        components + at[:, None].to(tl.int64) * step + token[None, :].to(tl.int64) * token_step,
        mask=inside[:, None] & there[None, :], other=0,
    ).to(tl.float32)  # fmt: skip
    if OFFSETS:
        own += tl.load(offsets + at, mask=inside, other=0.0)[:, None]
    return tl.where(there[None, :], tl.where((at == rank)[:, None], 1.0, own), 0.0)


@triton.jit(do_not_specialize=["rank", "count", "heads"])
def _add_squares(  # type: ignore[no-untyped-def]
    components, offsets, values, weights, seen, sums, squares, rank, count, heads, row_step, step, token_step,
    value_row, value_head, value_token, weight_row, weight_head, seen_row, VALUE: tl.constexpr, SIDE: tl.constexpr,
    TOKENS: tl.constexpr, OFFSETS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    program, own_block, block = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    row, head, blocks = program // heads, program % heads, tl.cdiv(rank + 1, SIDE)
    side, place = tl.arange(0, SIDE), tl.arange(0, TOKENS)
    own, column = own_block * SIDE + side, block * SIDE + side
    of_values = (block - blocks) * SIDE + side
    components += row * row_step
    values += row * value_row + head * value_head
    weights += row * weight_row + head * weight_head
    total, squared = tl.zeros((SIDE, SIDE), dtype=tl.float32), tl.zeros((SIDE,), dtype=tl.float32)
    for first in range(0, count, TOKENS):
        token = first + place
        there = token < count
        if MASKED:
            there = there & (tl.load(seen + row * seen_row + token, mask=there, other=0) != 0)
        inputs = _inputs(components, offsets, own, token, there, rank, step, token_step, OFFSETS)
        squared += tl.sum(inputs * inputs, 1)
        inputs *= tl.load(weights + token, mask=there, other=0.0)[None, :]
        if block < blocks:
            others = _inputs(components, offsets, column, token, there, rank, step, token_step, OFFSETS)
            total = tl.dot(inputs, tl.trans(others), total, input_precision="ieee")
        else:
            inside = there[:, None] & (of_values < VALUE)[None, :]
            others = tl.load(
                values + token[:, None].to(tl.int64) * value_token + of_values[None, :], mask=inside, other=0.0
            ).to(tl.float32)
            total = tl.dot(inputs, others, total, input_precision="ieee")
    at = column if block < blocks else rank + 1 + of_values
    end = rank + 1 if block < blocks else rank + 1 + VALUE
    inside = (own <= rank)[:, None] & (at < end)[None, :]
    into = sums + (program * (rank + 1) + own)[:, None] * (rank + 1 + VALUE) + at[None, :]
    tl.store(into, tl.load(into, mask=inside, other=0.0) + total, mask=inside)
    if (block == 0) & (head == 0):
        into_squares = squares + row * (rank + 1) + own
        tl.store(into_squares, tl.load(into_squares, mask=own <= rank, other=0.0) + squared, mask=own <= rank)


def add_squares(
    components: torch.Tensor, offsets: torch.Tensor | None, values: torch.Tensor, weights: torch.Tensor,
    seen: torch.Tensor | None, sums: torch.Tensor, squares: torch.Tensor,
) -> None:  # fmt: skip
    """As `fits.add_squares`. A program has a block of `_SIDE` inputs and as many columns, of a head."""
    (rows, rank, count), (_, heads, _, value) = components.shape, values.shape
    blocks = triton.cdiv(rank + 1, _SIDE)
    grid: Any = (blocks + triton.cdiv(value, _SIDE), blocks, rows * heads)
    _add_squares[grid](
        components, weights if offsets is None else offsets, values, weights,
        weights if seen is None else seen.view(torch.uint8), sums, squares, rank, count, heads, *components.stride(),
        *values.stride()[:3], *weights.stride()[:2], 0 if seen is None else seen.stride(0), value, _SIDE, _TOKENS,
        offsets is not None, seen is not None, num_warps=4,
    )  # fmt: skip
