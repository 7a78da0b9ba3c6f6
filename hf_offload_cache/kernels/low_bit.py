"""Elements in 1, 2 or 4 bits, group-wise, and back, and attention over them (KIVI; SpeCache, section 3.4); and entries
in 8 bits and back.

A row is one group: its codes, the first in the lowest bits of the first byte, then scale and zero point in half
precision; an element is code * scale + zero point. With 2 and 4 bits these are the rows of torch's own quantised
embeddings, whose compiled code packs and unpacks them on a CPU. One bit is spread to two for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from .on_a_device import with_kernel

LARGEST = 65000.0
"""Upper bound on elements, because scales and zero points are in half precision."""
SIDES = 4
"""Bytes of a row besides its codes."""
BLOCK = 4096
"""Tokens of a head unpacked at a time: a MB of 64 channels, which stays in the processor's cache."""
LEVELS = 127
"""Levels of either sign of an entry in 8 bits."""
_OPS = torch.ops.quantized


def row_bytes(group: int, bits: int) -> int:
    """Bytes of a group's row; its codes fill complete bytes."""
    return group * bits // 8 + SIDES


def packed(values: torch.Tensor, bits: int, *, plain: bool = False) -> torch.Tensor:
    """Rows (n, row_bytes) uint8 of groups (n, group).

    With 1 bit the zero point is the middle of the lower half of the range, and one step beyond it is that of the upper
    half (equation 3); `plain`: the smallest and the largest element, as with more bits (equation 2).
    """
    values = values.float().clamp(-LARGEST, LARGEST)
    if bits > 1 and values.device.type == "cpu":
        prepack = _OPS.embedding_bag_2bit_prepack if bits == 2 else _OPS.embedding_bag_4bit_prepack
        return prepack(values.contiguous())
    return packed_plainly(values, bits, plain)


