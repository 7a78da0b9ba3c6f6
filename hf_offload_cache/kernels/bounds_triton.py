"""The kernels of `bounds`, one launch each: see its functions. Products are in single precision.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests. Numbers that change while a cache grows are no constants of a kernel, so that it is compiled once for a model.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .bounds import LOWEST, TOKENS
from .low_bit_triton import _in_type, _scale, wide
from .ranking import MOST_UNITS
from .ranking_triton import _LOWEST, _exist, counters

_CHANNELS = 32
"""Channels of a key at a time."""
_OTHERS = 128
"""Chunks that a program compares its own with at a time."""
_NONE = tl.constexpr(LOWEST)


# Chunks

@triton.jit(do_not_specialize=["chunks"])
def _limits(  # type: ignore[no-untyped-def]
    states, abstracts, count, high, low, scaling, chunks, key_heads, each, state_row, state_head, row_step, chunk_step,
    end_step, head_step, EACH: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, CHUNKS: tl.constexpr,
    CHANNELS: tl.constexpr, EXPECTED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row, head = program // key_heads, program % key_heads
    asked, chunk = tl.arange(0, QUERIES), tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    of_query, there = asked < EACH, chunk < _exist(count, chunks, COUNTED)
    own_query = (row % each * key_heads + head) * EACH + asked  # of the sequence's
    states += row // each * state_row
    abstracts += row * row_step + head * head_step
    lowest = tl.zeros((QUERIES, CHUNKS), dtype=tl.float32)
    products = tl.zeros((QUERIES, CHUNKS), dtype=tl.float32)
    below = tl.zeros((QUERIES, CHUNKS), dtype=tl.float32)
    squares = tl.zeros((QUERIES, CHUNKS), dtype=tl.float32)
    for first in range(0, DIM, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        within = channel < DIM
        state = scaling * tl.load(
            states + own_query[:, None] * state_head + channel[None, :], mask=of_query[:, None] & within[None, :],
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        at, inside = channel[:, None] + chunk[None, :].to(tl.int64) * chunk_step, within[:, None] & there[None, :]
        least = tl.load(abstracts + at, mask=inside, other=0.0).to(tl.float32)
        ranges = tl.load(abstracts + end_step + at, mask=inside, other=0.0).to(tl.float32) - least
        lowest = tl.dot(state, least, lowest, input_precision="ieee")
        products = tl.dot(state, ranges, products, input_precision="ieee")
        below = tl.dot(tl.minimum(state, 0.0), ranges, below, input_precision="ieee")
        if EXPECTED:
            squares = tl.dot(state * state, ranges * ranges, squares, input_precision="ieee")
    reach = (products + tl.sqrt(squares)) * 0.5 if EXPECTED else products - below
    into = (program * EACH + asked)[:, None] * chunks + chunk[None, :]
    reach, below = lowest + reach, lowest + below
    reach, below = tl.where(reach == reach, reach, _NONE), tl.where(below == below, below, float("-inf"))  # not NaN
    if COUNTED:
        reach = tl.where(there[None, :], reach, float("-inf"))
        below = tl.where(there[None, :], below, float("-inf"))
    inside = of_query[:, None] & (chunk < chunks)[None, :]
    tl.store(high + into, reach, mask=inside)
    tl.store(low + into, below, mask=inside)


def limits(
    states: torch.Tensor, abstracts: torch.Tensor, scaling: float, expected: bool, count: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `bounds.limits`."""
    (batch, heads, _), (rows, chunks, _, key_heads, dim) = states.shape, abstracts.shape
    options: dict[str, Any] = {"dtype": torch.float32, "device": states.device}
    own = batch * heads // rows
    high, low = (torch.empty(rows, own, chunks, **options) for _ in range(2))
    grid: Any = (triton.cdiv(chunks, TOKENS), rows * key_heads)
    _limits[grid](
        states, abstracts, high if count is None else count, high, low, scaling, chunks, key_heads, rows // batch,
        *states.stride()[:2], *abstracts.stride()[:4], own // key_heads, dim, wide(own // key_heads), TOKENS, _CHANNELS,
        expected, count is not None, num_warps=4,
    )  # fmt: skip
    return high, low


