"""Single entries out of pinned host memory, which a GPU reads by itself."""

from __future__ import annotations

import numpy as np
import torch

from .chosen_entries import ChosenEntries, Entries
from .fetched import Source
from .storage import Storage


class PinnedEntries:
    """Of one layer, whose records may lie in pinned memory. For the thread that runs the model, which waits for nothing
    but what is still to be written."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._addresses: torch.Tensor | None = None
        """Where each record begins, (rows, units) int64, on the device."""
        self._stream: torch.cuda.Stream | None = None

    @staticmethod
    def planned(rows: int, units: int) -> int:
        """Bytes of where so many records lie."""
        return rows * units * 8

    @property
    def nbytes(self) -> int:
        return 0 if self._addresses is None else self._addresses.nbytes

    def forget(self) -> None:
        """Records lie elsewhere, or are those of other rows."""
        self._addresses = None

    def fetch(self, history: Source, chosen: ChosenEntries) -> bool:
        """Let `chosen` hold what it wants, behind the back of the current stream. False: no device reads there."""
        if (addresses := self._where(history)) is None:
            return False
        if self._stream is None:
            self._stream = torch.cuda.Stream(history.device)
        chosen.fetch(lambda tokens: self._read(history, addresses, tokens), self._stream)
        return True

    def gather(self, history: Source, tokens: torch.Tensor) -> Entries | None:
        """The entries of tokens (rows, heads, m), -1: none, on the current stream. None: no device reads there."""
        addresses = self._where(history)
        return None if addresses is None else self._read(history, addresses, tokens)

    def _read(self, history: Source, addresses: torch.Tensor, tokens: torch.Tensor) -> Entries:
        from ..kernels import host_entries_triton  # which torch for CUDA has, and others have not

        return Entries(tokens, *host_entries_triton.gather(addresses, tokens, history.form))

    def _where(self, history: Source) -> torch.Tensor | None:
        """`_addresses` of all units, written ones. None: some lie in memory that is not pinned."""
        if history.device.type != "cuda":
            return None
        known = self._addresses
        first = known.shape[1] if known is not None and len(known) == history.rows else 0
        if known is None or first != history.records:
            first = 0 if first > history.records else first
            units = np.broadcast_to(np.arange(first, history.records), (history.rows, history.records - first))
            records = history.extents(units).records
            self._storage.prefetcher.flush(history.store)  # what was written behind is there
            if (found := history.store.addresses(records.reshape(-1))) is None:
                return None
            new = torch.from_numpy(found.reshape(records.shape)).to(history.device)
            self._addresses = known = new if known is None or not first else torch.cat([known, new], 1)
        return known
