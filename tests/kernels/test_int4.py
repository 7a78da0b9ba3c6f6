"""Keys and values in 4 bits and back."""

from __future__ import annotations

import pytest
import torch

from hf_offload_cache.kernels.int4 import LARGEST, Int4Layout, dequantise, dequantised, quantise

SHAPES = [(8192, 32), (256, 4), (384, 8), (70000, 28)]


def sample(layout: Int4Layout, dtype: torch.dtype, count: int = 5) -> torch.Tensor:
    """(count, width): of sizes that differ from group to group; one with equal elements alone."""
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, layout.width // layout.group).repeat_interleave(layout.group)
    entries = torch.randn(count, layout.width) * sizes + 2 * sizes
    entries[1] = 3.25
    return entries.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "group"), SHAPES)
def test_every_element_is_within_half_a_step(width: int, group: int, dtype: torch.dtype) -> None:
    layout = Int4Layout(width, group)
    entries = sample(layout, dtype)
    replicas = torch.full((len(entries), layout.nbytes + 100), 255, dtype=torch.uint8)
    quantise(layout, entries, replicas)
    assert (replicas[:, layout.nbytes :] == 0).all()
    groups = entries.float().unflatten(1, (-1, group))
    apart = groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)
    most = groups.abs().amax(2, keepdim=True)
    allowed = apart / 30 + most * (2 * 2**-11 + torch.finfo(dtype).eps) + 2**-20
    out = torch.full((7, width), float("nan"), dtype=dtype)
    target = torch.tensor([6, 1, 0, 3, 5])
    dequantise(layout, replicas, torch.tensor([4, 0, 1, 2, 3]), out, target)
    got = out[target].float().unflatten(1, (-1, group))
    assert ((got - groups[[4, 0, 1, 2, 3]]).abs() <= allowed[[4, 0, 1, 2, 3]]).all()
    assert out[[2, 4]].isnan().all()
    assert torch.equal(out[0], entries[1])  # equal elements are what they were


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "group"), SHAPES)
def test_the_twin_gives_the_same(width: int, group: int, dtype: torch.dtype) -> None:
    layout = Int4Layout(width, group)
    replicas = torch.empty(5, layout.nbytes, dtype=torch.uint8)
    quantise(layout, sample(layout, dtype), replicas)
    out = torch.empty(5, width, dtype=dtype)
    dequantise(layout, replicas, torch.arange(5), out, torch.arange(5))
    assert torch.equal(out, dequantised(layout, replicas).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_stay_finite(dtype: torch.dtype) -> None:
    """Steps are rounded up at the worst."""
    layout = Int4Layout(64, 32)
    ends = torch.tensor([-LARGEST, LARGEST, 0, 17.0, -LARGEST / 3]).to(dtype)
    ends = ends[ends.abs() <= LARGEST]
    entries = torch.stack([a.repeat(64).index_fill(0, torch.arange(0, 64, 3), float(b)) for a in ends for b in ends])
    replicas = torch.empty(len(entries), layout.nbytes, dtype=torch.uint8)
    quantise(layout, entries, replicas)
    out = torch.empty(len(entries), 64, dtype=dtype)
    dequantise(layout, replicas, torch.arange(len(entries)), out, torch.arange(len(entries)))
    assert out.isfinite().all() and dequantised(layout, replicas).to(dtype).isfinite().all()


def test_rows_that_lie_apart() -> None:
    layout = Int4Layout(384, 8)
    entries = torch.randn(20, 512)
    replicas, other = (torch.zeros(20, layout.nbytes, dtype=torch.uint8) for _ in range(2))
    quantise(layout, entries[:, :384], replicas)
    quantise(layout, entries[:, :384].contiguous(), other)
    assert torch.equal(replicas, other)


def test_groups_divide_every_part() -> None:
    found = [Int4Layout.of(32, *widths) for widths in ((64, 64), (96, 64), (12, 20), (6, 64), (0, 64))]
    assert [None if one is None else (one.width, one.group) for one in found] == [
        (128, 32), (160, 32), (32, 4), None, (64, 32),
    ]  # fmt: skip
    assert Int4Layout(8192, 32).nbytes == 8192 // 2 + 8192 // 32 * 4