@triton.jit(do_not_specialize=["heads", "chunks", "places", "apart"])
def _stand(  # type: ignore[no-untyped-def]
    high, low, most, least, heads, chunks, places, apart, CHUNKS: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    there = chunk < chunks
    best = tl.zeros((CHUNKS,), dtype=tl.int32)
    total = tl.zeros((CHUNKS,), dtype=tl.int32)
    worst = tl.zeros((CHUNKS,), dtype=tl.int32)
    for head in range(heads):
        begin = (row * heads + head) * chunks
        own = tl.load(high + begin + chunk, mask=there, other=0.0)
        own_low = tl.load(low + begin + chunk, mask=there, other=0.0)
        rank = tl.zeros((CHUNKS,), dtype=tl.int32)
        beaten = tl.zeros((CHUNKS,), dtype=tl.int32)
        for first in range(0, chunks, OTHERS):
            place = first + tl.arange(0, OTHERS)
            other = tl.load(high + begin + place, mask=place < chunks, other=float("-inf"))
            before = (other[None, :] == own[:, None]) & (place[None, :] < chunk[:, None])
            rank += tl.sum(((other[None, :] > own[:, None]) | before).to(tl.int32), 1)
            beaten += tl.sum((other[None, :] > own_low[:, None]).to(tl.int32), 1)
        points = tl.maximum(places - rank, 0)
        best, total = tl.maximum(best, points), total + points
        worst = tl.maximum(worst, tl.where(points > 0, tl.maximum(places - beaten, 0), 0))
    found = best.to(tl.float32) + tl.div_rn(total.to(tl.float32), (heads * places + 1).to(tl.float32))
    tl.store(most + row * chunks + chunk, tl.where(chunk < apart, float("inf"), found), mask=there)
    tl.store(least + row * chunks + chunk, worst.to(tl.float32), mask=there)


def stand(high: torch.Tensor, low: torch.Tensor, places: int, apart: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `bounds.stand`, of contiguous tensors. Each chunk is compared with all others of its head."""
    rows, heads, chunks = high.shape
    most, least = (torch.empty(rows, chunks, dtype=torch.float32, device=high.device) for _ in range(2))
    grid: Any = (triton.cdiv(chunks, TOKENS), rows)
    _stand[grid](high, low, most, least, heads, chunks, places, apart, TOKENS, _OTHERS, num_warps=4)
    return most, least


@triton.jit(do_not_specialize=["chunks", "group", "wanted", "width"])
def _front(  # type: ignore[no-untyped-def]
    most, least, ranks, begins, done, units, chunks, group, wanted, width, CHUNKS: tl.constexpr, OTHERS: tl.constexpr,
    EVERY: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    begin, there = row * chunks, chunk < chunks
    own = tl.load(most + begin + chunk, mask=there, other=0.0)
    own_least = tl.load(least + begin + chunk, mask=there, other=0.0)
    rank = tl.zeros((CHUNKS,), dtype=tl.int32)
    above = tl.zeros((CHUNKS,), dtype=tl.int32)
    for first in range(0, chunks, OTHERS):
        place = first + tl.arange(0, OTHERS)
        other = tl.load(most + begin + place, mask=place < chunks, other=float("-inf"))
        before = (other[None, :] == own[:, None]) & (place[None, :] < chunk[:, None])
        rank += tl.sum(((other[None, :] > own[:, None]) | before).to(tl.int32), 1)
        above += tl.sum((other[None, :] > own_least[:, None]).to(tl.int32), 1)
    tl.store(ranks + begin + chunk, rank, mask=there)
    tl.store(begins + begin + chunk, tl.maximum(above, rank + 1), mask=there)
    tl.debug_barrier()  # before the program counts as done, all of it is stored
    if tl.atomic_add(done + row, 1) == tl.num_programs(0) - 1:
        tl.store(done + row, 0)
        every = tl.arange(0, EVERY)
        whole = tl.load(begins + begin + every, mask=every < chunks, other=2 * EVERY, cache_modifier=".cg")
        fewest, enough = tl.cast(1, tl.int32), tl.cast(width, tl.int32)  # the length is between them
        for _ in range(16):
            middle = (fewest + enough) // 2
            counted = middle + (group - 1) * tl.sum((whole <= middle).to(tl.int32), 0)
            fewest = tl.where((counted < wanted) & (fewest < enough), middle + 1, fewest)
            enough = tl.where(counted < wanted, enough, middle)
        rank = tl.load(ranks + begin + every, mask=every < chunks, other=2 * EVERY, cache_modifier=".cg")
        inside = rank < enough
        place = tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(units + row * width + every, tl.full((EVERY,), -1, dtype=tl.int32), mask=every < width)
        tl.debug_barrier()
        tl.store(units + row * width + place, every, mask=inside & (place < width))


def front(most: torch.Tensor, least: torch.Tensor, group: int, wanted: int, budget: int) -> torch.Tensor:
    """As `bounds.front`, of at most `MOST_UNITS` chunks. The last program of a row finds how many it takes."""
    rows, chunks = most.shape
    assert chunks <= MOST_UNITS, chunks
    options: dict[str, Any] = {"dtype": torch.int32, "device": most.device}
    width, every = min(budget, chunks), wide(chunks)
    ranks, begins = torch.empty(2, rows, chunks, **options)
    units = torch.empty(rows, width, **options)
    grid: Any = (triton.cdiv(chunks, TOKENS), rows)
    _front[grid](
        most, least, ranks, begins, counters(most.device, triton.next_power_of_2(rows)), units, chunks, group, wanted,
        width, TOKENS, _OTHERS, every, num_warps=min(32, max(4, every // 512)),
    )  # fmt: skip
    return units


# Tokens

@triton.jit(do_not_specialize=["tokens", "selected", "recent_room", "wanted", "apart", "slot_row", "blocks"])
def _look(  # type: ignore[no-untyped-def]
    query, data, largest, slots, recent, count, scores, tops, sums, done, keep, scaling, tokens, selected, recent_room,
    wanted, apart, blocks, key_heads, each, held, query_row, query_head, slot_row, recent_row, recent_head,
    recent_token, EACH: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr,
    KEY: tl.constexpr, ENTRY: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    EVERY: tl.constexpr, PACKED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    of_tokens = tl.cdiv(tokens, TOKENS)  # the blocks of slots come first
    asked = tl.arange(0, QUERIES)
    of_query, heads = asked < EACH, key_heads * EACH
    token = block * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + row * slot_row + token // GROUP, mask=token < tokens, other=-1)
    stored, later = slot >= 0, token - of_tokens * TOKENS
    among = (later >= 0) & (later < _exist(count, recent_room, COUNTED))
    begin, place = (row * held + slot) * WIDTH, token % GROUP
    for head in range(key_heads):
        own_query = (row % each * key_heads + head) * EACH + asked  # of the sequence's
        found = tl.zeros((QUERIES, TOKENS), dtype=tl.float32)
        for first in range(0, KEY, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)
            within = channel < KEY
            state = tl.load(
                query + row // each * query_row + own_query[:, None] * query_head + channel[None, :],
                mask=of_query[:, None] & within[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            keys = tl.load(
                data + (begin + place * ENTRY + head * KEY)[None, :] + channel[:, None],
                mask=stored[None, :] & within[:, None], other=0,
            ).to(tl.float32)  # fmt: skip
            if PACKED:
                at = (row * held + slot) * (WIDTH // largest.dtype.element_ty.itemsize) + LARGEST + head
                scale = _scale(largest, at + place * (2 * key_heads), stored, KIND)
                keys = _in_type(keys * scale[None, :], KIND)
            keys += tl.load(
                recent + row * recent_row + head * recent_head + later.to(tl.int64)[None, :] * recent_token
                + channel[:, None], mask=among[None, :] & within[:, None], other=0.0,
            ).to(tl.float32)  # fmt: skip
            found = tl.dot(state, keys, found, input_precision=PRECISION)
        found = tl.where((stored | among)[None, :], found * scaling, float("-inf"))
        to = row * heads + head * EACH + asked
        tl.store(
            scores + to[:, None] * tokens + token[None, :], found, mask=of_query[:, None] & (token < tokens)[None, :]
        )  # fmt: skip
        top = tl.maximum(tl.max(found, 1), _LOWEST)
        tl.store(tops + to * blocks + block, top, mask=of_query)
        tl.store(sums + to * blocks + block, tl.sum(tl.exp(found - top[:, None]), 1), mask=of_query)
    tl.debug_barrier()  # before the program counts as done, all of it is stored
    if tl.atomic_add(done + row, 1) == blocks - 1:
        tl.store(done + row, 0)
        every = tl.arange(0, EVERY)
        importance = tl.zeros((EVERY,), dtype=tl.float32)
        for head in range(heads):
            to = row * heads + head
            top, total = tl.cast(_LOWEST, tl.float32), tl.cast(0.0, tl.float32)
            for first in range(0, blocks, TOKENS):
                part = first + tl.arange(0, TOKENS)
                own = tl.load(tops + to * blocks + part, mask=part < blocks, other=_LOWEST, cache_modifier=".cg")
                weights = tl.load(sums + to * blocks + part, mask=part < blocks, other=0.0, cache_modifier=".cg")
                above = tl.maximum(top, tl.max(own, 0))
                total = total * tl.exp(top - above) + tl.sum(weights * tl.exp(own - above), 0)
                top = above
            own = tl.load(
                scores + to * tokens + every, mask=every < tokens, other=float("-inf"), cache_modifier=".cg"
            )  # fmt: skip
            importance += tl.exp(own - top) / total
        importance = tl.where(importance == importance, importance, 0.0)  # not NaN
        slot = tl.load(slots + row * slot_row + every // GROUP, mask=every < tokens, other=-1)
        bits = tl.where(every < apart, float("inf"), importance).to(tl.int32, bitcast=True)
        bits = tl.where(slot < 0, -1, bits)  # in the order of the numbers, which are not negative
        least, bit = tl.cast(0, tl.int32), tl.cast(0x40000000, tl.int32)
        for _ in range(31):  # bit by bit: the largest that at least as many reach
            reach = tl.sum((bits >= (least | bit)).to(tl.int32), 0)
            least = tl.where(reach >= wanted, least | bit, least)
            bit = bit >> 1
        more = wanted - tl.sum((bits > least).to(tl.int32), 0)
        equal = (bits == least) & (slot >= 0)
        kept = (bits > least) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= more))
        tl.store(keep + row * tokens + every, kept.to(tl.uint8), mask=every < tokens)


def look(
    query: torch.Tensor, data: torch.Tensor, slots: torch.Tensor, recent: torch.Tensor, form: Any, scaling: float,
    wanted: int, apart: int, count: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `bounds.look`, of contiguous `data`, `slots` in the last dimension, at most `MOST_UNITS` tokens a row and
    entries of at most 32 bits. The last program of a row keeps the best."""
    (batch, asked, _), (rows, selected), heads = query.shape, slots.shape, form.num_key_heads
    (_, held, width), packed, group = data.shape, form.bits is not None, form.group_size
    tokens, own = selected * group, batch * asked // rows
    assert tokens <= MOST_UNITS and form.dtype.itemsize <= 4, (tokens, form)
    options: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    blocks = triton.cdiv(tokens, TOKENS) + triton.cdiv(recent.shape[2], TOKENS)
    scores = torch.empty(rows, own, tokens, **options)
    tops, sums = torch.empty(2, rows, own, blocks, **options)
    keep = torch.empty(rows, selected, group, dtype=torch.bool, device=query.device)
    single = torch.float32 in (query.dtype, form.dtype, recent.dtype)
    largest_at, every = width - 2 * heads * group * form.dtype.itemsize, wide(tokens)
    grid: Any = (blocks, rows)
    _look[grid](
        query, data.view(torch.int8) if packed else data, data.view(form.dtype) if packed else data, slots, recent,
        recent if count is None else count, scores, tops, sums,
        counters(query.device, triton.next_power_of_2(rows)), keep.view(torch.uint8), scaling, tokens, selected,
        recent.shape[2], wanted, apart, blocks, heads, rows // batch, held, *query.stride()[:2],
        slots.stride(0), *recent.stride()[:3], own // heads, group, width, largest_at // form.dtype.itemsize,
        form.key_dim, form.entry_width, wide(own // heads), TOKENS, _CHANNELS, every, packed,
        str(form.dtype).removeprefix("torch."), "ieee" if single else "tf32", count is not None,
        num_warps=min(32, max(4, every // 512)),
    )  # fmt: skip
    return keep
