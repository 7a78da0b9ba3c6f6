"""The kernels of `clusters`, one launch each for a step's choice: see its functions. Products are in single precision.
A k-means has no distances in memory, and no sum that depends on the order in which programs run.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .clusters import MOST_CLUSTERS
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
_POINTS = 64
"""Points that a program assigns, or measures."""
_MEMBERS = 16
"""Points of a label that a program adds at a time."""
_LABELS = 128
"""Labels whose points a program finds."""
_TOKENS, _CHANNELS = 16, 256
"""Tokens whose entries a program writes, and channels at a time."""


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
    """As `clusters.score`."""
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
    scores, tops, sums, tables, units, keep, kept, shares, left, cuts, heads, clusters, parts, wanted, most, listed,
    largest, of_table, table_row, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
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
    every, partly = tl.zeros((PAGES,), dtype=tl.float32), tl.zeros((PAGES,), dtype=tl.float32)
    for begin_at in range(0, clusters, PAGES):  # from memory, because registers do not hold it
        one = begin_at + tl.arange(0, PAGES)
        own = tl.load(kept + row * clusters + one, mask=one < clusters, other=0)
        mass = (tl.load(tables + of_table + one, mask=one < clusters, other=0) - own).to(tl.float32)
        mass *= tl.load(shares + row * clusters + one, mask=one < clusters, other=0.0)
        every += mass
        partly += tl.where(own > 0, mass, 0.0)
    tl.store(left + row, tl.sum(every, 0))
    tl.store(left + tl.num_programs(0) + row, tl.sum(partly, 0))


def choose(
    scores: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, tables: torch.Tensor, wanted: int, most: int,
    listed: int, largest: int, group: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `clusters.choose`, of at most `MOST_CLUSTERS` clusters, and contiguous tensors except `tables`."""
    rows, heads, clusters = scores.shape
    assert clusters <= MOST_CLUSTERS, clusters
    options: dict[str, Any] = {"dtype": torch.int32, "device": scores.device}
    units, kept = torch.empty(rows, listed, **options), torch.empty(rows, clusters, **options)
    cuts = torch.empty(rows, clusters, **options)
    keep = torch.empty(rows, listed, group, dtype=torch.bool, device=scores.device)
    shares, left = (torch.empty(*shape, dtype=torch.float32, device=scores.device) for shape in (kept.shape, (2, rows)))
    wide_count, wide_group = wide(clusters), triton.next_power_of_2(group)
    _choose[(rows,)](
        scores, tops, sums, tables, units, keep.view(torch.uint8), kept, shares, left, cuts, heads, clusters,
        tops.shape[2], wanted, most, listed, largest, *tables.stride()[:2], group, wide_group, wide_count, _AT_ONCE,
        max(16, min(256, 4096 // wide_group)), num_warps=min(32, max(4, wide_count // 512)),
    )  # fmt: skip
    return units, keep, kept, shares, left


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
    """As `clusters.rest`, of tensors that are contiguous except `centroids` and `tables`. The last program of a row's
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


# K-means

@triton.jit(do_not_specialize=["count", "clusters"])
def _assign(  # type: ignore[no-untyped-def]
    points, centroids, closed, labels, count, clusters, row_stride, point_stride, centroid_stride, DIM: tl.constexpr,
    WIDE: tl.constexpr, CLOSED: tl.constexpr, POINTS: tl.constexpr, CENTROIDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    point, channel = tl.program_id(1) * POINTS + tl.arange(0, POINTS), tl.arange(0, WIDE)
    there = point < count
    states = tl.load(
        points + row * row_stride + point.to(tl.int64)[:, None] * point_stride + channel[None, :],
        mask=there[:, None] & (channel < DIM)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    least = tl.full((POINTS,), float("inf"), dtype=tl.float32)
    label = tl.zeros((POINTS,), dtype=tl.int32)
    for first in range(0, clusters, CENTROIDS):
        centroid = first + tl.arange(0, CENTROIDS)
        known = centroid < clusters
        own = tl.load(
            centroids + row * centroid_stride + centroid[:, None] * DIM + channel[None, :],
            mask=known[:, None] & (channel < DIM)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if CLOSED:
            known = known & (tl.load(closed + row * clusters + centroid, mask=known, other=1) == 0)
        products = tl.dot(states, tl.trans(own), input_precision="tf32x3")
        distance = (tl.sum(own * own, 1) / 2)[None, :] - products
        distance = tl.where(known[None, :] & (distance == distance), distance, float("inf"))
        smallest = tl.min(distance, 1)
        nearest = tl.min(tl.where(distance == smallest[:, None], centroid[None, :], clusters), 1)
        label = tl.where(smallest < least, nearest, label)
        least = tl.minimum(smallest, least)
    tl.store(labels + row * count + point, label, mask=there)


@triton.jit(do_not_specialize=["count", "clusters"])
def _ranges(  # type: ignore[no-untyped-def]
    ordered, firsts, counts, parts, count, clusters, STEPS: tl.constexpr, CAPACITY: tl.constexpr, LABELS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.program_id(1) * LABELS + tl.arange(0, LABELS)
    ordered += row * count
    low, low_next = tl.zeros((LABELS,), dtype=tl.int32), tl.zeros((LABELS,), dtype=tl.int32)
    high, high_next = low + count, low + count
    for _ in range(STEPS):  # two binary searches: where the label begins, and where the next one does
        middle, middle_next = (low + high) // 2, (low_next + high_next) // 2
        there, there_next = low < high, low_next < high_next
        right = there & (tl.load(ordered + middle, mask=there, other=0) < label)
        right_next = there_next & (tl.load(ordered + middle_next, mask=there_next, other=0) <= label)
        high, low = tl.where(there & (right == 0), middle, high), tl.where(right, middle + 1, low)
        high_next = tl.where(there_next & (right_next == 0), middle_next, high_next)
        low_next = tl.where(right_next, middle_next + 1, low_next)
    known = label < clusters
    tl.store(firsts + row * clusters + label, low, mask=known)
    tl.store(counts + row * clusters + label, low_next - low, mask=known)
    if CAPACITY > 0:
        tl.store(parts + row * clusters + label, (low_next - low + CAPACITY - 1) // CAPACITY, mask=known)


@triton.jit(do_not_specialize=["count", "clusters"])
def _means(  # type: ignore[no-untyped-def]
    points, order, firsts, counts, before, out, count, clusters, row_stride, point_stride, DIM: tl.constexpr,
    WIDE: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    row, label = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDE)
    first, number = tl.load(firsts + row * clusters + label), tl.load(counts + row * clusters + label)
    total = tl.zeros((WIDE,), dtype=tl.float32)
    for start in range(0, number, MEMBERS):
        member = start + tl.arange(0, MEMBERS)
        there = member < number
        point = tl.load(order + row * count + first + member, mask=there, other=0).to(tl.int64)
        states = tl.load(
            points + row * row_stride + point[:, None] * point_stride + channel[None, :],
            mask=there[:, None] & (channel < DIM)[None, :], other=0.0,
        )  # fmt: skip
        total += tl.sum(states.to(tl.float32), 0)
    at = (row * clusters + label) * DIM + channel
    old = tl.load(before + at, mask=channel < DIM, other=0.0)
    mean = tl.where(number > 0, total / tl.maximum(number, 1).to(tl.float32), old)
    tl.store(out + at, mean, mask=channel < DIM)


@triton.jit(do_not_specialize=["count", "clusters"])
def _apart(  # type: ignore[no-untyped-def]
    points, labels, centroids, out, count, clusters, row_stride, point_stride, DIM: tl.constexpr, WIDE: tl.constexpr,
    POINTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    point, channel = tl.program_id(1) * POINTS + tl.arange(0, POINTS), tl.arange(0, WIDE)
    there = point < count
    loaded = there[:, None] & (channel < DIM)[None, :]
    label = tl.load(labels + row * count + point, mask=there, other=0).to(tl.int64)
    at = points + row * row_stride + point.to(tl.int64)[:, None] * point_stride + channel[None, :]
    states = tl.load(at, mask=loaded, other=0.0)
    own = tl.load(centroids + (row * clusters + label)[:, None] * DIM + channel[None, :], mask=loaded, other=0.0)
    distance = states.to(tl.float32) - own
    tl.store(out + row * count + point, tl.sum(distance * distance, 1), mask=there)


@triton.jit(do_not_specialize=["count", "clusters"])
def _parted(  # type: ignore[no-untyped-def]
    order, firsts, counts, parts, ends, out, count, clusters, MEMBERS: tl.constexpr
):
    row, label = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * clusters + label
    first, number, several = tl.load(firsts + at), tl.load(counts + at), tl.load(parts + at)
    before = tl.load(ends + at).to(tl.int32) - several
    for start in range(0, number, MEMBERS):
        member = start + tl.arange(0, MEMBERS)
        there = member < number
        point = tl.load(order + row * count + first + member, mask=there, other=0)
        part = member.to(tl.int64) * several // tl.maximum(number, 1)
        tl.store(out + row * count + point, before + part.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["count", "clusters"])
def _placed(  # type: ignore[no-untyped-def]
    order, firsts, counts, pages, out, count, clusters, GROUP: tl.constexpr, MEMBERS: tl.constexpr
):
    row, label = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * clusters + label
    first, number = tl.load(firsts + at), tl.load(counts + at)
    begin = tl.load(pages + at).to(tl.int64)
    step = tl.load(pages + tl.num_programs(0).to(tl.int64) * clusters + at).to(tl.int64)
    for start in range(0, number, MEMBERS):
        member = start + tl.arange(0, MEMBERS)
        there = member < number
        point = tl.load(order + row * count + first + member, mask=there, other=0)
        tl.store(out + row * count + point, (begin + step * (member // GROUP)) * GROUP + member % GROUP, mask=there)


@triton.jit(do_not_specialize=["count", "held_count", "first", "size"])
def _put(  # type: ignore[no-untyped-def]
    held, keys, values, targets, out, count, held_count, first, size, held_row, held_token, key_row, key_head,
    key_token, value_row, value_head, value_token, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    place = tl.load(targets + row * count + token, mask=token < count, other=-1) - first
    fits = (token < count) & (place >= 0) & (place < size)
    old, new = (fits & (token < held_count))[:, None], (fits & (token >= held_count))[:, None]
    old_token, new_token = token.to(tl.int64)[:, None], (token - held_count).to(tl.int64)[:, None]
    for begin in range(0, WIDTH, WIDE):
        channel = (begin + tl.arange(0, WIDE))[None, :]
        value, there = channel - KEYS, channel < WIDTH
        at_key = keys + row * key_row + new_token * key_token + channel // DIM * key_head + channel % DIM
        at_value = values + row * value_row + new_token * value_token
        at_value += value // VALUE_DIM * value_head + value % VALUE_DIM
        own = tl.load(held + row * held_row + old_token * held_token + channel, mask=old & there, other=0.0)
        key = tl.load(at_key, mask=new & (value < 0), other=0.0)
        later = tl.load(at_value, mask=new & (value >= 0) & there, other=0.0)
        entry = tl.where(old, own, tl.where(value < 0, key, later))
        tl.store(out + place[:, None] * WIDTH + channel, entry, mask=fits[:, None] & there)


def _sorted(labels: torch.Tensor, clusters: int, capacity: int = 0) -> tuple[torch.Tensor, ...]:
    """The points (R, n) in the order of their labels; the first of each label in it, their number, and the parts of at
    most `capacity` points, (R, C) int32 each."""
    rows, count = labels.shape
    ordered, order = labels.sort(dim=1, stable=True)
    firsts, counts, parts = (torch.empty_like(labels[:1, :1].expand(rows, clusters)).contiguous() for _ in range(3))
    grid: Any = (rows, triton.cdiv(clusters, _LABELS))
    _ranges[grid](ordered, firsts, counts, parts, count, clusters, max(1, count.bit_length()), capacity, _LABELS)
    return order, firsts, counts, parts


def assign(points: torch.Tensor, centroids: torch.Tensor, closed: torch.Tensor | None = None) -> torch.Tensor:
    """As `clusters.assign`. The channels of a point are contiguous, and so are `closed` and a row's `centroids`; so it
    is for the others."""
    (rows, count, dim), clusters = points.shape, centroids.shape[1]
    labels = torch.empty(rows, count, dtype=torch.int32, device=points.device)
    if labels.numel():
        grid: Any = (rows, triton.cdiv(count, _POINTS))
        hidden = centroids if closed is None else closed.view(torch.uint8)
        _assign[grid](
            points, centroids, hidden, labels, count, clusters, points.stride(0), points.stride(1),
            centroids.stride(0), dim, wide(dim), closed is not None, _POINTS, 64 if dim <= 128 else 32,
        )  # fmt: skip
    return labels


def means(points: torch.Tensor, labels: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `clusters.means`; for where, see `assign`."""
    rows, clusters, dim = before.shape
    order, firsts, counts, _ = _sorted(labels, clusters)
    found = torch.empty_like(before)
    if found.numel():
        _means[(rows, clusters)](
            points, order, firsts, counts, before, found, labels.shape[1], clusters, points.stride(0),
            points.stride(1), dim, wide(dim), _MEMBERS,
        )  # fmt: skip
    return found, counts


def apart(points: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """As `clusters.apart`; for where, see `assign`."""
    (rows, count, dim), clusters = points.shape, centroids.shape[1]
    out = torch.empty(rows, count, dtype=torch.float32, device=points.device)
    if out.numel():
        _apart[(rows, triton.cdiv(count, _POINTS))](
            points, labels, centroids, out, count, clusters, points.stride(0), points.stride(1), dim, wide(dim),
            _POINTS,
        )  # fmt: skip
    return out


def parted(labels: torch.Tensor, clusters: int, capacity: int) -> torch.Tensor:
    """As `clusters.parted`; for where, see `assign`."""
    order, firsts, counts, parts = _sorted(labels, clusters, capacity)
    out = torch.empty_like(labels)
    if out.numel():
        _parted[(len(labels), clusters)](
            order, firsts, counts, parts, parts.cumsum(1), out, labels.shape[1], clusters, _MEMBERS
        )
    return out


def placed(labels: torch.Tensor, pages: torch.Tensor, group_size: int) -> torch.Tensor:
    """As `clusters.placed`; for where, see `assign`."""
    clusters = pages.shape[2]
    order, firsts, counts, _ = _sorted(labels, clusters)
    out = torch.empty(labels.shape, dtype=torch.int64, device=labels.device)
    if out.numel():
        _placed[(len(labels), clusters)](
            order, firsts, counts, pages, out, labels.shape[1], clusters, group_size, _MEMBERS
        )
    return out


def put(
    held: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, targets: torch.Tensor, first: int, out: torch.Tensor
) -> None:
    """As `clusters.put`; for where, see `assign`."""
    (rows, count), width = targets.shape, out.shape[1]
    if targets.numel() and out.numel():
        _put[(rows, triton.cdiv(count, _TOKENS))](
            held, keys, values, targets, out, count, held.shape[1], first, len(out), *held.stride()[:2],
            *keys.stride()[:3], *values.stride()[:3], keys.shape[3], values.shape[3], keys.shape[1] * keys.shape[3],
            width, min(wide(width), _CHANNELS), _TOKENS,
        )  # fmt: skip
