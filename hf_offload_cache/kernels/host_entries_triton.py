"""The kernels of `host_entries`, one launch each: see its functions.

They run on a CUDA device's current stream, `with_kernel` launches them there; under `TRITON_INTERPRET=1` on a CPU, for
tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit_triton import wide

_ENTRIES = 16
"""Entries of a head that a program reads at a time."""
_PROGRAMS = 264
"""Enough to keep a bus busy; more would keep the device from other work."""


@triton.jit
def _copied(  # type: ignore[no-untyped-def]
    address, begin, out, entry, token, DIM: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    channel = tl.arange(0, WIDE)
    within = (channel < DIM)[None, :]
    record = address.to(tl.pointer_type(out.dtype.element_ty))
    found = tl.load(record[:, None] + begin[:, None] + channel[None, :], mask=(token >= 0)[:, None] & within, other=0)
    tl.store(out + entry[:, None] * DIM + channel[None, :], found, mask=(token >= 0)[:, None] & within)


@triton.jit(do_not_specialize=["units", "entries"])
def _gather(  # type: ignore[no-untyped-def]
    addresses, tokens, keys, values, entries, count, units, heads, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BEGIN: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * ENTRIES, entries, tl.num_programs(0) * ENTRIES):
        entry = first + tl.arange(0, ENTRIES).to(tl.int64)
        there = entry < entries
        token = tl.load(tokens + entry, mask=there, other=-1)
        head = entry // count
        address = tl.load(addresses + head // heads * units + token // GROUP, mask=token >= 0, other=0)
        begin = token % GROUP * WIDTH
        _copied(address, begin + head % heads * KEY, keys, entry, token, KEY, KEY_WIDE)
        _copied(address, begin + BEGIN + head % heads * VALUE, values, entry, token, VALUE, VALUE_WIDE)


@triton.jit(do_not_specialize=["width"])
def _exchange(held, wanted, new, counts, count, width, HELD: tl.constexpr, WANTED: tl.constexpr):  # type: ignore[no-untyped-def]
    head = tl.program_id(0).to(tl.int64)
    slot, place = tl.arange(0, HELD), tl.arange(0, WANTED)
    there = tl.load(held + head * count + slot, mask=slot < count, other=-1).to(tl.int32)
    asked = tl.load(wanted + head * width + place, mask=place < width, other=-1).to(tl.int32)
    same = ((there[:, None] == asked[None, :]) & (asked >= 0)[None, :]).to(tl.int32)
    stays, absent = tl.max(same, 1), ((asked >= 0) & (tl.max(same, 0) == 0)).to(tl.int32)
    free = ((slot < count) & (stays == 0)).to(tl.int32)
    of_slot, of_place = tl.cumsum(free, 0), tl.cumsum(absent, 0)
    match = (of_slot[:, None] == of_place[None, :]) & (free[:, None] * absent[None, :] != 0)
    comes = tl.max(tl.where(match, asked[None, :], -1), 1)
    tl.store(held + head * count + slot, tl.where(stays != 0, there, comes), mask=slot < count)
    tl.store(new + head * count + slot, comes, mask=slot < count)
    tl.store(counts + head, tl.sum(absent.to(tl.int64), 0))


def exchange(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `host_entries.exchange`, of contiguous tensors."""
    rows, heads, count = tokens.shape
    options: dict[str, Any] = {"dtype": torch.int64, "device": tokens.device}
    new, counts = torch.empty(tokens.shape, **options), torch.empty(rows, heads, **options)
    both = wide(max(count, wanted.shape[2]))
    _exchange[(rows * heads,)](
        tokens, wanted, new, counts, count, wanted.shape[2], both, both, num_warps=4 if both <= 128 else 8
    )
    return new, counts


def bring(
    addresses: torch.Tensor, tokens: torch.Tensor, form: Any, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """As `host_entries.bring`, of contiguous tensors."""
    _, heads, count = tokens.shape
    if not tokens.numel():
        return
    grid: Any = (min(_PROGRAMS, triton.cdiv(tokens.numel(), _ENTRIES)),)
    _gather[grid](
        addresses, tokens, keys, values, tokens.numel(), count, addresses.shape[1], heads, form.group_size,
        form.entry_width, form.key_width, form.key_dim, form.value_dim,
        *map(triton.next_power_of_2, (form.key_dim, form.value_dim)), _ENTRIES,
    )  # fmt: skip
