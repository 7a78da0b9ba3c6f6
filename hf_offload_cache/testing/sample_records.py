"""Random records, put into a store and read back; and what a process has open."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ..stores.base import Store, aligned_empty

RECORD_BYTES = 8192


def pattern(count: int, *, seed: int = 0, record_bytes: int = RECORD_BYTES) -> torch.Tensor:
    """Random records (count, record_bytes), aligned, the same for the same arguments."""
    records = aligned_empty(count, record_bytes)
    records.numpy()[:] = np.random.default_rng(seed).integers(0, 256, (count, record_bytes), dtype=np.uint8)
    return records


def fill(store: Store, count: int, *, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Allocate and write `count` random records: their ids and content."""
    ids, records = store.allocate(count), pattern(count, seed=seed, record_bytes=store.record_bytes)
    store.write(ids, records)
    return ids, records


def read(store: Store, ids: np.ndarray) -> torch.Tensor:
    """The records `ids`, read into memory that held other bytes before."""
    out = aligned_empty(len(ids), store.record_bytes).fill_(0xEE)
    store.read(ids, out)
    return out


def open_descriptors() -> int:
    """Descriptors that this process has open; -1 where the platform does not tell."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else -1


def file_maps(directory: Path) -> int:
    """Maps that this process has of files in `directory`; -1 where the platform does not tell."""
    maps = Path("/proc/self/maps")
    return sum(str(directory) in line for line in maps.read_text().splitlines()) if maps.exists() else -1
