"""The kernels of `slots`, one launch each: see its functions.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit_triton import _in_8_bits, _in_type, _rounded, _scale, wide
from .ranking_triton import _LOWEST, _exist, _merged, _times, counters, split
from .slots import EVERY_STEP, LATER, MOST_WEIGHT

_LATER, _EVERY_STEP = tl.constexpr(LATER), tl.constexpr(EVERY_STEP)
_MOST_WEIGHT = tl.constexpr(MOST_WEIGHT)
_UNITS = 1024
"""Units whose uses a program divides at a time."""
_PROGRAMS = 64
"""Enough to keep a bus busy; more would keep the device from other work."""
_COPIED = 16384
"""Bytes of a record that a program copies at a time."""
_TOKENS = 32
"""Entries at a time; half as many of more than 128 channels."""
_TILE = 8192
"""Elements of parts that a program merges at a time."""
_SEALED = 4096
"""Elements of a tail that a program moves at a time."""
_CHANNELS = 64
"""Channels of entries that a program moves, unless it packs a head."""
_ZEROS = 512
"""Bytes behind a payload that a program fills at a time."""


# Tables

@triton.jit
def _count_uses(  # type: ignore[no-untyped-def]
    uses, weight, unit, asked, new, number, room, BLOCK: tl.constexpr
):  # fmt: skip
    """As `slots._count_uses`, of one row; `number` of its units are new."""
    now = tl.load(weight)
    count = tl.load(uses + unit, mask=asked, other=0.0) + now.to(tl.float32)
    count = tl.where(new, count, tl.minimum(count, (now * _EVERY_STEP).to(tl.float32)))
    tl.store(uses + unit, count, mask=asked)
    if number > 0:
        now = now * _LATER
    if now > _MOST_WEIGHT:
        tl.debug_barrier()
        for first in range(0, room, BLOCK):
            one = first + tl.arange(0, BLOCK)
            count = tl.load(uses + one, mask=one < room, other=0.0)
            tl.store(uses + one, tl.div_rn(count, now.to(tl.float32)), mask=one < room)
        now = now / now
    tl.debug_barrier()  # the weight is read, and uses are stored
    tl.store(weight, now)


@triton.jit
def _least(worth, number):  # type: ignore[no-untyped-def]
    """Mark the `number` least of `worth` (n,), uint32, of equal ones the first."""
    least, bit = tl.cast(0, tl.uint32), tl.cast(0x80000000, tl.uint32)
    for _ in range(32):  # bit by bit, the least number that is not above too few
        below = tl.sum((worth < (least | bit)).to(tl.int32), 0)
        least = tl.where(below < number, least | bit, least)
        bit = bit >> 1
    less, equal = worth < least, (worth == least).to(tl.int32)
    return less | ((equal > 0) & (tl.cumsum(equal, 0) <= number - tl.sum(less.to(tl.int32), 0)))


@triton.jit(do_not_specialize=["count", "room"])
def _exchange(  # type: ignore[no-untyped-def]
    units, slot_of, unit_in, order, uses, weight, slots, absent, counts, scratch, count, room, unit_row, of_row, in_row,
    order_row, uses_row, held, PLACES: tl.constexpr, SLOTS: tl.constexpr, BY_USE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place, slot = tl.arange(0, PLACES), tl.arange(0, SLOTS)
    listed, there = place < count, slot < held
    slot_of += row * of_row
    unit_in += row * in_row
    order += row * order_row
    taken = scratch + row * (2 * held)
    given = taken + held
    # slots that a unit of this step is in
    unit = tl.load(units + row * unit_row + place, mask=listed, other=-1)
    asked = unit >= 0
    own = tl.load(slot_of + unit, mask=asked, other=-1)
    new = asked & (own < 0)
    tl.store(taken + slot, tl.zeros((SLOTS,), dtype=tl.int32), mask=there)
    tl.debug_barrier()
    tl.store(taken + own, tl.full((PLACES,), 1, dtype=tl.int32), mask=asked & (own >= 0))
    tl.debug_barrier()
    # the first of the others, in their order, get the new units
    number = tl.sum(new.to(tl.int32), 0)
    if BY_USE:
        uses += row * uses_row
        _count_uses(uses, weight + row, unit, asked, new, number, room, BLOCK)
        turn = slot
        holds = tl.load(unit_in + slot, mask=there, other=-1)
        worth = tl.load(uses + holds, mask=there & (holds >= 0), other=0.0).to(tl.uint32, bitcast=True) + 1
        free = there & (tl.load(taken + slot, mask=there, other=1) == 0)
        filled = free & _least(tl.where(free, tl.where(holds < 0, 0, worth), 0xFFFFFFFF).to(tl.uint32), number)
        rank = tl.cumsum(filled.to(tl.int32), 0)
    else:
        turn = tl.load(order + slot, mask=there, other=0)
        free = there & (tl.load(taken + turn, mask=there, other=1) == 0)
        rank = tl.cumsum(free.to(tl.int32), 0)
        filled = free & (rank <= number)
    old = tl.load(unit_in + turn, mask=filled, other=-1)
    tl.store(given + rank - 1, turn, mask=filled)
    tl.debug_barrier()  # all of the tables is read
    if not BY_USE:
        stays = there & (filled == 0)
        to = tl.where(stays, tl.cumsum(stays.to(tl.int32), 0) - 1, held - number + rank - 1)
        tl.store(order + to, turn, mask=there)
    tl.store(slot_of + old, tl.full((SLOTS,), -1, dtype=tl.int32), mask=old >= 0)
    own = tl.where(new, tl.load(given + tl.cumsum(new.to(tl.int32), 0) - 1, mask=new, other=0), own)
    tl.store(slot_of + unit, own, mask=new)
    tl.store(unit_in + own, unit, mask=new)
    tl.store(slots + row * count + place, own, mask=listed)
    tl.store(absent + row * count + place, tl.where(new, unit, -1), mask=listed)
    tl.store(counts + row, number)
    tl.store(counts + tl.num_programs(0) + row, tl.sum(asked.to(tl.int32), 0) - number)


def exchange(
    units: torch.Tensor, slot_of: torch.Tensor, unit_in: torch.Tensor, order: torch.Tensor | None,
    uses: torch.Tensor | None = None, weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `slots.exchange`, of tensors that are contiguous in the last dimension."""
    (rows, count), held = units.shape, unit_in.shape[1]
    options: dict[str, Any] = {"dtype": torch.int32, "device": units.device}
    slots, absent = torch.empty(rows, count, **options), torch.empty(rows, count, **options)
    counts = torch.empty(2, rows, dtype=torch.int64, device=units.device)
    scratch = torch.empty(rows, 2, held, **options)
    places, wide_held = wide(count), wide(held)
    _exchange[(rows,)](
        units, slot_of, unit_in, slots if order is None else order, slots if uses is None else uses,
        slots if weight is None else weight, slots, absent, counts, scratch, count, slot_of.shape[1], units.stride(0),
        slot_of.stride(0), unit_in.stride(0), 0 if order is None else order.stride(0),
        0 if uses is None else uses.stride(0), held, places, wide_held, order is None, _UNITS,
        num_warps=4 if wide_held <= 1024 else 8,
    )  # fmt: skip
    return slots, absent, counts


