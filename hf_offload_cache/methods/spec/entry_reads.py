"""Single entries of each key head: out of records that are read, or as parts of records that lie in host memory."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from ...errors import BudgetError
from ...fetch.areas import Areas
from ...fetch.choice import Source
from ...fetch.fetcher import Fetcher
from ...fetch.storage import Storage
from .chosen_entries import Entries, picked, records_of
from .pinned_entries import PinnedEntries


class EntryReads:
    """Of one layer. Tokens are (rows, heads, m), -1: none. For the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas) -> None:
        self._storage, self.areas = storage, areas
        self.pinned = PinnedEntries(storage)

    @staticmethod
    def area_bytes(form: Any, tokens: int) -> int:
        """What entries of so many tokens of every head take on their way out of host memory."""
        return tokens * form.entry_bytes

    def ahead(self, fetcher: Fetcher, history: Source, tokens: torch.Tensor) -> None:
        """Begin to read what `bring` will be asked for, as far as there is room. A read that fails is made anew."""
        if history.store.in_memory:
            return
        if choices := records_of(tokens.cpu().numpy(), history.form.group_size, fetcher.most_records):
            with self._storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
                fetcher.ahead(history, choices[0])

    def bring(self, fetcher: Fetcher, history: Source, tokens: torch.Tensor) -> list[Entries]:
        """The entries of these tokens, none of which stands behind a -1: copies, in parts, and no more columns than
        there are tokens. Raises as `Fetcher.gather`."""
        if history.store.in_memory and (found := self.pinned.gather(history, tokens)) is not None:
            return [found]
        there = tokens.cpu().numpy()
        there = there[:, :, : int((there >= 0).sum(2).max(initial=0))]
        if history.store.in_memory:
            return [self._parts(history, there)] if there.size else []
        choices = records_of(there, history.form.group_size, fetcher.most_records)
        return [picked(history.form, fetcher.bring(history, choice), choice, there) for choice in choices]

    def _parts(self, history: Source, tokens: np.ndarray) -> Entries:
        """No more of a record than is wanted of it."""
        form, store, there = history.form, history.store, np.maximum(tokens, 0)
        (rows, heads, count), item = tokens.shape, form.dtype.itemsize
        records = history.extents((there // form.group_size).reshape(rows, -1)).records.reshape(-1)
        head, entry = np.arange(heads)[:, None], there % form.group_size * form.entry_width
        parts, first = [], 0
        keys, values = entry + head * form.key_dim, entry + form.key_width + head * form.value_dim
        area = self.areas.borrow(self.area_bytes(form, rows * count), history.device)
        try:
            self._storage.prefetcher.flush(store)  # what was written behind is there
            for dim, at in ((form.key_dim, keys), (form.value_dim, values)):
                store.read_parts(records, at.reshape(-1) * item, area.host_rows(tokens.size, dim * item, first))
                own = area.upload(tokens.size, dim * item, first).view(form.dtype)
                parts.append(own.view(rows, heads, count, dim).clone())
                first += tokens.size * dim * item
        finally:
            self.areas.give_back(area)
        return Entries(torch.from_numpy(tokens).to(history.device), *parts)
