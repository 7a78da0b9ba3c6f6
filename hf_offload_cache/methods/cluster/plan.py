"""The best fields of `ClusterCache` that a budget allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...history.records import RecordFormat
from ...memory.fit import LEAST_RECENT, SHORT_TAIL, STREAM_SHARES, Search
from .config import ClusterConfig, ClusterForm
from .pages import piece_bytes
from .partition import BATCH, MOST_ROOM, ORDERED

# What is held for a while as "packing" when clusters are made, written, grown, split and streamed; in bytes

MOST_SETTLED, FEWEST_SETTLED = 64, 24
"""Pages that are written together where clusters grow and are split, and where tokens join them a page at a time, as a
tight budget has it. With the fewer a settling of 32 tokens is in two parts, and a decode adapts .052 of its time for
.041 (SmolLM2-135M, 4K tokens)."""


def clustering(form: RecordFormat, tokens: int) -> int:
    """While clusters are made of so many tokens, `BATCH` at a time: their keys in 32 bits, and a half of that again for
    k-means and for how far they are from their means."""
    return 6 * form.key_width * min(tokens, BATCH)


def writing(form: RecordFormat, tokens: int, clusters: int, write_queue: int) -> int:
    """While so many tokens, in `clusters` new clusters, are put in order and written: which are wanted together, of as
    many as are ordered at a time, three times; then pages with what goes into them."""
    pages = 4 * min(piece_bytes(write_queue), (tokens // form.group_size + clusters) * form.record_bytes)
    return max(pages, 3 * 4 * min(clusters, ORDERED) ** 2)


def most_settled(form: RecordFormat, joining: int, write_queue: int) -> int:
    """Pages that are written at a time where clusters grow and are split, so many tokens a row `joining` them at once,
    or all of one cluster."""
    most = FEWEST_SETTLED if joining <= form.group_size else MOST_SETTLED
    return max(1, min(most, piece_bytes(write_queue) // form.record_bytes))


def settling(form: RecordFormat, pages: int) -> int:
    """While so many pages are written anew, of clusters that grow or are split: what goes into them as it is read and
    put together, and its keys in 32 bits, twice; then the pages, and these packed."""
    return pages * (2 * form.record_bytes + form.group_size * (2 * form.entry_bytes + 2 * 4 * form.key_width))


def streaming(form: RecordFormat, pages: int, entries: int, tokens: int) -> int:
    """While all that is stored is streamed: which `pages` of all rows, of which clusters, in which order; the `entries`
    of a block and of the one before once more, and which tokens these are; and of one row's `tokens` which of them
    these may be."""
    return 88 * pages + (2 * form.entry_bytes + 48) * entries + 9 * tokens


def most_packing(form: RecordFormat, clusters: ClusterForm, tokens: int, write_queue: int) -> tuple[int, int]:
    """The most of these while so many tokens come at once, and in steps."""
    joining = clusters.together(form.group_size)
    few = -(-2 * joining // clusters.size)
    at_once, a_group = (
        max(clustering(form, own), writing(form, own, count, write_queue))
        for own, count in ((tokens, clusters.most_clusters(tokens, form.group_size)), (joining, few))
    )
    held = clusters.places(form.group_size) + clusters.append_buffer + joining + form.group_size
    largest = -(-held // form.group_size)
    return at_once, max(a_group, settling(form, max(largest, most_settled(form, joining, write_queue))))


_LEAST_BUFFER, _LEAST_SELECTED = 4, 32
_SIZES = (12, 16, 32, 64, 128)
"""Keys a cluster, the best first."""


def fit_cluster(search: Search[ClusterConfig]) -> ClusterConfig:
    """The best configuration that fits: all that is to be attended to, and what is left for slots.

    Where that does not fit, these give way, one after another: the queue and the buffers of streams, how many
    tokens join clusters together, the centroids, which are on the disk then, the latest tokens, small clusters, what
    may wait, and what is attended to. Raises `BudgetError` with the least memory that would do.
    """
    chosen = search.first_fit(_tried(search))
    return search.config(search.wider_blocks(search.most(chosen, "reuse_capacity", search.max_context)))


def _tried(search: Search[ClusterConfig]) -> Iterator[dict[str, Any]]:
    wanted = search.config({}).brought(search.max_context)
    chosen: dict[str, Any] = {"num_selected": wanted, "reuse_capacity": 0}
    places: list[dict[str, Any]] = [{}, {"join_every": 1}]
    if search.fields.get("encryption_key") is None:
        places.append({"join_every": 1, "centroids": "disk"})
    for place in places:
        yield from ({**chosen, **place, **search.streams(share)} for share in STREAM_SHARES)
    for place in places:
        yield {**chosen, **place, **search.least_streams(), "look_ahead": False}
    chosen.update(places[-1], look_ahead=False)
    given, capacity = (search.fields.get(name) for name in ("cluster_size", "cluster_capacity"))
    least, most = (1, _SIZES[-1]) if capacity is None else (capacity / MOST_ROOM, capacity)
    sizes = [size for size in _SIZES if least <= size <= most] if given is None else [given]
    if capacity is not None and not sizes:
        sizes = [capacity // 2]
    for size in sizes:
        for recent in (SHORT_TAIL, SHORT_TAIL // 2, LEAST_RECENT):
            yield {**chosen, **search.least_streams(recent), "cluster_size": size}
    chosen.update(search.least_streams(LEAST_RECENT), append_buffer=_LEAST_BUFFER)
    while True:
        yield from ({**chosen, "num_selected": wanted, "cluster_size": size} for size in sizes)
        if wanted <= _LEAST_SELECTED or search.fields.get("num_selected") is not None:
            return
        wanted = max(_LEAST_SELECTED, wanted * 3 // 4)
