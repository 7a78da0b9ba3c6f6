"""Kernels against their floor: the bytes that a call moves, over the bandwidth of a copy that was measured here."""

from __future__ import annotations

import functools
import itertools
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload_cache import kernels
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import on_a_device
from hf_offload_cache.kernels.low_bit import ReplicaLayout, row_bytes
from hf_offload_cache.stores import MemoryStore

DEVICE, BUS = "device copy", "pinned copy"
"""Floors: a copy within the device, which reads and writes, and one to it out of pinned host memory."""
GATHERED = "SDPA on a gathered copy"
PRODUCTS = "float32 products of points and centroids"
OF_TORCH = (GATHERED, PRODUCTS)
"""Calls of torch's that kernels are compared with, because their work is more than moving bytes."""


@dataclass(frozen=True)
class Sizes:
    """One layer of Llama-3.1-8B in a step, and the bytes of a copy."""

    rows: int = 8
    tokens: int = 32768
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    attended: int = 512
    """Tokens a row that attention reads, or that are copied out of host memory."""
    copied: int = 1 << 30


QUICK = Sizes(rows=1, tokens=256, heads=4, kv_heads=2, dim=64, attended=64, copied=1 << 16)


class Case(NamedTuple):
    """A call that moves `nbytes` bytes at the speed of `floor`.

    `least`: share of the floor that it must reach. `most`: seconds that it may take, over those of the case `over`."""

    run: Callable[[], Any]
    nbytes: int
    floor: str = DEVICE
    least: float | None = None
    over: str | None = None
    most: float | None = None


CASES: dict[str, Callable[[Sizes, torch.device], Case]] = {}
"""Name -> how its tensors are made: "module.function", as in `on_a_device.TWINS`, or a call of torch's."""


def case(name: str) -> Callable[[Callable[[Sizes, torch.device], Case]], Callable[[Sizes, torch.device], Case]]:
    """Add a function that makes the case `name`; what `over` names comes before it."""

    def added(make: Callable[[Sizes, torch.device], Case]) -> Callable[[Sizes, torch.device], Case]:
        CASES[name] = make
        return make

    return added


def kernel(name: str) -> Callable[..., Any]:
    """The kernel "module.function" of the package."""
    module, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"hf_offload_cache.kernels.{module}"), function)
    return found


def missing(name: str, device: torch.device) -> str | None:
    """Why the kernel `name` cannot be measured on `device`; None: it can."""
    if name not in CASES:
        return "eval.gpu_kernels has no case for it"
    return None if name in OF_TORCH or on_a_device.has_step(device) else "Triton's kernels do not run here"


def every_name() -> list[str]:
    """Names of all cases, then of kernels without one."""
    for module in pkgutil.iter_modules(kernels.__path__):
        if not module.name.endswith("_triton"):
            import_module(f"{kernels.__name__}.{module.name}")  # which adds its functions
    return [*CASES, *(name for name in on_a_device.TWINS if name not in CASES)]


