"""Unpacks 4-bit replicas into their places on a device in one fused kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .int4 import Int4Layout
from .on_a_device import on_its_device

_BLOCK = 1024
"""Bytes of codes that a program unpacks."""


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    replicas, sides, rows, out, target, replica_bytes, out_stride, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = here < WIDTH // 2
    row = tl.load(rows + tl.program_id(0)).to(tl.int64) * replica_bytes
    into = out + tl.load(target + tl.program_id(0)).to(tl.int64) * out_stride + 2 * here
    group = here // HALF
    both = tl.load(replicas + row + group * (HALF + 4) + here % HALF, mask=there, other=0).to(tl.int32)
    side = sides + (row + group * (HALF + 4) + HALF) // 2
    step = tl.load(side, mask=there, other=0).to(tl.float32)
    least = tl.load(side + 1, mask=there, other=0).to(tl.float32)
    low = (both & 15).to(tl.float32) * step + least
    high = (both >> 4).to(tl.float32) * step + least
    tl.store(into, low.to(out.dtype.element_ty), mask=there)
    tl.store(into + 1, high.to(out.dtype.element_ty), mask=there)


@on_its_device
def dequantise(
    layout: Int4Layout, replicas: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, target: torch.Tensor
) -> None:
    """As `int4.dequantise`, on a CUDA device and its current stream.

    Under `TRITON_INTERPRET=1` on a CPU, for tests. `replicas` and `out` are contiguous in the last dimension. Rows of
    `replicas` begin at even bytes, and so do steps, because groups have a multiple of 4 elements.
    """
    if not len(rows):
        return
    grid: Any = (len(rows), triton.cdiv(layout.width // 2, _BLOCK))
    halves = replicas.view(torch.float16)
    _unpack[grid](
        replicas, halves, rows, out, target, replicas.stride(0), out.stride(0), layout.width, layout.group, _BLOCK
    )
