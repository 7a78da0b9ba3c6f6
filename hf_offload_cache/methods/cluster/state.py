"""Whether what was captured of clusters holds together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import not_whole
from ...history.records import RecordFormat
from .pages import in_order

_TABLES = {
    "counts": np.int32, "variances": np.float32, "centroids": np.float16, "used": np.int64, "limits": np.float32,
    "first": np.int32, "step": np.int8,
}  # fmt: skip


def check_clusters(
    form: RecordFormat, tree: Any, rows: int, sealed: int, capacity: int, records: int, name: str
) -> None:
    """Raises `ContextError` unless captured clusters of `sealed` tokens in each of `rows` rows hold together: every
    token is in one, none has more pages than `capacity` tokens need, and each page is one of `records` records, that no
    other cluster of its row has."""
    wrong = _tables_wrong(form, tree, rows, sealed)
    if wrong is None:
        tables = {key: table.cpu().numpy() for key, table in tree.items()}
        wrong = _clusters_wrong(form, tables, capacity, records)
    if wrong:
        raise not_whole(name, f"its clusters: {wrong}")


def _tables_wrong(form: RecordFormat, tree: Any, rows: int, sealed: int) -> str | None:
    names = {*_TABLES, "labels"}
    if not isinstance(tree, dict) or set(tree) != names or not all(isinstance(tree[x], torch.Tensor) for x in names):
        return f"their tables are {sorted(tree) if isinstance(tree, dict) else type(tree)}, and not {sorted(names)}"
    tables = {key: table.cpu().numpy() for key, table in tree.items()}
    found = {key: str(table.dtype) for key, table in tables.items() if key in _TABLES and table.dtype != _TABLES[key]}
    if found or tables["labels"].dtype not in (np.uint16, np.uint32):
        return f"their tables have the types {found}, and labels {tables['labels'].dtype}"
    counts, first = tables["counts"], tables["first"]
    shapes = {
        "counts": (rows, counts.shape[-1]), "variances": counts.shape, "centroids": (*counts.shape, form.key_width),
        "used": (rows,), "limits": (rows,), "first": (rows, first.shape[-1]), "step": first.shape,
        "labels": (rows, sealed),
    }  # fmt: skip
    odd = {key: tables[key].shape for key, shape in shapes.items() if tables[key].shape != shape}
    if odd:
        return f"of {rows} rows of {sealed} tokens they have the shapes {odd}"
    return None


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
