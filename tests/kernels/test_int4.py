"""Keys and values in 4 bits and back."""

from __future__ import annotations

import pytest
import torch

from hf_offload_cache.kernels.int4 import Int4Layout, dequantise, dequantised, quantise

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
    """Of its group; and what step and least element lose in half precision (2^-11), and the result in `dtype`."""
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
    """To the bit: one product and one sum in 32 bits, of the same numbers."""
    layout = Int4Layout(width, group)
    replicas = torch.empty(5, layout.nbytes, dtype=torch.uint8)
    quantise(layout, sample(layout, dtype), replicas)
    out = torch.empty(5, width, dtype=dtype)
    dequantise(layout, replicas, torch.arange(5), out, torch.arange(5))
    assert torch.equal(out, dequantised(layout, replicas).to(dtype))


def test_groups_divide_every_part() -> None:
    found = [Int4Layout.of(32, *widths) for widths in ((64, 64), (96, 64), (12, 20), (6, 64), (0, 64))]
    assert [None if one is None else (one.width, one.group) for one in found] == [
        (128, 32), (160, 32), (32, 4), None, (64, 32),
    ]  # fmt: skip
    assert Int4Layout(8192, 32).nbytes == 8192 // 2 + 8192 // 32 * 4
