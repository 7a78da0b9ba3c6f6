"""Entries of single tokens out of records in pinned host memory, which a GPU reads over its bus by itself."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ENTRIES = 4
"""Entries of a head that a program reads."""


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    addresses, tokens, out, count, units, heads, GROUP: tl.constexpr, WIDTH: tl.constexpr, BEGIN: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    token = tl.load(tokens + head * count + entry, mask=entry < count, other=-1)
    address = tl.load(addresses + head // heads * units + token // GROUP, mask=token >= 0, other=0)
    begin = token % GROUP * WIDTH + BEGIN + head % heads * DIM
    channel = tl.arange(0, WIDE)
    within = (channel < DIM)[None, :]
    record = address.to(tl.pointer_type(out.dtype.element_ty))
    found = tl.load(record[:, None] + begin[:, None] + channel[None, :], mask=(token >= 0)[:, None] & within, other=0)
    into = out + (head * count + entry)[:, None] * DIM + channel[None, :]
    tl.store(into, found, mask=(entry < count)[:, None] & within)


def gather(addresses: torch.Tensor, tokens: torch.Tensor, form: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (rows, heads, m, Dk) and values (rows, heads, m, Dv) of `tokens` (rows, heads, m), -1: zeros, in `form`'s
    type, on the device of both and its current stream.

    `addresses` (rows, units) int64: where each row's units of `form.group_size` tokens begin, in host memory that the
    device reads, which is to stay until this has run. Each head of a key has its value's. Under `TRITON_INTERPRET=1` on
    a CPU, for tests. Its twin is `MemoryStore.read_parts`, by which a CPU reads the same.
    """
    rows, heads, count = tokens.shape
    tokens = tokens.contiguous()
    grid: Any = (rows * heads, triton.cdiv(count, _ENTRIES))
    parts = []
    for begin, dim in ((0, form.key_dim), (form.key_width, form.value_dim)):
        out = torch.empty(rows, heads, count, dim, dtype=form.dtype, device=tokens.device)
        if out.numel():
            _gather[grid](
                addresses, tokens, out, count, addresses.shape[1], heads, form.group_size, form.entry_width, begin, dim,
                triton.next_power_of_2(dim), _ENTRIES,
            )  # fmt: skip
        parts.append(out)
    return parts[0], parts[1]
