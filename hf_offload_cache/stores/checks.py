"""What every store asks of its arguments, said once."""

from __future__ import annotations

import errno

import numpy as np
import torch

from ..errors import StoreError
from .base import DEVICE_BLOCK


def check_batch(ids: np.ndarray, records: torch.Tensor, record_bytes: int, *, aligned: bool = False) -> None:
    """Raise unless `ids` and `records` are what `Store.read` (`aligned`) and `Store.write` take.

    `TypeError` for the wrong dtype or device, `ValueError` for a wrong shape, stride or alignment.
    """
    if ids.dtype != np.int64:
        raise TypeError(f"ids must be int64, got {ids.dtype}")
    if records.dtype != torch.uint8 or records.device.type != "cpu":
        raise TypeError(f"records must be uint8 in host memory, got {records.dtype} on {records.device}")
    if ids.ndim != 1 or records.shape != (ids.size, record_bytes):
        raise ValueError(
            f"records must have shape (len(ids), record_bytes) = ({ids.size}, {record_bytes}) and ids one dimension, "
            f"got {tuple(records.shape)} and ids of shape {ids.shape}"
        )
    if not records.is_contiguous():
        raise ValueError("records must be contiguous; call .contiguous()")
    if aligned and ids.size and records.data_ptr() % DEVICE_BLOCK:
        raise ValueError(f"out must be aligned to {DEVICE_BLOCK} bytes; make it with aligned_empty")


def check_range(name: str, ids: np.ndarray, capacity: int, first_id: int = 0) -> None:
    """Raise `StoreError` when one of `ids` is not a record of the store called `name`, which has `capacity`.

    The message counts records from `first_id`.
    """
    if ids.size and np.maximum.reduce(ids.view(np.uint64)) >= capacity:  # a negative one is above all others
        outside = ids[(ids < 0) | (ids >= capacity)] + first_id
        exist = f"{capacity} records that exist" + (f" from {first_id} on" if first_id else "")
        raise StoreError(errno.EINVAL, f"{name}: {describe(outside)} outside the {exist}")


def describe(ids: np.ndarray) -> str:
    """Records as a message names them: "record 7", "records 7..9 (3)"."""
    if len(ids) == 1:
        return f"record {int(ids[0])}"
    return f"records {int(ids.min())}..{int(ids.max())} ({len(ids)})"
