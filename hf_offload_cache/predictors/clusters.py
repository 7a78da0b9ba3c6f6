"""Clusters judged by their centroids (DynaKV, section 4.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..config import SelectiveConfig
from ..fetch.choice import Choice
from ..history.base import Sealed
from ..history.cluster_form import ClusterForm
from ..history.clustered_entries import ClusteredEntries
from ..history.record_format import RecordFormat
from ..memory.account import MemoryAccount
from ..memory.plan import LayerPlan, Planned
from .base import Decision, Query


class ClusterPredictor:
    """The clusters whose keys have most of the attention of a row's heads, if each key were its centroid.

    Each head's shares are of the attention to all that is there, the latest tokens by their keys; so that no head
    drowns the others their sum over heads is what counts, a token. Clusters are taken until they hold as many tokens as
    are wanted, or lie in `most_pages`; of the last one its latest ones. Those with a row's first tokens come before
    all, whole where that is no more than is wanted. What waits beside the clusters is attended to anyhow, and is among
    these. Holds nothing: centroids and counts are the history's. See `Predictor`.
    """

    def __init__(
        self, clustered: ClusteredEntries, config: SelectiveConfig, clusters: ClusterForm, account: MemoryAccount
    ) -> None:
        self.clustered, self.config, self._clusters, self._account = clustered, config, clusters, account

    @staticmethod
    def planned(form: RecordFormat, clusters: ClusterForm, context: int, rows: int, heads: int) -> LayerPlan:
        """What it takes to judge `context` tokens a row by: centroids in 32 bits, scores of each head thrice, and what
        clusters are sorted by; of what is taken, which entries."""
        scores = _score_bytes(form, rows, clusters.most_clusters(context, form.group_size), heads, clusters)
        return LayerPlan(shared=Planned(decode={"scores": scores}))

    @staticmethod
    def most_pages(budget: int, num_sinks: int, clusters: ClusterForm, group_size: int) -> int:
        """Pages a row that are taken at most for what `budget` full ones of `group_size` entries hold: of most clusters
        one is not full. No fewer than clusters with the first tokens have, each in another one."""
        partly = max(budget, -(-budget * group_size // clusters.size))
        return max(budget + partly, num_sinks * clusters.places(group_size) // group_size)

    def ready(self, units: int) -> bool:
        return units == self.clustered.partition.clusters

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """The history has."""

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        own = self.clustered
        rows, count = own.partition.counts.shape
        heads = query.states.shape[0] * query.states.shape[1] // rows
        with self._account.holding("scores", _score_bytes(own.form, rows, count, heads, self._clusters)):
            return self._choice(query, budget)

    def _choice(self, query: Query, budget: int) -> Choice:
        own = self.clustered
        stored, group, pages = own.stored, own.form.group_size, own.page_counts
        shares = self.shares(query, own.partition.counts)
        shares[stored == 0] = -np.inf
        begin, sinks = self._mark(shares, query.visible)
        wanted = np.maximum(budget * group - own.buffer.counts, sinks.sum(1))
        narrow = (sinks > 0) & (np.where(sinks > 0, stored, 0).sum(1) > wanted)[:, None]  # of these the sinks alone
        there = np.where(shares > -np.inf, np.where(narrow, sinks, stored), 0)
        order = np.argsort(-shares, 1, kind="stable")
        pages = np.where(there > 0, pages, 0)
        counts, pages, stored = (np.take_along_axis(one, order, 1) for one in (there, pages, stored))
        before = np.cumsum(counts, 1) - counts
        most = self.most_pages(budget, self.config.num_sinks, self._clusters, group)
        taken = (before < wanted[:, None]) & (counts > 0) & (np.cumsum(pages, 1) <= most)
        width = int(taken.sum(1).max(initial=0))
        cut = np.minimum(counts, wanted[:, None] - before)[:, :width]  # of these many of each
        last = np.where(np.take_along_axis(narrow, order, 1), np.take_along_axis(begin, order, 1) + counts, stored)
        entry, last = np.arange(own.pages.largest * group), last[:, :width, None]
        keep = (entry >= last - cut[..., None]) & (entry < last)
        units, taken = order[:, :width], taken[:, :width]
        ascending = np.argsort(np.where(taken, units, np.iinfo(np.int64).max), 1)
        units = np.take_along_axis(np.where(taken, units, -1), ascending, 1)
        importance = np.take_along_axis(shares, np.maximum(units, 0), 1).astype(np.float32)
        records = np.take_along_axis(own.page_counts, np.maximum(units, 0), 1)
        return Choice(units, np.take_along_axis(keep, ascending[..., None], 1), importance, records)

    def shares(self, query: Query, counts: np.ndarray) -> np.ndarray:
        """What a key of each cluster has of the attention of a row's heads, (rows, clusters) float32, if all keys were
        their centroids."""
        rows = len(counts)
        states = (query.states * query.scaling).float().reshape(rows, -1, query.states.shape[2])
        latest = query.recent()[:, 0].float()
        recent = (states.to(latest.device) @ latest.transpose(1, 2)).cpu().numpy()
        centroids = torch.from_numpy(self.clustered.partition.centroids.astype(np.float32))
        products = (states.cpu() @ centroids.transpose(1, 2)).numpy()
        with np.errstate(divide="ignore"):
            held = products + np.log(counts, dtype=np.float32)[:, None]
        everything = np.concatenate([held, recent], 2)
        most = everything.max(2, keepdims=True)
        total = most + np.log(np.exp(everything - most).sum(2, keepdims=True))
        return np.exp(products - total).sum(1)

    def _mark(self, shares: np.ndarray, visible: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Clusters with a row's first tokens are above all, those of padding alone below all. Of each cluster, how many
        members come before a row's first tokens, and how many are among these: (rows, clusters) each."""
        labels = self.clustered.labels
        first = np.zeros(len(shares), dtype=np.int64)
        if visible is not None:
            seen = visible[:, : labels.shape[1]].cpu().numpy()
            seen = np.repeat(seen, len(shares) // len(seen), 0)
            first = seen.argmax(1)
            some = np.zeros(shares.shape, dtype=bool)
            where = seen.nonzero()
            some[where[0], labels[where]] = True
            shares[~some] = -np.inf
        begin, sinks = np.zeros(shares.shape, dtype=np.int64), np.zeros(shares.shape, dtype=np.int64)
        for row, start in enumerate(first.tolist()):
            own = labels[row, start : start + self.config.num_sinks]
            np.add.at(sinks[row], own, 1)
            if start:
                begin[row] = np.bincount(labels[row, :start], minlength=shares.shape[1])
        shares[(sinks > 0) & (self.clustered.stored > 0)] = np.inf
        return begin, sinks

    def truncate(self, units: int) -> None:
        """The history does, and so with what follows."""

    def select_rows(self, rows: torch.Tensor) -> None: ...

    def capture(self) -> dict[str, Any]:
        return {}

    def restore(self, tree: dict[str, Any]) -> None: ...

    @property
    def tables_nbytes(self) -> int:
        return 0

    def close(self) -> None: ...


def _score_bytes(form: RecordFormat, rows: int, count: int, heads: int, clusters: ClusterForm) -> int:
    """Centroids in 32 bits, and those that are mapped, scores of each head thrice, what clusters are sorted by, and of
    each which entries."""
    means = (6 if clusters.mapped else 4) * form.key_width
    return rows * count * (means + 12 * heads + 64 + clusters.places(form.group_size))
