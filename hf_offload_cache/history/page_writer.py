"""Entries on their way into pages."""

from __future__ import annotations

import numpy as np
import torch

from ..fetch.storage import Storage
from ..stores.base import Store, aligned_empty
from .packing import PIECE_BYTES, places_within
from .record_format import RecordFormat


def piece_bytes(write_queue: int) -> int:
    """Bytes of pages that are handed to the writer at a time, beside a queue of so many."""
    return min(PIECE_BYTES, write_queue // 2)


class PageWriter:
    """Packs entries into records of `group_size` each, and hands them to the writer; what is not full has zeros behind.

    Raises `StoreError` of an earlier write; those of this one's pages that were handed over before are written then:
    none, where all are handed over `at_once`, by `end`.
    """

    def __init__(self, storage: Storage, store: Store, form: RecordFormat, *, at_once: bool = False) -> None:
        self._storage, self._store, self._form = storage, store, form
        self._ids: list[np.ndarray] = []
        self._pages: list[torch.Tensor] = []
        self._bytes = 0
        self.piece = 1 << 62 if at_once else piece_bytes(storage.write_queue)
        """Bytes that are handed over at a time, or all of one cluster."""

    @property
    def packed(self) -> bool:
        """There is something for `end` to hand over."""
        return bool(self._ids)

    @property
    def ids(self) -> np.ndarray:
        """The records (n,) that `end` hands over."""
        return np.concatenate(self._ids) if self._ids else np.empty(0, dtype=np.int64)

    def put(self, entries: torch.Tensor, counts: np.ndarray, first: np.ndarray, step: np.ndarray) -> None:
        """Of entries (n, width) the first `counts[0]` go to the records `first[0]`, `first[0] + step[0]` and so on, the
        next `counts[1]` to those of the next, and so on."""
        form, group = self._form, self._form.group_size
        each = -(-counts // group)
        which = np.repeat(np.arange(len(counts)), each)
        number = places_within(each)
        begins = np.repeat((np.cumsum(each) - each) * group - (np.cumsum(counts) - counts), counts)
        pages = entries.new_zeros(which.size, form.record_bytes // form.dtype.itemsize)
        rows = entries.new_zeros(which.size * group, form.entry_width)
        rows[torch.from_numpy(begins + np.arange(len(entries))).to(entries.device)] = entries
        pages[:, : form.payload_width] = rows.view(which.size, form.payload_width)
        self._ids.append(first[which] + step[which] * number)
        self._pages.append(pages)
        self._bytes += pages.nbytes
        if self._bytes >= self.piece:
            self.end()

    def end(self) -> tuple[np.ndarray, torch.Tensor]:
        """Hand over what is packed, of which there is some, in the order of the records, so that those side by side are
        written at once. The records (n,) and what they hold, (n, payload width): views."""
        order = np.argsort(self.ids)
        ids, place = self.ids[order], torch.from_numpy(np.argsort(order))
        records = aligned_empty(len(ids), self._form.record_bytes)
        for pages, places in zip(self._pages, place.split([len(pages) for pages in self._pages]), strict=True):
            records.index_copy_(0, places, pages.view(torch.uint8).cpu())
        self._ids, self._pages, self._bytes = [], [], 0
        self._storage.prefetcher.write(self._store, ids, records)
        return ids, self._form.payload(records)
