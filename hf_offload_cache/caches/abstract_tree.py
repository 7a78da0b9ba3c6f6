"""`AbstractTreeCache`: LeoAM (section 4). Chunks judged by abstracts of their keys, tokens of the best by the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..config import OffloadConfig, SelectiveConfig
from ..core.offload_layer import OffloadLayer
from ..core.planned import LayerKind
from ..core.selective_cache import SelectiveCache
from ..core.selective_layer import SelectiveLayer
from ..history.abstract_pages import AbstractPages
from ..history.base import History
from ..history.chunk_history import ChunkHistory
from ..history.packing import sealed_groups
from ..history.position_history import PositionHistory
from ..history.record_format import RecordFormat
from ..memory.plan import LayerPlan
from ..memory.search import Search
from ..model.geometry import Geometry
from ..predictors.abstract_tree import AbstractTreePredictor
from ..predictors.stored_abstracts import StoredAbstractsPredictor
from ..stores.freezable import FreezableStore
from .abstract_tree_config import AbstractTreeConfig
from .abstract_tree_fit import fit_abstract_tree


class AbstractTreeLayer(SelectiveLayer):
    """A layer whose chunks are brought by their abstracts, and whose tokens are chosen within them; each key head has
    chunks of its own."""

    heads_apart: ClassVar[bool] = True

    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> History:
        config, shared = self.shared.config, self.shared
        kind = ChunkHistory if _on_disk(config) else PositionHistory
        return kind(shared.storage, form, rows, device, config, self.name)

    def restore_history(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> History:
        config, shared = self.shared.config, self.shared
        kind = ChunkHistory if _on_disk(config) else PositionHistory
        return kind.restore(shared.storage, tree, parts, device, config, self.name)

    @classmethod
    def plan_history(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        plan = super().plan_history(kind, config, context)
        if _on_disk(config):
            plan = plan + AbstractPages.planned(kind.form, sealed_groups(kind.form, config, context), kind.rows)
        return plan

    def make_predictor(self) -> AbstractTreePredictor:
        config, history, account = self.shared.config, self.history, self.shared.storage.account
        assert isinstance(config, AbstractTreeConfig)
        if isinstance(history, ChunkHistory):
            return StoredAbstractsPredictor(history.form, history.rows, config, account, history.pages)
        reserve = sealed_groups(history.form, config, config.max_context or 0)
        return AbstractTreePredictor(history.form, history.rows, config, account, reserve)

    @classmethod
    def plan_predictor(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        assert isinstance(config, SelectiveConfig)
        chunks, heads = sealed_groups(kind.form, config, context), kind.num_heads * kind.batch // kind.rows
        predictor = StoredAbstractsPredictor if _on_disk(config) else AbstractTreePredictor
        return predictor.plan(kind.form, config, chunks, kind.rows, heads)

    @classmethod
    def most_kept(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> int:
        return config.attended(context) + config.num_sinks


def _on_disk(config: OffloadConfig) -> bool:
    """An exact cache judges nothing."""
    return isinstance(config, AbstractTreeConfig) and config.abstracts == "disk" and not config.exact


class AbstractTreeCache(SelectiveCache):
    """Keeps the KV cache on disk, in chunks, and in memory the least and the largest of each component of their keys.

    `model.generate(..., past_key_values=AbstractTreeCache(model))`. See `AbstractTreeConfig` for the fields. Prefill is
    exact. A step of decoding brings the chunks whose keys can score highest, and attends to the best tokens in them,
    by their keys, beside the first tokens and the latest ones.
    """

    config_class: ClassVar[type[OffloadConfig]] = AbstractTreeConfig
    layer_class: ClassVar[type[OffloadLayer]] = AbstractTreeLayer
    config: AbstractTreeConfig

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        return super().choose_fields(search, geometry) if search.fields.get("exact") else fit_abstract_tree(search)
