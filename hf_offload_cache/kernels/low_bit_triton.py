"""The kernels of `low_bit`, one launch each, and what kernels over low-bit elements share.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit import LARGEST, LEVELS, ReplicaLayout, group_of

_LARGEST, _LEVELS = tl.constexpr(LARGEST), tl.constexpr(float(LEVELS))
_TINY = tl.constexpr(torch.finfo(torch.float16).tiny)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a small float32 number and subtracted again, it rounds to an integer, to nearest even."""
_MOST = tl.constexpr(torch.finfo(torch.float32).max)
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


@triton.jit
def _rounded(number):  # type: ignore[no-untyped-def]
    """A finite float32 `number`, rounded to bfloat16 to nearest even; still float32."""
    bits = number.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _of_largest(largest, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of heads in 8 bits with these `largest` magnitudes, float32, as `RecordFormat` rounds them."""
    found = tl.div_rn(largest, _LEVELS)
    return _rounded(found) if KIND == "bfloat16" else found


@triton.jit
def _scale(largest, at, there, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of heads in 8 bits whose largest magnitudes are here."""
    return _of_largest(tl.load(largest + at, mask=there, other=0.0).to(tl.float32), KIND)


@triton.jit
def _in_type(number, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float32 `number` in the entries' type; still float32."""
    if KIND == "bfloat16":
        return _rounded(number)
    return number.to(tl.float16).to(tl.float32) if KIND == "float16" else number


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


# Entries in 8 bits

@triton.jit
def _place(  # type: ignore[no-untyped-def]
    tokens, GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, AT_ONCE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A program's tokens of one head: their records, places in these, and which exist; and the elements of the head in
    an entry (AT_ONCE, WIDE), and which of these exist."""
    token, channel, head = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, WIDE), tl.program_id(1)
    there = token < tokens
    of_key = head < KEY_HEADS
    first = tl.where(of_key, head * KEY, KEY_HEADS * KEY + (head - KEY_HEADS) * VALUE)
    inside = there[:, None] & (channel < tl.where(of_key, KEY, VALUE))[None, :]
    return (token // GROUP).to(tl.int64), token % GROUP, there, (first + channel)[None, :], inside


@triton.jit
def _in_8_bits(own, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitudes (n,) of heads `own` (n, WIDE) float32, and their elements in 8 bits, still int32."""
    unknown = tl.max((own != own).to(tl.int32), 1) > 0
    most = tl.where(unknown, float("nan"), tl.max(tl.abs(own), 1))
    known = most < float("inf")
    factor = tl.minimum(tl.div_rn(1.0, tl.where(known, _of_largest(most, KIND), 1.0)), _MOST)
    found = tl.where(known[:, None], own * factor[:, None], 0.0)
    found = tl.minimum(tl.maximum(found, -_LEVELS), _LEVELS)
    return most, ((found + _TO_INTEGER) - _TO_INTEGER).to(tl.int32)


@triton.jit(do_not_specialize=["tokens"])
def _pack_entries(  # type: ignore[no-untyped-def]
    entries, codes, largest, tokens, entry_record, entry_token, code_record, largest_record, GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, AT_ONCE: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, ENTRY: tl.constexpr, LARGEST: tl.constexpr, END: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(1), tl.num_programs(1)
    record, place, there, element, inside = _place(tokens, GROUP, KEY_HEADS, KEY, VALUE, AT_ONCE, WIDE)
    begin = entries + record * entry_record + place * entry_token
    own = tl.load(begin[:, None] + element, mask=inside, other=0.0).to(tl.float32)
    most, found = _in_8_bits(own, KIND)
    tl.store(largest + record * largest_record + place * heads + head, most.to(largest.dtype.element_ty), mask=there)
    into = codes + record * code_record
    tl.store((into + place * ENTRY)[:, None] + element, found.to(tl.int8), mask=inside)
    if head == 0:  # zeros between the integers and the largest magnitudes, and behind these
        zeros, once, byte = tl.zeros((AT_ONCE, 16), dtype=tl.int8), there & (place == 0), tl.arange(0, 16)
        padding = once[:, None] & (GROUP * ENTRY + byte < LARGEST)[None, :]
        tl.store((into + GROUP * ENTRY)[:, None] + byte[None, :], zeros, mask=padding)
        for first in range(END, BYTES, 16):
            padding = once[:, None] & (first + byte < BYTES)[None, :]
            tl.store((into + first)[:, None] + byte[None, :], zeros, mask=padding)


def pack_entries(entries: torch.Tensor, records: torch.Tensor, form: Any) -> None:
    """As `low_bit.pack_entries`."""
    if len(entries):
        codes, largest, grid, shape = _packed(records, form)
        strides = *entries.stride()[:2], codes.stride(0), largest.stride(0)
        ends = form.entry_width, form.largest_at, form.payload_width, records.shape[1]
        _pack_entries[grid](entries, codes, largest, len(entries) * form.group_size, *strides, *shape, *ends)


@triton.jit(do_not_specialize=["tokens"])
def _unpack_entries(  # type: ignore[no-untyped-def]
    codes, largest, entries, tokens, code_record, largest_record, GROUP: tl.constexpr, KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, AT_ONCE: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr,
    ENTRY: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(1), tl.num_programs(1)
    record, place, there, element, inside = _place(tokens, GROUP, KEY_HEADS, KEY, VALUE, AT_ONCE, WIDE)
    begin = codes + record * code_record + place * ENTRY
    own = tl.load(begin[:, None] + element, mask=inside, other=0).to(tl.float32)
    most = tl.load(largest + record * largest_record + place * heads + head, mask=there, other=0.0).to(tl.float32)
    known = most < float("inf")
    scale = tl.where(known, _of_largest(tl.where(known, most, 1.0), KIND), 1.0)
    found = tl.where(known[:, None], _in_type(own * scale[:, None], KIND), float("nan"))
    into = entries + (record * GROUP + place) * ENTRY
    tl.store(into[:, None] + element, found.to(entries.dtype.element_ty), mask=inside)


def unpack_entries(payloads: torch.Tensor, entries: torch.Tensor, form: Any) -> None:
    """As `low_bit.unpack_entries`."""
    if len(entries):
        codes, largest, grid, shape = _packed(payloads, form)
        strides = codes.stride(0), largest.stride(0)
        _unpack_entries[grid](
            codes, largest, entries, len(entries) * form.group_size, *strides, *shape, form.entry_width
        )


def _packed(payloads: torch.Tensor, form: Any) -> tuple[torch.Tensor, torch.Tensor, Any, tuple[Any, ...]]:
    """The integers of packed payloads and their largest magnitudes, each record's side by side; a kernel's grid; and
    what it knows of their layout. Bytes may follow the payloads."""
    width = triton.next_power_of_2(max(form.key_dim, form.value_dim))
    at_once, kind = max(1, _ELEMENTS // width), str(form.dtype).removeprefix("torch.")
    grid = triton.cdiv(len(payloads) * form.group_size, at_once), form.num_key_heads + form.num_value_heads
    shape = form.group_size, form.num_key_heads, form.key_dim, form.value_dim, at_once, width, kind
    largest = payloads[:, form.largest_at : form.payload_width].view(form.dtype)
    return payloads.view(torch.int8), largest, grid, shape
