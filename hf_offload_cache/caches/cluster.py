"""`ClusterCache`: DynaKV (sections 4 to 6). Clusters of keys that follow a long generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ..config import OffloadConfig, SelectiveConfig
from ..core.offload_layer import OffloadLayer, Output
from ..core.planned import LayerKind, plan_store
from ..core.selective_cache import SelectiveCache
from ..core.selective_layer import SelectiveLayer
from ..fetch.choice import Choice
from ..fetch.fetched import Fetched
from ..history.base import History
from ..history.cluster_history import ClusterHistory
from ..history.record_format import RecordFormat
from ..memory.plan import LayerPlan
from ..model.attention_call import AttentionCall
from ..predictors.clusters import ClusterPredictor
from ..stores.freezable import FreezableStore
from .cluster_config import ClusterConfig


class ClusterLayer(SelectiveLayer):
    """A layer whose history lies in clusters, each key head's of its own."""

    heads_apart: ClassVar[bool] = True
    config: ClusterConfig

    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> History:
        own = self.shared.storage, form, rows, device, self.config, self.name
        return ClusterHistory(*own, self.config.clusters, self.stale)

    def restore_history(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> History:
        own = self.shared.storage, tree, parts, device, self.config, self.name
        return ClusterHistory.restore(*own, self.config.clusters, self.stale)

    def stale(self, records: np.ndarray) -> None:
        """These records are written anew: nothing that was read of them is valid."""
        if self._fetcher is not None:
            self._fetcher.stale(records)

    @classmethod
    def plan_history(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        assert isinstance(config, ClusterConfig)
        plan, records = ClusterHistory.planned(kind.form, config, config.clusters, context, kind.rows)
        return plan + plan_store(kind, config, records)

    @classmethod
    def plan_predictor(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        assert isinstance(config, ClusterConfig)
        heads = kind.num_heads * kind.batch // kind.rows
        return ClusterPredictor.planned(kind.form, config.clusters, context, kind.rows, heads)

    @classmethod
    def most_records(cls, units: int) -> int:
        return 2 * units  # of most clusters one page is not full

    @classmethod
    def most_beside(cls, kind: LayerKind, config: SelectiveConfig) -> int:
        assert isinstance(config, ClusterConfig)
        return config.append_buffer + kind.form.group_size

    @classmethod
    def most_kept(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> int:
        return cls.most_units(kind, config, context) * kind.form.group_size

    def make_predictor(self) -> ClusterPredictor:
        assert isinstance(self.history, ClusterHistory)
        return ClusterPredictor(self.history.clustered, self.config, self.shared.storage.account)

    def combine(
        self, call: AttentionCall, choice: Choice, fetched: Fetched, visible: torch.Tensor | None
    ) -> tuple[Output, Choice | None]:
        output = super().combine(call, choice, fetched, visible)
        self._settle(choice, fetched)
        return output

    def _settle(self, choice: Choice, fetched: Fetched) -> None:
        """What waits for a cluster that is at hand does so no longer (DynaKV, algorithm 1)."""
        history = self.history
        assert isinstance(history, ClusterHistory)
        own = history.clustered
        rows, waiting = own.waiting.nonzero()
        if not rows.size:
            return
        here = np.zeros(own.partition.counts.shape, dtype=bool)
        at = np.nonzero(choice.units >= 0)
        here[at[0], choice.units[at]] = True
        rows, waiting = rows[here[rows, waiting]], waiting[here[rows, waiting]]
        extents, stored = history.extents(choice.units), own.stored
        assert fetched.records is not None and extents.unit is not None
        found = []
        for row, cluster in zip(rows.tolist(), waiting.tolist(), strict=True):
            column = int((choice.units[row] == cluster).argmax())
            pages = ((extents.unit[row] == column) & (extents.records[row] >= 0)).nonzero()[0]
            entries = fetched.records[row, torch.from_numpy(pages)].flatten(0, 1)
            found.append(entries[: stored[row, cluster]])
        own.settle(rows, waiting, found)


class ClusterCache(SelectiveCache):
    """Keeps the KV cache on disk, in clusters of keys, and in memory what each cluster's keys have in common.

    `model.generate(..., past_key_values=ClusterCache(model))`. See `ClusterConfig` for the fields. Prefill is exact. A
    step of decoding attends to the clusters whose centroids score highest, beside the first tokens and the latest ones;
    what is decoded joins clusters, which are split where their keys have gone apart.
    """

    config_class: ClassVar[type[OffloadConfig]] = ClusterConfig
    layer_class: ClassVar[type[OffloadLayer]] = ClusterLayer
    config: ClusterConfig
