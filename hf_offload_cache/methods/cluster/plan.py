"""The best fields of `ClusterCache` for a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...history.records import RecordFormat, rounding_bytes
from ...memory.fit import LEAST_RECENT, SHORT_TAIL, STREAM_SHARES, Search
from .config import USUAL_SIZE, ClusterConfig, ClusterForm
from .new_clusters import ORDERED, most_labels
from .pages import piece_bytes
from .partition import BATCH, MOST_ROOM

# Temporary memory, "packing", when clusters are made, written, grown, split and streamed; in bytes

MOST_SETTLED, FEWEST_SETTLED = 64, 24
"""Pages written at a time while clusters grow and are split. The fewer apply if tokens join a page at a time, as in a
tight budget. A settling of 32 tokens then has two parts, and adaptation takes .052 instead of .041 of the decode time
(SmolLM2-135M, 4K tokens)."""


def clustering(form: RecordFormat, tokens: int) -> int:
    """Bytes to cluster so many tokens, `BATCH` at a time: their keys in 32 bits, and half of that for k-means and
    distances."""
    return 6 * form.key_width * min(tokens, BATCH)


def writing(form: RecordFormat, tokens: int, clusters: int, write_queue: int) -> int:
    """Bytes to write so many tokens in `clusters` new clusters: pages and their entries."""
    pages = min(-(-piece_bytes(write_queue) // form.record_bytes), tokens // form.group_size + clusters)
    each = 2 * form.record_bytes + 2 * max(form.record_bytes, form.group_size * form.entry_bytes)
    return pages * each + rounding_bytes(form, pages)


def ordering(clusters: int) -> int:
    """Bytes to order so many new clusters of a row: three co-retrieval tables of those that are ordered at a time."""
    return 3 * 4 * min(clusters, ORDERED) ** 2


Part = tuple[int, int]
"""Rows that a device clusters at a time, and bytes of pages that it packs at a time."""
MOST_PACKED = 64 << 20
"""Bytes of pages that a device packs at a time, if there is room. Each time costs the same launches."""


def parts_there(rows: int, write_queue: int) -> list[Part]:
    """The parts in which a device may make clusters of so many rows, the best first."""
    halves = [-(-rows >> times) for times in range(max(0, rows - 1).bit_length() + 1)]
    return [*((each, MOST_PACKED) for each in halves), (1, piece_bytes(write_queue))]


def clustering_there(form: RecordFormat, clusters: ClusterForm, tokens: int, part: Part) -> int:
    """Bytes to cluster so many tokens of each row on a device, `BATCH` at a time: keys, labels and their order; means
    before and after."""
    keys = min(tokens, BATCH)
    size = 2 if clusters.number is not None else max(2, clusters.size)
    labels = most_labels(keys // size + 1, keys, clusters.places(form.group_size))
    each_key, each_label = form.key_width * form.dtype.itemsize + 64, 14 * form.key_width + 48
    return part[0] * (keys * each_key + labels * each_label)


def writing_there(form: RecordFormat, tokens: int, clusters: int, part: Part) -> int:
    """Bytes to write so many tokens of each row in `clusters` new clusters: each token's place, pages and their
    entries."""
    rows, nbytes = part
    packed = min(-(-nbytes // form.record_bytes), rows * (tokens // form.group_size + clusters))
    entries = form.group_size * form.entry_bytes
    each = form.record_bytes + (3 if form.fills else 5) * entries // 2
    pages = packed * each + rounding_bytes(form, packed)
    return 96 * rows * tokens + pages


def most_settled(form: RecordFormat, joining: int, write_queue: int) -> int:
    """Pages written at a time while clusters grow and are split, or all of one cluster. `joining` tokens a row join at
    once."""
    most = FEWEST_SETTLED if joining <= form.group_size else MOST_SETTLED
    return max(1, min(most, piece_bytes(write_queue) // form.record_bytes))


def settling(form: RecordFormat, pages: int) -> int:
    """Bytes to rewrite so many pages, of clusters that grow or are split: entries as read and as assembled, and their
    keys in 32 bits, twice; then the pages, and their packed records. Entries in 8 bits are also rounded."""
    each = 2 * form.record_bytes + form.group_size * (2 * form.entry_bytes + 2 * 4 * form.key_width)
    return pages * each + rounding_bytes(form, pages)


def streaming(form: RecordFormat, pages: int, entries: int, tokens: int) -> int:
    """Bytes to stream all stored entries: row, cluster, index and order of all rows' `pages`; the `entries` of two
    blocks and their tokens; and a mask of one row's `tokens`."""
    return 88 * pages + (2 * form.entry_bytes + 48) * entries + 9 * tokens


