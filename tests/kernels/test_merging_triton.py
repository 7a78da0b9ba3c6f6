"""Merging on a device against its twin: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import pytest
import torch
from triton_kernels import DEVICES, kernels

from hf_offload_cache.kernels import mixed_attention


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "heads", "queries", "dim"), [(2, 3, 37, 24), (1, 4, 130, 64), (3, 1, 1, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_merged_as_the_twin_merges_them(
    device: str, rows: int, heads: int, queries: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with any strides, some of which see nothing before, in the part, or in both."""
    kernel, made = kernels("mixed_attention_triton", device, monkeypatch), torch.Generator().manual_seed(dim)
    total, part = (torch.randn(rows, queries, heads, dim, generator=made).transpose(1, 2) for _ in range(2))
    sums = [torch.randn(rows, heads, queries + 3, generator=made)[..., :queries] * 9 for _ in range(2)]
    for one, sees_nothing in zip(sums, (slice(0, None, 2), slice(0, None, 3)), strict=True):
        one[..., sees_nothing] = float("-inf")
    sums[1][..., -1] = 90.0
    part = part.contiguous().to(dtype)
    on_device = [one.clone(memory_format=torch.preserve_format).to(device) for one in (total, sums[0], part, sums[1])]
    around = torch.full((rows, heads, queries + 3), 7.0, device=device)  # stays as it is
    around[..., :queries] = on_device[1]
    kernel.merge(on_device[0], around[..., :queries], *on_device[2:])
    mixed_attention.merge(total, sums[0], part, sums[1])
    torch.testing.assert_close(on_device[0].cpu(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(around[..., :queries].cpu(), sums[0], rtol=1e-5, atol=1e-5)
    assert bool((around[..., queries:] == 7).all())
    assert queries == 1 or sums[0][0, 0, 0] == float("-inf")
