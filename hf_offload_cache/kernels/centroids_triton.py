"""The kernels of `centroids`, one launch each: see its functions. Products are in single precision.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .centroids import MOST_CLUSTERS
from .low_bit_triton import wide
from .ranking import BLOCK, HIDDEN
from .ranking_triton import _added, _exist, _merged, _times, counters, split

_HIDDEN = tl.constexpr(HIDDEN)
_HEADS = 64
"""Query heads whose scores a program computes at most."""
_AT_ONCE = 128
"""Parts of a softmax at a time."""
_TILE = 8192
"""Elements that a program holds at a time."""
_CLUSTERS = 32
"""Clusters whose centroids are summed up at a time."""


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    states, keys, key_row, at, there, head, of_head, head_row, scaling, DIM: tl.constexpr, WIDE: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (HEADS, COUNT) of a row's queries and the `keys` at `at`."""
    total = tl.zeros((HEADS, COUNT), dtype=tl.float32)
    for first in tl.static_range(0, WIDE, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        within = channel < DIM
        state = tl.load(
            states + head[:, None] * head_row + channel[None, :], mask=of_head[:, None] & within[None, :], other=0.0
        ).to(tl.float32)
        key = tl.load(
            keys + at[None, :] * key_row + channel[:, None], mask=there[None, :] & within[:, None], other=0.0
        ).to(tl.float32)
        total += _times(state, key, PRECISION)
    total *= scaling
    return tl.where(total == total, total, _HIDDEN)


@triton.jit(do_not_specialize=["heads", "clusters", "latest_room", "blocks", "each"])
def _score(  # type: ignore[no-untyped-def]
    states, centroids, tables, recent, count, scores, tops, sums, scaling, heads, clusters, latest_room, blocks, each,
    state_row, state_head, of_row, table_row, recent_row, recent_token, DIM: tl.constexpr, WIDE: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    of_head, to = head < heads, row * heads + head
    states += row // each * state_row + row % each * heads * state_head
    if part < blocks:
        cluster = part * BLOCK + tl.arange(0, BLOCK)
        there = cluster < clusters
        found = _products(
            states, centroids + row * of_row, DIM, cluster, there, head, of_head, state_head, scaling, DIM, WIDE,
            CHANNELS, HEADS, BLOCK, PRECISION,
        )  # fmt: skip
        into = scores + to[:, None] * clusters + cluster[None, :]
        tl.store(into, found, mask=of_head[:, None] & there[None, :])
        keys = tl.load(tables + row * table_row + cluster, mask=there, other=0)
        logarithm = tl.log(tl.maximum(keys, 1).to(tl.float32))
        found = tl.where((keys > 0)[None, :], found + logarithm[None, :], _HIDDEN)
    else:
        token = (part - blocks) * BLOCK + tl.arange(0, BLOCK)
        there = token < _exist(count, latest_room, COUNTED)
        found = _products(
            states, recent + row * recent_row, recent_token, token, there, head, of_head, state_head, scaling, DIM,
            WIDE, CHANNELS, HEADS, BLOCK, EXACT,
        )  # fmt: skip
        found = tl.where(there[None, :], found, _HIDDEN)
    top = tl.max(found, 1)
    weights = tl.where(found <= _HIDDEN, 0.0, tl.exp(found - top[:, None]))
    tl.store(tops + to * parts + part, top, mask=of_head)
    tl.store(sums + to * parts + part, tl.sum(weights, 1), mask=of_head)


def score(
    states: torch.Tensor, centroids: torch.Tensor, tables: torch.Tensor, recent: torch.Tensor, scaling: float,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `centroids.score`."""
    (batch, heads, dim), (rows, clusters, _), latest = states.shape, centroids.shape, recent.shape[1]
    options: dict[str, Any] = {"dtype": torch.float32, "device": states.device}
    own, blocks = batch * heads // rows, triton.cdiv(clusters, BLOCK)
    scores = torch.empty(rows, own, clusters, **options)
    tops, sums = (torch.empty(rows, own, blocks + triton.cdiv(latest, BLOCK), **options) for _ in range(2))
    precisions = ["ieee" if torch.float32 in dtypes else "tf32" for dtypes in ((), (recent.dtype,))]
    at_once = min(_HEADS, wide(own))
    grid: Any = (tops.shape[2], rows, triton.cdiv(own, at_once))
    _score[grid](
        states, centroids, tables, recent, scores if count is None else count, scores, tops, sums, scaling, own,
        clusters, latest, blocks, rows // batch, *states.stride()[:2], centroids.stride(0), tables.stride(1),
        *recent.stride()[:2], dim, wide(dim),
        min(wide(dim), 64), at_once, BLOCK, *precisions, count is not None, num_warps=4,
    )  # fmt: skip
    return scores, tops, sums


@triton.jit(do_not_specialize=["heads", "clusters", "parts", "wanted", "most", "listed", "largest"])
def _choose(  # type: ignore[no-untyped-def]
    scores, tops, sums, tables, units, keep, kept, shares, cuts, heads, clusters, parts, wanted, most, listed, largest,
    of_table, table_row, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
    PAGES: tl.constexpr,
):  # fmt: skip
    row, cluster = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = cluster < clusters
    found = tl.zeros((BLOCK,), dtype=tl.float32)
    for head in range(heads):
        at = row * heads + head
        top = tl.full((AT_ONCE,), _HIDDEN, dtype=tl.float32)
        total = tl.zeros((AT_ONCE,), dtype=tl.float32)
        for first in range(0, parts, AT_ONCE):
            part = first + tl.arange(0, AT_ONCE)
            own = tl.load(tops + at * parts + part, mask=part < parts, other=_HIDDEN)
            top, total = _added(top, total, own, tl.load(sums + at * parts + part, mask=part < parts, other=0.0))
        most_of_all = tl.max(top, 0)
        total_of_all = tl.sum(total * tl.exp(top - most_of_all), 0)
        own = tl.load(scores + at * clusters + cluster, mask=there, other=_HIDDEN)
        share = tl.exp(own - (most_of_all + tl.log(total_of_all)))
        found += tl.where((own > _HIDDEN) & (share == share), share, 0.0)
    tables += row * table_row
    members = tl.load(tables + cluster, mask=there, other=0)
    stored = tl.load(tables + of_table + cluster, mask=there, other=0)
    sinks = tl.load(tables + 2 * of_table + cluster, mask=there, other=0)
    found = tl.where(stored > 0, found, 0.0)
    tl.store(shares + row * clusters + cluster, found, mask=there)
    first = (sinks > 0) & (stored > 0)
    pages = (stored + GROUP - 1) // GROUP
    others = tl.where(first, 0, pages)
    wants = tl.maximum(wanted - tl.sum(members - stored, 0) - tl.sum(sinks, 0), 0)
    room = most - tl.sum(tl.where(first, pages, 0), 0)
    # bit by bit, the largest share such that all clusters with at least as much are too many
    bits = found.to(tl.uint32, bitcast=True)
    image = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)  # in the order of the numbers
    image = tl.where(stored > 0, image, 0)
    least, bit = tl.cast(0, tl.uint32), tl.cast(0x80000000, tl.uint32)
    for _ in range(32):
        reach = image >= (least | bit)
        beyond = (tl.sum(tl.where(reach, stored, 0), 0) >= wants) | (tl.sum(tl.where(reach, others, 0), 0) > room)
        least = tl.where(beyond, least | bit, least)
        bit = bit >> 1
    above, equal = image > least, (image == least) & (stored > 0)
    before = tl.sum(tl.where(above, stored, 0), 0) + tl.cumsum(tl.where(equal, stored, 0), 0) - stored
    equal = equal & (before < wants)
    equal = equal & (tl.sum(tl.where(above, others, 0), 0) + tl.cumsum(tl.where(image == least, others, 0), 0) <= room)
    cut = tl.where(above, stored, tl.where(equal, tl.minimum(stored, wants - before), 0))
    tl.store(cuts + row * clusters + cluster, cut, mask=there)
    tl.store(kept + row * clusters + cluster, tl.minimum(stored, cut + tl.where(first, sinks, 0)), mask=there)
    # pages with chosen entries: the first `early` of a cluster, and those from `late` on
    late = tl.where(cut > 0, (stored - cut) // GROUP, pages)
    early = tl.where(first, (tl.minimum(sinks, stored) + GROUP - 1) // GROUP, 0)
    early = tl.minimum(early, late)
    number = pages - late + early
    begin = tl.cumsum(number, 0) - number
    total_pages = tl.sum(number, 0)
    for page in range(largest):
        place = begin + tl.where(page < early, page, page - late + early)
        is_listed = there & (page < pages) & ((page < early) | (page >= late)) & (place < listed)
        tl.store(units + row * listed + place, cluster * largest + page, mask=is_listed)
    tl.debug_barrier()  # all of them are stored
    entry = tl.arange(0, WIDE)
    for begin_at in range(0, listed, PAGES):
        place = begin_at + tl.arange(0, PAGES)
        inside = place < listed
        filled = place < total_pages
        unit = tl.load(units + row * listed + place, mask=inside & filled, other=0)
        of = unit // largest
        held = tl.load(tables + of_table + of, mask=filled, other=0)
        early_ones = tl.load(tables + 2 * of_table + of, mask=filled, other=0)
        late_ones = tl.load(cuts + row * clusters + of, mask=inside & filled, other=0)
        own = ((unit % largest) * GROUP)[:, None] + entry[None, :]
        keeps = (own < held[:, None]) & ((own >= (held - late_ones)[:, None]) | (own < early_ones[:, None]))
        keeps = keeps & filled[:, None]
        into = keep + (row * listed + place)[:, None] * GROUP + entry[None, :]
        tl.store(into, keeps.to(tl.uint8), mask=inside[:, None] & (entry < GROUP)[None, :])
        tl.store(units + row * listed + place, tl.full((PAGES,), -1, dtype=tl.int32), mask=inside & (filled == 0))


def choose(
    scores: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, tables: torch.Tensor, wanted: int, most: int,
    listed: int, largest: int, group: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `centroids.choose`, of at most `MOST_CLUSTERS` clusters, and contiguous tensors except `tables`."""
    rows, heads, clusters = scores.shape
    assert clusters <= MOST_CLUSTERS, clusters
    options: dict[str, Any] = {"dtype": torch.int32, "device": scores.device}
    units, kept = torch.empty(rows, listed, **options), torch.empty(rows, clusters, **options)
    cuts = torch.empty(rows, clusters, **options)
    keep = torch.empty(rows, listed, group, dtype=torch.bool, device=scores.device)
    shares = torch.empty(rows, clusters, dtype=torch.float32, device=scores.device)
    wide_count, wide_group = wide(clusters), triton.next_power_of_2(group)
    _choose[(rows,)](
        scores, tops, sums, tables, units, keep.view(torch.uint8), kept, shares, cuts, heads, clusters, tops.shape[2],
        wanted, most, listed, largest, *tables.stride()[:2], group, wide_group, wide_count, _AT_ONCE,
        max(16, min(256, 4096 // wide_group)), num_warps=min(32, max(4, wide_count // 512)),
    )  # fmt: skip
    return units, keep, kept, shares


@triton.jit(do_not_specialize=["heads", "blocks", "clusters", "per_part"])
def _rest(  # type: ignore[no-untyped-def]
    scores, centroids, tables, kept, maps, scale, log_ratio, best, total, parted, done, value, weight, heads, blocks,
    clusters, per_part, of_row, of_table, table_row, DIM: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr,
    VALUES: tl.constexpr, HEADS: tl.constexpr, CLUSTERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = program // blocks
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    of_head, to, channel = head < heads, row * heads + head, tl.arange(0, WIDE)
    within = channel < DIM
    centroids += row * of_row
    tables += row * table_row + of_table
    most = tl.full((HEADS,), _HIDDEN, dtype=tl.float32)
    shares = tl.zeros((HEADS,), dtype=tl.float32)
    found = tl.zeros((HEADS, WIDE), dtype=tl.float32)
    for first in range(part * per_part, min((part + 1) * per_part, clusters), CLUSTERS):
        cluster = first + tl.arange(0, CLUSTERS)
        there = cluster < clusters
        stored = tl.load(tables + cluster, mask=there, other=0)
        there = there & (stored > 0) & (tl.load(kept + row * clusters + cluster, mask=there, other=1) == 0)
        own = tl.load(
            scores + to[:, None] * clusters + cluster[None, :], mask=of_head[:, None] & there[None, :], other=0.0
        )
        own += tl.log(tl.maximum(stored, 1).to(tl.float32))[None, :]
        own = tl.where(there[None, :], own, _HIDDEN)
        above = tl.maximum(most, tl.max(own, 1))
        before = tl.exp(most - above)
        weights = tl.where(there[None, :], tl.exp(own - above[:, None]), 0.0)
        means = tl.load(
            centroids + cluster[:, None] * DIM + channel[None, :], mask=there[:, None] & within[None, :], other=0.0
        ).to(tl.float32)
        found = found * before[:, None] + _times(weights, means, "tf32")
        shares = shares * before + tl.sum(weights, 1)
        most = above
    place = tl.arange(0, HEADS)
    into = (program * parts + part) * HEADS + place
    tl.store(best + into, most)
    tl.store(total + into, shares)
    tl.store(parted + into[:, None] * WIDE + channel[None, :], found)
    tl.debug_barrier()  # before the program counts as done, all of it is stored
    if tl.atomic_add(done + program, 1) == parts - 1:
        tl.store(done + program, 0)
        most, shares, found = _merged(best, total, parted, program, parts, HEADS, WIDE, HEADS, WIDE, PARTS)
        total_of_all = tl.where(shares > 0, shares, 1.0)
        own = most + tl.log(total_of_all) + tl.load(log_ratio + to, mask=of_head, other=0.0)
        tl.store(weight + to, tl.where(shares > 0, own, float("-inf")), mask=of_head)
        scale += row * (DIM + 1)
        mean = found / total_of_all[:, None]
        mean *= tl.load(scale + channel, mask=within, other=0.0)[None, :]
        always = tl.load(scale + DIM)
        maps += row * (DIM + 1) * VALUE
        for first in range(0, VALUE, VALUES):
            column = first + tl.arange(0, VALUES)
            inside = column < VALUE
            own_map = tl.load(
                maps + channel[:, None] * VALUE + column[None, :], mask=within[:, None] & inside[None, :], other=0
            ).to(tl.float32)
            shift_by = tl.load(maps + DIM * VALUE + column, mask=inside, other=0).to(tl.float32)
            mapped = _times(mean, own_map, "tf32") + (shift_by * always)[None, :]
            tl.store(value + to[:, None] * VALUE + column[None, :], mapped, mask=of_head[:, None] & inside[None, :])


def rest(
    scores: torch.Tensor, centroids: torch.Tensor, tables: torch.Tensor, kept: torch.Tensor, maps: torch.Tensor,
    scale: torch.Tensor, log_ratio: torch.Tensor, batch: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `centroids.rest`, of tensors that are contiguous except `centroids` and `tables`. The last program of a row's
    heads merges their parts and applies the maps."""
    (rows, heads, clusters), dim, value_dim = scores.shape, centroids.shape[2], maps.shape[3]
    options: dict[str, Any] = {"dtype": torch.float32, "device": scores.device}
    value = torch.empty(batch, rows // batch * heads, value_dim, **options)
    weight = torch.empty(batch, rows // batch * heads, **options)
    at_once = min(32, wide(heads))
    blocks = triton.cdiv(heads, at_once)
    parts, per_part = split(clusters, rows * blocks, _CLUSTERS, 2 * _CLUSTERS)
    best, total = torch.empty(2, rows * blocks, parts, at_once, **options)
    parted = torch.empty(rows * blocks, parts, at_once, wide(dim), **options)
    grid: Any = (rows * blocks, parts)
    _rest[grid](
        scores, centroids, tables, kept, maps, scale, log_ratio, best, total, parted,
        counters(scores.device, triton.next_power_of_2(rows * blocks)), value, weight, heads, blocks, clusters,
        per_part, centroids.stride(0), *tables.stride()[:2], dim, wide(dim), value_dim,
        min(wide(value_dim), max(16, _TILE // 2 // wide(dim))), at_once, _CLUSTERS,
        max(1, _TILE // (at_once * wide(dim))), num_warps=8 if dim > 64 else 4,
    )  # fmt: skip
    return value, weight
