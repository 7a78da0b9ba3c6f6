"""Attention over low-bit elements on a device, unpacked in registers only."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit import SIDES
from .on_a_device import on_its_device

_GROUPS = 4
"""Groups of tokens per program of scores."""
_TOKENS = 64
"""Tokens whose values a program adds at a time."""
_PROGRAMS = 1024
"""Enough to keep a device busy: with fewer rows and heads, the sum over the tokens is split."""
_QUERIES = 16
"""Queries of a key head at a time: the fewest that tensor cores take."""


@triton.jit
def _half(at, there):  # type: ignore[no-untyped-def]
    """The number in half precision whose bytes, at any address, are here."""
    low = tl.load(at, mask=there, other=0).to(tl.int16)
    high = tl.load(at + 1, mask=there, other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["groups", "key_stride", "out_stride", "out_row"])
def _scores(  # type: ignore[no-untyped-def]
    queries, keys, out, count, groups, query_stride, key_stride, out_stride, out_row, DIM: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    asked = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    channel, token = tl.arange(0, WIDE), tl.arange(0, GROUP)
    states = tl.load(
        queries + head * query_stride + asked[:, None] * DIM + channel[None, :],
        mask=(asked < count)[:, None] & (channel < DIM)[None, :], other=0.0,
    )  # fmt: skip
    for step in range(GROUPS):
        group = tl.program_id(1) * GROUPS + step
        there = channel < tl.where(group < groups, DIM, 0)
        rows = keys + head * key_stride + (group.to(tl.int64) * DIM + channel) * ROW
        codes = tl.load(rows[:, None] + (token * BITS // 8)[None, :], mask=there[:, None], other=0).to(tl.int32)
        codes = (codes >> (token * BITS % 8)[None, :]) & ((1 << BITS) - 1)
        scale, zero = _half(rows + GROUP * BITS // 8, there), _half(rows + GROUP * BITS // 8 + 2, there)
        found = tl.dot(states * scale[None, :], codes.to(tl.float32), input_precision="tf32x3")
        found += tl.sum(states * zero[None, :], 1)[:, None]
        into = out + head * out_stride + asked[:, None] * out_row + (group * GROUP + token)[None, :]
        tl.store(into, found, mask=(asked < tl.where(group < groups, count, 0))[:, None])


@triton.jit(do_not_specialize=["tokens", "per_part", "share_stride", "share_row", "value_stride", "group_stride"])
def _weighted(  # type: ignore[no-untyped-def]
    shares, values, out, count, tokens, per_part, share_stride, share_row, value_stride, group_stride, out_part,
    out_stride, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    group, part = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    asked = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, WIDE)
    total = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
    offset = tl.zeros((QUERIES,), dtype=tl.float32)
    for first in range(part * per_part, min((part + 1) * per_part, tokens), TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < tokens
        share = tl.load(
            shares + head * share_stride + asked[:, None] * share_row + token[None, :],
            mask=(asked < count)[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        rows = values + head * value_stride + group * group_stride + token.to(tl.int64) * ROW
        codes = tl.load(
            rows[:, None] + (channel * BITS // 8)[None, :],
            mask=there[:, None] & (channel < CHANNELS)[None, :], other=0,
        ).to(tl.int32)  # fmt: skip
        codes = (codes >> (channel * BITS % 8)[None, :]) & ((1 << BITS) - 1)
        scale, zero = _half(rows + CHANNELS * BITS // 8, there), _half(rows + CHANNELS * BITS // 8 + 2, there)
        total += tl.dot(share * scale[None, :], codes.to(tl.float32), input_precision="tf32x3")
        offset += tl.sum(share * zero[None, :], 1)
    into = out + part * out_part + head * out_stride + asked[:, None] * (GROUPS * CHANNELS)
    into += (group * CHANNELS + channel)[None, :]
    tl.store(into, total + offset[:, None], mask=(asked < count)[:, None] & (channel < CHANNELS)[None, :])


@on_its_device
def scores(queries: torch.Tensor, keys: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """As `low_bit.scores`, on a CUDA device and its current stream; under `TRITON_INTERPRET=1` on a CPU, for tests. The
    rows of a head of `keys` are contiguous, and so are the scores of a query in `out`."""
    (rows, heads, count, dim), (groups, row) = queries.shape, (keys.shape[2], keys.shape[4])
    if not groups or not rows:
        return
    queries = queries.contiguous()
    grid: Any = (rows * heads, triton.cdiv(groups, _GROUPS), triton.cdiv(count, _QUERIES))
    _scores[grid](
        queries, keys, out, count, groups, count * dim, keys.stride(1), out.stride(1), out.stride(2), dim, bits,
        (row - SIDES) * 8 // bits, row, wide(dim), _QUERIES, _GROUPS,
    )  # fmt: skip


@on_its_device
def weighted(shares: torch.Tensor, values: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """As `low_bit.weighted`, on a CUDA device and its current stream; under `TRITON_INTERPRET=1` on a CPU, for tests.
    The rows of a channel group of `values` are contiguous, and so are the shares of a query; `group` has no effect
    here."""
    (rows, heads, count, tokens), (groups, row) = shares.shape, (values.shape[2], values.shape[4])
    channels = (row - SIDES) * 8 // bits
    blocks = triton.cdiv(tokens, _TOKENS)
    parts = max(1, min(blocks, _PROGRAMS // max(1, rows * heads * groups)))
    per_part = triton.cdiv(blocks, parts) * _TOKENS
    sums = shares.new_zeros(parts, rows, heads, count, groups * channels)
    if tokens and rows:
        grid: Any = (rows * heads, groups * parts, triton.cdiv(count, _QUERIES))
        _weighted[grid](
            shares, values, sums, count, tokens, per_part, shares.stride(1), shares.stride(2), values.stride(1),
            values.stride(2), sums.stride(0), sums.stride(2), groups, channels, bits, row, wide(channels), _QUERIES,
            _TOKENS,
        )  # fmt: skip
    return sums[0] if parts == 1 else sums.sum(0)


def wide(size: int) -> int:
    """At least the width that tensor cores need."""
    return max(16, triton.next_power_of_2(size))
