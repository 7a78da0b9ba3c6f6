"""How a copy in a few bits lies in memory (KIVI; SpeCache, section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..history.record_format import RecordFormat
from ..kernels.low_bit import row_bytes


@dataclass(frozen=True)
class LowBitForm:
    """Keys in groups of `group` tokens, each channel by itself; values in groups of at most `group` channels, each
    token by itself. Rows are as `kernels.low_bit` has them.

    Attributes:
        plain: 1-bit groups as KIVI has them, for comparison (SpeCache, table 5).
    """

    entry: RecordFormat
    bits: int
    group: int
    plain: bool = False

    @cached_property
    def value_dim(self) -> int:
        """Channels of a value, filled up to whole bytes."""
        return -(-self.entry.value_dim // 8) * 8

    @cached_property
    def value_group(self) -> int:
        """Channels of a group of a value."""
        return max(size for size in range(8, self.group + 1, 8) if self.value_dim % size == 0)

    def layout(self, rows: int, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes, of bytes, of `rows` rows of `tokens` tokens, whole groups: keys (rows, Hk, groups, Dk, row bytes) and
        values (rows, Hv, groups of channels, tokens, row bytes)."""
        entry, parts = self.entry, self.value_dim // self.value_group
        key_row, value_row = (row_bytes(group, self.bits) for group in (self.group, self.value_group))
        return {
            "keys": (rows, entry.num_key_heads, tokens // self.group, entry.key_dim, key_row),
            "values": (rows, entry.num_value_heads, parts, tokens, value_row),
        }

    def nbytes(self, rows: int, tokens: int) -> int:
        """Of that."""
        return sum(torch.Size(shape).numel() for shape in self.layout(rows, tokens).values())
