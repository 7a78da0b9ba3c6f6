"""What a CUDA device knows of a layer's clusters, so that steps choose among them without the host."""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.on_a_device import to_device
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from .entries import ClusteredEntries

_OWNER = "centroids"


class DeviceClusters:
    """Copies of a layer's centroids and counts on its device. The account books them as "centroids".

    They are renewed when clusters have changed, which waits for nothing. For the thread that runs the model.
    """

    def __init__(self, clustered: ClusteredEntries, num_sinks: int, account: MemoryAccount) -> None:
        self._clustered, self._num_sinks, self._account = clustered, num_sinks, account
        self._number = -1  # of the change that is known
        self._centroids: torch.Tensor | None = None
        self._tables: torch.Tensor | None = None

    @staticmethod
    def rehearse(run: DryRun, rows: int, clusters: int, largest: int, dim: int) -> None:
        """Take the memory for at most `clusters` clusters a row of `largest` pages, in a dry run; that of the slots'
        tables, too."""
        room = _room(clusters)
        run.keeps(_OWNER, rows * (2 * room * dim + 4 * 3 * clusters))
        run.keeps("tables", (8 + 4) * rows * _room(clusters * largest))

    @property
    def latest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Centroids (rows, clusters, D) float16 and tables (3, rows, clusters) int32, which work of the current stream
        may read: see `kernels.centroids.score`. Valid until clusters change. Raises `BudgetError`; they are renewed
        when they are needed again then."""
        if self._number != self._clustered.changes.number or self._centroids is None or self._tables is None:
            self._renew()
        assert self._centroids is not None and self._tables is not None
        return self._centroids[:, : self._tables.shape[2]], self._tables

    def _renew(self) -> None:
        clustered, partition = self._clustered, self._clustered.partition
        device, centroids = clustered.buffer.entries.device, partition.centroids
        (rows, count, dim), before, changed = centroids.shape, self._centroids, clustered.changes.since(self._number)
        if before is None or len(before) != rows or before.shape[1] < count:
            self.close()
            self._centroids = self._empty(rows, _room(count), dim, dtype=torch.float16, device=device).zero_()
            changed = None
        if self._tables is None or self._tables.shape[1:] != (rows, count):
            if self._tables is not None:
                self._account.free(_OWNER, self._tables)
                self._tables = None
            self._tables = self._empty(3, rows, count, dtype=torch.int32, device=device)
        assert self._centroids is not None
        if changed is None:
            self._centroids[:, :count] = to_device(np.ascontiguousarray(centroids), device)
        else:
            row, cluster = to_device(np.stack(changed).astype(np.int64), device)
            self._centroids[row, cluster] = to_device(centroids[changed], device)
        sinks = np.zeros((rows, count), dtype=np.int32)
        np.add.at(sinks, (np.arange(rows)[:, None], clustered.labels[:, : self._num_sinks]), 1)
        tables = np.stack([partition.counts, clustered.stored, sinks])
        self._tables.copy_(to_device(tables, device))
        self._number = clustered.changes.number

    def _empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._account.empty(_OWNER, *shape, dtype=dtype, device=device)

    def close(self) -> None:
        """Free the memory; it is taken again when it is needed."""
        for one in (self._centroids, self._tables):
            if one is not None:
                self._account.free(_OWNER, one)
        self._centroids, self._tables, self._number = None, None, -1


def _room(count: int) -> int:
    """Room that is made for so many."""
    return count + max(64, count // 8)
