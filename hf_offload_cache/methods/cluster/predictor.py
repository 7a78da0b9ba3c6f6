"""Selects clusters by their centroids (DynaKV, section 4.1, equations 4 and 5; algorithm 1, load the top-k
clusters)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import not_whole
from ...fetch.choice import Choice, DeviceChoice, Estimates, kept_entries
from ...history.base import Sealed
from ...history.records import RecordFormat
from ...history.state import Number, State
from ...kernels.clusters import MOST_CLUSTERS, centroids_bytes, choose, rest, score
from ...kernels.on_a_device import to_host
from ...memory.account import MemoryAccount
from ...memory.dry_run import DryRun
from ...predictors.base import Decision, Predictor, Query
from ...predictors.sinks import largest
from ...predictors.value_maps import LEAST_TOKENS, ValueMaps
from .config import ClusterConfig, ClusterForm
from .entries import ClusteredEntries
from .on_device import DeviceClusters
from .partition import MOST_ROOM
from .remainder import estimates, fit_bytes, fit_maps, rehearse_maps, rows_together

_GROWN = 1.25
"""Growth of the history after which maps are fitted again, to the tokens of a long call."""


class ClusterPredictor(Predictor):
    """Selects the clusters whose keys get the most attention of a row's heads, as if each key were its centroid.

    Each head's shares are of its attention to all tokens, with the exact keys of the latest ones. They are summed over
    heads, a token, so that no head drowns the others. Clusters are selected until they contain the wanted tokens, or
    fill `most_pages`; the last one gives its latest entries. A row's first tokens are selected from any cluster.
    Buffered entries are always attended to, and count among the wanted ones. The history owns centroids and counts. See
    `Predictor`.
    """

    STATE: ClassVar[State] = State("fitted state", fitted_at=Number())

    def __init__(self, clustered: ClusteredEntries, config: ClusterConfig, account: MemoryAccount) -> None:
        self.clustered, self.config, self._clusters, self._account = clustered, config, config.clusters, account
        self.maps: ValueMaps | None = None
        """Estimates the remainder of steps; None: it is dropped."""
        self.scaling = 0.0
        """Factor of the scores, from the prompt; 0: unknown yet."""
        self.fitted_at = 0
        """Tokens of the history at the latest fit; 0 before the first."""
        self.on_device = DeviceClusters(clustered, config.num_sinks, account)
        if clustered.buffer.entries.device.type == "cuda":
            clustered.join_there = self.on_device.join
        self.kept: torch.Tensor | None = None
        """Entries of each cluster that `choose_on_device` chose last, (rows, clusters) int32, on the device."""

    def rehearse(self, run: DryRun, context: int, heads: int, wanted: int) -> None:
        """As `Predictor.rehearse`."""
        clustered = self.clustered
        most = self._clusters.most_clusters(context, clustered.form.group_size)
        run.passes("scores", decode=_score_bytes(clustered.form, clustered.partition.rows, most, heads, self._clusters))
        if run.device_type == "cuda" and clustered.store.in_memory and not self._clusters.mapped:
            sizes = clustered.partition.rows, most, clustered.pages.largest, clustered.form.key_width
            DeviceClusters.rehearse(run, *sizes)
        if self.config.remainder and context >= LEAST_TOKENS:
            rehearse_maps(run, clustered.form, clustered.partition.rows, heads, most)

    @staticmethod
    def most_pages(budget: int, num_sinks: int, clusters: ClusterForm, group_size: int) -> int:
        """Upper bound on the pages a row for the entries of `budget` full pages of `group_size`. Most clusters have a
        partial page, and each of the first tokens may be in another cluster. Never below the pages of these
        clusters."""
        size = max(clusters.size, clusters.places(group_size) / MOST_ROOM)
        partly = max(budget, math.ceil(budget * group_size / size))
        return max(budget + partly + num_sinks, num_sinks * clusters.places(group_size) // group_size)

    def ready(self, units: int) -> bool:
        return units == self.clustered.partition.clusters

    # --- learning ----------------------------------------------------------------------------------------------

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """As `Predictor.learn`: fit the maps of the remainder after a prompt, or a long piece of it. Raises
        `BudgetError`."""
        tokens, grown = sealed.tokens, sealed.tokens >= self.fitted_at * _GROWN
        if not self.config.remainder or not self.scaling or not grown or sealed.fresh < LEAST_TOKENS:
            return
        clustered, rows = self.clustered, self.clustered.partition.rows
        own = queries.reshape(rows, -1, *queries.shape[2:])
        seen = None
        if visible is not None:
            seen = visible[:, :tokens].expand(len(queries), -1).repeat_interleave(rows // len(queries), 0)
        partition, wanted = clustered.partition, self.config.tokens_fetched(tokens)
        sizes, has_room = (clustered.form, own.shape[1], partition.clusters), self._account.has_room
        tried, alone = rows_together(rows, own.device, clustered.form)
        together = next((count for count in tried if has_room(fit_bytes(*sizes, count, alone))), tried[-1])
        with self._account.holding("fitting", fit_bytes(*sizes, together, alone)):
            made_of = clustered.form, clustered.labels, partition.centroids, partition.counts
            maps = fit_maps(sealed, *made_of, own, self.scaling, wanted, seen, self._account, together)
        if self.maps is not None:
            self.maps.close()
        self.maps, self.fitted_at = maps, tokens

    # --- choosing ----------------------------------------------------------------------------------------------

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        clustered = self.clustered
        if clustered.late:
            clustered.catch_up()
        rows, count = clustered.partition.counts.shape
        heads = query.states.shape[0] * query.states.shape[1] // rows
        nbytes = _score_bytes(clustered.form, rows, count, heads, self._clusters)
        self._account.hold("scores", nbytes)
        try:
            return self._choice(query, budget, self.maps is not None and not guess)
        finally:
            self._account.release("scores", nbytes)

    @property
    def chooses_on_device(self) -> bool:
        """Whether centroids are in memory, and not too many for `choose_on_device`."""
        return not self._clusters.mapped and self.clustered.partition.clusters <= MOST_CLUSTERS

    @property
    def room(self) -> int:
        """Clusters a row that there is room for, after a step on the device."""
        return self.on_device.memory[0].shape[1]

    def graph_parts(self) -> list[Any]:
        """The tensors that `choose_on_device` uses in a captured step, which is valid while they stay."""
        device = self.clustered.buffer.entries.device
        return [*self.on_device.memory, *([] if self.maps is None else self.maps.on(device))]

    def device_bytes(self, context: int, heads: int, wanted: int, recent: int) -> dict[str, int] | None:
        """Upper bounds by owner on the device memory of `choose_on_device`, of `wanted` pages of `context` tokens a
        row, for `heads` query heads a row and so many `recent` entries. None: it cannot choose there."""
        form, rows = self.clustered.form, self.clustered.partition.rows
        count = self._clusters.most_clusters(context, form.group_size)
        if self._clusters.mapped or count > MOST_CLUSTERS:
            return None
        sizes = count, form.key_width, form.value_dim, recent, wanted * form.group_size
        return {"scores": centroids_bytes(rows, heads, *sizes)}

    def choose_on_device(self, query: Query, budget: int, looks: bool) -> DeviceChoice:
        """As `select`, on the history's device; units are the numbers of pages. `looks`: with the lost mass."""
        clustered, form, maps, (batch, heads, _) = self.clustered, self.clustered.form, self.maps, query.states.shape
        captured = query.sizes
        centroids, tables = self.on_device.latest if captured is None else self.on_device.memory
        rows, count, dim = centroids.shape
        if maps is not None and maps.ratio.shape[1] != batch * heads // rows:
            maps = None
        most = self.most_pages(budget, self.config.num_sinks, self._clusters, form.group_size)
        recent, value, weight, lost, there = query.recent()[:, 0], None, None, None, None
        listed = min(most, clustered.most_pages)
        if captured is not None:  # as many as there may be
            listed, there = most, captured.recent
        sizes = count, dim, form.value_dim, recent.shape[1], listed * form.group_size
        nbytes = centroids_bytes(rows, batch * heads // rows, *sizes)
        with self._account.holding("scores", nbytes):
            scored = score(query.states, centroids, tables, recent, query.scaling, there)
            limits = budget * form.group_size, most, listed, clustered.pages.largest, form.group_size
            units, keep, kept, _, left = choose(*scored, tables, *limits)
            if maps is not None:
                value, weight = rest(scored[0], centroids, tables, kept, *maps.on(centroids.device), batch)
        if captured is None:
            self.kept = kept
        if looks:
            lost = left[0 if maps is None else 1]
        return DeviceChoice(units, keep, budget * form.group_size, value, weight, lost, nbytes)

    def estimate(self, queries: list[Query], units: list[np.ndarray]) -> Estimates | None:
        """As `Predictor.estimate`."""
        clustered, maps, (batch, heads, _) = self.clustered, self.maps, queries[0].states.shape
        rows = clustered.partition.rows
        if maps is None or maps.ratio.shape[1] != batch * heads // rows:
            return None
        states = [(one.states.float() * one.scaling).reshape(rows, -1, one.states.shape[2]) for one in queries]
        return estimates(
            maps, clustered.form, clustered.partition.centroids.astype(np.float32, copy=False), clustered.stored,
            [own.numpy(force=True) for own in states], units, batch, queries[0].states.device,
        )  # fmt: skip

    def lost(self, query: Query, choice: Choice, estimated: bool) -> float | None:
        """As `Predictor.lost`, as if each key were its cluster's centroid."""
        clustered, every = self.clustered, np.arange(len(choice.units))[:, None]
        rows, count = clustered.partition.counts.shape
        heads = query.states.shape[0] * query.states.shape[1] // rows
        with self._account.holding("scores", _score_bytes(clustered.form, rows, count, heads, self._clusters)):
            padded, _ = self._first(np.empty((rows, count), dtype=np.float32), query.visible)
            shares, left = self.shares(query, clustered.partition.counts - padded), clustered.stored - padded
            begin, last = ((choice.units >= 0) * part[every, choice.units] for part in (padded, clustered.stored))
            entry = np.arange(clustered.pages.largest * clustered.form.group_size)
            kept = (entry >= begin[..., None]) & (entry < last[..., None])
            if choice.keep is not None:
                kept &= choice.keep
            np.subtract.at(left, (every, choice.units), kept.sum(2))
            if estimated and choice.next is not None:
                left[np.broadcast_to(every, choice.next.shape)[choice.next >= 0], choice.next[choice.next >= 0]] = 0
            return float((shares[left > 0] * left[left > 0]).sum()) / (rows * heads)

    def _choice(self, query: Query, budget: int, estimates_others: bool) -> Choice:
        clustered = self.clustered
        stored, page_counts, group = clustered.stored, clustered.page_counts, clustered.form.group_size
        shares = self.shares(query, clustered.partition.counts)
        shares[stored == 0] = -np.inf
        padded, sinks = self._first(shares, query.visible)
        first, row = (sinks > 0) & (stored > 0), np.arange(len(stored))[:, None]
        wanted = np.maximum(0, budget * group - clustered.buffer.counts - sinks.sum(1))[:, None]
        most = self.most_pages(budget, self.config.num_sinks, self._clusters, group)
        order = _best(shares, most + self.config.num_sinks)  # each has at least one page, so no others fit
        most -= (np.where(shares > -np.inf, page_counts, 0) * first).sum(1)[:, None]
        pages = np.where(shares[row, order] > -np.inf, page_counts[row, order], 0)
        counts, others = np.where(pages, stored[row, order], 0), pages * ~first[row, order]
        before = np.cumsum(counts, 1) - counts
        selected = (before < wanted) & (counts > 0) & (np.cumsum(others, 1) <= most)
        cut = np.zeros_like(stored)  # entries kept of each cluster, its latest ones
        cut[row, order] = np.where(selected, np.minimum(counts, wanted - before), 0)
        units, named = kept_entries((cut > 0) | first)
        entry = np.arange(clustered.pages.largest * group)
        last, begin = stored[row, units], padded[row, units][..., None]
        keep = entry >= (last - cut[row, units])[..., None]
        keep |= first[row, units][..., None] & (entry >= begin) & (entry < begin + sinks[row, units][..., None])
        importance = np.where(first[row, units], np.inf, shares[row, units]).astype(np.float32)
        records = page_counts[row, units]
        left = None
        if estimates_others:
            left, apart = kept_entries((shares > -np.inf) & (padded == 0) & (cut == 0) & ~first)
            left = left if apart is None else np.where(apart, left, -1)
        return Choice(units if named is None else np.where(named, units, -1), keep, importance, records, left)

    def shares(self, query: Query, counts: np.ndarray) -> np.ndarray:
        """Share of a row's heads' attention that each key of a cluster gets, (rows, clusters) float32, as if all keys
        were their centroids. Scores that are not numbers count for nothing."""
        rows = len(counts)
        states = (query.states * query.scaling).float().reshape(rows, -1, query.states.shape[2])
        latest = query.recent()[:, 0].float()
        recent = states.to(latest.device) @ latest.transpose(1, 2)
        if not (states.is_cpu and recent.is_cpu):
            states, recent = to_host(states, recent)
        centroids = torch.from_numpy(self.clustered.partition.centroids).float()
        products = states @ centroids.transpose(1, 2)
        scores = products + torch.from_numpy(counts).float().log()[:, None]
        total = torch.cat([scores, recent], 2).logsumexp(2, keepdim=True)
        if not total.isfinite().all():
            for part in (products, scores, recent):
                part.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
            total = torch.cat([scores, recent], 2).logsumexp(2, keepdim=True)
            return (products - total).exp().nan_to_num_(0).sum(1).numpy()
        return (products - total).exp().sum(1).numpy()

    def _first(self, shares: np.ndarray, visible: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Count each cluster's members before a row's first visible token, and among its first tokens: (rows, clusters)
        each. Sets the shares of clusters of padding to -inf."""
        labels = self.clustered.labels
        first = np.zeros(len(shares), dtype=np.int64)
        if visible is not None:
            seen = visible[:, : labels.shape[1]].cpu().numpy()
            seen = np.repeat(seen, len(shares) // len(seen), 0)
            first = seen.argmax(1)
            occupied = np.zeros(shares.shape, dtype=bool)
            tokens = seen.nonzero()
            occupied[tokens[0], labels[tokens]] = True
            shares[~occupied] = -np.inf
        begin, sinks = np.zeros(shares.shape, dtype=np.int64), np.zeros(shares.shape, dtype=np.int64)
        for row, start in enumerate(first.tolist()):
            sinks[row] = np.bincount(labels[row, start : start + self.config.num_sinks], minlength=shares.shape[1])
            if start:
                begin[row] = np.bincount(labels[row, :start], minlength=shares.shape[1])
        return begin, sinks

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> None:
        self.kept = None
        if not units:
            self.close()

    def select_rows(self, rows: torch.Tensor) -> None:
        self.kept = None
        if self.maps is not None:
            self.maps.select_rows(rows)

    def close(self) -> None:
        if self.maps is not None:
            self.maps.close()
        self.on_device.close()
        self.maps, self.fitted_at, self.kept = None, 0, None

    # --- contexts ----------------------------------------------------------------------------------------------

    def fitted_state(self) -> dict[str, Any] | None:
        return None if self.maps is None else self.capture()

    def capture(self) -> dict[str, Any]:
        return {"maps": None if self.maps is None else self.maps.capture(), **self.STATE.capture(self)}

    def restore(self, tree: dict[str, Any]) -> None:
        """As `Predictor.restore`. Raises `ContextError`."""
        self.STATE.check(self.STATE.own(tree), "a layer")
        if (tree["maps"] is None) != (tree["fitted_at"] == 0):
            raise not_whole("a layer", f"its maps were fitted at {tree['fitted_at']} tokens")
        if tree["maps"] is not None and self.config.remainder:
            form, rows = self.clustered.form, self.clustered.partition.rows
            self.maps = ValueMaps.restore(tree["maps"], form, rows, form.key_width, self._account)
            self.fitted_at = tree["fitted_at"]


def _best(shares: np.ndarray, most: int) -> np.ndarray:
    """The clusters with the largest `shares` (rows, clusters), at most `most` a row, in descending order. Of equal ones
    the first come first."""
    candidates = largest(shares, most) if most < shares.shape[1] else np.arange(shares.shape[1])[None]
    order = np.argsort(-np.take_along_axis(shares, candidates, 1), 1, kind="stable")
    return np.take_along_axis(candidates, order, 1)


def _score_bytes(form: RecordFormat, rows: int, count: int, heads: int, clusters: ClusterForm) -> int:
    """Bytes of centroids in 32 bits, and of mapped copies; of three scores a head; of sort keys; and of the entries'
    mask."""
    means = (6 if clusters.mapped else 4) * form.key_width
    return rows * count * (means + 12 * heads + 64 + clusters.places(form.group_size))
