"""The kernel that unpacks replicas on a device, in Triton's interpreter: see `make test-kernels`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_kernels import kernels

from hf_offload_cache.kernels.int4 import Int4Layout, dequantised, quantise

pytestmark = pytest.mark.kernels


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    return kernels("int4_triton", "cpu", monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "group"), [(8192, 32), (256, 4), (384, 8), (6020, 28)])
def test_the_kernel_gives_what_its_twin_gives(kernel: Any, width: int, group: int, dtype: torch.dtype) -> None:
    layout = Int4Layout(width, group)
    torch.manual_seed(0)
    replicas = torch.zeros(5, -(-layout.nbytes // 64) * 64, dtype=torch.uint8)
    quantise(layout, torch.randn(5, width).to(dtype), replicas)
    out = torch.full((7, width), float("nan"), dtype=dtype)
    target = torch.tensor([6, 1, 0, 3, 5])
    rows = torch.tensor([4, 0, 1, 1, 3])
    kernel.dequantise(layout, replicas, rows, out, target)
    expected = dequantised(layout, replicas)[rows]
    if dtype == torch.bfloat16:
        assert ((out[target].float() - expected).abs() <= expected.abs() * 2**-7).all()
    else:
        assert torch.equal(out[target], expected.to(dtype))
    assert out[[2, 4]].isnan().all()
