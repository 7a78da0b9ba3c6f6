"""The best fields of `ClusterCache` that a budget allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..history.partition import MOST_ROOM
from ..memory.search import LEAST_RECENT, SHORT_TAIL, STREAM_SHARES, Search
from .cluster_config import ClusterConfig

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
