"""The kernels of `mixed_attention`, one launch each: see its functions. Split-K attention with a log-sum-exp merge.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests. The copy is unpacked in registers only. Numbers that differ between layers and steps are no constants of a
kernel, so that it is compiled once for a model.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit import group_of
from .low_bit_triton import _rounded, half, wide
from .mixed_attention import PART, PROGRAMS
from .ranking_triton import _exist, _times, counters

_QUERIES = 64
"""Most queries of a key head that a program attends with."""
_TOKENS = 32
"""Stored and latest entries at a time; half as many of more than 128 channels."""
_SHARED = 1024
"""Tokens whose shares a program sums up."""
_HELD = 128
"""Stored entries whose tokens are looked up at a time."""


@triton.jit
def _capped(own, scaling, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    own = own * scaling
    return (2 * tl.sigmoid(2 * own / softcap) - 1) * softcap if CAPPED else own


@triton.jit
def _masked(own, mask, at, there, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores (queries, n) with a mask's entries `at` these places."""
    if MASK == "boolean":
        own = tl.where(tl.load(mask + at, mask=there, other=0) != 0, own, float("-inf"))
    elif MASK == "additive":
        own += tl.load(mask + at, mask=there, other=0.0).to(tl.float32)
    return own


@triton.jit
def _added(most, shares, found, own, entries, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest score, sum of weights and weighted sum, with further scores (queries, n) and values (n, channels)."""
    above = tl.maximum(most, tl.max(own, 1))
    safe = tl.where(above == float("-inf"), 0.0, above)
    weights, before = tl.exp(own - safe[:, None]), tl.exp(most - safe)
    found = found * before[:, None] + tl.dot(weights, entries, input_precision=PRECISION)
    return above, shares * before + tl.sum(weights, 1), found


@triton.jit(do_not_specialize=[
    "copy_room", "per_part", "copy_parts", "entries", "entry_parts", "latest_room", "guesses", "key_head", "value_head",
    "value_part", "mask_row", "mask_query"
])  # fmt: skip
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, tokens, entry_keys, entry_values, latest_keys, latest_values, guess_keys, guess_values, mask,
    sink, exist, latest_count, hidden, scores, best, total, parted, done, output, logarithm, scaling, softcap, heads,
    count, copy_room, per_part, copy_parts, entries, entry_parts, latest_room, guesses, query_row, query_head,
    query_token, key_head, value_head, value_part, latest_key_row, latest_key_head, latest_key_token, latest_value_row,
    latest_value_head, latest_value_token, guess_key_row, guess_key_head, guess_key_token, guess_value_row,
    guess_value_head, guess_value_token, mask_row, mask_query, EACH: tl.constexpr, KEY: tl.constexpr,
    KEY_WIDE: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, KEY_BYTES: tl.constexpr,
    CHANNELS: tl.constexpr, CHANNELS_WIDE: tl.constexpr, VALUE_PARTS: tl.constexpr, VALUE_PARTS_WIDE: tl.constexpr,
    VALUE_BYTES: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr, PER_PART: tl.constexpr, HELD: tl.constexpr,
    MASK: tl.constexpr, SINK: tl.constexpr, CAPPED: tl.constexpr, SCORED: tl.constexpr, GUESSED: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    head, part, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, own_head, parts = head // heads, head % heads, tl.num_programs(1)
    LANES: tl.constexpr = VALUE_PARTS_WIDE * CHANNELS_WIDE
    lane, key = tl.arange(0, LANES), tl.arange(0, KEY_WIDE)
    channel = lane // CHANNELS_WIDE * CHANNELS + lane % CHANNELS_WIDE
    of_lane = (lane % CHANNELS_WIDE < CHANNELS) & (lane // CHANNELS_WIDE < VALUE_PARTS)
    of_value, of_key = of_lane & (channel < VALUE), key < KEY
    asked = block * QUERIES + tl.arange(0, QUERIES)
    of_query, turn = asked < count, asked % EACH
    query_heads = count // EACH  # of a key head
    own_query = own_head * query_heads + asked // EACH
    state = tl.load(
        query + row * query_row + (own_query * query_head + turn * query_token)[:, None] + key[None, :],
        mask=of_query[:, None] & of_key[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    mask += row * mask_row
    in_mask = turn * mask_query
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    shares = tl.zeros((QUERIES,), dtype=tl.float32)
    found = tl.zeros((QUERIES, LANES), dtype=tl.float32)
    tokens += head * entries
    scores += (head * count + asked)[:, None] * copy_room  # of each query
    if part < copy_parts:
        begin, end = part * per_part, min((part + 1) * per_part, _exist(exist, copy_room, COUNTED))
        hidden += (block * tl.num_programs(0) + head) * copy_room
        for first in range(begin, end, GROUP):  # a copy's tokens are complete groups
            tl.store(hidden + first + tl.arange(0, GROUP), tl.zeros((GROUP,), dtype=tl.uint8))
        tl.debug_barrier()
        for first in range(0, entries, HELD):
            place = first + tl.arange(0, HELD)
            token = tl.load(tokens + place, mask=place < entries, other=-1)
            here = (token >= begin) & (token < end)
            tl.store(hidden + token, tl.full((HELD,), 1, dtype=tl.uint8), mask=here)
        tl.debug_barrier()
        token, of_part, inner = tl.arange(0, GROUP), tl.arange(0, VALUE_PARTS_WIDE), tl.arange(0, CHANNELS_WIDE)
        for first in range(begin, end, GROUP):
            rows = keys + head * key_head + (first // GROUP * KEY + key) * KEY_BYTES
            codes = tl.load(rows[:, None] + (token * BITS // 8)[None, :], mask=of_key[:, None], other=0).to(tl.int32)
            codes = (codes >> (token * BITS % 8)[None, :]) & ((1 << BITS) - 1)
            scale, zero = half(rows + GROUP * BITS // 8, of_key), half(rows + GROUP * BITS // 8 + 2, of_key)
            own = _times(state * scale[None, :], codes.to(tl.float32), PRECISION)
            own = _capped(own + tl.sum(state * zero[None, :], 1)[:, None], scaling, softcap, CAPPED)
            at = first + token
            there = of_query[:, None] & (at >= 0)[None, :]
            own = _masked(own, mask, in_mask[:, None] + at[None, :], there, MASK)
            seen = (tl.load(hidden + at, cache_modifier=".cg") == 0)[None, :]
            if SCORED:
                tl.store(scores + at[None, :], own, mask=there & seen)
            own = tl.where(seen, own, float("-inf"))
            rows = values + head * value_head + at[:, None] * VALUE_BYTES + of_part[None, :] * value_part
            of_row = (at >= 0)[:, None] & (of_part < VALUE_PARTS)[None, :]
            codes = tl.load(
                rows[:, :, None] + (inner * BITS // 8)[None, None, :],
                mask=of_row[:, :, None] & (inner < CHANNELS)[None, None, :], other=0,
            ).to(tl.int32)  # fmt: skip
            codes = (codes >> (inner * BITS % 8)[None, None, :]) & ((1 << BITS) - 1)
            scale = half(rows + CHANNELS * BITS // 8, of_row)
            zero = half(rows + CHANNELS * BITS // 8 + 2, of_row)
            stored = codes.to(tl.float32) * scale[:, :, None] + zero[:, :, None]
            most, shares, found = _added(most, shares, found, own, tl.reshape(stored, (GROUP, LANES)), PRECISION)
    elif part < copy_parts + entry_parts:
        begin = (part - copy_parts) * PER_PART
        for first in range(begin, min(begin + PER_PART, entries), TOKENS):
            entry = first + tl.arange(0, TOKENS)
            token = tl.load(tokens + entry, mask=entry < entries, other=-1)
            there, at = token >= 0, (head * entries + entry)
            stored = tl.load(
                entry_keys + at[None, :] * KEY + key[:, None], mask=there[None, :] & of_key[:, None], other=0.0
            ).to(tl.float32)  # fmt: skip
            own = _capped(tl.dot(state, stored, input_precision=PRECISION), scaling, softcap, CAPPED)
            of_each = of_query[:, None] & there[None, :]
            own = _masked(own, mask, in_mask[:, None] + token[None, :], of_each, MASK)
            if SCORED:
                tl.store(scores + token[None, :], own, mask=of_each)
            own = tl.where(there[None, :], own, float("-inf"))
            stored = tl.load(
                entry_values + at[:, None] * VALUE + channel[None, :], mask=there[:, None] & of_value[None, :],
                other=0.0,
            ).to(tl.float32)  # fmt: skip
            most, shares, found = _added(most, shares, found, own, stored, PRECISION)
    else:
        latest = _exist(latest_count, latest_room, COUNTED)
        begin, number = (part - copy_parts - entry_parts) * PER_PART, latest + guesses
        latest_keys += row * latest_key_row + own_head * latest_key_head
        latest_values += row * latest_value_row + own_head * latest_value_head
        guess_keys += row * guess_key_row + own_head * guess_key_head
        guess_values += row * guess_value_row + own_head * guess_value_head
        for first in range(begin, min(begin + PER_PART, number), TOKENS):
            entry = first + tl.arange(0, TOKENS)
            old, guess = entry < latest, (entry >= latest) & (entry < number)
            stored = tl.load(
                latest_keys + entry[None, :] * latest_key_token + key[:, None], mask=old[None, :] & of_key[:, None],
                other=0.0,
            ).to(tl.float32)  # fmt: skip
            if GUESSED:
                stored += tl.load(
                    guess_keys + (entry - latest)[None, :] * guess_key_token + key[:, None],
                    mask=guess[None, :] & of_key[:, None], other=0.0,
                ).to(tl.float32)  # fmt: skip
            own = _capped(tl.dot(state, stored, input_precision=PRECISION), scaling, softcap, CAPPED)
            there = entry < number
            if MASK == "none":
                own = tl.where(entry[None, :] <= (number - EACH + turn)[:, None], own, float("-inf"))
            else:
                at = in_mask[:, None] + (copy_room + entry)[None, :]
                own = _masked(own, mask, at, of_query[:, None] & there[None, :], MASK)
            own = tl.where(there[None, :], own, float("-inf"))
            stored = tl.load(
                latest_values + entry[:, None] * latest_value_token + channel[None, :],
                mask=old[:, None] & of_value[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            if GUESSED:
                stored += tl.load(
                    guess_values + (entry - latest)[:, None] * guess_value_token + channel[None, :],
                    mask=guess[:, None] & of_value[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
            most, shares, found = _added(most, shares, found, own, stored, PRECISION)
    into = (head * parts + part) * count + asked
    tl.store(best + into, most, mask=of_query)
    tl.store(total + into, shares, mask=of_query)
    within = of_query[:, None] & of_value[None, :]
    tl.store(parted + into[:, None] * VALUE + channel[None, :], found, mask=within)
    tl.debug_barrier()  # before the program counts as done, all of it is stored
    at = done + head * tl.num_programs(2) + block
    if tl.atomic_add(at, 1) == parts - 1:
        tl.store(at, 0)
        most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
        shares = tl.zeros((QUERIES,), dtype=tl.float32)
        found = tl.zeros((QUERIES, LANES), dtype=tl.float32)
        for other in range(parts):
            into = (head * parts + other) * count + asked
            own = tl.load(best + into, mask=of_query, other=float("-inf"), cache_modifier=".cg")
            above = tl.maximum(most, own)
            safe = tl.where(above == float("-inf"), 0.0, above)
            before, now = tl.exp(most - safe), tl.exp(own - safe)
            shares = shares * before + now * tl.load(total + into, mask=of_query, other=0.0, cache_modifier=".cg")
            more = tl.load(
                parted + into[:, None] * VALUE + channel[None, :], mask=within, other=0.0, cache_modifier=".cg"
            )
            found = found * before[:, None] + more * now[:, None]
            most = above
        if SINK:
            own = tl.load(sink + own_query, mask=of_query, other=float("-inf")).to(tl.float32)
            above = tl.maximum(most, own)
            safe = tl.where(above == float("-inf"), 0.0, above)
            before = tl.exp(most - safe)
            shares = shares * before + tl.exp(own - safe)
            found = found * before[:, None]
            most = above
        none = shares == 0
        shares = tl.where(none, 1.0, shares)
        tl.store(logarithm + head * count + asked, tl.where(none, 0.0, most) + tl.log(shares), mask=of_query)
        found = found / shares[:, None]
        if output.dtype.element_ty == tl.bfloat16:
            found = _rounded(found)
        into = (row * EACH + turn) * (heads * query_heads) + own_query
        tl.store(
            output + into[:, None] * VALUE + channel[None, :], found.to(output.dtype.element_ty), mask=within
        )


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: int, tokens: torch.Tensor,
    entry_keys: torch.Tensor, entry_values: torch.Tensor, latest_keys: torch.Tensor, latest_values: torch.Tensor,
    guess_keys: torch.Tensor | None, guess_values: torch.Tensor | None, mask: torch.Tensor | None,
    sink: torch.Tensor | None, scaling: float, softcap: float | None, scored: bool,
    exist: torch.Tensor | None = None, count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """As `mixed_attention.attend`, of tensors that are contiguous in the last dimension. Rows of the copy's keys are
    those of a view of the first groups of each key head, and those of its values of the first tokens of each part. The
    last program of a key head merges its parts."""
    (batch, heads, each, key), key_heads, copied = query.shape, keys.shape[1], values.shape[3]
    entries, latest, value_dim = tokens.shape[2], latest_keys.shape[2], latest_values.shape[3]
    own, group, channels = heads // key_heads * each, group_of(keys, bits), group_of(values, bits)
    guesses = 0 if guess_keys is None else guess_keys.shape[2]
    options: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    output = torch.empty(batch, each, heads, value_dim, dtype=query.dtype, device=query.device)
    logarithm = torch.empty(batch, key_heads, own, **options)
    scores = torch.empty(batch, key_heads, own, copied, **options) if scored else None
    queries = min(_QUERIES, wide(own))
    blocks, programs = triton.cdiv(own, queries), batch * key_heads
    copy_parts, per_part = 0, group
    if copied:
        copy_parts = max(1, min(PROGRAMS // programs, copied // (2 * PART)))
        per_part = triton.cdiv(triton.cdiv(copied, copy_parts), group) * group
        copy_parts = triton.cdiv(copied, per_part)
    entry_parts = triton.cdiv(entries, PART)
    parts = copy_parts + entry_parts + triton.cdiv(latest + guesses, PART)
    best, total = torch.empty(2, programs, parts, own, **options)
    parted = torch.empty(programs, parts, own, value_dim, **options)
    assert (exist is None) is (count is None) and (count is None or mask is None)
    hidden = torch.empty(blocks, programs, copied, dtype=torch.uint8, device=query.device)
    kind, strides = "none", (0, 0)
    if mask is not None:
        kind = "boolean" if mask.dtype == torch.bool else "additive"
        strides = mask.stride(0) if len(mask) > 1 else 0, mask.stride(2)
        mask = mask.view(torch.uint8) if kind == "boolean" else mask
    more_keys, more_values = (latest_keys, latest_values) if guess_keys is None else (guess_keys, guess_values)
    assert more_values is not None
    single = torch.float32 in (query.dtype, entry_keys.dtype, latest_keys.dtype)
    value_parts, at_once = values.shape[2], _TOKENS if max(key, value_dim) <= 128 else _TOKENS // 2
    grid: Any = (programs, parts, blocks)
    _attend[grid](
        query, keys, values, tokens, entry_keys, entry_values, latest_keys, latest_values, more_keys, more_values,
        logarithm if mask is None else mask, logarithm if sink is None else sink,
        logarithm if exist is None else exist, logarithm if count is None else count, hidden,
        logarithm if scores is None else scores, best, total, parted,
        counters(query.device, triton.next_power_of_2(programs * blocks)), output, logarithm, scaling, softcap or 1.0,
        key_heads, own, copied, per_part, copy_parts, entries, entry_parts, latest, guesses, *query.stride()[:3],
        keys.stride(1), values.stride(1), values.stride(2), *latest_keys.stride()[:3], *latest_values.stride()[:3],
        *more_keys.stride()[:3], *more_values.stride()[:3], *strides, each, key, wide(key), value_dim, bits, group,
        keys.shape[4], channels, triton.next_power_of_2(channels) if value_parts > 1 else wide(channels), value_parts,
        triton.next_power_of_2(value_parts), values.shape[4], queries, at_once, PART, _HELD, kind, sink is not None,
        softcap is not None, scored, guess_keys is not None, "tf32x3" if single else "tf32", count is not None,
        num_warps=4 if max(key, value_dim) <= 128 else 8,
    )  # fmt: skip
    return output, scores, logarithm


@triton.jit(do_not_specialize=["count", "copied", "first", "stop", "entries", "sinks", "begin_row"])
def _share(  # type: ignore[no-untyped-def]
    scores, logarithm, held, begin, exist, importance, count, copied, first, stop, entries, loyalty, sinks, heads,
    begin_row, EACH: tl.constexpr, TOKENS: tl.constexpr, HELD: tl.constexpr, BEGINS: tl.constexpr, KEEPS: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TOKENS
    token = start + tl.arange(0, TOKENS)
    there, after = token < copied, (token > 0) & (token < copied)
    found = tl.zeros((TOKENS,), dtype=tl.float32)
    for own in range(head * count, (head + 1) * count, EACH):
        for turn in range(first, stop):
            base, at = tl.load(logarithm + own + turn), scores + (own + turn) * copied + token
            found += tl.exp(tl.load(at, mask=there, other=float("-inf")) - base)
            if turn < stop - 1:
                found += tl.exp(tl.load(at - 1, mask=after, other=float("-inf")) - base)
    since = token
    if BEGINS:
        since = token - tl.load(begin + head // heads * begin_row)
    found = tl.where((since >= 0) & (since < sinks), float("inf"), tl.where(found == found, found, 0.0))
    if COUNTED:
        found = tl.where(token < _exist(exist, copied, COUNTED), found, float("-inf"))
    importance += head * copied
    tl.store(importance + token, found, mask=there)
    if KEEPS:
        tl.debug_barrier()
        for place in range(0, entries, HELD):
            entry = place + tl.arange(0, HELD)
            own_token = tl.load(held + head * entries + entry, mask=entry < entries, other=-1)
            here = (own_token >= start) & (own_token < start + TOKENS)
            own_share = tl.load(importance + own_token, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(importance + own_token, own_share * loyalty, mask=here)


def share(
    scores: torch.Tensor, logarithm: torch.Tensor, queries: int, first: int, stop: int, held: torch.Tensor | None,
    loyalty: float, sinks: int, begin: torch.Tensor | None, exist: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `mixed_attention.share`, of contiguous tensors."""
    batch, key_heads, count, tokens = scores.shape
    importance = torch.empty(batch * key_heads, tokens, dtype=torch.float32, device=scores.device)
    if importance.numel():
        _share[(batch * key_heads, triton.cdiv(tokens, _SHARED))](
            scores, logarithm, importance if held is None else held, importance if begin is None else begin,
            importance if exist is None else exist, importance, count, tokens, first, stop,
            0 if held is None else held.shape[2], loyalty, sinks, key_heads,
            0 if begin is None or len(begin) == 1 else 1, queries, _SHARED, _HELD, begin is not None, held is not None,
            exist is not None,
        )  # fmt: skip
    return importance


# Stored entries of single tokens

_ENTRIES = 16
"""Entries of a head that a program reads at a time."""
_READERS = 264
"""Programs that read: enough to keep a bus busy; more would keep the device from other work."""


@triton.jit
def _copied(  # type: ignore[no-untyped-def]
    address, begin, out, entry, token, DIM: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    channel = tl.arange(0, WIDE)
    within = (channel < DIM)[None, :]
    record = address.to(tl.pointer_type(out.dtype.element_ty))
    found = tl.load(record[:, None] + begin[:, None] + channel[None, :], mask=(token >= 0)[:, None] & within, other=0)
    tl.store(out + entry[:, None] * DIM + channel[None, :], found, mask=(token >= 0)[:, None] & within)


@triton.jit(do_not_specialize=["units", "entries"])
def _gather(  # type: ignore[no-untyped-def]
    addresses, tokens, keys, values, entries, count, units, heads, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BEGIN: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * ENTRIES, entries, tl.num_programs(0) * ENTRIES):
        entry = first + tl.arange(0, ENTRIES).to(tl.int64)
        there = entry < entries
        token = tl.load(tokens + entry, mask=there, other=-1)
        head = entry // count
        address = tl.load(addresses + head // heads * units + token // GROUP, mask=token >= 0, other=0)
        begin = token % GROUP * WIDTH
        _copied(address, begin + head % heads * KEY, keys, entry, token, KEY, KEY_WIDE)
        _copied(address, begin + BEGIN + head % heads * VALUE, values, entry, token, VALUE, VALUE_WIDE)


@triton.jit(do_not_specialize=["width"])
def _exchange(held, wanted, new, counts, count, width, HELD: tl.constexpr, WANTED: tl.constexpr):  # type: ignore[no-untyped-def]
    head = tl.program_id(0).to(tl.int64)
    slot, place = tl.arange(0, HELD), tl.arange(0, WANTED)
    there = tl.load(held + head * count + slot, mask=slot < count, other=-1).to(tl.int32)
    asked = tl.load(wanted + head * width + place, mask=place < width, other=-1).to(tl.int32)
    same = ((there[:, None] == asked[None, :]) & (asked >= 0)[None, :]).to(tl.int32)
    stays, absent = tl.max(same, 1), ((asked >= 0) & (tl.max(same, 0) == 0)).to(tl.int32)
    free = ((slot < count) & (stays == 0)).to(tl.int32)
    of_slot, of_place = tl.cumsum(free, 0), tl.cumsum(absent, 0)
    match = (of_slot[:, None] == of_place[None, :]) & (free[:, None] * absent[None, :] != 0)
    comes = tl.max(tl.where(match, asked[None, :], -1), 1)
    tl.store(held + head * count + slot, tl.where(stays != 0, there, comes), mask=slot < count)
    tl.store(new + head * count + slot, comes, mask=slot < count)
    tl.store(counts + head, tl.sum(absent.to(tl.int64), 0))


def exchange(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `mixed_attention.exchange`, of contiguous tensors."""
    rows, heads, count = tokens.shape
    options: dict[str, Any] = {"dtype": torch.int64, "device": tokens.device}
    new, counts = torch.empty(tokens.shape, **options), torch.empty(rows, heads, **options)
    both = wide(max(count, wanted.shape[2]))
    _exchange[(rows * heads,)](
        tokens, wanted, new, counts, count, wanted.shape[2], both, both, num_warps=4 if both <= 128 else 8
    )
    return new, counts


def bring(
    addresses: torch.Tensor, tokens: torch.Tensor, form: Any, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """As `mixed_attention.bring`, of contiguous tensors."""
    _, heads, count = tokens.shape
    if not tokens.numel():
        return
    grid: Any = (min(_READERS, triton.cdiv(tokens.numel(), _ENTRIES)),)
    _gather[grid](
        addresses, tokens, keys, values, tokens.numel(), count, addresses.shape[1], heads, form.group_size,
        form.entry_width, form.key_width, form.key_dim, form.value_dim,
        *map(triton.next_power_of_2, (form.key_dim, form.value_dim)), _ENTRIES,
    )  # fmt: skip


# Attention over parts of a history

_MERGED = 1 << 12
"""Elements that a program merges."""


@triton.jit(do_not_specialize=["heads", "queries"])
def _merge(  # type: ignore[no-untyped-def]
    total, log_sum, part, part_log_sum, heads, queries, dim, total_row, total_head, total_query, sum_row, sum_head,
    sum_query, part_row, part_head, part_query, more_row, more_head, more_query, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(1).to(tl.int64)
    row, head = own // heads, own % heads
    query, channel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    there = query < queries
    inside = there[:, None] & (channel < dim)[None, :]
    log_sum += row * sum_row + head * sum_head + query * sum_query
    total += row * total_row + head * total_head + query[:, None] * total_query + channel[None, :]
    part += row * part_row + head * part_head + query[:, None] * part_query + channel[None, :]
    before = tl.load(log_sum, mask=there, other=float("-inf"))
    more = tl.load(
        part_log_sum + row * more_row + head * more_head + query * more_query, mask=there, other=float("-inf")
    )
    top = tl.maximum(before, more)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither sees anything
    added = tl.exp(more - top)
    both = tl.exp(before - top) + added
    share = tl.where(both > 0, added / both, 0.0)[:, None]
    old = tl.load(total, mask=inside, other=0.0)
    new = tl.load(part, mask=inside, other=0.0).to(tl.float32)
    tl.store(total, old + (new - old) * share, mask=inside)
    tl.store(log_sum, tl.where(both > 0, tl.log(both) + top, float("-inf")), mask=there)


def merge(
    total: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, part_log_sum: torch.Tensor
) -> None:
    """As `mixed_attention.merge`."""
    batch, heads, queries, dim = total.shape
    channels = triton.next_power_of_2(dim)
    rows = max(1, _MERGED // channels)
    grid: Any = (triton.cdiv(queries, rows), batch * heads)
    strides = [stride for one in (total, log_sum, part, part_log_sum) for stride in one.stride()[:3]]
    _merge[grid](total, log_sum, part, part_log_sum, heads, queries, dim, *strides, rows, channels)
