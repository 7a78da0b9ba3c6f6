"""The kernels of `ranking`, one launch each: see its functions. Products are in single precision.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests. Numbers that differ between layers are no constants of a kernel, so that it is compiled once for a model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit_triton import _rounded, wide
from .ranking import BLOCK, HIDDEN, LEAST, MOST_UNITS, PROGRAMS, Counts

_HIDDEN, _LEAST, _LOWEST = tl.constexpr(HIDDEN), tl.constexpr(LEAST), tl.constexpr(-3e38)
_HEADS = 64
"""Query heads whose scores a program computes at most."""
_BYTES = 32
"""Bytes of a code at a time."""
_CHANNELS = 16
"""Channels of a key at a time in a product without tensor cores: with more, a program would not have the registers."""
_TILE = 8192
"""Elements that a program holds at a time."""
_TOKENS = 32
"""Tokens at a time."""
_UNITS = 256
"""Units whose importance a program computes."""


@triton.jit
def _times(weights, entries, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product of float32 matrices. Unless "ieee", tensor cores hold the `entries` exactly, as they hold integers of
    8 bits and numbers of 16 bits, and the `weights` are given to them in two parts."""
    if PRECISION == "ieee":
        return tl.dot(weights, entries, input_precision="ieee")
    leading = (weights.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    product = tl.dot(weights - leading, entries, input_precision="tf32")
    return tl.dot(leading, entries, product, input_precision="tf32")


@triton.jit
def _merged(  # type: ignore[no-untyped-def]
    best, total, parted, head, parts, COUNT: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The largest score, the sum of weights and the weighted sum over all parts of program `head`: (QUERIES,) each, and
    (QUERIES, WIDE), of which there are weighted sums (COUNT, WIDTH)."""
    query, channel = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    shares = tl.zeros((QUERIES,), dtype=tl.float32)
    found = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & (query >= 0)[None, :]
        at = (head * parts + part)[:, None] * QUERIES + query[None, :]
        own = tl.load(best + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        above = tl.maximum(most, tl.max(own, 0))
        least = tl.maximum(above, _LOWEST)  # parts without a key weigh 0
        now, before = tl.exp(own - least[None, :]), tl.exp(most - least)
        shares = shares * before + tl.sum(
            now * tl.load(total + at, mask=there, other=0.0, cache_modifier=".cg"), 0
        )  # fmt: skip
        more = tl.load(
            parted + at[:, :, None] * WIDTH + channel[None, None, :],
            mask=(there & (query < COUNT)[None, :])[:, :, None] & (channel < WIDTH)[None, None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        found = found * before[:, None] + tl.sum(more * now[:, :, None], 0)
        most = above
    return most, shares, found


def counters(device: torch.device, size: int) -> torch.Tensor:
    """(size,) int32 zeros of `device`, the same at each call on a stream: programs that are done, for each sum that
    several share.

    The last program of a sum sets its counter to zero again, so no launch clears them. Kernels of one stream run one
    after the other, so each finds zeros.
    """
    on_cuda = device.type == "cuda"
    return _counters(device, size, torch.cuda.current_stream(device).cuda_stream if on_cuda else 0)


@functools.cache
def _counters(device: torch.device, size: int, stream: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def split(tokens: int, heads: int, at_once: int, least: int) -> tuple[int, int]:
    """In how many parts `heads` programs of `tokens` tokens each are split, 0 of none, and the tokens of a part: at
    least `least`, a multiple of `at_once`, which divides it."""
    parts = max(1, min(PROGRAMS // heads, tokens // least))
    each = triton.cdiv(max(1, triton.cdiv(tokens, parts)), at_once) * at_once
    return triton.cdiv(tokens, each), each


def _type(low: torch.Tensor) -> Any:
    """Type that holds queries and components exactly in a product. Triton's interpreter has none of bfloat16."""
    return tl.bfloat16 if low.is_cuda else tl.float32


# Queries

@triton.jit
def _exist(count, room, COUNTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of `room` exist: all, or as many as `count` says on the device."""
    return tl.minimum(tl.load(count).to(tl.int32), room) if COUNTED else room


@triton.jit(do_not_specialize=["sink_count", "recent_room"])
def _project(  # type: ignore[no-untyped-def]
    states, queries, scale, mean, offsets, sinks, recent, count, low, constant, near, scaling, rank, sink_count,
    recent_room, heads, state_row, state_head, sink_row, sink_head, sink_token, recent_row, recent_head, recent_token,
    EACH: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, RANKS: tl.constexpr,
    TOKENS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row, own = head // heads, head % heads
    asked, channel = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    there, within, to = asked < EACH, channel < DIM, head * EACH + asked
    state = tl.load(
        states + row * state_row + (own * EACH + asked)[:, None] * state_head + channel[None, :],
        mask=there[:, None] & within[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    if tl.program_id(1) == 0:
        less = tl.load(mean + own * DIM + channel, mask=within, other=0.0)
        total = tl.sum(state * less[None, :], 1) * scaling
        for first in range(0, rank, RANKS):
            component = first + tl.arange(0, RANKS)
            inside = component < rank
            part = tl.load(
                queries + (own * DIM + channel)[:, None] * rank + component[None, :],
                mask=within[:, None] & inside[None, :], other=0,
            ).to(tl.float32)  # fmt: skip
            factor = tl.load(scale + component, mask=inside, other=0.0) * scaling
            found = _rounded(tl.dot(state, part, input_precision=PRECISION) * factor[None, :])
            into = low + to[:, None] * rank + component[None, :]
            tl.store(into, found.to(tl.bfloat16), mask=there[:, None] & inside[None, :])
            total += tl.sum(found * tl.load(offsets + component, mask=inside, other=0.0)[None, :], 1)
        tl.store(constant + to, total, mask=there)
    else:
        token = (tl.program_id(1) - 1) * TOKENS + tl.arange(0, TOKENS)
        later, recent_count = token - sink_count, _exist(count, recent_room, COUNTED)
        keys = tl.load(
            sinks + row * sink_row + own * sink_head + token[None, :] * sink_token + channel[:, None],
            mask=(later < 0)[None, :] & within[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        keys += tl.load(
            recent + row * recent_row + own * recent_head + later[None, :] * recent_token + channel[:, None],
            mask=((later >= 0) & (later < recent_count))[None, :] & within[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        found = tl.dot(state, keys, input_precision=EXACT) * scaling
        if COUNTED:
            found = tl.where((later < recent_count)[None, :], found, float("-inf"))
        into = near + to[:, None] * (sink_count + recent_room) + token[None, :]
        tl.store(into, found, mask=there[:, None] & (later < recent_room)[None, :])


def project(
    states: torch.Tensor, queries: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor, offsets: torch.Tensor,
    sinks: torch.Tensor, recent: torch.Tensor, scaling: float, count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `ranking.project`. Contiguous: `queries` and `mean`, and `states` in the last dimension."""
    (batch, heads, dim), (key_heads, _, rank) = states.shape, queries.shape
    options: dict[str, Any] = {"device": states.device}
    low = torch.empty(batch, heads, rank, dtype=torch.bfloat16, **options)
    constant = torch.empty(batch, heads, dtype=torch.float32, **options)
    near = torch.empty(batch, heads, sinks.shape[2] + recent.shape[2], dtype=torch.float32, **options)
    single = [torch.float32 in dtypes for dtypes in ([states.dtype], (states.dtype, sinks.dtype, recent.dtype))]
    tile = _TILE // 2 // wide(dim)
    grid: Any = (batch * key_heads, 1 + triton.cdiv(near.shape[2], min(_TOKENS, tile)))
    _project[grid](
        states, queries, scale, mean, offsets, sinks, recent, mean if count is None else count, low, constant, near,
        scaling, rank, sinks.shape[2], recent.shape[2], key_heads, *states.stride()[:2], *sinks.stride()[:3],
        *recent.stride()[:3], heads // key_heads, dim, wide(dim), wide(heads // key_heads), min(128, tile),
        min(_TOKENS, tile),
        *("ieee" if one else "tf32" for one in single), count is not None, num_warps=4 if dim <= 128 else 8,
    )  # fmt: skip
    return low, constant, near


# Scores

@triton.jit
def _part(total, low, stored, component, head, of_head, inside, rank, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`total` (heads, n), plus the product of the heads' queries with their `stored` components (c, n)."""
    asked = tl.load(
        low + head[:, None] * rank + component[None, :], mask=of_head[:, None] & inside[None, :], other=0.0
    ).to(TYPE)
    return tl.dot(asked, stored.to(tl.int8, bitcast=True).to(TYPE), total, input_precision="tf32")


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    low, codes, at, there, head, of_head, rank, wide, four, two, line, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    BYTES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Products (HEADS, TOKENS) of queries with the tokens whose bytes 0 are `at`; byte n is n times `line` further."""
    total = tl.zeros((HEADS, TOKENS), dtype=tl.float32)
    half, quarter = four // 2, two // 4
    for first in range(0, wide, BYTES):
        byte = first + tl.arange(0, BYTES)
        inside = byte < wide
        stored = tl.load(codes + byte[:, None] * line + at[None, :], mask=inside[:, None] & there[None, :], other=0)
        total = _part(total, low, stored, byte, head, of_head, inside, rank, TYPE)
    codes, low = codes + wide * line, low + wide
    for first in range(0, half, BYTES):
        byte = first + tl.arange(0, BYTES)
        inside = byte < half
        stored = tl.load(codes + byte[:, None] * line + at[None, :], mask=inside[:, None] & there[None, :], other=0)
        total = _part(total, low, stored & 15, byte, head, of_head, inside, rank, TYPE)
        total = _part(total, low, stored >> 4, half + byte, head, of_head, inside, rank, TYPE)
    codes, low = codes + half * line, low + four
    for first in range(0, quarter, BYTES):
        byte = first + tl.arange(0, BYTES)
        inside = byte < quarter
        stored = tl.load(codes + byte[:, None] * line + at[None, :], mask=inside[:, None] & there[None, :], other=0)
        for place in tl.static_range(4):
            own = (stored >> (2 * place)) & 3
            total = _part(total, low, own, place * quarter + byte, head, of_head, inside, rank, TYPE)
    return total


@triton.jit(do_not_specialize=["rank", "wide", "four", "two", "heads", "units", "apart"])
def _score(  # type: ignore[no-untyped-def]
    low, constant, codes, count, best, tops, sums, rank, wide, four, two, heads, units, apart, line, code_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr,
    TYPE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    row, blocks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exist = _exist(count, units, COUNTED)
    of_head, there = head < heads, unit // ALIGNED * ALIGNED < exist
    found = tl.full((HEADS, BLOCK), float("-inf"), dtype=tl.float32)
    tokens = GROUP
    if COUNTED:  # nothing is read for a block of no unit
        tokens = tl.where(tl.program_id(0) * BLOCK < exist, GROUP, 0)
    for token in range(tokens):
        own = _products(
            low + row * heads * rank, codes + row * code_row + token * line, unit, there, head, of_head, rank, wide,
            four, two, GROUP * line, HEADS, BLOCK, BYTES, TYPE,
        )  # fmt: skip
        found = tl.maximum(found, own)
    to = row * heads + head
    found += tl.load(constant + to, mask=of_head, other=0.0)[:, None]
    found = tl.where(((unit >= apart) & (unit < exist))[None, :], found, _HIDDEN)
    tl.store(best + to[:, None] * units + unit[None, :], found, mask=of_head[:, None] & (unit < units)[None, :])
    top = tl.max(found, 1)
    weights = tl.where(found <= _HIDDEN, 0.0, tl.exp(found - top[:, None]))
    tl.store(tops + to * blocks + tl.program_id(0), top, mask=of_head)
    tl.store(sums + to * blocks + tl.program_id(0), tl.sum(weights, 1), mask=of_head)


def score(
    low: torch.Tensor, constant: torch.Tensor, codes: torch.Tensor, counts: Counts, group: int, apart: int,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `ranking.score`. Loads are of 16 bytes if lines of `codes` begin at multiples of 16."""
    (batch, heads, rank), units = low.shape, codes.shape[2]
    options: dict[str, Any] = {"dtype": torch.float32, "device": low.device}
    grid: Any = (triton.cdiv(units, BLOCK), batch, triton.cdiv(heads, _HEADS))
    best = torch.empty(batch, heads, units, **options)
    tops, sums = (torch.empty(batch, heads, grid[0], **options) for _ in range(2))
    aligned = (codes.stride(0) | codes.stride(1) | codes.data_ptr()) % 16 == 0
    _score[grid](
        low, constant, codes, low if count is None else count, best, tops, sums, rank, *counts, heads, units, apart,
        codes.stride(1), codes.stride(0), group, min(_HEADS, wide(heads)), BLOCK, _BYTES, 16 if aligned else 1,
        _type(low), count is not None, num_warps=4 if heads <= 16 else 8,
    )  # fmt: skip
    return best, tops, sums


@triton.jit
def _added(top, total, own, weights):  # type: ignore[no-untyped-def]
    above = tl.maximum(top, own)
    return above, total * tl.exp(top - above) + weights * tl.exp(own - above)


@triton.jit(do_not_specialize=["heads", "units", "blocks", "keys", "apart"])
def _share(  # type: ignore[no-untyped-def]
    best, tops, sums, near, count, importance, heads, units, blocks, keys, apart, HEADS: tl.constexpr,
    UNITS: tl.constexpr, AT_ONCE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    row, unit = tl.program_id(1).to(tl.int64), tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    found = tl.zeros((UNITS,), dtype=tl.float32)
    for first in range(0, heads, HEADS):
        of_head = first + tl.arange(0, HEADS) < heads
        head = row * heads + first + tl.arange(0, HEADS)
        most = tl.full((HEADS, AT_ONCE), _HIDDEN, dtype=tl.float32)
        total = tl.zeros((HEADS, AT_ONCE), dtype=tl.float32)
        for begin in range(0, blocks, AT_ONCE):
            block = begin + tl.arange(0, AT_ONCE)
            there, at = of_head[:, None] & (block < blocks)[None, :], head[:, None] * blocks + block[None, :]
            own = tl.load(tops + at, mask=there, other=_HIDDEN)
            most, total = _added(most, total, own, tl.load(sums + at, mask=there, other=0.0))
        for begin in range(0, keys, AT_ONCE):
            key = begin + tl.arange(0, AT_ONCE)
            there = of_head[:, None] & (key < keys)[None, :]
            own = tl.load(near + head[:, None] * keys + key[None, :], mask=there, other=float("-inf"))
            most, total = _added(most, total, own, 1.0)
        top = tl.max(most, 1)
        shares = tl.sum(total * tl.exp(most - top[:, None]), 1)
        there = of_head[:, None] & (unit < units)[None, :]
        own = tl.load(best + head[:, None] * units + unit[None, :], mask=there, other=_HIDDEN)
        own = tl.exp(tl.maximum(own - top[:, None], _LEAST)) / tl.where(of_head, shares, 1.0)[:, None]
        found += tl.sum(tl.where(of_head[:, None] & (own == own), own, 0.0), 0)  # no NaN
    found = tl.where(unit < apart, float("inf"), found)
    if COUNTED:
        found = tl.where(unit < _exist(count, units, COUNTED), found, float("-inf"))
    tl.store(importance + row * units + unit, found, mask=unit < units)


def share(
    best: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, near: torch.Tensor, rows: int, apart: int,
    count: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `ranking.share`, of contiguous tensors."""
    units, each = best.shape[2], best.shape[0] * best.shape[1] // rows
    importance = torch.empty(rows, units, dtype=torch.float32, device=best.device)
    grid: Any = (triton.cdiv(units, _UNITS), rows)
    _share[grid](
        best, tops, sums, near, near if count is None else count, importance, each, units, tops.shape[2],
        near.shape[2], apart, min(8, triton.next_power_of_2(each)), _UNITS, 128, count is not None,
    )  # fmt: skip
    return importance


# Choice

@triton.jit(do_not_specialize=["count", "wanted", "among"])
def _pick(importance, units, others, left, count, wanted, among, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, unit = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = unit < count
    given = tl.load(importance + row * count + unit, mask=there, other=0.0)
    bits = tl.where(given == 0, 0.0, given).to(tl.uint32, bitcast=True)  # -0 is 0
    image = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)  # in the order of the numbers
    image = tl.where(there, image, 0)  # below -inf's
    # both bounds, bit by bit: the largest that at least as many numbers reach. Counts of both are one number
    wants, follows, bit = tl.cast(0, tl.uint32), tl.cast(0, tl.uint32), tl.cast(0x80000000, tl.uint32)
    for _ in range(32):
        both = (image >= (wants | bit)).to(tl.uint32) + ((image >= (follows | bit)).to(tl.uint32) << 16)
        reach = tl.sum(both, 0)
        wants = tl.where((reach & 0xFFFF).to(tl.int32) >= wanted, wants | bit, wants)
        follows = tl.where((reach >> 16).to(tl.int32) >= among, follows | bit, follows)
        bit = bit >> 1
    above = tl.sum((image > wants).to(tl.uint32) + ((image > follows).to(tl.uint32) << 16), 0)
    equal = tl.cumsum((image == wants).to(tl.uint32) + ((image == follows).to(tl.uint32) << 16), 0)
    of_wanted, of_among = wanted - (above & 0xFFFF).to(tl.int32), among - (above >> 16).to(tl.int32)
    first = (image > wants) | ((image == wants) & ((equal & 0xFFFF).to(tl.int32) <= of_wanted))
    later = (image > follows) | ((image == follows) & ((equal >> 16).to(tl.int32) <= of_among))
    weighs = there & (first == 0) & (later == 0) & (image > 0x80000000) & (image < 0xFF800000)  # positive, finite
    rest = tl.where(weighs, (image & 0x7FFFFFFF).to(tl.float32, bitcast=True), 0.0)
    tl.store(left + row, tl.sum(rest, 0))
    first, later = first & there, later & there & (first == 0)
    place = tl.cumsum(first.to(tl.uint32) + (later.to(tl.uint32) << 16), 0)
    tl.store(units + row * wanted + (place & 0xFFFF).to(tl.int32) - 1, unit, mask=first)
    tl.store(others + row * (among - wanted) + (place >> 16).to(tl.int32) - 1, unit, mask=later)


def pick(importance: torch.Tensor, wanted: int, among: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `ranking.pick`, of at most `MOST_UNITS` units."""
    rows, count = importance.shape
    options: dict[str, Any] = {"dtype": torch.int32, "device": importance.device}
    assert count <= MOST_UNITS, count
    units, others = torch.empty(rows, wanted, **options), torch.empty(rows, among - wanted, **options)
    wide_count, left = wide(count), torch.empty(rows, dtype=torch.float32, device=importance.device)
    _pick[(rows,)](
        importance, units, others, left, count, wanted, among, wide_count, num_warps=min(32, max(4, wide_count // 512))
    )
    return units, others, left


# The remainder

@triton.jit
def _leading(codes, byte, shift, bits, signed, at, there, inside):  # type: ignore[no-untyped-def]
    """Leading components (TOKENS, INPUTS), as they are stored."""
    stored = tl.load(codes + byte[None, :] + at[:, None], mask=there[:, None] & inside[None, :], other=0)
    stored = (stored.to(tl.int32) >> shift[None, :]) & bits[None, :]
    return tl.where(signed[None, :] & (stored > 127), stored - 256, stored).to(tl.float32)


@triton.jit(do_not_specialize=[
    "rank", "wide", "four", "two", "heads", "blocks", "chosen", "per_part", "inputs", "value_heads", "each", "per_value"
])  # fmt: skip
def _rest(  # type: ignore[no-untyped-def]
    low, constant, codes, others, maps, scale, log_ratio, offsets, count, best, total, parted, done, value, weight,
    rank, wide, four, two, heads, blocks, chosen, per_part, inputs, value_heads, each, per_value, line, code_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, BYTES: tl.constexpr, INPUTS: tl.constexpr,
    VALUE: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr, TYPE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    program, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, begin = program // blocks, program % blocks * HEADS
    sequence = row // each
    head, place, entry = begin + tl.arange(0, HEADS), tl.arange(0, HEADS), tl.arange(0, INPUTS)
    of_head, of_input = head < heads, entry < inputs
    to = row * heads + head
    # where the leading components are
    half, quarter, signed = tl.maximum(four // 2, 1), tl.maximum(two // 4, 1), entry < wide
    in_pairs, pair, quad = entry < wide + four, tl.maximum(entry - wide, 0), tl.maximum(entry - wide - four, 0)
    byte = tl.where(signed, entry, tl.where(in_pairs, wide + pair % half, wide + four // 2 + quad % quarter))
    byte = byte * (GROUP * line)
    shift = tl.where(signed, 0, tl.where(in_pairs, pair // half * 4, quad // quarter * 2))
    bits = tl.where(signed, 255, tl.where(in_pairs, 15, 3))
    codes += sequence * code_row
    adds = tl.load(constant + to, mask=of_head, other=0.0)
    most = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    shares = tl.zeros((HEADS,), dtype=tl.float32)
    found = tl.zeros((HEADS, INPUTS), dtype=tl.float32)
    for first in range(part * per_part, min((part + 1) * per_part, chosen * GROUP), TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < chosen * GROUP
        unit = tl.load(others + row * chosen + token % chosen, mask=there, other=0)
        if COUNTED:
            there = there & (unit < tl.load(count).to(tl.int32))
        at = token // chosen * line + unit
        own = _products(
            low + row * heads * rank, codes, at, there, head, of_head, rank, wide, four, two, GROUP * line, HEADS,
            TOKENS, BYTES, TYPE,
        )  # fmt: skip
        own = tl.where(there[None, :], own + adds[:, None], float("-inf"))
        above = tl.maximum(most, tl.max(own, 1))
        if COUNTED:  # there may be none so far, and -inf less itself is no number
            above = tl.maximum(above, _HIDDEN)
        own, before = tl.exp(own - above[:, None]), tl.exp(most - above)
        entries = _leading(codes, byte, shift, bits, signed, at, there, of_input)
        found = found * before[:, None] + _times(own, entries, "tf32")
        shares = shares * before + tl.sum(own, 1)
        most = above
    into = (program * parts + part) * HEADS + place
    tl.store(best + into, most)
    tl.store(total + into, shares)
    tl.store(parted + into[:, None] * INPUTS + entry[None, :], found)
    tl.debug_barrier()  # before the program counts as done, all of it is stored
    if tl.atomic_add(done + program, 1) == parts - 1:
        tl.store(done + program, 0)
        most, shares, found = _merged(best, total, parted, program, parts, HEADS, INPUTS, HEADS, INPUTS, PARTS)
        ratio = tl.load(log_ratio + to, mask=of_head, other=0.0)
        tl.store(weight + to, tl.log(shares) + most + ratio, mask=of_head)
        maps += sequence * (inputs + 1) * value_heads * VALUE
        scale += sequence * (inputs + 1)
        mean = found / shares[:, None] + tl.load(offsets + entry, mask=of_input, other=0.0)[None, :]
        mean *= tl.load(scale + entry, mask=of_input, other=0.0)[None, :]
        always, in_sequence = tl.load(scale + inputs), row % each * heads + head
        least = (row % each * heads + begin) // per_value
        for own_head in range(least, (row % each * heads + min(begin + HEADS, heads) - 1) // per_value + 1):
            mine = of_head & (in_sequence // per_value == own_head)
            for first in range(0, VALUE, VALUES):
                channel = first + tl.arange(0, VALUES)
                within = channel < VALUE
                at = own_head * VALUE + channel
                own_map = tl.load(
                    maps + (entry * value_heads)[:, None] * VALUE + at[None, :],
                    mask=of_input[:, None] & within[None, :], other=0,
                ).to(tl.float32)  # fmt: skip
                shift_by = tl.load(maps + inputs * value_heads * VALUE + at, mask=within, other=0).to(tl.float32)
                mapped = _times(mean, own_map, "tf32") + (shift_by * always)[None, :]
                tl.store(value + to[:, None] * VALUE + channel[None, :], mapped, mask=mine[:, None] & within[None, :])


def rest(
    low: torch.Tensor, constant: torch.Tensor, codes: torch.Tensor, counts: Counts, group: int, others: torch.Tensor,
    maps: torch.Tensor, scale: torch.Tensor, log_ratio: torch.Tensor, offsets: torch.Tensor,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `ranking.rest`, of tensors that are contiguous except `codes`. The last program of a row's heads merges their
    parts and applies the maps."""
    (batch, heads, rank), (rows, chosen), (_, inputs, value_heads, dim) = low.shape, others.shape, maps.shape
    options: dict[str, Any] = {"dtype": torch.float32, "device": low.device}
    value, weight = torch.empty(batch, heads, dim, **options), torch.empty(batch, heads, **options)
    own, inputs = batch * heads // rows, inputs - 1
    at_once, wide_inputs = min(32, wide(own)), wide(inputs)
    blocks = triton.cdiv(own, at_once)
    parts, per_part = split(chosen * group, rows * blocks, _TOKENS, 2 * _TOKENS)
    best, total = torch.empty(2, rows * blocks, parts, at_once, **options)
    parted = torch.empty(rows * blocks, parts, at_once, wide_inputs, **options)
    grid: Any = (rows * blocks, parts)
    _rest[grid](
        low, constant, codes, others, maps, scale, log_ratio, offsets, low if count is None else count, best, total,
        parted, counters(low.device, triton.next_power_of_2(rows * blocks)), value, weight, rank, *counts, own, blocks,
        chosen, per_part, inputs, value_heads, rows // batch, heads // value_heads, codes.stride(1), codes.stride(0),
        group, at_once, _TOKENS, _BYTES, wide_inputs, dim, min(wide(dim), max(16, _TILE // 2 // wide_inputs)),
        max(1, _TILE // (at_once * wide_inputs)), _type(low), count is not None,
        num_warps=8 if wide_inputs > 64 else 4,
    )  # fmt: skip
    return value, weight


# Codes

@triton.jit
def _product(total, key, projection, place, within, component, inside, rank):  # type: ignore[no-untyped-def]
    """`total` (TOKENS, BYTES), plus the product of `key` (TOKENS, c) with the projection to some components."""
    part = tl.load(
        projection + place[:, None] * rank + component[None, :], mask=within[:, None] & inside[None, :], other=0
    )
    return tl.dot(key, part.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _code(total, scale, component, inside, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes int32 of products, as they are stored: in two's complement if of 8 bits, else from 0 on."""
    bound: tl.constexpr = 2 ** (BITS - 1)
    found = tl.floor(total * tl.load(scale + component, mask=inside, other=0.0)[None, :])
    found = tl.minimum(tl.maximum(found, -bound), bound - 1).to(tl.int32)
    return (found & 255) if BITS == 8 else (found + bound)


@triton.jit
def _put(  # type: ignore[no-untyped-def]
    keys, mean, projection, scale, codes, rank, block, count, token, there, at, key_head, key_token, step,
    PARTS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, BYTES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Code and store a block of bytes of one class, which has `count` bytes of PARTS components each. `projection`,
    `scale` and `codes` begin with the class. Byte 0 of the tokens is `at`; byte n is n times `step` further."""
    byte = block * BYTES + tl.arange(0, BYTES)
    inside = byte < count
    first = tl.zeros((TOKENS, BYTES), dtype=tl.float32)
    second, third, fourth = first, first, first
    blocks: tl.constexpr = (DIM + CHANNELS - 1) // CHANNELS
    for part in range(KEY_HEADS * blocks):
        head, channel = part // blocks, part % blocks * CHANNELS + tl.arange(0, CHANNELS)
        place, within = head * DIM + channel, channel < DIM
        key = tl.load(
            keys + head * key_head + token[:, None] * key_token + channel[None, :],
            mask=there[:, None] & within[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        key -= tl.load(mean + place, mask=within, other=0.0)[None, :]
        first = _product(first, key, projection, place, within, byte, inside, rank)
        if PARTS > 1:
            second = _product(second, key, projection, place, within, count + byte, inside, rank)
        if PARTS > 2:
            third = _product(third, key, projection, place, within, 2 * count + byte, inside, rank)
            fourth = _product(fourth, key, projection, place, within, 3 * count + byte, inside, rank)
    bits: tl.constexpr = 8 // PARTS
    packed = _code(first, scale, byte, inside, bits)
    if PARTS > 1:
        packed += _code(second, scale, count + byte, inside, bits) << bits
    if PARTS > 2:
        packed += _code(third, scale, 2 * count + byte, inside, bits) << (2 * bits)
        packed += _code(fourth, scale, 3 * count + byte, inside, bits) << (3 * bits)
    into = codes + (byte * step)[None, :] + at[:, None]
    tl.store(into, packed.to(tl.uint8), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rank", "wide", "four", "two", "tokens", "first"])
def _encode(  # type: ignore[no-untyped-def]
    keys, mean, projection, scale, codes, rank, wide, four, two, tokens, first, key_row, key_head, key_token, line,
    code_row, GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    BYTES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row, block, half, quarter = tl.program_id(2).to(tl.int64), tl.program_id(1), four // 2, two // 4
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there, at, step = token < tokens, (first + token) % GROUP * line + (first + token) // GROUP, GROUP * line
    keys, codes = keys + row * key_row, codes + row * code_row
    of_eight, of_four = tl.cdiv(wide, BYTES), tl.cdiv(half, BYTES)
    if block < of_eight:
        _put(
            keys, mean, projection, scale, codes, rank, block, wide, token, there, at, key_head, key_token, step,
            1, KEY_HEADS, DIM, TOKENS, BYTES, CHANNELS,
        )  # fmt: skip
    elif block < of_eight + of_four:
        _put(
            keys, mean, projection + wide, scale + wide, codes + wide * step, rank, block - of_eight, half, token,
            there, at, key_head, key_token, step, 2, KEY_HEADS, DIM, TOKENS, BYTES, CHANNELS,
        )  # fmt: skip
    else:
        _put(
            keys, mean, projection + wide + four, scale + wide + four, codes + (wide + half) * step, rank,
            block - of_eight - of_four, quarter, token, there, at, key_head, key_token, step, 4, KEY_HEADS, DIM,
            TOKENS, BYTES, CHANNELS,
        )  # fmt: skip


def encode(
    keys: torch.Tensor, mean: torch.Tensor, projection: torch.Tensor, scale: torch.Tensor, counts: Counts,
    codes: torch.Tensor, group: int, first: int,
) -> None:  # fmt: skip
    """As `ranking.encode`, of contiguous `mean`, `projection` and `scale`. A program computes `_BYTES` bytes of
    `_TOKENS` tokens, with one product for each component of a byte."""
    (batch, key_heads, tokens, dim), (eight, four, two) = keys.shape, counts
    blocks = sum(triton.cdiv(count, _BYTES) for count in (eight, four // 2, two // 4))
    grid: Any = (triton.cdiv(tokens, _TOKENS), blocks, batch)
    _encode[grid](
        keys, mean, projection, scale, codes, len(scale), *counts, tokens, first, *keys.stride()[:3], codes.stride(1),
        codes.stride(0), group, key_heads, dim, _TOKENS, _BYTES, _CHANNELS, num_warps=8,
    )  # fmt: skip
