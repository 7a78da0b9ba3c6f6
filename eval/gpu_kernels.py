"""Kernels against their floor: the bytes that a call moves, over the bandwidth of a copy that was measured here."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import on_a_device
from hf_offload_cache.kernels.low_bit import row_bytes
from hf_offload_cache.stores import MemoryStore

DEVICE, BUS = "device copy", "pinned copy"
"""Floors: a copy within the device, which reads and writes, and one to it out of pinned host memory."""
GATHERED = "SDPA on a gathered copy"


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
    if name != GATHERED and name not in on_a_device.TWINS and not on_a_device.has_kernels(device):
        return "Triton's kernels do not run here"
    return None


def every_name() -> list[str]:
    """Names of all cases, then of kernels without one."""
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


@case("low_bit_triton.scores")
def _scores(sizes: Sizes, device: torch.device) -> Case:
    count, groups = sizes.heads // sizes.kv_heads, sizes.tokens // _GROUP
    queries = torch.randn(sizes.rows, sizes.kv_heads, count, sizes.dim, device=device)
    shape = sizes.rows, sizes.kv_heads, groups, sizes.dim, row_bytes(_GROUP, _BITS)
    keys = random_bytes(*shape, device=device)
    out = torch.empty(sizes.rows, sizes.kv_heads, count, sizes.tokens, device=device)
    run = functools.partial(kernel("low_bit_triton.scores"), queries, keys, _BITS, out)
    return Case(run, keys.nbytes + out.nbytes, least=0.6)


@case("low_bit_triton.weighted")
def _weighted(sizes: Sizes, device: torch.device) -> Case:
    count, groups = sizes.heads // sizes.kv_heads, sizes.dim // _GROUP
    shares = torch.rand(sizes.rows, sizes.kv_heads, count, sizes.tokens, device=device)
    shape = sizes.rows, sizes.kv_heads, groups, sizes.tokens, row_bytes(_GROUP, _BITS)
    values = random_bytes(*shape, device=device)
    run = functools.partial(kernel("low_bit_triton.weighted"), shares, values, _BITS, _GROUP)
    return Case(run, values.nbytes + shares.nbytes)


@case("host_entries_triton.gather")
def _gather(sizes: Sizes, device: torch.device) -> Case:
    form = RecordFormat(sizes.kv_heads, sizes.dim, sizes.kv_heads, sizes.dim, torch.bfloat16, _GROUP)
    store, units = MemoryStore(form.record_bytes, "kernels", pinned=True), sizes.tokens // _GROUP
    addresses = store.addresses(store.allocate(sizes.rows * units))
    if addresses is None:
        raise MemoryError("the system pins no more memory")
    where = torch.from_numpy(np.ascontiguousarray(addresses)).view(sizes.rows, units).to(device)
    tokens = torch.randint(0, sizes.tokens, (sizes.rows, sizes.kv_heads, sizes.attended), device=device)
    gather = kernel("host_entries_triton.gather")

    def run() -> Any:
        assert store.capacity, "its memory is there as long as this"
        return gather(where, tokens, form)

    return Case(run, tokens.numel() * 2 * sizes.dim * form.dtype.itemsize, BUS, least=0.8)
