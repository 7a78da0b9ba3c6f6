"""Checks of captured clusters."""

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
    """Raise `ContextError` unless the captured clusters of `sealed` tokens in each of `rows` rows are consistent.

    Every token is in one cluster. No cluster has more pages than `capacity` tokens need. Each page is one of `records`
    records, and no other cluster of its row has it.
    """
    _CLUSTERS.check(tree, name, rows=rows, sealed=sealed, width=form.key_width)
    wrong = _clusters_wrong(form, {key: table.cpu().numpy() for key, table in tree.items()}, capacity, records)
    if wrong:
        raise not_whole(name, f"its clusters: {wrong}")


def _clusters_wrong(form: RecordFormat, tables: dict[str, np.ndarray], capacity: int, records: int) -> str | None:
    counts, used, labels = tables["counts"], tables["used"], tables["labels"]
    if used.min(initial=0) < 0 or used.max(initial=0) > min(counts.shape[1], tables["first"].shape[1]):
        return f"rows use {used.tolist()} of {counts.shape[1]} clusters"
    for row, (row_labels, count, row_used) in enumerate(zip(labels, counts, used.tolist(), strict=True)):
        in_range = row_labels.max(initial=0) < max(1, row_used)  # else the table of members could be huge
        if not in_range or not np.array_equal(np.bincount(row_labels, minlength=counts.shape[1]), count):
            return f"the token counts of row {row} do not match its tokens"
    pages, most = -(-counts // form.group_size), -(-capacity // form.group_size)
    if pages.max(initial=0) > most:
        return f"one has {pages.max()} records, but {capacity} tokens need only {most}"
    rows, clusters, page = in_order(pages)
    ids = tables["first"][rows, clusters].astype(np.int64) + tables["step"][rows, clusters].astype(np.int64) * page
    if ids.size and not (ids.min() >= 0 and ids.max() < records):
        return f"they use records {ids.min()} to {ids.max()} of only {records}"
    if not np.isin(tables["step"][rows, clusters], (-1, 1)).all():
        return "one has records that are not adjacent"
    if len(np.unique(rows * max(1, records) + ids)) != ids.size:
        return "two of a row share a record"
    if not (np.isfinite(tables["centroids"]).all() and np.isfinite(tables["variances"]).all()):
        return "a centroid or variance is not a finite number"
    if np.isnan(tables["limits"]).any():
        return "a variance limit is not a number"
    return None