def most_packing(
    form: RecordFormat, clusters: ClusterForm, tokens: int, write_queue: int, part: Part | None = None
) -> tuple[int, int]:
    """Upper bounds on these bytes: when so many tokens arrive at once, and when they arrive step by step. `part`: of
    `parts_there`; None: a processor makes the clusters."""
    joining = clusters.together(form.group_size)
    new_clusters = -(-2 * joining // clusters.size)

    def making(arriving: int, count: int) -> int:
        if part is None:
            made = clustering(form, arriving), writing(form, arriving, count, write_queue)
        else:
            made = clustering_there(form, clusters, arriving, part), writing_there(form, arriving, count, part)
        return max(*made, ordering(count))

    at_once, a_group = making(tokens, clusters.most_clusters(tokens, form.group_size)), making(joining, new_clusters)
    room = clusters.places(form.group_size) + clusters.append_buffer + joining + form.group_size
    largest = -(-room // form.group_size)
    return at_once, max(a_group, settling(form, max(largest, most_settled(form, joining, write_queue))))


_LEAST_BUFFER, _LEAST_SELECTED = 4, 32
_SIZES = (USUAL_SIZE, 16, 32, 64, 128)
"""Keys a cluster, the best first."""


def fit_cluster(search: Search[ClusterConfig], complete: Callable[[ClusterConfig], int]) -> ClusterConfig:
    """Find the best configuration that fits: all wanted tokens are attended to, and the remaining memory is for slots.
    On a device these hold the `complete` tokens of a step's pages if they fit.

    If that does not fit, these are reduced in turn: stream queue and buffers, tokens that join at once, centroids in
    memory (then on disk), the recent window, small clusters, the buffer, and the attended tokens. Raises `BudgetError`
    with the minimum memory needed.
    """
    chosen = search.first_fit(_tried(search))
    return search.config(search.wider_streams(search.most_slots(chosen, complete(search.config(chosen)))))


def _tried(search: Search[ClusterConfig]) -> Iterator[dict[str, Any]]:
    wanted = search.config({}).tokens_fetched(search.max_context)
    chosen: dict[str, Any] = {"num_selected": wanted, "reuse_capacity": 0}
    savings: list[dict[str, Any]] = [{}, {"join_every": 1}]
    if search.fields.get("encryption_key") is None:
        savings.append({"join_every": 1, "centroids": "disk"})
    tried = [{**chosen, **saving, **search.streams(share)} for saving in savings for share in STREAM_SHARES]
    tried += [{**chosen, **saving, **search.least_streams(), "look_ahead": False} for saving in savings]
    yield from search.group(tried)
    chosen.update(savings[-1], look_ahead=False)
    given, capacity = (search.fields.get(name) for name in ("cluster_size", "cluster_capacity"))
    least, most = (1, _SIZES[-1]) if capacity is None else (capacity / MOST_ROOM, capacity)
    sizes = [size for size in _SIZES if least <= size <= most] if given is None else [given]
    if capacity is not None and not sizes:
        sizes = [capacity // 2]
    tails = [search.least_streams(recent) for recent in (SHORT_TAIL, SHORT_TAIL // 2, LEAST_RECENT)]
    for size in sizes:
        yield from search.group([{**chosen, **tail, "cluster_size": size} for tail in tails])
    chosen.update(tails[-1], append_buffer=_LEAST_BUFFER)
    counts = [wanted]
    while counts[-1] > _LEAST_SELECTED and search.fields.get("num_selected") is None:
        counts.append(max(_LEAST_SELECTED, counts[-1] * 3 // 4))
    yield from search.shrinking(
        [[{**chosen, "num_selected": count, "cluster_size": size} for size in sizes] for count in counts]
    )
