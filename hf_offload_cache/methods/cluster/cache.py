"""`ClusterCache`: DynaKV (sections 4 to 6). Clusters of keys that adapt to a long generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from ...config import OffloadConfig, SelectiveConfig
from ...core.budget import Goals, choices_for_fidelity, on_curve
from ...core.layer import OffloadLayer, Output
from ...core.plan import LayerKind
from ...core.selective_cache import SelectiveCache
from ...core.selective_layer import SelectiveLayer
from ...core.shared import Shared
from ...errors import ConfigError
from ...fetch.choice import Choice, DeviceChoice, Fetched
from ...fetch.policy import MostUsed, Policy
from ...history.base import History
from ...history.records import RecordFormat
from ...kernels.on_a_device import to_device
from ...memory.account import GRAPHS, beside
from ...memory.dry_run import DryRun
from ...memory.fit import LOST_BY, Search
from ...model.attention_call import AttentionCall
from ...model.geometry import Geometry
from ...predictors.sinks import sink_units
from ...stores.base import FreezableStore
from .config import USUAL_SIZE, ClusterConfig
from .entries import fullest
from .history import ClusterHistory
from .on_device import CapturedClusterLayer, DeviceClusters
from .plan import fit_cluster
from .predictor import ClusterPredictor

_PLACED_BY = 32
"""A call's latest queries, which order the clusters of its tokens on disk."""


