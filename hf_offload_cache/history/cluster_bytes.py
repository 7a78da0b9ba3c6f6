"""What is held for a while as "packing" when clusters are made, written, grown and split; in bytes."""

from __future__ import annotations

import numpy as np

from .cluster_form import ClusterForm
from .clustering import BATCH
from .co_retrieval import ORDERED
from .page_writer import piece_bytes
from .record_format import RecordFormat

FEW_PAGES = 4
"""Pages that are written together where clusters grow, however little is to be held."""


def clustering(form: RecordFormat, tokens: int) -> int:
    """While clusters are made of so many tokens, `BATCH` at a time: their keys in 32 bits, and a half of that again for
    k-means and for how far they are from their means."""
    return 6 * form.key_width * min(tokens, BATCH)


def writing(form: RecordFormat, tokens: int, clusters: int, write_queue: int) -> int:
    """While so many tokens, in `clusters` new clusters, are put in order and written: which are wanted together, of as
    many as are ordered at a time, twice; then pages with what goes into them."""
    pages = 4 * min(piece_bytes(write_queue), (tokens // form.group_size + clusters) * form.record_bytes)
    return max(pages, 2 * 4 * min(clusters, ORDERED) ** 2)


def most_appended(form: RecordFormat, capacity: int, write_queue: int) -> int:
    """Pages that are written at a time where clusters grow: as many as take what it takes to split the largest, or a
    few."""
    size = max(splitting(form, capacity) // 4, FEW_PAGES * form.record_bytes)
    return max(1, min(size, piece_bytes(write_queue)) // form.record_bytes)


def appending(form: RecordFormat, counts: np.ndarray) -> int:
    """While so many entries of clusters (n,) are put at the ends of their pages: these as they are read and put
    together, in pages, and packed."""
    return 4 * int((-(-counts // form.group_size)).sum()) * form.record_bytes


def splitting(form: RecordFormat, most: int) -> int:
    """While a cluster of at most so many tokens is split: its entries as they are read, put together and packed, and
    its keys in 32 bits."""
    return (most + form.group_size) * (4 * form.entry_bytes + 2 * 4 * form.key_width)


def planned_packing(form: RecordFormat, clusters: ClusterForm, tokens: int, write_queue: int) -> tuple[int, int]:
    """The most of these while so many tokens come at once, and in steps."""
    few = -(-2 * form.group_size // clusters.size)
    at_once, a_group = (
        max(clustering(form, own), writing(form, own, count, write_queue))
        for own, count in ((tokens, clusters.most_clusters(tokens)), (form.group_size, few))
    )
    split = splitting(form, clusters.capacity + clusters.append_buffer + form.group_size)
    pages = most_appended(form, clusters.capacity, write_queue)
    grown = clusters.append_buffer + 2 * form.group_size  # of one cluster all pages are written at once
    return at_once, max(a_group, split + appending(form, np.array([max(pages * form.group_size, grown)])))
