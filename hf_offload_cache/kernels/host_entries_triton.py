"""Single tokens' entries out of records in pinned host memory, which a GPU reads over its bus by itself."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .on_a_device import on_its_device

_ENTRIES = 16
"""Entries of a head that a program reads at a time."""
_PROGRAMS = 264
"""Enough to keep a bus busy; more would keep the device from other work."""


@triton.jit
def _copied(  # type: ignore[no-untyped-def]
    address, begin, out, entry, token, there, DIM: tl.constexpr, WIDE: tl.constexpr, KEEPS: tl.constexpr
):  # fmt: skip
    channel = tl.arange(0, WIDE)
    within = (channel < DIM)[None, :]
    record = address.to(tl.pointer_type(out.dtype.element_ty))
    found = tl.load(record[:, None] + begin[:, None] + channel[None, :], mask=(token >= 0)[:, None] & within, other=0)
    into = out + entry[:, None] * DIM + channel[None, :]
    if KEEPS:
        tl.store(into, found, mask=(token >= 0)[:, None] & within)
    else:
        tl.store(into, found, mask=there[:, None] & within)


@triton.jit(do_not_specialize=["units", "entries"])
def _gather(  # type: ignore[no-untyped-def]
    addresses, tokens, keys, values, entries, count, units, heads, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BEGIN: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    ENTRIES: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * ENTRIES, entries, tl.num_programs(0) * ENTRIES):
        entry = first + tl.arange(0, ENTRIES).to(tl.int64)
        there = entry < entries
        token = tl.load(tokens + entry, mask=there, other=-1)
        head = entry // count
        address = tl.load(addresses + head // heads * units + token // GROUP, mask=token >= 0, other=0)
        begin = token % GROUP * WIDTH
        _copied(address, begin + head % heads * KEY, keys, entry, token, there, KEY, KEY_WIDE, KEEPS)
        _copied(address, begin + BEGIN + head % heads * VALUE, values, entry, token, there, VALUE, VALUE_WIDE, KEEPS)


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
    tl.atomic_add(counts, tl.sum((asked >= 0).to(tl.int64), 0))
    tl.atomic_add(counts + 1, tl.sum(absent.to(tl.int64), 0))


MOST_EXCHANGED = 256
"""Upper bound on the entries per head of `exchange`."""


@on_its_device
def exchange(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `tokens` (rows, heads, n) int64, -1: none, exactly those `wanted` (rows, heads, n at most); tokens that stay
    keep their place. Returns the new ones, (rows, heads, n), -1 elsewhere; and the numbers of wanted and of new tokens:
    (2,) int64. At most `MOST_EXCHANGED` per head. Its twin is `ChosenEntries.take`."""
    rows, heads, count = tokens.shape
    new, counts = torch.empty_like(tokens), tokens.new_zeros(2)
    wide = max(16, triton.next_power_of_2(max(count, wanted.shape[2])))
    _exchange[(rows * heads,)](
        tokens, wanted.contiguous(), new, counts, count, wanted.shape[2], wide, wide, num_warps=4 if wide <= 128 else 8
    )
    return new, counts


def gather(addresses: torch.Tensor, tokens: torch.Tensor, form: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (rows, heads, m, Dk) and values (rows, heads, m, Dv) of `tokens` (rows, heads, m), -1: zeros, in `form`'s
    type, on the device of both and its current stream.

    `addresses` (rows, units) int64: the start of each row's units of `form.group_size` tokens, in host memory that the
    device reads, which must stay until this has run. Each head has both a key and a value. Under `TRITON_INTERPRET=1`
    on a CPU, for tests. Its twin is `MemoryStore.read_parts`, by which a CPU reads the same.
    """
    options = {"dtype": form.dtype, "device": tokens.device}
    keys, values = (torch.empty(*tokens.shape, dim, **options) for dim in (form.key_dim, form.value_dim))
    gather_into(addresses, tokens.contiguous(), form, (keys, values), keeps=False)
    return keys, values


@on_its_device
def gather_into(
    addresses: torch.Tensor, tokens: torch.Tensor, form: Any, out: tuple[torch.Tensor, torch.Tensor], *, keeps: bool
) -> None:
    """Like `gather`, into existing contiguous keys and values. `keeps`: entries without a token stay as they are."""
    rows, heads, count = tokens.shape
    if not tokens.numel():
        return
    grid: Any = (min(_PROGRAMS, triton.cdiv(tokens.numel(), _ENTRIES)),)
    _gather[grid](
        addresses, tokens, *out, tokens.numel(), count, addresses.shape[1], heads, form.group_size, form.entry_width,
        form.key_width, form.key_dim, form.value_dim, *map(triton.next_power_of_2, (form.key_dim, form.value_dim)),
        _ENTRIES, keeps,
    )  # fmt: skip
