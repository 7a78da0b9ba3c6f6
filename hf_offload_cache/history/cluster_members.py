"""Which tokens lie where in clusters."""

from __future__ import annotations

import numpy as np

from .clustered_entries import ClusteredEntries


def members(own: ClusteredEntries, rows: np.ndarray, clusters: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Which token each entry of pages of clusters of rows (n,) is, (n, group_size), -1: none."""
    asked = np.zeros(own.stored.shape, dtype=bool)
    asked[rows, clusters] = True
    found = [some[labels].nonzero()[0] for some, labels in zip(asked, own.labels, strict=True)]
    tokens = [some[np.argsort(labels[some], kind="stable")] for some, labels in zip(found, own.labels, strict=True)]
    counts = np.where(asked, own.partition.counts, 0)  # what waits of a cluster is behind what lies there
    first = (np.cumsum(counts).reshape(counts.shape) - counts)[rows, clusters]
    place = (pages * own.form.group_size)[:, None] + np.arange(own.form.group_size)
    there = place < own.stored[rows, clusters][:, None]
    return np.where(there, np.concatenate(tokens)[np.where(there, first[:, None] + place, 0)], -1)
