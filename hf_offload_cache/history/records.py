"""The layout of keys and values in a record: one entry a token, all key heads and then all value heads, no gaps.

In 8 bits, the entries' integers come first, followed by the largest magnitude of each token and head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch

from ..config import BLOCK_TOKENS, OffloadConfig
from ..errors import ConfigError
from ..kernels.low_bit import LEVELS, pack_entries, unpack_entries
from ..kernels.on_a_device import has_step
from ..memory.account import MemoryAccount
from ..stores.base import DEVICE_BLOCK
from ..stores.memory import CHUNK_BYTES

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


PACKED_AT_ONCE, PACKED_BY_A_DEVICE = 1 << 16, 1 << 23
"""Elements that are packed at a time, for which there is temporary memory; and on a device without a budget, where each
time costs the same launches."""


def stored_dtype(keys: torch.Tensor, values: torch.Tensor) -> torch.dtype:
    """The type that both are stored in: their own. If they differ, the type that attention casts both to under
    `torch.autocast`; without it, the type that can represent both."""
    if keys.dtype == values.dtype:
        return keys.dtype
    return autocast_dtype(keys.device) or torch.promote_types(keys.dtype, values.dtype)


@dataclass(frozen=True)
class RecordFormat:
    """Geometry of one layer's records. A record holds `group_size` consecutive tokens of one sequence.

    Entries lie token after token, so gathered records are attention's keys and values as strided views. With `bits`,
    records hold them in fewer bits: integers up to `LEVELS` of either sign, times a scale of each token's head, its
    largest magnitude divided by `LEVELS`. Entries that were unpacked are packed again without a further change.
    """

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    dtype: torch.dtype
    """Type of the entries in memory, for attention."""
    group_size: int
    bits: int | None = None
    """8: records hold integers of 8 bits; None: `dtype`."""

    def __post_init__(self) -> None:
        if self.bits is not None and self.dtype.itemsize == 1:
            raise ConfigError(
                f"the model's keys and values are {self.dtype}, which has 8 bits already: leave out entry_bits="
                f"{self.bits} (weights of 8 bits alone, with keys and values of 16, work)"
            )

    @classmethod
    def of(
        cls, keys: torch.Tensor, values: torch.Tensor, group_size: int | None, bits: int | None = None
    ) -> RecordFormat:
        """The format for keys (B, Hk, T, Dk) and values (B, Hv, T, Dv) in `stored_dtype`.

        Without `group_size`: the largest power of two from 4 to 16 whose record is at most 16 KiB, or 4. With `bits`:
        the number of tokens from 4 to 16 whose record has the fewest bytes a token, the largest of several.
        """
        sizes = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
        return cls.of_sizes(sizes, stored_dtype(keys, values), group_size, bits)

    @classmethod
    @lru_cache(64)
    def of_sizes(
        cls, sizes: tuple[int, int, int, int], dtype: torch.dtype, group_size: int | None, bits: int | None = None
    ) -> RecordFormat:
        """As `of`, for `sizes` (Hk, Dk, Hv, Dv). Cached because planning asks for the same ones often."""
        if group_size is None and bits is not None:  # largest magnitudes make an entry a little too large for a block
            forms = [cls(*sizes, dtype, count, bits) for count in range(16, 3, -1)]
            short = [form for form in forms if form.record_bytes <= TARGET_RECORD_BYTES] or forms[-1:]
            return min(short, key=lambda form: form.record_bytes / form.group_size)
        if group_size is None:
            entry = (sizes[0] * sizes[1] + sizes[2] * sizes[3]) * dtype.itemsize
            group_size = 4
            while group_size < 16 and 2 * group_size * entry <= TARGET_RECORD_BYTES:
                group_size *= 2
        return cls(*sizes, dtype, group_size, bits)

    def joined(self, heads: int) -> RecordFormat:
        """The format of `heads` rows side by side, the key heads of a sequence."""
        if heads == 1:
            return self
        return replace(self, num_key_heads=heads * self.num_key_heads, num_value_heads=heads * self.num_value_heads)

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
    def record_width(self) -> int:
        """Elements of the entries of one record, in `dtype`."""
        return self.group_size * self.entry_width

    @cached_property
    def payload_dtype(self) -> torch.dtype:
        """Type of a record's payload: that of entries, or bytes if entries are packed."""
        return self.dtype if self.bits is None else torch.uint8

    @cached_property
    def payload_width(self) -> int:
        """Elements of one record without padding, in `payload_dtype`."""
        if self.bits is None:
            return self.record_width
        return self.largest_at + self.group_size * (self.num_key_heads + self.num_value_heads) * self.dtype.itemsize

    @cached_property
    def largest_at(self) -> int:
        """Byte of a packed payload at which the largest magnitudes begin: behind the integers, aligned."""
        return -(-self.record_width // self.dtype.itemsize) * self.dtype.itemsize

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one record without padding."""
        return self.payload_width * self.payload_dtype.itemsize

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one record on disk: the payload rounded up to the device's block."""
        return -(-self.payload_bytes // DEVICE_BLOCK) * DEVICE_BLOCK

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
            shape = batch, tokens, 2, self.num_key_heads, self.key_dim
            both = entries.view(shape).permute(2, 0, 3, 1, 4)  # as `both`: a step on a CPU makes no more calls
            return both[0], both[1]
        keys = entries[..., :width].view(batch, tokens, self.num_key_heads, self.key_dim)
        values = entries[..., width:].view(batch, tokens, self.num_value_heads, self.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def both(self, entries: torch.Tensor) -> torch.Tensor:
        """Keys and values as one view (2, B, H, T, D) of entries (B, T, entry_width), if they have the same shape."""
        shape = *entries.shape[:2], 2, self.num_key_heads, self.key_dim
        return entries.view(shape).permute(2, 0, 3, 1, 4)

    def payload(self, records: torch.Tensor) -> torch.Tensor:
        """The payload (n, payload_width) of raw records (uint8, (n, record_bytes)) as a view."""
        return records.view(self.payload_dtype)[:, : self.payload_width]

    @property
    def fills(self) -> bool:
        """Whether entries fill their records as they are, so that they can be written there."""
        return self.bits is None and self.payload_bytes == self.record_bytes

    # --- entries in 8 bits -------------------------------------------------------------------------------------

    def pack(self, entries: torch.Tensor, payloads: torch.Tensor, at_once: int = PACKED_AT_ONCE) -> None:
        """Write the entries (n, group_size, entry_width) of n records to their `payloads` (n, payload_width), in 8 bits
        `at_once` elements at a time.

        In 8 bits an element x of a head of scale s becomes round(x / s), from -127 to 127. A head with an element that
        is not finite becomes NaN. A kernel packs all at once."""
        if self.bits is None:
            payloads.view(entries.shape).copy_(entries)
            return
        if entries.is_cuda and self._has_kernels(entries.device):
            pack_entries(entries, payloads, self)
            return
        step = max(1, at_once // self.record_width)
        for some, into in zip(entries.split(step), payloads.split(step), strict=True):
            into[:, self.record_width : self.largest_at] = 0
            self.quantise(self.unpacking(into, some))

    def fill(self, entries: torch.Tensor, records: torch.Tensor, at_once: int = PACKED_AT_ONCE) -> None:
        """As `pack`, to complete `records` (n, record_bytes) uint8, whose bytes behind the payload become zeros."""
        if self.bits is not None and entries.is_cuda and self._has_kernels(entries.device):
            pack_entries(entries, records, self)
            return
        if self.payload_bytes < self.record_bytes:
            records[:, self.payload_bytes :] = 0
        self.pack(entries, self.payload(records), at_once)

    def quantise(self, views: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Write the integers and largest magnitudes of packed payloads; `views`: of `unpacking`, with the entries."""
        for codes, largest, heads in views:
            wide = heads.to(self._wide, copy=True)
            most = torch.maximum(wide.amax(-1, keepdim=True), -wide.amin(-1, keepdim=True))
            largest.copy_(most)
            factor = self._scales(largest).to(self._wide).reciprocal_().clamp_(max=torch.finfo(self._wide).max)
            codes.copy_(wide.mul_(factor).round_().clamp_(-LEVELS, LEVELS).nan_to_num_(0))

    def _has_kernels(self, device: torch.device) -> bool:
        """Whether kernels pack and unpack such entries on a CUDA device."""
        return self.dtype.itemsize <= 4 and has_step(device)

    def unpacking(
        self, payloads: torch.Tensor, entries: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Views of packed `payloads` (n, payload_width) and of the `entries` (n, group_size, entry_width) that they are
        unpacked to: runs of equal heads, each with integers, largest magnitudes, and the result."""
        return list(zip(*self._packed(payloads), self._heads(entries), strict=True))

    def unpack(self, views: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Write the entries of packed payloads; `views`: of `unpacking`."""
        for codes, largest, heads in views:
            heads.copy_(codes).mul_(self._scales(largest))

    def unpacked(self, payloads: torch.Tensor) -> torch.Tensor:
        """The entries (n, group_size, entry_width) of `payloads` (n, payload_width): a view, or new if they are packed.
        """
        shape = len(payloads), self.group_size, self.entry_width
        if self.bits is None:
            return payloads.view(shape)
        entries = torch.empty(shape, dtype=self.dtype, device=payloads.device)
        if payloads.is_cuda and self._has_kernels(payloads.device):
            unpack_entries(payloads, entries, self)
        else:
            self.unpack(self.unpacking(payloads, entries))
        return entries

    @cached_property
    def _wide(self) -> torch.dtype:
        """Type that packing computes in."""
        return torch.promote_types(self.dtype, torch.float32)

    def _scales(self, largest: torch.Tensor) -> torch.Tensor:
        """The scales of heads with these `largest` magnitudes. In bfloat16 they are rounded, so that unpacking needs no
        conversion to float32, which would take twice as long; float16 has too few exponents for that."""
        return largest.to(self.dtype if self.dtype == torch.bfloat16 else self._wide) / LEVELS

    @cached_property
    def _parts(self) -> tuple[tuple[int, int], ...]:
        """Heads and dimension of the runs of equal heads in an entry."""
        if self.key_dim == self.value_dim:
            return ((self.num_key_heads + self.num_value_heads, self.key_dim),)
        return ((self.num_key_heads, self.key_dim), (self.num_value_heads, self.value_dim))

    def _heads(self, entries: torch.Tensor) -> list[torch.Tensor]:
        """Runs of equal heads, (n, group_size, heads, dimension) each, as views of entries or of their integers."""
        runs = entries.split([heads * dim for heads, dim in self._parts], -1)
        return [run.unflatten(-1, part) for run, part in zip(runs, self._parts, strict=True)]

    def _packed(self, payloads: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The integers of packed payloads, as `_heads`, and each one's largest magnitudes (n, group_size, heads, 1)."""
        codes = payloads[:, : self.record_width].view(torch.int8).unflatten(1, (self.group_size, self.entry_width))
        largest = payloads[:, self.largest_at :].view(self.dtype).unflatten(1, (self.group_size, -1, 1))
        return self._heads(codes), list(largest.split([heads for heads, _ in self._parts], 2))


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


_TOGETHER = 8
"""Most rows of which a device packs `CHUNK_BYTES` each at a time."""


def piece_groups(form: RecordFormat, rows: int, write_queue: int, in_place: bool = False) -> int:
    """Number of groups a row that `append` packs at a time. `in_place`: a device fills them where they are stored."""
    most = min(rows, _TOGETHER) * CHUNK_BYTES if in_place else min(PIECE_BYTES, write_queue // 2)
    return max(1, most // (rows * form.record_bytes))


def together(form: RecordFormat, config: OffloadConfig) -> int:
    """Number of groups that leave a tail at once."""
    return -(-config.leave_together // form.group_size)


def latest_tokens(form: RecordFormat, config: OffloadConfig) -> int:
    """Maximum tokens a row in a tail after an `append`, plus one group."""
    return config.num_recent + together(form, config) * form.group_size


_LONGEST_BLOCK, _LARGEST_BLOCK = 1 << 14, 32 << 20
"""Most tokens per sequence, and most bytes of all rows' entries, of a block that a device gets."""


def longest_block(form: RecordFormat, rows: int) -> int:
    """Most tokens a row in a block for a device other than the CPU, a power of two. There each block costs the same
    launches and waits, however long it is; a longer one than this saves few of them."""
    fitting = max(1, _LARGEST_BLOCK // (rows * form.entry_bytes))
    return max(BLOCK_TOKENS, min(_LONGEST_BLOCK, 1 << fitting.bit_length() - 1))


def block_groups(
    form: RecordFormat, config: OffloadConfig, device: torch.device | str, rows: int, records: int | None = None
) -> int:
    """Most groups a row in a block of a streamed history, which has at most so many `records` a row."""
    least = (config.block_tokens or BLOCK_TOKENS) // form.group_size
    if config.block_tokens is not None or config.memory is not None or torch.device(device).type == "cpu":
        return max(1, least)
    longest = longest_block(form, rows) // form.group_size
    return max(1, least, longest if records is None else min(longest, records))


def packing_bytes(
    form: RecordFormat, rows: int, latest: int, groups: int, at_once: int = PACKED_AT_ONCE
) -> int:
    """Memory of `append` while it packs `groups` groups a row: entries, their records, and a new tail of `latest`
    tokens. `at_once`: as of `RecordFormat.pack`."""
    group_bytes = form.record_width * form.dtype.itemsize + form.record_bytes
    return rows * (groups * group_bytes + latest * form.entry_bytes) + rounding_bytes(form, rows * groups, at_once)


def rounding_bytes(form: RecordFormat, records: int, at_once: int = PACKED_AT_ONCE) -> int:
    """Memory of `RecordFormat.pack` for so many records; 0 if it packs nothing."""
    if form.bits is None:
        return 0
    return min(max(at_once, form.record_width), records * form.record_width) * max(4, form.dtype.itemsize)


def unpacking_bytes(form: RecordFormat, records: int) -> int:
    """Memory of the entries of `records` packed records that were streamed; 0 if they are not packed."""
    return 0 if form.bits is None else records * form.record_width * form.dtype.itemsize


def unpacking(account: MemoryAccount, form: RecordFormat, records: int) -> AbstractContextManager[object]:
    """Book the entries of at most `records` packed records while they are streamed."""
    nbytes = unpacking_bytes(form, records)
    return account.holding("unpacked entries", nbytes) if nbytes else nullcontext()


def sealed_groups(form: RecordFormat, config: OffloadConfig, context: int) -> int:
    """Number of groups a row that are sealed at a length of `context` tokens."""
    return max(0, context - config.num_recent) // form.group_size
