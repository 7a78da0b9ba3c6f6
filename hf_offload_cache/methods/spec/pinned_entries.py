"""Single entries out of pinned host memory, which a GPU reads by itself."""

from __future__ import annotations

import numpy as np
import torch

from ...fetch.choice import Source
from ...fetch.storage import Storage
from ...kernels.on_a_device import has_kernels
from .chosen_entries import ChosenEntries, Entries


class PinnedEntries:
    """Of one layer, whose records may lie in pinned memory. For the thread that runs the model, which waits for no
    read; but, when there are new records, until they are written and the device knows where they lie."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._addresses: torch.Tensor | None = None
        """Where each record begins, (rows, units) int64, on the device."""
        self._elsewhere = False
        """Not in pinned memory, some of them."""
        self._stream: torch.cuda.Stream | None = None
        self._gathered: torch.cuda.Event | None = None
        """Behind the last `gather`."""

    @staticmethod
    def planned(rows: int, units: int) -> int:
        """Bytes of where so many records lie."""
        return rows * units * 8

    @property
    def nbytes(self) -> int:
        return 0 if self._addresses is None else self._addresses.nbytes

    def forget(self) -> None:
        """Records will lie elsewhere, or be those of other rows. Blocks until `gather` has read what it was asked for.
        """
        if self._gathered is not None:
            self._gathered.synchronize()
        self._addresses = self._gathered = None
        self._elsewhere = False

    def exchange(self, history: Source, chosen: ChosenEntries, wanted: torch.Tensor) -> torch.Tensor | None:
        """Let `chosen` hold what is `wanted`, what is read behind the back of the current stream; how many are
        wanted, and how many of these came: (2,) int64. None: no device reads there, or they are too many."""
        if (addresses := self._where(history)) is None:
            return None
        from ...kernels import host_entries_triton as kernel

        if max(chosen.count, wanted.shape[2]) > kernel.MOST_EXCHANGED:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(history.device)

        def gather(tokens: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor]) -> None:
            addresses.record_stream(torch.cuda.current_stream(history.device))
            kernel.gather_into(addresses, tokens, history.form, into, keeps=True)

        counts = chosen.exchange(wanted, kernel.exchange, gather, self._stream)
        self._count(history, counts[1])
        return counts

    def gather(self, history: Source, tokens: torch.Tensor) -> Entries | None:
        """The entries of tokens (rows, heads, m), -1: none, on the current stream. None: no device reads there."""
        if (addresses := self._where(history)) is None:
            return None
        from ...kernels import host_entries_triton as kernel

        found = Entries(tokens, *kernel.gather(addresses, tokens, history.form))
        self._gathered = torch.cuda.current_stream(history.device).record_event()
        self._count(history, (tokens >= 0).sum())
        return found

    def _count(self, history: Source, entries: torch.Tensor) -> None:
        """So many entries of a head were read, () int64."""
        form, store = history.form, history.store
        entry = (form.key_dim + form.value_dim) * form.dtype.itemsize
        self._storage.counters.tell_later(lambda read: store.count_read(read, read * entry), entries)

    def _where(self, history: Source) -> torch.Tensor | None:
        """`_addresses` of all units, written ones. None: some lie in memory that is not pinned."""
        if self._elsewhere or not has_kernels(history.device):
            return None
        known = self._addresses
        first = known.shape[1] if known is not None and len(known) == history.rows else 0
        if known is None or first != history.records:
            first = 0 if first > history.records else first
            units = np.broadcast_to(np.arange(first, history.records), (history.rows, history.records - first))
            records = history.extents(units).records
            self._storage.prefetcher.flush(history.store)  # what was written behind is there
            if (found := history.store.addresses(records.reshape(-1))) is None:
                self._elsewhere, self._addresses = True, None
                return None
            new = torch.from_numpy(found.reshape(records.shape)).to(history.device)
            self._addresses = known = new if known is None or not first else torch.cat([known, new], 1)
        return known
