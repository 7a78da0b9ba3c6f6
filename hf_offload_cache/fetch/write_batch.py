"""What waits to be written: batches, and those of one store."""

from __future__ import annotations

import numpy as np
import torch

from ..stores.base import Store, runs


class WriteBatch:
    """What was given to one `WriteQueue.add`.

    Attributes:
        started: the thread has begun to write it.
        lowest, highest: of the ids; 0 and -1 for none.
    """

    def __init__(self, store: Store, ids: np.ndarray, records: torch.Tensor) -> None:
        self.store: Store | None = store
        self.ids = ids
        self.records = records
        self.nbytes = records.numel()
        self.started = False
        self.lowest, self.highest = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)


class StoreWrites:
    """The writes of one store.

    Attributes:
        batches: those that are queued, oldest first; the one that is being written is in it.
        lost: records whose write failed, and with what, until they are written again.
        failure: what a write failed with, until it was reported.
    """

    def __init__(self) -> None:
        self.batches: list[WriteBatch] = []
        self.lost: list[tuple[np.ndarray, BaseException]] = []
        self.failure: BaseException | None = None


def copy_rows(
    queued: list[tuple[WriteBatch, torch.Tensor]], ids: np.ndarray, out: torch.Tensor
) -> list[tuple[int, int]]:
    """Fill the rows of `out` whose records are in `queued` (oldest first); the ranges of rows that remain."""
    absent = np.ones(len(ids), dtype=bool)
    if len(ids):
        lowest, highest = int(ids.min()), int(ids.max())
        rows = out.numpy()
        for batch, records in queued:
            if batch.lowest > highest or batch.highest < lowest:
                continue
            found = np.isin(ids, batch.ids)
            if found.any():
                order = np.argsort(batch.ids)
                rows[found] = records.numpy()[order[np.searchsorted(batch.ids, ids[found], sorter=order)]]
                absent[found] = False
    positions = np.flatnonzero(absent)
    return [(int(positions[first]), int(positions[stop - 1]) + 1) for first, stop in runs(positions)]
