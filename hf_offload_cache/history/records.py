"""The layout of keys and values in a record: one entry a token, all key heads and then all value heads, no gaps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..config import OffloadConfig
from ..stores.base import DEVICE_BLOCK

# `torch.autocast`: the model's own attention runs under it; storing and selecting run without it

def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that `torch.autocast` casts to in this thread on `device`; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off for this thread, on `device` and on the processor, where part of the selection runs.

    Operations then keep their arguments' type. Every layer of a step calls it, so it first checks whether autocast is
    on, which it seldom is."""
    on = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
    return _off(on) if on else nullcontext()


@contextmanager
def _off(kinds: list[str]) -> Iterator[None]:
    with ExitStack() as off:
        for kind in kinds:
            off.enter_context(torch.autocast(kind, enabled=False))
        yield


TARGET_RECORD_BYTES = 16 * 1024
"""Reads of this size come close to the best rate for small devices (bandwidth over operations a second)."""


def stored_dtype(keys: torch.Tensor, values: torch.Tensor) -> torch.dtype:
    """The type that both are stored in: their own. If they differ, the type that attention casts both to under
    `torch.autocast`; without it, the type that can represent both."""
    if keys.dtype == values.dtype:
        return keys.dtype
    return autocast_dtype(keys.device) or torch.promote_types(keys.dtype, values.dtype)


@dataclass(frozen=True)
class RecordFormat:
    """Geometry of one layer's records. A record holds `group_size` consecutive tokens of one sequence.

    Entries lie token after token, so gathered records are attention's keys and values as strided views.
    """

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    dtype: torch.dtype
    group_size: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, group_size: int | None) -> RecordFormat:
        """The format for keys (B, Hk, T, Dk) and values (B, Hv, T, Dv) in `stored_dtype`.

        Without `group_size`: the largest power of two from 4 to 16 whose record is at most 16 KiB, or 4.
        """
        sizes = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
        return cls.of_sizes(sizes, stored_dtype(keys, values), group_size)

    @classmethod
    def of_sizes(cls, sizes: tuple[int, int, int, int], dtype: torch.dtype, group_size: int | None) -> RecordFormat:
        """As `of`, for `sizes` (Hk, Dk, Hv, Dv)."""
        if group_size is None:
            entry = (sizes[0] * sizes[1] + sizes[2] * sizes[3]) * dtype.itemsize
            group_size = 4
            while group_size < 16 and 2 * group_size * entry <= TARGET_RECORD_BYTES:
                group_size *= 2
        return cls(*sizes, dtype, group_size)

    @cached_property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @cached_property
    def entry_width(self) -> int:
        """Elements of one token."""
        return self.key_width + self.num_value_heads * self.value_dim

    @cached_property
    def entry_bytes(self) -> int:
        return self.entry_width * self.dtype.itemsize

    @cached_property
    def payload_width(self) -> int:
        """Elements of one record without padding."""
        return self.group_size * self.entry_width

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one record on disk: the payload rounded up to the device's block."""
        return -(-self.payload_width * self.dtype.itemsize // DEVICE_BLOCK) * DEVICE_BLOCK

    def entries(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write keys (B, Hk, T, Dk) and values (B, Hv, T, Dv) into `out` (B, T, entry_width); returns `out`."""
        batch, _, tokens, _ = keys.shape
        width = self.key_width
        out[..., :width].view(batch, tokens, self.num_key_heads, self.key_dim).copy_(keys.transpose(1, 2))
        out[..., width:].view(batch, tokens, self.num_value_heads, self.value_dim).copy_(values.transpose(1, 2))
        return out

    def split(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, Hk, T, Dk) and values (B, Hv, T, Dv) as views of entries (B, T, entry_width)."""
        batch, tokens, width = *entries.shape[:2], self.key_width
        if (self.num_key_heads, self.key_dim) == (self.num_value_heads, self.value_dim):
            both = entries.view(batch, tokens, 2, self.num_key_heads, self.key_dim).permute(2, 0, 3, 1, 4)
            return both[0], both[1]
        keys = entries[..., :width].view(batch, tokens, self.num_key_heads, self.key_dim)
        values = entries[..., width:].view(batch, tokens, self.num_value_heads, self.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def payload(self, records: torch.Tensor) -> torch.Tensor:
        """The payload (n, payload_width) of raw records (uint8, (n, record_bytes)) as a view."""
        return records.view(self.dtype)[:, : self.payload_width]


# The number of groups that leave a tail, their packing for the writer, and its memory

PIECE_BYTES = 1 << 20
"""Maximum bytes that are packed and handed to the writer at a time; half the write queue if that is less."""


def places_within(counts: np.ndarray) -> np.ndarray:
    """For runs of lengths `counts` (n,) laid end to end, each element's index within its run."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def leaving(
    form: RecordFormat, tail: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the first `count` tokens of a tail (rows, t, entry width) followed by the new keys and values
    (rows, heads, n, D): views, in non-empty parts."""
    new = max(0, count - tail.shape[1])
    parts = [form.split(tail[:, :count]), (keys[:, :, :new], values[:, :, :new])]
    return [part for part in parts if part[0].shape[2]]


def piece_groups(form: RecordFormat, rows: int, write_queue: int) -> int:
    """Number of groups a row that `append` packs at a time."""
    return max(1, min(PIECE_BYTES, write_queue // 2) // (rows * form.record_bytes))


def together(form: RecordFormat, config: OffloadConfig) -> int:
    """Number of groups that leave a tail at once."""
    return -(-config.leave_together // form.group_size)


def latest_tokens(form: RecordFormat, config: OffloadConfig) -> int:
    """Maximum tokens a row in a tail after an `append`, plus one group."""
    return config.num_recent + together(form, config) * form.group_size


def packing_bytes(form: RecordFormat, rows: int, latest: int, groups: int) -> int:
    """Memory of `append` while it packs `groups` groups a row: entries, their records, and a new tail of `latest`
    tokens."""
    group_bytes = form.payload_width * form.dtype.itemsize + form.record_bytes
    return rows * (groups * group_bytes + latest * form.entry_bytes)


def sealed_groups(form: RecordFormat, config: OffloadConfig, context: int) -> int:
    """Number of groups a row that are sealed at a length of `context` tokens."""
    return max(0, context - config.num_recent) // form.group_size