def packed_plainly(values: torch.Tensor, bits: int, plain: bool) -> torch.Tensor:
    """The twin of `packed` for float32 values within `LARGEST`, in operations that every device has."""
    low, high = values.aminmax(dim=-1, keepdim=True)
    if bits > 1:
        zero = low.half()
        span = high - zero.float()
        scale = (span / (2**bits - 1)).half()
        scale = torch.where((span == 0) | (scale == 0), 1, scale)
        codes = (values - zero.float()) * (1 / scale.float())
    else:
        zero, scale = (low, high - low) if plain else ((3 * low + high) / 4, (high - low) / 2)
        zero, scale = zero.half(), scale.clamp(max=LARGEST).half()
        codes = (values - zero.float()) / scale.float().clamp(min=torch.finfo(torch.float16).tiny)
    codes = codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    in_bytes = (codes.unflatten(1, (-1, 8 // bits)) << shifts).sum(2, dtype=torch.uint8)
    return torch.cat([in_bytes, torch.cat([scale, zero], 1).view(torch.uint8)], 1)


def group_of(rows: torch.Tensor, bits: int) -> int:
    """Elements of each of the rows."""
    return (rows.shape[-1] - SIDES) * 8 // bits


@with_kernel()
def pack(
    keys: torch.Tensor, values: torch.Tensor, bits: int, plain: bool, key_rows: torch.Tensor, value_rows: torch.Tensor
) -> None:
    """Quantise keys (B, K, T, D) and values (B, K, T, Dv), of any strides, as `packed` does.

    Args:
        key_rows: (B, K, T / group, D, row bytes) uint8: a row has one channel of a group of tokens. Filled.
        value_rows: (B, K, parts, T, row bytes) uint8: a row has a token's channels of one part. Filled. Channels beyond
            Dv are filled up with the last one.
    """
    group, part, filled = group_of(key_rows, bits), group_of(value_rows, bits), values
    groups = keys.unflatten(2, (-1, group)).transpose(3, 4).reshape(-1, group)
    key_rows.copy_(packed(groups, bits, plain=plain).view_as(key_rows))
    if more := part * value_rows.shape[2] - values.shape[3]:
        filled = torch.cat([values, values[..., -1:].expand(-1, -1, -1, more)], 3)
    groups = filled.unflatten(3, (-1, part)).transpose(2, 3).reshape(-1, part)
    value_rows.copy_(packed(groups, bits, plain=plain).view_as(value_rows))


def unpacked(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Elements (..., group) float32 of contiguous rows (..., row_bytes)."""
    if rows.device.type != "cpu":
        return unpacked_plainly(rows, bits)
    flat = rows.flatten(0, -2)
    if bits == 1:
        flat, bits = _in_two_bits(flat), 2
    unpack = _OPS.embedding_bag_2bit_unpack if bits == 2 else _OPS.embedding_bag_4bit_unpack
    return unpack(flat).view(*rows.shape[:-1], -1)


def unpacked_plainly(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The twin of `unpacked`, in operations that every device has."""
    codes, sides = rows[..., :-SIDES], torch.cat([rows[..., -SIDES:-2], rows[..., -2:]], -1)  # a copy, which is aligned
    sides = sides.view(torch.float16).float()
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device)
    spread = (codes.unsqueeze(-1) >> shifts & 2**bits - 1).flatten(-2)
    return spread * sides[..., :1] + sides[..., 1:]


def _in_two_bits(rows: torch.Tensor) -> torch.Tensor:
    """Rows of 1 bit as rows of 2."""
    codes = np.take(_spread_bits(), rows[:, :-SIDES].numpy()).view(np.uint8)
    return torch.cat([torch.from_numpy(codes), rows[:, -SIDES:]], 1)


@cache
def _spread_bits() -> np.ndarray:
    """Bits of each byte, spread to two bits each: (256,) uint16, little-endian."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return (bits << 2 * np.arange(8)).sum(1).astype("<u2")


def scores(queries: torch.Tensor, keys: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Products of queries (rows, heads, n, D) float32 with keys, into `out` (rows, heads, n, tokens) float32.

    A row of `keys` (rows, heads, groups, D, row_bytes) has one channel of a group of tokens. Unpacked block by block;
    `low_bit_triton.scores` does it on a device that has its kernels.
    """
    group = out.shape[3] // keys.shape[2] if keys.shape[2] else 1
    for start in range(0, out.shape[3], BLOCK):
        stop = min(start + BLOCK, out.shape[3])
        for row, head in np.ndindex(*queries.shape[:2]):
            groups = keys[row, head, start // group : stop // group]
            products = queries[row, head] @ unpacked(groups, bits)  # (groups, n, tokens of a group)
            out[row, head, :, start:stop].unflatten(1, (-1, group)).copy_(products.transpose(0, 1))


def weighted(shares: torch.Tensor, values: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Sums of values weighted by `shares` (rows, heads, n, tokens) float32: (rows, heads, n, D) float32.

    A row of `values` (rows, heads, groups, tokens, row_bytes) has one group of channels of a token. `group`: tokens
    summed at a time, a divisor of their number. Like `scores`; `low_bit_triton.weighted` does it on a device.
    """
    groups, channels = values.shape[2], (values.shape[4] - SIDES) * 8 // bits
    total = shares.new_zeros(*shares.shape[:3], groups * channels)
    for start in range(0, shares.shape[3], BLOCK):
        stop = min(start + BLOCK, shares.shape[3])
        for row, head in np.ndindex(*shares.shape[:2]):
            part = shares[row, head, :, start:stop].unflatten(1, (-1, group)).transpose(0, 1)
            for into, rows in zip(total[row, head].split(channels, 1), values[row, head, :, start:stop], strict=True):
                parts = part @ unpacked(rows, bits).unflatten(0, (-1, group))  # one product per thread
                into += parts.sum(0)
    return total


# Replicas of records in 4 bits

_AT_ONCE = 1 << 15
"""Elements processed at a time in host memory."""


@dataclass(frozen=True)
class ReplicaLayout:
    """A replica of `width` elements: one row for each `group` elements, a multiple of 4 that divides them."""

    width: int
    group: int

    @classmethod
    def of(cls, group: int, *widths: int) -> ReplicaLayout | None:
        """For parts of these widths, each in separate groups of at most `group`, a power of two. None: some part has no
        multiple of 4."""
        own = math.gcd(group, *widths)
        return None if own % 4 else cls(sum(widths), own)

    @cached_property
    def row_bytes(self) -> int:
        return row_bytes(self.group, 4)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one replica."""
        return self.width // self.group * self.row_bytes

    @cached_property
    def at_once(self) -> int:
        """Replicas processed at a time."""
        return max(1, _AT_ONCE // self.width)

    @property
    def working_bytes(self) -> int:
        """Memory of packing or unpacking besides its arguments: elements in 32 bits, a copy in 16, and rows."""
        return self.at_once * (6 * self.width + self.nbytes)

    def rows(self, replicas: torch.Tensor) -> torch.Tensor:
        """The rows (n, rows, row_bytes) of replicas (n, at least nbytes) uint8."""
        return replicas[:, : self.nbytes].reshape(len(replicas), -1, self.row_bytes)


def pack_replicas(layout: ReplicaLayout, entries: torch.Tensor, out: torch.Tensor) -> None:
    """Replicas of entries (n, width), none beyond `LARGEST`, into `out` (n, at least nbytes) uint8, in host memory.
    Bytes after `nbytes` become zeros."""
    out[:, layout.nbytes :] = 0
    for start in range(0, len(entries), layout.at_once):
        elements = entries[start : start + layout.at_once].float()
        rows = _OPS.embedding_bag_4bit_prepack(elements.reshape(-1, layout.group))
        out[start : start + len(elements), : layout.nbytes] = rows.view(len(elements), -1)


@with_kernel()
def unpack_replicas(
    layout: ReplicaLayout, replicas: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, target: torch.Tensor
) -> None:
    """Entries of replica `rows[i]` of `replicas` (n, at least nbytes) uint8 into row `target[i]` of `out` (N, width).
    `rows` and `target` are int64."""
    if replicas.device.type != "cpu":
        out[target] = unpacked_plainly(layout.rows(replicas[rows]), 4).flatten(1).to(out.dtype)
        return
    places, into, got = target.numpy(), out.view(torch.uint8).numpy(), rows.numpy()
    packed = replicas.numpy()
    for start in range(0, len(got), layout.at_once):
        packed_part = torch.from_numpy(packed[got[start : start + layout.at_once], : layout.nbytes])
        entries = _OPS.embedding_bag_4bit_unpack(packed_part.view(-1, layout.row_bytes)).to(out.dtype)
        into[places[start : start + layout.at_once]] = entries.view(len(packed_part), -1).view(torch.uint8).numpy()


# Entries in 8 bits

@with_kernel()
def pack_entries(entries: torch.Tensor, records: torch.Tensor, form: Any) -> None:
    """Write entries (n, G, entry width), contiguous in the last dimension, to `records` (n, at least the payload width)
    uint8 of `form`, a `RecordFormat` in 8 bits of at most 32: see its `pack`. Bytes between integers and largest
    magnitudes, and behind these, become zeros."""
    payloads = records[:, : form.payload_width]
    payloads[:, form.record_width : form.largest_at] = records[:, form.payload_width :] = 0
    form.quantise(form.unpacking(payloads, entries))


@with_kernel()
def unpack_entries(payloads: torch.Tensor, entries: torch.Tensor, form: Any) -> None:
    """Write the entries (n, G, entry width), contiguous, of `payloads` that `pack_entries` has filled."""
    views = form.unpacking(payloads, entries)
    form.unpack(views)