class ClusterAligned(MostUsed):
    """Cluster-aligned replacement (DynaKV, section 6.2): small clusters and recently rewritten pages stay.

    A page stays by how often it was used of late, divided by a power of its cluster's number of pages, because one read
    fetches all pages of a large cluster. Pages rewritten in the latest steps, when their cluster was merged or split,
    are not evicted, up to an eighth of the slots.

    Args:
        sizes: returns the number of pages, (n,), of the cluster of each of records (n,) int64.
    """

    _BY_SIZE = 0.25
    """Exponent of the number of pages. Hit rates over 500 steps after 2K tokens of text, for least recently used, uses
    only, and this with exponents 1/4, 1/2 and 1. Slots for half a selection: .406, .457, .456, .448, .432 of pages;
    .423, .448, .467, .478, .491 of complete clusters. Slots for one selection: .780, .788, .784, .780, .765 of pages;
    .767, .771, .778, .783, .785 of complete clusters."""
    _LATELY, _SHARE = 16, 8

    def __init__(self, capacity: int, sizes: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(capacity)
        self._sizes, self._steps = sizes, 0
        self._renewed = np.full(capacity, -self._LATELY, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._renewed.nbytes

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        self._steps += wanted
        taken, slots = super().place(records, in_use, wanted=wanted)
        self._renewed[slots] = -self._LATELY
        return taken, slots

    def emptied(self, slots: np.ndarray) -> None:
        super().emptied(slots)
        self._renewed[slots] = -self._LATELY

    def _worth(self, records: np.ndarray) -> np.ndarray:
        return self._uses[records] / self._sizes(records) ** self._BY_SIZE

    def _reserved(self) -> np.ndarray:
        lately = (self._renewed > self._steps - self._LATELY).nonzero()[0]
        most = self._renewed.size // self._SHARE
        return lately if lately.size <= most else lately[np.argsort(-self._renewed[lately], kind="stable")[:most]]

    def renewed(self, slots: np.ndarray) -> None:
        self._renewed[slots] = self._steps


class ClusterLayer(SelectiveLayer):
    """A layer whose history is clustered, separately for each KV head."""

    history_class: ClassVar[type[ClusterHistory]] = ClusterHistory
    captured_class = CapturedClusterLayer
    by_use = True
    config: ClusterConfig
    history: ClusterHistory
    predictor: ClusterPredictor | None

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        super().__init__(shared, layer_idx, place, **kwargs)
        self.following: ClusterLayer | None = None
        """The next layer, whose centroids are used after this layer's attention; set by the cache."""
        self.turn = layer_idx
        """Layers take turns to settle over the host: this one so many tokens before the first one."""

    @property
    def num_stores(self) -> int:  # type: ignore[override]
        return 3 if self.config.centroids == "disk" else 1  # a mapped file has its own descriptor

    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> History:
        given = self.shared.storage, form, rows, device, self.config, self.name
        return self.history_class(*given, self.config.clusters, self)

    def restore_history(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> History:
        given = self.shared.storage, tree, parts, device, self.config, self.name
        return self.history_class.restore(*given, self.config.clusters, self)

    def stale(self, records: np.ndarray) -> None:
        """As `Readers.stale`."""
        if self._fetcher is not None:
            self._fetcher.stale(records)

    def renewed(self, records: np.ndarray, payloads: torch.Tensor, gone: np.ndarray) -> None:
        """As `Readers.renewed`. Updated clusters stay in their slots (DynaKV, section 6.2, principle 2)."""
        if self._fetcher is not None:
            self._fetcher.renew(records, payloads, gone)

    def settle_rows(self, rows: torch.Tensor) -> None:
        self.history.place()
        self.history.clustered.settle_shared(self.rows.expand(rows))

    # --- slots -------------------------------------------------------------------------------------------------

    @staticmethod
    def policy_of(sizes: Callable[[np.ndarray], np.ndarray]) -> Callable[[int], Policy]:
        """Make the policy of a number of slots; `sizes` as in `ClusterAligned`."""
        return partial(ClusterAligned, sizes=sizes)

    @property
    def policy(self) -> Callable[[int], Policy]:
        return self.policy_of(self.history.clustered.sizes)

    # --- memory ------------------------------------------------------------------------------------------------

    @classmethod
    def most_records(cls, config: SelectiveConfig, group_size: int, units: int) -> int:
        assert isinstance(config, ClusterConfig)
        return ClusterPredictor.most_pages(units, config.num_sinks, config.clusters, group_size)

    def most_kept(self, context: int) -> int:
        assert self.selecting is not None
        group = self.history.form.group_size
        return self.selecting.units(self.config, group, context) * group

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        super().rehearse(run, kind, context)
        if self.config.graphs and kind.device == "cuda":
            run.keeps(GRAPHS, self.captured_class(self).own_bytes)
        if run.alone:  # pages that settle are read from the store
            clustered = self.history.clustered
            pages = max(clustered.pages.largest, clustered.most_settled)
            run.stages("stream buffers", decode=pages * kind.form.record_bytes)
            most = kind.layers * DeviceClusters.most_sent(clustered)  # all layers settle in the same step
            run.passes(beside("stream buffers"), decode=most, together=True)

    def make_predictor(self) -> ClusterPredictor:
        return ClusterPredictor(self.history.clustered, self.config, self.shared.storage.account)

    @property
    def estimates(self) -> bool:
        return self.config.remainder

    def prompted(self, call: AttentionCall) -> None:
        if self.predictor is not None:
            self.predictor.scaling = self.scaling

    # --- placement ---------------------------------------------------------------------------------------------

    # The queries of the next attention order the clusters of an `update` on disk, while it runs. Without attention,
    # `end_step` places them.

    def _take_in(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.history.holds_back = self.shared.step is not None and self.state != "full"
        return super()._take_in(key_states, value_states)

    def _attend(self, call: AttentionCall) -> Output:
        if self.history.held_back:
            latest = call.query[:, :, -_PLACED_BY:].detach() * call.scaling
            queries = latest.unflatten(1, (self.rows.heads, -1)).flatten(0, 1)
            self.history.order(queries, self.config.tokens_fetched(self.length))
        try:
            output = super()._attend(call)
            if self.history.held_back:  # ordered meanwhile
                self.history.place()
            return output
        finally:
            self.history.left = None
            if self.config.centroids == "disk":
                self.history.clustered.partition.rest()

    def fetched(self, choice: Choice, fetched: Fetched) -> None:
        if self.following is not None and self.following.is_initialized:  # one layer early (DynaKV, section 6.1)
            self.following.history.clustered.partition.will_need()

    def end_step(self) -> None:
        if self.is_filled:
            if self.history.held_back:
                self.history.place()
            self.history.left = None
            self.history.clustered.partition.rest()  # in case no attention has used the centroids
        super().end_step()

    # --- attention ---------------------------------------------------------------------------------------------

    def combine(
        self, call: AttentionCall, choice: Choice, fetched: Fetched, visible: torch.Tensor | None
    ) -> Output:
        output = super().combine(call, choice, fetched, visible)
        history, batch = self.history, self.history.together
        turn = history.tail.length - self.config.num_recent - 1 + self.turn  # 0: after tokens have joined
        if turn // batch > (turn - call.query.shape[2]) // batch:
            self.settle(choice, fetched)
        return output

    def attended_on_device(self, choice: DeviceChoice) -> None:
        """As `combine` does, settle clusters once in as many tokens as leave the tail together: all layers in the step
        after that, so that others change nothing. The next step does so at its beginning, when the device's choice has
        arrived: nothing waits for it."""
        history = self.history
        if not self.settles():
            return
        assert self.predictor is not None
        self.predictor.on_device.settle(self.predictor.kept if history.records > self.budget else None)

    def settles(self, more: int = 0) -> bool:
        """Whether a step on a device settles clusters, with so many `more` tokens than now."""
        history = self.history
        due = (history.tail.length + more - self.config.num_recent - 1) % history.together == 0
        return due and bool(history.clustered.buffer.counts.any())

    def settle(self, choice: Choice, fetched: Fetched) -> None:
        """Algorithm 1 after attention: settle the clusters that the step retrieved, and, over the buffer budget, the
        fullest others.

        A retrieved cluster gets its buffered entries, and is split if it is flagged. Its pages are in `fetched`. If
        more than `append_buffer` entries would remain, the clusters with the most are read and settled too. `combine`
        calls this once each time that tokens leave the tail.
        """
        history, clustered = self.history, self.history.clustered
        extents = history.extents(choice.units)
        assert fetched.records is not None and extents.unit is not None
        begins = np.diff(extents.unit, axis=1, prepend=-1) > 0
        row, column = (begins & (extents.records >= 0)).nonzero()
        first = np.full(clustered.stored.shape, -1)  # column of each cluster's first fetched page
        first[row, choice.units[row, extents.unit[row, column]]] = column
        retrieved = (clustered.waiting > 0) & (first >= 0)
        records = fetched.records

        def pages(rows: np.ndarray, clusters: np.ndarray, numbers: np.ndarray) -> torch.Tensor:
            begin = first[rows, clusters]
            if (absent := begin < 0).all():
                return clustered.read(rows, clusters, numbers)
            row, at = to_device(np.stack([rows, np.where(absent, 0, begin + numbers)]), records.device)
            out = records[row, at]
            if absent.any():
                read = clustered.read(rows[absent], clusters[absent], numbers[absent])
                out[to_device(absent.nonzero()[0], records.device)] = read
            return out

        others = fullest(np.where(retrieved, 0, clustered.waiting), clustered.buffer.most)
        rows, clusters = map(np.concatenate, zip(retrieved.nonzero(), others, strict=True))
        if rows.size:
            clustered.settle(pages, rows, clusters)


def faithful(context: int) -> tuple[dict[str, Any], ...]:
    """`Goals.faithful`: see `choices_for_fidelity`. The other clusters are estimated."""
    return choices_for_fidelity(context, remainder=True)


_LOST = ((4096, 0.04), (7168, 0.23))
"""Tokens of a context -> share of the full cache's needles that are lost. Measured on SmolLM2-135M, as the next two: 36
needles in 4,000 tokens, 84 in 7,000. 800 selected tokens lost as many as 400."""
_LOST_BY_SIZE = ((12, 0.0), (16, 0.2), (32, 0.25), (64, 0.35), (128, 0.5))
"""Average keys a cluster -> the additional share that is lost."""
_LOST_BY_FEW = ((0, 0.9), (150, 0.3), (400, 0.0))
"""Selected tokens -> the additional share that is lost."""


def needles_lost(config: ClusterConfig, geometry: Geometry) -> float:
    """The share of needles that are lost, by context, size of clusters, and selected tokens."""
    context = config.max_context or _LOST[-1][0]
    assert config.cluster_size is not None
    lost = on_curve(context, _LOST) + on_curve(config.cluster_size, _LOST_BY_SIZE)
    return min(0.99, lost + on_curve(config.tokens_fetched(context), _LOST_BY_FEW))


class ClusterCache(SelectiveCache):
    """Keep the KV cache on disk in clusters of similar keys, and the centroids of these in memory.

    `model.generate(..., past_key_values=ClusterCache(model))`. See `ClusterConfig` for the fields. Prefill is exact. A
    decoding step attends to the clusters whose centroids score highest, and to the first and the latest tokens. Decoded
    tokens join clusters, and clusters whose keys have drifted apart are split.
    """

    config_class: ClassVar[type[OffloadConfig]] = ClusterConfig
    layer_class: ClassVar[type[OffloadLayer]] = ClusterLayer
    goals = Goals(faithful, lost=needles_lost)
    config: ClusterConfig

    @classmethod
    def missing(cls) -> str | None:
        if find_spec("faiss") is not None:
            return None
        return (
            f"{cls.__name__} needs faiss, which is not installed: pip install 'hf-offload-cache[cluster]'"
        )

    def prepare(self, model: Any) -> None:
        if (why := self.missing()) is not None:
            raise ConfigError(why)
        super().prepare(model)
        if self.config.centroids == "disk":
            for layer, following in pairwise(self.selective):
                assert isinstance(layer, ClusterLayer) and isinstance(following, ClusterLayer)
                layer.following = following

    @classmethod
    def to_try(cls, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Other cluster sizes: smaller clusters lose fewer needles, larger ones need fewer reads."""
        if any(given.get(name) is not None for name in ("cluster_size", "cluster_capacity", "num_clusters")):
            return [{"join_every": tokens} for tokens in (16, 64)] if given.get("join_every") is None else []
        return [{"cluster_size": size} for size in (8, 16, 32)]

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        """As `SelectiveCache.shortfalls`, and clusters that a budget made larger."""
        found, sizes = super().shortfalls(config, geometry, given), ("cluster_size", "cluster_capacity", "num_clusters")
        if config.exact or config.cluster_size <= USUAL_SIZE or any(name in given for name in sizes):
            return found
        larger = f"clusters have {config.cluster_size} keys on average; {USUAL_SIZE} lose fewer needles {LOST_BY}"
        return [*found, larger]

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        def complete(config: ClusterConfig) -> int:
            group = config.group_size or 1
            wanted = -(-config.tokens_fetched(search.max_context) // group) + sink_units(config.num_sinks, group, False)
            return ClusterLayer.most_records(config, group, wanted) * group

        return fit_cluster(search, complete)
