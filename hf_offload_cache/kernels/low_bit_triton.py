"""The kernels of `low_bit`, one launch each, and what kernels over low-bit elements share.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit import LARGEST, ReplicaLayout, group_of

_LARGEST = tl.constexpr(LARGEST)
_TINY = tl.constexpr(torch.finfo(torch.float16).tiny)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a small float32 number and subtracted again, it rounds to an integer, to nearest even."""
_ELEMENTS = 4096
"""Elements that a program quantises."""
_CODES = 1024
"""Bytes of codes that a program unpacks."""


@triton.jit
def half(at, there):  # type: ignore[no-untyped-def]
    """The number in half precision whose bytes, at any address, are here."""
    low = tl.load(at, mask=there, other=0).to(tl.int16)
    high = tl.load(at + 1, mask=there, other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


def wide(size: int) -> int:
    """At least the width that tensor cores need."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    first, step, begin, last, rows, there, GROUP: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Quantise the elements at `first` + i `step`, i from `begin` on and at most `last`, into `rows`: (ROWS,) each."""
    PER: tl.constexpr = 8 // BITS
    CODES: tl.constexpr = GROUP // PER
    element = tl.minimum(begin + tl.minimum(tl.arange(0, WIDE), GROUP - 1), last)  # those beyond repeat the last one
    own = tl.load(first[:, None] + element[None, :].to(tl.int64) * step, mask=there[:, None], other=0.0)
    own = tl.minimum(tl.maximum(own.to(tl.float32), -_LARGEST), _LARGEST)
    low, high = tl.min(own, 1), tl.max(own, 1)
    if BITS > 1:
        zero = low.to(tl.float16)
        span = high - zero.to(tl.float32)
        scale = tl.div_rn(span, (1 << BITS) - 1).to(tl.float16)
        scale = tl.where((span == 0) | (scale == 0), 1.0, scale.to(tl.float32)).to(tl.float16)
        factor = tl.div_rn(1.0, scale.to(tl.float32))
        codes = (own - zero.to(tl.float32)[:, None]) * factor[:, None]
    else:
        if PLAIN:
            zero, scale = low.to(tl.float16), tl.minimum(high - low, _LARGEST).to(tl.float16)
        else:
            zero, scale = ((low + low + low + high) / 4).to(tl.float16), ((high - low) / 2).to(tl.float16)
        factor = tl.maximum(scale.to(tl.float32), _TINY)
        codes = tl.div_rn(own - zero.to(tl.float32)[:, None], factor[:, None])
    codes = tl.minimum(tl.maximum(codes, 0.0), (1 << BITS) - 1)
    codes = ((codes + _TO_INTEGER) - _TO_INTEGER).to(tl.int32)
    place = tl.arange(0, PER)
    codes = tl.reshape(codes, (own.shape[0], WIDE // PER, PER)) << (place * BITS)[None, None, :]
    byte = tl.arange(0, WIDE // PER)
    inside = there[:, None] & (byte < CODES)[None, :]
    tl.store(rows[:, None] + byte[None, :], tl.sum(codes, 2).to(tl.uint8), mask=inside)
    side = scale.to(tl.uint16, bitcast=True).to(tl.int32) | (zero.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    part = tl.arange(0, 4)
    side = (side[:, None] >> (8 * part)[None, :]) & 255
    tl.store(rows[:, None] + CODES + part[None, :], side.to(tl.uint8), mask=there[:, None] & (part >= 0)[None, :])


@triton.jit(do_not_specialize=["tokens", "key_programs", "heads"])
def _pack(  # type: ignore[no-untyped-def]
    keys, values, key_rows, value_rows, heads, tokens, key_programs, key_row, key_head, key_token, key_channel,
    value_row, value_head, value_token, value_channel, into_row, into_head, into_group, into_channel, of_row, of_head,
    of_part, of_token, KEY: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr,
    GROUP: tl.constexpr, GROUP_WIDE: tl.constexpr, CHANNELS: tl.constexpr, PART: tl.constexpr,
    PART_WIDE: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, head = head // heads, head % heads
    if program < key_programs:
        BLOCKS: tl.constexpr = (KEY + CHANNELS - 1) // CHANNELS
        group, channel = program // BLOCKS, program % BLOCKS * CHANNELS + tl.arange(0, CHANNELS)
        keys += row * key_row + head * key_head
        key_rows += row * into_row + head * into_head + group * into_group
        _quantise(
            keys + channel * key_channel, key_token, group * GROUP, tokens, key_rows + channel * into_channel,
            channel < KEY, GROUP, GROUP_WIDE, BITS, PLAIN,
        )  # fmt: skip
    else:
        program -= key_programs
        part, token = program % PARTS, program // PARTS * TOKENS + tl.arange(0, TOKENS)
        values += row * value_row + head * value_head
        value_rows += row * of_row + head * of_head + part * of_part
        _quantise(
            values + token * value_token, value_channel, part * PART, VALUE - 1, value_rows + token * of_token,
            token < tokens, PART, PART_WIDE, BITS, PLAIN,
        )  # fmt: skip


def pack(
    keys: torch.Tensor, values: torch.Tensor, bits: int, plain: bool, key_rows: torch.Tensor, value_rows: torch.Tensor
) -> None:
    """As `low_bit.pack`, into rows that are contiguous in the last dimension."""
    batch, heads, tokens, key = keys.shape
    if not keys.numel():
        return
    group, part = group_of(key_rows, bits), group_of(value_rows, bits)
    group_wide, part_wide = (max(8, triton.next_power_of_2(size)) for size in (group, part))
    channels = min(triton.next_power_of_2(key), max(1, _ELEMENTS // group_wide))
    at_once, parts = max(1, _ELEMENTS // part_wide), value_rows.shape[2]
    key_programs = tokens // group * triton.cdiv(key, channels)
    grid: Any = (key_programs + triton.cdiv(tokens, at_once) * parts, batch * heads)
    _pack[grid](
        keys, values, key_rows, value_rows, heads, tokens, key_programs, *keys.stride(), *values.stride(),
        *key_rows.stride()[:4], *value_rows.stride()[:4], key, values.shape[3], bits, plain, group, group_wide,
        channels, part, part_wide, parts, at_once,
    )  # fmt: skip


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    replicas, sides, rows, out, target, replica_bytes, out_stride, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = here < WIDTH // 2
    row = tl.load(rows + tl.program_id(0)).to(tl.int64) * replica_bytes
    into = out + tl.load(target + tl.program_id(0)).to(tl.int64) * out_stride + 2 * here
    group = here // HALF
    both = tl.load(replicas + row + group * (HALF + 4) + here % HALF, mask=there, other=0).to(tl.int32)
    side = sides + (row + group * (HALF + 4) + HALF) // 2
    step = tl.load(side, mask=there, other=0).to(tl.float32)
    least = tl.load(side + 1, mask=there, other=0).to(tl.float32)
    low = (both & 15).to(tl.float32) * step + least
    high = (both >> 4).to(tl.float32) * step + least
    tl.store(into, low.to(out.dtype.element_ty), mask=there)
    tl.store(into + 1, high.to(out.dtype.element_ty), mask=there)


def unpack_replicas(
    layout: ReplicaLayout, replicas: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, target: torch.Tensor
) -> None:
    """As `low_bit.unpack_replicas`, of tensors that are contiguous in the last dimension. Rows of `replicas` begin at
    even bytes, and so do steps, because groups have a multiple of 4 elements."""
    if not len(rows):
        return
    grid: Any = (len(rows), triton.cdiv(layout.width // 2, _CODES))
    halves = replicas.view(torch.float16)
    _unpack[grid](
        replicas, halves, rows, out, target, replicas.stride(0), out.stride(0), layout.width, layout.group, _CODES
    )
