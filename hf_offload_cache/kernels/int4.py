"""Keys and values in 4 bits, group-wise, and back.

The rows are those of torch's own 4-bit embeddings, whose compiled code packs and unpacks them on a CPU: `group` / 2
bytes of codes, two per byte, the first in the low bits, then step and least element in half precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .low_bit import LARGEST as LARGEST
from .low_bit import SIDES

_AT_ONCE = 1 << 15
"""Elements processed at a time."""


@dataclass(frozen=True)
class Int4Layout:
    """A replica of `width` elements: one row for each `group` elements, a multiple of 4 that divides them."""

    width: int
    group: int

    @classmethod
    def of(cls, group: int, *widths: int) -> Int4Layout | None:
        """For parts of these widths, each in separate groups of at most `group`, a power of two. None: some part has no
        multiple of 4."""
        own = math.gcd(group, *widths)
        return None if own % 4 else cls(sum(widths), own)

    @cached_property
    def row_bytes(self) -> int:
        return self.group // 2 + SIDES

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
        """The rows (n * rows, row_bytes) of replicas (n, at least nbytes) uint8."""
        return replicas[:, : self.nbytes].reshape(-1, self.row_bytes)


def quantise(layout: Int4Layout, entries: torch.Tensor, out: torch.Tensor) -> None:
    """Replicas of entries (n, width), none beyond `LARGEST`, into `out` (n, at least nbytes) uint8, in host memory.
    Bytes after `nbytes` become zeros."""
    out[:, layout.nbytes :] = 0
    for start in range(0, len(entries), layout.at_once):
        elements = entries[start : start + layout.at_once].float()
        rows = torch.ops.quantized.embedding_bag_4bit_prepack(elements.reshape(-1, layout.group))
        out[start : start + len(elements), : layout.nbytes] = rows.view(len(elements), -1)


def dequantise(
    layout: Int4Layout, replicas: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, target: torch.Tensor
) -> None:
    """Entries of replica `rows[i]` of `replicas` (n, at least nbytes) uint8 into row `target[i]` of `out` (N, width),
    in host memory; `rows` and `target` int64. `int4_triton.dequantise` does it on a device."""
    places, into, got = target.numpy(), out.view(torch.uint8).numpy(), rows.numpy()
    packed = replicas.numpy()
    for start in range(0, len(got), layout.at_once):
        packed_part = torch.from_numpy(packed[got[start : start + layout.at_once], : layout.nbytes])
        entries = torch.ops.quantized.embedding_bag_4bit_unpack(packed_part.view(-1, layout.row_bytes)).to(out.dtype)
        into[places[start : start + layout.at_once]] = entries.view(len(packed_part), -1).view(torch.uint8).numpy()


def dequantised(layout: Int4Layout, replicas: torch.Tensor) -> torch.Tensor:
    """Entries of replicas (n, at least nbytes) uint8: (n, width) float32, on their device. The twin of both
    `dequantise`."""
    rows = layout.rows(replicas)
    codes, sides = rows[:, : layout.group // 2], rows[:, layout.group // 2 :].contiguous().view(torch.float16).float()
    both = torch.stack([codes & 15, codes >> 4], 2).flatten(1).float()
    return (both * sides[:, :1] + sides[:, 1:]).view(len(replicas), layout.width)
