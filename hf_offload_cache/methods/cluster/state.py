"""Whether what was captured of clusters holds together."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import not_whole
from ...history.records import RecordFormat
from ...history.state import State
from .entries import ClusteredEntries
from .pages import ClusterPages, in_order
from .partition import Partition

_CLUSTERS = State(
    "clusters", **Partition.STATE.entries, **ClusterPages.STATE.entries, **ClusteredEntries.STATE.entries
)


def check_clusters(
    form: RecordFormat, tree: Any, rows: int, sealed: int, capacity: int, records: int, name: str
) -> None:
    """Raises `ContextError` unless captured clusters of `sealed` tokens in each of `rows` rows hold together: every
    token is in one, none has more pages than `capacity` tokens need, and each page is one of `records` records, that no
    other cluster of its row has."""
    _CLUSTERS.check(tree, name, rows=rows, sealed=sealed, width=form.key_width)
    wrong = _clusters_wrong(form, {key: table.cpu().numpy() for key, table in tree.items()}, capacity, records)
    if wrong:
        raise not_whole(name, f"its clusters: {wrong}")


def _clusters_wrong(form: RecordFormat, tables: dict[str, np.ndarray], capacity: int, records: int) -> str | None:
    counts, used, labels = tables["counts"], tables["used"], tables["labels"]
    if used.min(initial=0) < 0 or used.max(initial=0) > min(counts.shape[1], tables["first"].shape[1]):
        return f"rows have {used.tolist()} of {counts.shape[1]}"
    for number, (own, count, last) in enumerate(zip(labels, counts, used.tolist(), strict=True)):
        if own.max(initial=0) >= max(1, last) or not np.array_equal(np.bincount(own, minlength=counts.shape[1]), count):
            return f"in row {number} they have other numbers of tokens than tokens are in them"
    pages, most = -(-counts // form.group_size), -(-capacity // form.group_size)
    if pages.max(initial=0) > most:
        return f"one has {pages.max()} records, and {capacity} tokens need {most}"
    rows, clusters, page = in_order(pages)
    ids = tables["first"][rows, clusters].astype(np.int64) + tables["step"][rows, clusters].astype(np.int64) * page
    if ids.size and not (ids.min() >= 0 and ids.max() < records):
        return f"they name records {ids.min()} to {ids.max()} and there are {records}"
    if not np.isin(tables["step"][rows, clusters], (-1, 1)).all():
        return "one lies in records that are not side by side"
    if len(np.unique(rows * max(1, records) + ids)) != ids.size:
        return "two of a row have a record in common"
    if not (np.isfinite(tables["centroids"]).all() and np.isfinite(tables["variances"]).all()):
        return "some mean or variance is no number"
    if np.isnan(tables["limits"]).any():
        return "some limit is no number"
    return None