# Records of host memory

@triton.jit(do_not_specialize=["total", "count"])
def _bring(  # type: ignore[no-untyped-def]
    addresses, absent, slots, data, total, count, units, held, WORDS: tl.constexpr, BODY: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    for place in range(tl.program_id(0), total, tl.num_programs(0)):
        unit = tl.load(absent + place)
        if unit >= 0:
            row = (place // count).to(tl.int64)
            record = tl.load(addresses + row * units + unit).to(tl.pointer_type(data.dtype.element_ty))
            record = tl.multiple_of(record, 16)
            into = tl.multiple_of(data + (row * held + tl.load(slots + place)) * WORDS, ALIGNED)
            for first in range(0, BODY, BLOCK):
                word = first + tl.arange(0, BLOCK)
                tl.store(into + word, tl.load(record + word, mask=word < BODY), mask=word < BODY)
            if BODY < WORDS:
                word = BODY + tl.arange(0, TAIL)
                tl.store(into + word, tl.load(record + word, mask=word < WORDS), mask=word < WORDS)


def bring(addresses: torch.Tensor, absent: torch.Tensor, slots: torch.Tensor, data: torch.Tensor) -> None:
    """As `slots.bring`, of contiguous tensors, `addresses` in the last dimension. Reads are of 16 bytes, except the
    last of a record whose length is no multiple of 16; writes are as long as the slots' alignment allows."""
    (rows, count), nbytes = absent.shape, data.shape[2] * data.itemsize
    aligned = math.gcd(nbytes, data.data_ptr(), 16)
    word = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[min(4, aligned)]
    words, each = nbytes // word.itemsize, 16 // word.itemsize
    _bring[(min(_PROGRAMS, rows * count),)](
        addresses, absent, slots, data.view(word), rows * count, count, addresses.stride(0), data.shape[1], words,
        words // each * each, aligned, min(triton.next_power_of_2(words), _COPIED // word.itemsize), each, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "each"])
def _seal(  # type: ignore[no-untyped-def]
    tail, codes, typed, left, length, each, tail_row, code_record, typed_record, GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ENTRY: tl.constexpr, LARGEST: tl.constexpr,
    END: tl.constexpr, BYTES: tl.constexpr, PACKED: tl.constexpr, KIND: tl.constexpr, TOKENS: tl.constexpr,
    WIDE: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Some channels of all of a row's entries: a head's if it is packed. No other program reads or writes them."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    channel, place, count, of_key = tl.arange(0, WIDE), tl.arange(0, TOKENS), each * GROUP, head < KEY_HEADS
    element = tl.where(of_key, head * KEY, KEY_HEADS * KEY + (head - KEY_HEADS) * VALUE) + channel
    inside = (channel < tl.where(of_key, KEY, VALUE)) & (element < ENTRY)
    tail += row * tail_row
    for first in range(0, length, TOKENS):
        token = first + place
        there, leaves = (token < length)[:, None] & inside[None, :], token < count
        own = tl.load(tail + token[:, None] * ENTRY + element[None, :], mask=there, other=0)
        if first < count:
            goes, record, within = there & leaves[:, None], row * each + token // GROUP, token % GROUP
            tl.store(left + (row * count + token)[:, None] * ENTRY + element[None, :], own, mask=goes)
            if PACKED:
                most, found = _in_8_bits(own.to(tl.float32), KIND)
                at = record * typed_record + LARGEST + within * heads + head
                tl.store(typed + at, most.to(typed.dtype.element_ty), mask=leaves)
                into = codes + record * code_record + within * ENTRY
                tl.store(into[:, None] + element[None, :], found.to(tl.int8), mask=goes)
            else:
                into = typed + record * typed_record + within * ENTRY
                tl.store(into[:, None] + element[None, :], own, mask=goes)
        tl.debug_barrier()  # all of these tokens are read, and later ones lie behind the places that they move to
        tl.store(tail + (token - count)[:, None] * ENTRY + element[None, :], own, mask=there & (leaves == 0)[:, None])
    zeros, byte = tl.zeros((ZEROS,), dtype=tl.int8), tl.arange(0, ZEROS)
    for record in range(each):  # zeros behind payloads, and before the largest magnitudes
        into = codes + (row * each + record) * code_record
        for first in range(END + head * ZEROS, BYTES, heads * ZEROS):
            tl.store(into + first + byte, zeros, mask=first + byte < BYTES)
        if PACKED and head == 0:
            padding = GROUP * ENTRY + byte
            tl.store(into + padding, zeros, mask=padding < LARGEST * typed.dtype.element_ty.itemsize)


def seal(tail: torch.Tensor, length: int, records: torch.Tensor, form: Any) -> torch.Tensor:
    """As `slots.seal`. In 8 bits each program has a head, because that has one largest magnitude."""
    rows, each, size = len(tail), len(records) // len(tail), form.dtype.itemsize
    left = torch.empty(rows, each * form.group_size, form.entry_width, dtype=tail.dtype, device=tail.device)
    packed, wide_head = form.bits is not None, triton.next_power_of_2(max(form.key_dim, form.value_dim))
    typed = records.view(form.dtype)
    if packed:
        heads, shape = form.num_key_heads + form.num_value_heads, (form.num_key_heads, form.key_dim, form.value_dim)
        given: Any = tail, records.view(torch.int8), typed, left
    else:  # bits are copied
        word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        heads, wide_head = triton.cdiv(form.entry_width, _CHANNELS), _CHANNELS
        shape = heads, _CHANNELS, _CHANNELS
        given = tail.view(word), records.view(torch.int8), records.view(word), left.view(word)
    _seal[(rows, heads)](
        *given, length, each, tail.stride(0), records.stride(0), typed.stride(0), form.group_size, *shape,
        form.entry_width, form.largest_at // size, form.payload_bytes, records.shape[1], packed,
        str(form.dtype).removeprefix("torch."), max(1, _SEALED // wide_head), wide_head, _ZEROS,
    )  # fmt: skip
    return left


# Tokens in slots

@triton.jit(do_not_specialize=["count", "stored", "units", "selected"])
def _units_at(  # type: ignore[no-untyped-def]
    places, flags, found, count, stored, units, selected, place_row, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    flags += row * units
    found += row * selected
    for first in range(0, units, BLOCK):
        unit = first + tl.arange(0, BLOCK)
        tl.store(flags + unit, tl.zeros((BLOCK,), dtype=tl.int8), mask=unit < units)
    for first in range(0, selected, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(found + place, tl.full((BLOCK,), -1, dtype=tl.int32), mask=place < selected)
    tl.debug_barrier()
    for first in range(0, count, BLOCK):
        each = first + tl.arange(0, BLOCK)
        token = tl.load(places + row * place_row + each, mask=each < count, other=-1)
        tl.store(flags + token // GROUP, tl.full((BLOCK,), 1, dtype=tl.int8), mask=(token >= 0) & (token < stored))
    tl.debug_barrier()
    before = 0
    for first in range(0, units, BLOCK):
        unit = first + tl.arange(0, BLOCK)
        flag = tl.load(flags + unit, mask=unit < units, other=0).to(tl.int32)
        tl.store(found + before + tl.cumsum(flag, 0) - 1, unit, mask=flag > 0)
        before += tl.sum(flag, 0)


def units_at(places: torch.Tensor, stored: int, group: int, count: int) -> torch.Tensor:
    """As `slots.units_at`."""
    rows, units = len(places), stored // group
    found = torch.empty(rows, count, dtype=torch.int32, device=places.device)
    flags = torch.empty(rows, units, dtype=torch.int8, device=places.device)
    given = places, flags, found, places.shape[1], stored, units, count, places.stride(0)
    _units_at[(rows,)](*given, group, _UNITS)
    return found


@triton.jit(do_not_specialize=["count", "stored", "held", "mask_row", "slot_row"])
def _tokens_at(  # type: ignore[no-untyped-def]
    places, slot_of, data, recent, mask, entries, seen, count, stored, held, place_row, slot_row, recent_row,
    recent_entry, mask_row, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = at // count
    token = tl.load(places + row * place_row + at % count)
    each = tl.arange(0, BLOCK)
    entry = tl.zeros((BLOCK,), dtype=entries.dtype.element_ty)
    if token >= stored:
        entry = tl.load(recent + row * recent_row + (token - stored) * recent_entry + each, mask=each < WIDTH)
    elif token >= 0:
        slot = tl.load(slot_of + row * slot_row + token // GROUP)
        inside = (row * held + slot) * GROUP + token % GROUP
        entry = tl.load(data + inside * WIDTH + each, mask=each < WIDTH)
    tl.store(entries + at * WIDTH + each, entry, mask=each < WIDTH)
    if MASKED:
        value = tl.load(mask + row * mask_row + token, mask=token >= 0, other=0)
        tl.store(seen + at, tl.where(token >= 0, value, tl.full((), LEAST, dtype=seen.dtype.element_ty)))
    else:
        tl.store(seen + at, (token >= 0).to(tl.uint8))


def tokens_at(
    places: torch.Tensor, slot_of: torch.Tensor, data: torch.Tensor, recent: torch.Tensor, stored: int, group: int,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `slots.tokens_at`."""
    (rows, count), width = places.shape, recent.shape[2]
    entries = torch.empty(rows, count, width, dtype=recent.dtype, device=places.device)
    kind = torch.bool if mask is None else mask.dtype
    seen = torch.empty(rows, count, dtype=kind, device=places.device)
    masks = entries if mask is None else mask.view(torch.uint8) if kind == torch.bool else mask
    _tokens_at[(rows * count,)](
        places, slot_of, data, recent, masks, entries, seen.view(torch.uint8) if kind == torch.bool else seen,
        count, stored, data.shape[1], places.stride(0), slot_of.stride(0), recent.stride(0), recent.stride(1),
        0 if mask is None or len(mask) == 1 else mask.stride(0), group, width, wide(width), mask is not None,
        0 if kind == torch.bool else torch.finfo(kind).min,
    )  # fmt: skip
    return entries, seen


# Attention

@triton.jit
def _added(  # type: ignore[no-untyped-def]
    query, keys, values, there, most, shares, found, scaling, PRECISION: tl.constexpr
):  # fmt: skip
    """Largest score, sum of weights and weighted sum, with further keys (D, n) and values (n, Dv)."""
    own = tl.where(there[None, :], tl.dot(query, keys, input_precision=PRECISION) * scaling, float("-inf"))
    above = tl.maximum(most, tl.max(own, 1))
    least = tl.maximum(above, _LOWEST)  # of no key yet, the weights are 0
    own, before = tl.exp(own - least[:, None]), tl.exp(most - least)
    return above, shares * before + tl.sum(own, 1), found * before[:, None] + _times(own, values, PRECISION)


@triton.jit(do_not_specialize=[
    "each", "selected", "stored_parts", "per_part", "recent_room", "slot_row", "seen_row"
])  # fmt: skip
def _attend(  # type: ignore[no-untyped-def]
    query, data, largest, slots, keep, recent, seen, value, weight, count, best, total, parted, done, output, logarithm,
    scaling, each, heads, selected, stored_parts, per_part, recent_room, held, query_row, query_head, slot_row,
    recent_row, recent_token, seen_row, EACH: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    LARGEST: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, VALUES_AT: tl.constexpr, ENTRY: tl.constexpr,
    KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr,
    PARTS: tl.constexpr, PACKED: tl.constexpr, KIND: tl.constexpr, ESTIMATED: tl.constexpr, KEPT: tl.constexpr,
    SEEN: tl.constexpr, COUNTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, head = program // heads, program % heads
    asked, key, channel = tl.arange(0, QUERIES), tl.arange(0, KEY_WIDE), tl.arange(0, VALUE_WIDE)
    of_query, of_key, of_value = asked < EACH, key < KEY, channel < VALUE
    own_query = ((row % each) * heads + head) * EACH + asked  # of the sequence's
    state = tl.load(
        query + row // each * query_row + own_query[:, None] * query_head + key[None, :],
        mask=of_query[:, None] & of_key[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    shares = tl.zeros((QUERIES,), dtype=tl.float32)
    found = tl.zeros((QUERIES, VALUE_WIDE), dtype=tl.float32)
    for first in range(part * per_part, min((part + 1) * per_part, selected * GROUP), TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < selected * GROUP
        slot = tl.load(slots + row * slot_row + token // GROUP, mask=there, other=-1)
        there = slot >= 0
        if KEPT:
            there = there & (tl.load(keep + row * (selected * GROUP) + token, mask=there, other=0) != 0)
        begin, place = (row * held + slot) * WIDTH, token % GROUP
        key_at, value_at = begin + place * ENTRY + head * KEY, begin + place * ENTRY + VALUES_AT + head * VALUE
        keys = tl.load(
            data + key_at[None, :] + key[:, None], mask=there[None, :] & of_key[:, None], other=0
        ).to(tl.float32)  # fmt: skip
        values = tl.load(
            data + value_at[:, None] + channel[None, :], mask=there[:, None] & of_value[None, :], other=0
        ).to(tl.float32)  # fmt: skip
        if PACKED:
            at = (row * held + slot) * (WIDTH // largest.dtype.element_ty.itemsize) + LARGEST + head
            at += place * (2 * heads)
            keys = _in_type(keys * _scale(largest, at, there, KIND)[None, :], KIND)
            values = _in_type(values * _scale(largest, at + heads, there, KIND)[:, None], KIND)
        most, shares, found = _added(state, keys, values, there, most, shares, found, scaling, PRECISION)
    begin, recent_count = (part - stored_parts) * per_part, _exist(count, recent_room, COUNTED)
    for first in range(max(begin, 0), min(begin + per_part, recent_count), TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < recent_count
        if SEEN:
            there = there & (tl.load(seen + row * seen_row + token, mask=there, other=0) != 0)
        entry = recent + row * recent_row + token.to(tl.int64) * recent_token
        keys = tl.load(
            entry[None, :] + head * KEY + key[:, None], mask=there[None, :] & of_key[:, None], other=0.0
        ).to(tl.float32)  # fmt: skip
        values = tl.load(
            entry[:, None] + VALUES_AT + head * VALUE + channel[None, :], mask=there[:, None] & of_value[None, :],
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        most, shares, found = _added(state, keys, values, there, most, shares, found, scaling, PRECISION)
    into = (program * parts + part) * QUERIES + asked
    tl.store(best + into, most)
    tl.store(total + into, shares)
    tl.store(parted + into[:, None] * VALUE + channel[None, :], found, mask=of_query[:, None] & of_value[None, :])
    tl.debug_barrier()  # before the program counts as done, all of it is stored
    if tl.atomic_add(done + program, 1) == parts - 1:
        tl.store(done + program, 0)
        most, shares, found = _merged(best, total, parted, program, parts, EACH, VALUE, QUERIES, VALUE_WIDE, PARTS)
        to = program * EACH + asked
        at = to[:, None] * VALUE + channel[None, :]
        within = of_query[:, None] & of_value[None, :]
        if ESTIMATED:
            own = tl.load(weight + to, mask=of_query, other=0.0)
            above = tl.maximum(most, own)
            now, before = tl.exp(own - above), tl.exp(most - above)
            found = found * before[:, None] + now[:, None] * tl.load(value + at, mask=within, other=0.0)
            shares = shares * before + now
            most = above
        found = found / shares[:, None]
        if output.dtype.element_ty == tl.bfloat16:
            found = _rounded(found)
        tl.store(output + at, found.to(output.dtype.element_ty), mask=within)
        tl.store(logarithm + to, most + tl.log(shares), mask=of_query)


def attend(
    query: torch.Tensor, data: torch.Tensor, slots: torch.Tensor, recent: torch.Tensor, form: Any, scaling: float,
    value: torch.Tensor | None, weight: torch.Tensor | None, keep: torch.Tensor | None = None,
    seen: torch.Tensor | None = None, count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `slots.attend`, of contiguous tensors; `query` and `slots` in the last dimension. As many heads of values as
    of keys, and entries of at most 32 bits. The last program of a key head merges its parts."""
    (batch, query_heads, _), (rows, selected), heads = query.shape, slots.shape, form.num_key_heads
    assert heads == form.num_value_heads and form.dtype.itemsize <= 4, form
    (_, held, width), key, dim, packed = data.shape, form.key_dim, form.value_dim, form.bits is not None
    options: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    output = torch.empty(batch, query_heads, dim, dtype=query.dtype, device=query.device)
    logarithm = torch.empty(batch, query_heads, **options)
    each = batch * query_heads // (rows * heads)
    queries, value_wide, at_once = wide(each), wide(dim), _TOKENS if max(key, dim) <= 128 else _TOKENS // 2
    stored_parts, per_part = split(selected * form.group_size, rows * heads, at_once, 2 * _TOKENS)
    parts = stored_parts + triton.cdiv(recent.shape[1], per_part)
    best, total = torch.empty(2, rows * heads, parts, queries, **options)
    parted = torch.empty(rows * heads, parts, queries, dim, **options)
    single = torch.float32 in (query.dtype, form.dtype, recent.dtype)
    largest_at = width - 2 * heads * form.group_size * form.dtype.itemsize
    grid: Any = (rows * heads, parts)
    _attend[grid](
        query, data.view(torch.int8) if packed else data, data.view(form.dtype) if packed else data, slots,
        slots if keep is None else keep.view(torch.uint8), recent,
        slots if seen is None else seen.view(torch.uint8), logarithm if value is None else value,
        logarithm if weight is None else weight, logarithm if count is None else count, best, total, parted,
        counters(query.device, triton.next_power_of_2(rows * heads)), output, logarithm, scaling, rows // batch, heads,
        selected, stored_parts, per_part, recent.shape[1], held, *query.stride()[:2], slots.stride(0),
        *recent.stride()[:2], 0 if seen is None else seen.stride(0), each, form.group_size, width,
        largest_at // form.dtype.itemsize, key, dim, form.key_width, form.entry_width, wide(key), value_wide, queries,
        at_once, max(1, _TILE // (queries * value_wide)), packed, str(form.dtype).removeprefix("torch."),
        weight is not None, keep is not None, seen is not None, count is not None, "ieee" if single else "tf32",
        num_warps=4 if max(key, dim) <= 128 else 8,
    )  # fmt: skip
    return output, logarithm
