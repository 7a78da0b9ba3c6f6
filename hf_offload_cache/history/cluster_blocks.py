"""All that lies in clusters, block by block, for attention over everything."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..fetch.storage import Storage
from .base import Block, equal_parts
from .cluster_members import members
from .cluster_pages import in_order
from .clustered_entries import ClusteredEntries


def cluster_blocks(
    own: ClusteredEntries, storage: Storage, device: torch.device, stop: int, step: int
) -> Iterator[Block]:
    """What lies in pages and comes before token `stop`, at most `step` pages a row at a time, in the order of the
    records."""
    pages, form, rows = in_order(own.page_counts), own.form, len(own.page_counts)
    ids = own.pages.records(*pages)
    each = np.bincount(pages[0], minlength=rows)
    width, begins = int(each.max()), (np.cumsum(each) - each)[:, None]
    step = equal_parts(width, step)
    columns = np.arange(width)
    # of a row with fewer pages than others its last one again, or the first of all, as if there were no entries
    which = np.lexsort((ids, pages[0]))[np.clip(begins + np.minimum(columns, each[:, None] - 1), 0, None)]
    parts = [which[:, at : at + step] for at in range(0, width, step)]
    flat = np.concatenate([ids[some.reshape(-1)] for some in parts])
    streamed = storage.stream(own.store, flat, step * rows, device)
    for at, some, records in zip(range(0, width, step), parts, streamed, strict=True):
        places = members(own, *(table[some.reshape(-1)] for table in pages)).reshape(*some.shape, -1)
        places[columns[at : at + step] >= each[:, None]] = -1
        places[places >= stop] = -1
        entries, found = _filled(form.payload(records).reshape(rows, -1, form.entry_width), places.reshape(rows, -1))
        if found.size:
            yield Block(*form.split(entries), found)


def _filled(entries: torch.Tensor, places: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Entries (rows, t, width) and which token each is, (rows, t), -1: none, without those that are none, but for rows
    that have fewer than others. A copy. A third of what lies in pages of 16 is none, and attention takes its time."""
    there = places >= 0
    order = np.argsort(~there, axis=1, kind="stable")[:, : there.sum(1).max()]
    index = torch.from_numpy(order).to(entries.device).unsqueeze(-1)
    return torch.take_along_dim(entries, index, 1), np.take_along_axis(places, order, 1)
