"""K-means over the rows of a batch on a device: no distances in memory, and no sum that depends on the order in which
programs run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit_triton import wide

_POINTS = 64
"""Points that a program assigns, or measures."""
_MEMBERS = 16
"""Points of a label that a program adds at a time."""
_LABELS = 128
"""Labels whose points a program finds."""
_TOKENS, _CHANNELS = 16, 256
"""Tokens whose entries a program writes, and channels at a time."""


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
    """As `kmeans.assign`, on a CUDA device and its current stream; under `TRITON_INTERPRET=1` on a CPU, for tests. The
    channels of a point are contiguous, and so are `closed` and a row's `centroids`; so it is for the others."""
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
    """As `kmeans.means`; for where, see `assign`."""
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
    """As `kmeans.apart`; for where, see `assign`."""
    (rows, count, dim), clusters = points.shape, centroids.shape[1]
    out = torch.empty(rows, count, dtype=torch.float32, device=points.device)
    if out.numel():
        _apart[(rows, triton.cdiv(count, _POINTS))](
            points, labels, centroids, out, count, clusters, points.stride(0), points.stride(1), dim, wide(dim),
            _POINTS,
        )  # fmt: skip
    return out


def parted(labels: torch.Tensor, clusters: int, capacity: int) -> torch.Tensor:
    """As `kmeans.parted`; for where, see `assign`."""
    order, firsts, counts, parts = _sorted(labels, clusters, capacity)
    out = torch.empty_like(labels)
    if out.numel():
        _parted[(len(labels), clusters)](
            order, firsts, counts, parts, parts.cumsum(1), out, labels.shape[1], clusters, _MEMBERS
        )
    return out


def placed(labels: torch.Tensor, pages: torch.Tensor, group_size: int) -> torch.Tensor:
    """As `kmeans.placed`; for where, see `assign`."""
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
    """As `kmeans.put`; for where, see `assign`."""
    (rows, count), width = targets.shape, out.shape[1]
    if targets.numel() and out.numel():
        _put[(rows, triton.cdiv(count, _TOKENS))](
            held, keys, values, targets, out, count, held.shape[1], first, len(out), *held.stride()[:2],
            *keys.stride()[:3], *values.stride()[:3], keys.shape[3], values.shape[3], keys.shape[1] * keys.shape[3],
            width, min(wide(width), _CHANNELS), _TOKENS,
        )  # fmt: skip