def seconds_of(run: Callable[[], Any], samples: int = 7, least_seconds: float = 0.01) -> list[float]:
    """Seconds of a call, `samples` times, each the mean over as many calls as take `least_seconds`. Data that the
    device's own cache holds is read from there: such a call may be faster than its floor."""

    def timed(calls: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    timed(3)  # compiles it
    calls = max(1, min(1000, int(least_seconds / timed(3))))
    return [timed(calls) for _ in range(samples)]


def times(seconds: list[float]) -> dict[str, float]:
    """Median, least and most, and of how many."""
    found = {"median_seconds": statistics.median(seconds), "least_seconds": min(seconds), "most_seconds": max(seconds)}
    return {**found, "repetitions": len(seconds)}


def copies(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name of each floor, and its measurement, with "bytes_per_second"."""

    def measured(source: torch.Tensor, passes: int) -> dict[str, Any]:
        target = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
        found = times(seconds_of(lambda: target.copy_(source, non_blocking=True)))
        nbytes = passes * sizes.copied
        return {**found, "nbytes": nbytes, "bytes_per_second": nbytes / found["median_seconds"]}

    yield DEVICE, lambda: measured(torch.zeros(sizes.copied, dtype=torch.uint8, device=device), 2)
    yield BUS, lambda: measured(torch.zeros(sizes.copied, dtype=torch.uint8, device="cpu").pin_memory(), 1)


def measure(name: str, sizes: Sizes, device: torch.device, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Times of the case `name`, its "share" of the floor, and "over", its seconds over those of the case that it is
    compared with. `known`: rows measured so far, by name."""
    made = CASES[name](sizes, device)
    row: dict[str, Any] = {**times(seconds_of(made.run)), "nbytes": made.nbytes, "floor": made.floor}
    if "bytes_per_second" in (floor := known.get(made.floor, {})):
        row["floor_seconds"] = made.nbytes / floor["bytes_per_second"]
        row["share"] = row["floor_seconds"] / row["median_seconds"]
    if made.over is not None and "median_seconds" in (other := known.get(made.over, {})):
        row |= {"over": row["median_seconds"] / other["median_seconds"], "compared_with": made.over}
    return {**row, "least_share": made.least, "most_over": made.most}


def random_bytes(*shape: int, device: torch.device) -> torch.Tensor:
    """uint8, small enough to be finite numbers in half precision."""
    return torch.randint(0, 60, shape, dtype=torch.uint8, device=device)


# --- the cases -------------------------------------------------------------------------------------------------------


@case(GATHERED)
def _attention(sizes: Sizes, device: torch.device) -> Case:
    made = {"dtype": torch.bfloat16, "device": device}
    query = torch.randn(sizes.rows, sizes.heads, 1, sizes.dim, **made)
    keys, values = (torch.randn(sizes.rows, sizes.kv_heads, sizes.attended, sizes.dim, **made) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return Case(lambda: attend(query, keys, values, enable_gqa=True), keys.nbytes + values.nbytes)


_BITS, _GROUP = 2, 64


@case("mixed_attention.attend")
def _mixed(sizes: Sizes, device: torch.device) -> Case:
    """A step's token and its guess, over a copy with 68 entries instead of its own, and the latest 64 tokens."""
    made, heads = {"dtype": torch.bfloat16, "device": device}, (sizes.rows, sizes.kv_heads)
    query = torch.randn(sizes.rows, sizes.heads, 2, sizes.dim, **made)
    row, chosen = row_bytes(_GROUP, _BITS), min(68, sizes.tokens)
    keys = random_bytes(*heads, sizes.tokens // _GROUP, sizes.dim, row, device=device)
    values = random_bytes(*heads, sizes.dim // _GROUP, sizes.tokens, row, device=device)
    tokens = torch.rand(*heads, sizes.tokens, device=device).topk(chosen).indices
    stored, latest, guess = (
        [torch.randn(*heads, count, sizes.dim, **made) for _ in range(2)] for count in (chosen, 64, 1)
    )
    given = query, keys, values, _BITS, tokens, *stored, *latest, *guess, None, None, sizes.dim**-0.5, None, True
    scores = 4 * sizes.rows * sizes.heads * 2 * sizes.tokens
    read = sum(one.nbytes for one in (keys, values, *stored, *latest, *guess))
    return Case(functools.partial(kernel("mixed_attention.attend"), *given), read + scores, least=0.6)


@case("mixed_attention.share")
def _of_copy(sizes: Sizes, device: torch.device) -> Case:
    scores = torch.randn(sizes.rows, sizes.kv_heads, 2 * sizes.heads // sizes.kv_heads, sizes.tokens, device=device)
    held = torch.rand(sizes.rows, sizes.kv_heads, sizes.tokens, device=device).topk(min(68, sizes.tokens)).indices
    given = scores, scores.logsumexp(3), 2, 0, 2, held, 4.0, 4, None
    run = functools.partial(kernel("mixed_attention.share"), *given)
    return Case(run, scores.nbytes + scores[:, :, 0].nbytes, least=0.6)


@case("low_bit.pack")
def _pack(sizes: Sizes, device: torch.device) -> Case:
    """A part of a prompt, as a model gives it: each token's heads side by side."""
    made, count = {"dtype": torch.bfloat16, "device": device}, min(sizes.tokens, _PIECE)
    keys, values = (torch.randn(sizes.rows, count, sizes.kv_heads, sizes.dim, **made).transpose(1, 2) for _ in range(2))
    heads, row = (sizes.rows, sizes.kv_heads), row_bytes(_GROUP, _BITS)
    key_rows = random_bytes(*heads, count // _GROUP, sizes.dim, row, device=device)
    value_rows = random_bytes(*heads, sizes.dim // _GROUP, count, row, device=device)
    run = functools.partial(kernel("low_bit.pack"), keys, values, _BITS, False, key_rows, value_rows)
    return Case(run, sum(one.nbytes for one in (keys, values, key_rows, value_rows)))


@case("low_bit.unpack_replicas")
def _unpack(sizes: Sizes, device: torch.device) -> Case:
    """Records of 64 tokens of one sequence, as many as a step of `AbstractTreeCache` attends to."""
    layout, count = ReplicaLayout(2 * _CHUNK * sizes.kv_heads * sizes.dim, 64), max(1, sizes.attended // _CHUNK)
    replicas, every = random_bytes(count, layout.nbytes, device=device), torch.arange(count, device=device)
    out = torch.empty(count, layout.width, dtype=torch.bfloat16, device=device)
    run = functools.partial(kernel("low_bit.unpack_replicas"), layout, replicas, every, out, every)
    return Case(run, replicas.nbytes + out.nbytes)


def _in_8_bits(sizes: Sizes, device: torch.device) -> tuple[RecordFormat, torch.Tensor, torch.Tensor]:
    """A part of a prompt as entries of records, and the records' payloads."""
    form = RecordFormat(sizes.kv_heads, sizes.dim, sizes.kv_heads, sizes.dim, torch.bfloat16, _UNIT, 8)
    count = sizes.rows * min(sizes.tokens, _PIECE) // _UNIT
    entries = torch.randn(count, _UNIT, form.entry_width, dtype=torch.bfloat16, device=device)
    return form, entries, form.payload(random_bytes(count, form.record_bytes, device=device))


@case("low_bit.pack_entries")
def _pack_entries(sizes: Sizes, device: torch.device) -> Case:
    form, entries, payloads = _in_8_bits(sizes, device)
    run = functools.partial(kernel("low_bit.pack_entries"), entries, payloads, form)
    return Case(run, entries.nbytes + len(payloads) * form.payload_bytes)


@case("low_bit.unpack_entries")
def _unpack_entries(sizes: Sizes, device: torch.device) -> Case:
    form, entries, payloads = _in_8_bits(sizes, device)
    run = functools.partial(kernel("low_bit.unpack_entries"), payloads, entries, form)
    return Case(run, entries.nbytes + len(payloads) * form.payload_bytes)


class Records(NamedTuple):
    """Records of one layer in pinned host memory, not written to, and the begin of each, (rows, units) int64 on the
    device; the store keeps them."""

    form: RecordFormat
    addresses: torch.Tensor
    store: MemoryStore


def records(sizes: Sizes, group: int, device: torch.device) -> Records:
    """All records of `sizes.rows` rows. Raises `MemoryError` if the system does not pin so much."""
    form = RecordFormat(sizes.kv_heads, sizes.dim, sizes.kv_heads, sizes.dim, torch.bfloat16, group)
    store = MemoryStore(form.record_bytes, "kernels", pinned=True)
    found = store.addresses(store.allocate(sizes.rows * (sizes.tokens // group)))
    if found is None:
        raise MemoryError("the system pins no more")
    return Records(form, torch.from_numpy(np.ascontiguousarray(found)).view(sizes.rows, -1).to(device), store)


@case("mixed_attention.exchange")
def _exchange_entries(sizes: Sizes, device: torch.device) -> Case:
    """68 tokens a key head, of which a third is new in each step; the steps alternate."""
    of_head = torch.arange(90, device=device).expand(sizes.rows, sizes.kv_heads, -1)
    exchange = kernel("mixed_attention.exchange")
    held, turns = of_head[:, :, :68].contiguous(), [of_head[:, :, first : first + 68].contiguous() for first in (22, 0)]

    def run() -> None:
        turns.append(turns.pop(0))
        exchange(held, turns[0])

    return Case(run, 4 * held.nbytes)


@case("mixed_attention.bring")
def _entries(sizes: Sizes, device: torch.device) -> Case:
    made, heads = records(sizes, _GROUP, device), (sizes.rows, sizes.kv_heads)
    tokens = torch.randint(0, sizes.tokens, (*heads, sizes.attended), device=device)
    shape, options = (*heads, sizes.attended, sizes.dim), {"dtype": torch.bfloat16, "device": device}
    keys, values = (torch.empty(shape, **options) for _ in range(2))
    bring, nbytes = kernel("mixed_attention.bring"), keys.nbytes + values.nbytes
    return Case(lambda: bring(made.addresses, tokens, made.form, keys, values), nbytes, BUS, least=0.8)


# DiskSwapCache's step: units of four tokens, with codes of 112 bytes a token

_UNIT, _COUNTS, _MAPPED, _SINKS, _RECENT = 4, (64, 64, 64), 64, 4, 32


def _codes(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Low-rank queries, their constants, and codes, as `ranking.score` takes them."""
    low = torch.randn(sizes.rows, sizes.heads, sum(_COUNTS), device=device).to(torch.bfloat16)
    each = _COUNTS[0] + _COUNTS[1] // 2 + _COUNTS[2] // 4
    codes = random_bytes(sizes.rows, each * _UNIT, sizes.tokens // _UNIT, device=device)
    return low, torch.randn(sizes.rows, sizes.heads, device=device), codes


def _units(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Units (rows, n) int32 that a step attends to, ascending."""
    count, every = (sizes.attended - _RECENT) // _UNIT, sizes.tokens // _UNIT
    return torch.rand(sizes.rows, every, device=device).topk(count).indices.sort(1).values.int()


@case("ranking.project")
def _project(sizes: Sizes, device: torch.device) -> Case:
    states = torch.randn(sizes.rows, sizes.heads, sizes.dim, device=device).to(torch.bfloat16)
    queries = torch.randint(-127, 128, (sizes.kv_heads, sizes.dim, sum(_COUNTS)), device=device).to(torch.int8)
    scale, offsets = (torch.rand(sum(_COUNTS), device=device) for _ in range(2))
    mean = torch.randn(sizes.kv_heads, sizes.dim, device=device)
    sinks, recent = (
        torch.randn(sizes.rows, sizes.kv_heads, count, sizes.dim, device=device).to(torch.bfloat16)
        for count in (_SINKS, _RECENT)
    )
    given = states, queries, scale, mean, offsets, sinks, recent
    return Case(functools.partial(kernel("ranking.project"), *given, 0.1), sum(one.nbytes for one in given))


@case("ranking.score")
def _score(sizes: Sizes, device: torch.device) -> Case:
    given, units = _codes(sizes, device), sizes.tokens // _UNIT
    run = functools.partial(kernel("ranking.score"), *given, _COUNTS, _UNIT, 1)
    return Case(run, given[2].nbytes + 4 * sizes.rows * sizes.heads * units, least=0.6)


@case("ranking.share")
def _share(sizes: Sizes, device: torch.device) -> Case:
    best, tops, sums = kernel("ranking.score")(*_codes(sizes, device), _COUNTS, _UNIT, 1)
    near = torch.randn(sizes.rows, sizes.heads, _SINKS + _RECENT, device=device)
    run = functools.partial(kernel("ranking.share"), best, tops, sums, near, sizes.rows, 1)
    return Case(run, best.nbytes + 4 * sizes.rows * best.shape[2])


@case("ranking.pick")
def _pick(sizes: Sizes, device: torch.device) -> Case:
    importance, count = torch.rand(sizes.rows, sizes.tokens // _UNIT, device=device), sizes.attended // _UNIT
    return Case(functools.partial(kernel("ranking.pick"), importance, count, 2 * count), importance.nbytes)


@case("ranking.rest")
def _rest(sizes: Sizes, device: torch.device) -> Case:
    low, constant, codes = _codes(sizes, device)
    others = _units(sizes, device)
    maps = torch.randint(-127, 128, (sizes.rows, _MAPPED + 1, sizes.kv_heads, sizes.dim), device=device).to(torch.int8)
    scale, ratio = torch.rand(sizes.rows, _MAPPED + 1, device=device), torch.zeros_like(constant)
    offsets = torch.rand(sum(_COUNTS), device=device)
    given = low, constant, codes, _COUNTS, _UNIT, others, maps, scale, ratio, offsets
    return Case(functools.partial(kernel("ranking.rest"), *given), others.numel() * codes.shape[1] + maps.nbytes)


@case("ranking.encode")
def _encode(sizes: Sizes, device: torch.device) -> Case:
    keys = torch.randn(sizes.rows, sizes.tokens, sizes.kv_heads, sizes.dim, dtype=torch.bfloat16, device=device)
    width, rank = sizes.kv_heads * sizes.dim, sum(_COUNTS)
    mean, scale = torch.randn(width, device=device), torch.rand(rank, device=device) / width**0.5
    projection = torch.randint(-127, 128, (width, rank), device=device).to(torch.int8)
    given = keys.transpose(1, 2), mean, projection, scale, _COUNTS, _codes(sizes, device)[2]
    nbytes = sum(one.nbytes for one in given if isinstance(one, torch.Tensor))
    return Case(functools.partial(kernel("ranking.encode"), *given, _UNIT, 0), nbytes)


@case("slots.exchange")
def _exchange(sizes: Sizes, device: torch.device) -> Case:
    steps = [_units(sizes, device) for _ in range(8)]
    count = 2 * steps[0].shape[1]
    options: dict[str, Any] = {"dtype": torch.int32, "device": device}
    slot_of = torch.full((sizes.rows, sizes.tokens // _UNIT), -1, **options)
    unit_in = torch.full((sizes.rows, count), -1, **options)
    order = torch.arange(count, **options).repeat(sizes.rows, 1)
    exchange, turns = kernel("slots.exchange"), itertools.cycle(steps)
    nbytes = 3 * steps[0].nbytes + unit_in.nbytes + 2 * order.nbytes
    return Case(lambda: exchange(next(turns), slot_of, unit_in, order), nbytes)


def _slots(units: torch.Tensor, form: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots (rows, S) of a step's units, and data of so many."""
    rows, count = units.shape
    slots = torch.arange(count, dtype=torch.int32, device=units.device).repeat(rows, 1)
    data = torch.zeros(rows, count, form.payload_width, dtype=form.payload_dtype, device=units.device)
    return slots, data


@case("slots.seal")
def _seal(sizes: Sizes, device: torch.device) -> Case:
    """A unit leaves the latest entries, as many times as are called: the others stay as many."""
    form = RecordFormat(sizes.kv_heads, sizes.dim, sizes.kv_heads, sizes.dim, torch.bfloat16, _UNIT)
    tail = torch.randn(sizes.rows, _RECENT + _UNIT, form.entry_width, device=device).to(torch.bfloat16)
    filled = torch.empty(sizes.rows, form.record_bytes, dtype=torch.uint8, device=device)
    given = tail, tail.shape[1], filled, form
    return Case(functools.partial(kernel("slots.seal"), *given), 2 * tail.nbytes + filled.nbytes)


@case("slots.bring")
def _bring(sizes: Sizes, device: torch.device) -> Case:
    made, absent, bring = records(sizes, _UNIT, device), _units(sizes, device), kernel("slots.bring")
    slots, data = _slots(absent, made.form)
    return Case(lambda: bring(made.addresses, absent, slots, data), data.nbytes, BUS, least=0.8)


@case("slots.units_at")
def _units_at(sizes: Sizes, device: torch.device) -> Case:
    places = _units(sizes, device) * _UNIT
    return Case(functools.partial(kernel("slots.units_at"), places, sizes.tokens, _UNIT, len(places[0])), places.nbytes)


@case("slots.tokens_at")
def _tokens_at(sizes: Sizes, device: torch.device) -> Case:
    slots, data = _slots(_units(sizes, device), form := RecordFormat(1, 512, 1, 64, torch.bfloat16, _UNIT))
    given = slots * _UNIT, slots, data, data.view(sizes.rows, -1, form.entry_width), len(slots[0]) * _UNIT, _UNIT, None
    return Case(functools.partial(kernel("slots.tokens_at"), *given), 2 * slots.numel() * form.entry_bytes)


@case("slots.attend")
def _attend(sizes: Sizes, device: torch.device) -> Case:
    form = RecordFormat(sizes.kv_heads, sizes.dim, sizes.kv_heads, sizes.dim, torch.bfloat16, _UNIT)
    slots, data = _slots(_units(sizes, device), form)
    query = torch.randn(sizes.rows, sizes.heads, sizes.dim, device=device).to(torch.bfloat16)
    recent = torch.randn(sizes.rows, _RECENT, form.entry_width, device=device).to(torch.bfloat16)
    run = functools.partial(kernel("slots.attend"), query, data, slots, recent, form, 0.1, None, None)
    return Case(run, data.nbytes + recent.nbytes, over=GATHERED, most=1.5)


# ClusterCache's prefill: k-means of the keys of a piece of the prompt, all key heads at once

_PIECE, _CLUSTER = 8192, 12
"""Maximum number of keys a piece, and mean number of keys a cluster."""


def _points(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Points, centroids and labels, as functions of `clusters` take them."""
    rows, count = sizes.rows * sizes.kv_heads, min(sizes.tokens, _PIECE)
    clusters = count // _CLUSTER
    points = torch.randn(rows, count, sizes.dim, dtype=torch.bfloat16, device=device)
    labels = torch.randint(0, clusters, (rows, count), dtype=torch.int32, device=device)
    return points, torch.randn(rows, clusters, sizes.dim, device=device), labels


@case(PRODUCTS)
def _products(sizes: Sizes, device: torch.device) -> Case:
    points, centroids, labels = _points(sizes, device)
    wide, across = points.float(), centroids.transpose(1, 2)
    out = torch.empty(*labels.shape, centroids.shape[1], device=device)
    return Case(lambda: torch.bmm(wide, across, out=out), wide.nbytes + centroids.nbytes + out.nbytes)


@case("clusters.assign")
def _assign(sizes: Sizes, device: torch.device) -> Case:
    points, centroids, labels = _points(sizes, device)
    nbytes = points.nbytes + centroids.nbytes + labels.nbytes
    return Case(functools.partial(kernel("clusters.assign"), points, centroids), nbytes, over=PRODUCTS)


@case("clusters.means")
def _means(sizes: Sizes, device: torch.device) -> Case:
    points, before, labels = _points(sizes, device)
    nbytes = points.nbytes + labels.nbytes + 2 * before.nbytes + 4 * before[..., 0].numel()
    return Case(functools.partial(kernel("clusters.means"), points, labels, before), nbytes)


@case("clusters.apart")
def _apart(sizes: Sizes, device: torch.device) -> Case:
    points, centroids, labels = _points(sizes, device)
    nbytes = points.nbytes + 2 * labels.nbytes + centroids.nbytes  # distances have four bytes, as labels
    return Case(functools.partial(kernel("clusters.apart"), points, labels, centroids), nbytes)


@case("clusters.parted")
def _parted(sizes: Sizes, device: torch.device) -> Case:
    _, centroids, labels = _points(sizes, device)
    run = functools.partial(kernel("clusters.parted"), labels, centroids.shape[1], 2 * _CLUSTER)
    return Case(run, 2 * labels.nbytes)


_PAGE = 16
"""Entries of a page."""


@case("clusters.placed")
def _placed(sizes: Sizes, device: torch.device) -> Case:
    _, centroids, labels = _points(sizes, device)
    pages = torch.ones(2, *centroids.shape[:2], dtype=torch.int32, device=device)
    return Case(functools.partial(kernel("clusters.placed"), labels, pages, _PAGE), 3 * labels.nbytes + pages.nbytes)


@case("clusters.put")
def _put(sizes: Sizes, device: torch.device) -> Case:
    points, _, _ = _points(sizes, device)
    (rows, count, dim), new = points.shape, points[:, None]
    targets = torch.randperm(rows * count, device=device).view(rows, count)
    out = torch.empty(rows * count, 2 * dim, dtype=points.dtype, device=device)
    held = out.new_empty(rows, 0, 2 * dim)
    run = functools.partial(kernel("clusters.put"), held, new, new, targets, 0, out)
    return Case(run, 2 * points.nbytes + out.nbytes + targets.nbytes)


# AbstractTreeCache's step: chunks of 64 tokens, each key head with its own, four times as many examined as attended to

_CHUNK, _EXAMINED = 64, 4


def _ends(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and the abstracts of all chunks."""
    states = torch.randn(sizes.rows, sizes.heads, sizes.dim, device=device).to(torch.bfloat16)
    shape = sizes.rows * sizes.kv_heads, sizes.tokens // _CHUNK, 2, 1, sizes.dim
    return states, torch.randn(shape, device=device).sort(2).values.to(torch.bfloat16)


@case("bounds.limits")
def _limits(sizes: Sizes, device: torch.device) -> Case:
    states, ends = _ends(sizes, device)
    results = 2 * 4 * sizes.rows * sizes.heads * ends.shape[1]
    return Case(functools.partial(kernel("bounds.limits"), states, ends, 0.1, True), ends.nbytes + results, least=0.6)


def _examined(sizes: Sizes) -> int:
    return min(sizes.tokens, _EXAMINED * sizes.attended) // _CHUNK


@case("bounds.stand")
def _stand(sizes: Sizes, device: torch.device) -> Case:
    high, low = kernel("bounds.limits")(*_ends(sizes, device), 0.1, True)
    run = functools.partial(kernel("bounds.stand"), high, low, _examined(sizes), 1)
    return Case(run, high.nbytes + low.nbytes)


@case("bounds.front")
def _front(sizes: Sizes, device: torch.device) -> Case:
    high, low = kernel("bounds.limits")(*_ends(sizes, device), 0.1, True)
    standings = kernel("bounds.stand")(high, low, _examined(sizes), 1)
    run = functools.partial(kernel("bounds.front"), *standings, _CHUNK, sizes.attended, _examined(sizes))
    return Case(run, sum(one.nbytes for one in standings))


@case("bounds.look")
def _look(sizes: Sizes, device: torch.device) -> Case:
    rows, form = sizes.rows * sizes.kv_heads, RecordFormat(1, sizes.dim, 1, sizes.dim, torch.bfloat16, _CHUNK)
    chosen = torch.zeros(rows, _examined(sizes), dtype=torch.int32, device=device)
    slots, data = _slots(chosen, form)
    query = torch.randn(sizes.rows, sizes.heads, sizes.dim, device=device).to(torch.bfloat16)
    recent = torch.randn(rows, 1, _RECENT, sizes.dim, device=device).to(torch.bfloat16)
    run = functools.partial(kernel("bounds.look"), query, data, slots, recent, form, 0.1, sizes.attended, _SINKS)
    return Case(run, data.nbytes // 2 + recent.nbytes)


# ClusterCache's step: clusters of a dozen keys, each key head with its own, in pages of four entries

_PAGES = 8
"""Most pages of a cluster."""


def _clusters(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, centroids, tables and latest keys, as `centroids.score` takes them."""
    rows, clusters = sizes.rows * sizes.kv_heads, sizes.tokens // _CLUSTER
    states = torch.randn(sizes.rows, sizes.heads, sizes.dim, device=device).to(torch.bfloat16)
    centroids = torch.randn(rows, clusters, sizes.dim, device=device).to(torch.float16)
    tables = torch.full((3, rows, clusters), _CLUSTER, dtype=torch.int32, device=device)
    tables[2] = 0
    tables[2, :, 0] = _SINKS
    return states, centroids, tables, torch.randn(rows, _RECENT, sizes.dim, device=device).to(torch.bfloat16)


@case("clusters.score")
def _of_centroids(sizes: Sizes, device: torch.device) -> Case:
    given = _clusters(sizes, device)
    scores = 4 * given[1][..., 0].numel() * sizes.heads // sizes.kv_heads
    run = functools.partial(kernel("clusters.score"), *given, 0.1)
    return Case(run, given[1].nbytes + given[2].nbytes + scores, least=0.6)


def _choice(sizes: Sizes, device: torch.device) -> tuple[list[torch.Tensor], functools.partial[Any]]:
    """Tensors of `centroids.score`, and the call that chooses by them."""
    states, centroids, tables, recent = _clusters(sizes, device)
    scored = kernel("clusters.score")(states, centroids, tables, recent, 0.1)
    pages = 2 * sizes.attended // _UNIT
    limits = sizes.attended, pages, pages, _PAGES, _UNIT
    return [*scored, centroids, tables], functools.partial(kernel("clusters.choose"), *scored, tables, *limits)


@case("clusters.choose")
def _choose(sizes: Sizes, device: torch.device) -> Case:
    (scores, _, _, _, tables), run = _choice(sizes, device)
    return Case(run, scores.nbytes + tables.nbytes + 2 * tables[0].nbytes)


@case("clusters.rest")
def _other_clusters(sizes: Sizes, device: torch.device) -> Case:
    (scores, _, _, centroids, tables), choose = _choice(sizes, device)
    kept, rows = choose()[2], len(centroids)
    maps = torch.randint(-127, 128, (rows, sizes.dim + 1, 1, sizes.dim), device=device).to(torch.int8)
    scale, ratio = torch.rand(rows, sizes.dim + 1, device=device), torch.zeros(rows, scores.shape[1], device=device)
    given = scores, centroids, tables, kept, maps, scale, ratio
    run = functools.partial(kernel("clusters.rest"), *given, sizes.rows)
    return Case(run, sum(one.nbytes for one in given[:5]))


# A fit of estimates: 16 queries of each key head weigh 2,048 of its tokens

def _fit(sizes: Sizes, device: torch.device) -> tuple[list[Any], list[Any], torch.Tensor]:
    """Arguments of `fits.unselected` and of `fits.weigh`, and the tokens' keys."""
    _, centroids, tables, _ = _clusters(sizes, device)
    heads, tokens = sizes.heads // sizes.kv_heads, min(sizes.tokens, 2048)
    keys = torch.randn(len(centroids), tokens, sizes.dim, device=device).to(torch.bfloat16)
    states = keys[:, :1].expand(-1, 16 * heads, -1)
    labels = torch.zeros(keys.shape[:2], dtype=torch.int32, device=device)
    scored = kernel("clusters.score")(states, centroids, tables, keys[:, :0], 0.1)
    asked = [*scored, tables[0], heads, sizes.attended]
    return asked, [states, keys, labels, *kernel("fits.unselected")(*asked), scored[0], None, 0.1, (1, tokens, 8)], keys


@case("fits.unselected")
def _unselected(sizes: Sizes, device: torch.device) -> Case:
    asked, _, _ = _fit(sizes, device)
    return Case(functools.partial(kernel("fits.unselected"), *asked), asked[0].nbytes + asked[3].nbytes)


@case("fits.weigh")
def _weigh(sizes: Sizes, device: torch.device) -> Case:
    _, given, keys = _fit(sizes, device)
    return Case(functools.partial(kernel("fits.weigh"), *given), keys.nbytes + given[3].nbytes + given[5].nbytes)


@case("fits.add_squares")
def _add_squares(sizes: Sizes, device: torch.device) -> Case:
    keys = _fit(sizes, device)[2]
    (rows, _, dim), weights = keys.shape, torch.rand(len(keys), 1, keys.shape[1], device=device)
    sums = torch.zeros(rows, 1, dim + 1, 2 * dim + 1, device=device), torch.zeros(rows, dim + 1, device=device)
    run = functools.partial(kernel("fits.add_squares"), keys.mT, None, keys[:, None], weights, None, *sums)
    return Case(run, 2 * keys.nbytes + 2 * sums[0].nbytes)


# A prompt: attention of a piece to one more block of the history

@case("mixed_attention.merge")
def _merge(sizes: Sizes, device: torch.device) -> Case:
    shape = sizes.rows, sizes.heads, min(1024, sizes.tokens), sizes.dim
    total, part = torch.randn(shape, device=device), torch.randn(shape, device=device).to(torch.bfloat16)
    sums = [torch.zeros(shape[:3], device=device) for _ in range(2)]
    nbytes = 2 * total.nbytes + part.nbytes + 3 * sums[0].nbytes
    return Case(functools.partial(kernel("mixed_attention.merge"), total, sums[0], part, sums[1]), nbytes)
