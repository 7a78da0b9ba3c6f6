"""How many groups leave a tail, how they are packed for the writer, and what that takes."""

from __future__ import annotations

import numpy as np
import torch

from ..config import OffloadConfig
from .record_format import RecordFormat

PIECE_BYTES = 1 << 20
"""Bytes that are packed and handed to the writer at a time: no more than this, nor than half the write queue."""


def places_within(counts: np.ndarray) -> np.ndarray:
    """Of some things, `counts` (n,) of them one after the other, the how manieth of its own each is, from 0 on."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def leaving(
    form: RecordFormat, tail: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the first `count` tokens of a tail (rows, t, entry width), followed by these new ones (rows,
    heads, n, D): views, in parts of which none is empty."""
    new = max(0, count - tail.shape[1])
    parts = [form.split(tail[:, :count]), (keys[:, :, :new], values[:, :, :new])]
    return [part for part in parts if part[0].shape[2]]


def piece_groups(form: RecordFormat, rows: int, write_queue: int) -> int:
    """Groups a row that `append` packs at a time."""
    return max(1, min(PIECE_BYTES, write_queue // 2) // (rows * form.record_bytes))


def together(form: RecordFormat, config: OffloadConfig) -> int:
    """Groups that leave a tail together."""
    return -(-config.leave_together // form.group_size)


def latest_tokens(form: RecordFormat, config: OffloadConfig) -> int:
    """Tokens a row that a tail holds at most when an `append` has ended, and one group."""
    return config.num_recent + together(form, config) * form.group_size


def packing_bytes(form: RecordFormat, rows: int, latest: int, groups: int) -> int:
    """What `append` holds while it packs `groups` groups a row: entries, their records, and a new tail of `latest`
    tokens."""
    group_bytes = form.payload_width * form.dtype.itemsize + form.record_bytes
    return rows * (groups * group_bytes + latest * form.entry_bytes)


def sealed_groups(form: RecordFormat, config: OffloadConfig, context: int) -> int:
    """Groups a row that are sealed when `context` tokens are held."""
    return max(0, context - config.num_recent) // form.group_size
