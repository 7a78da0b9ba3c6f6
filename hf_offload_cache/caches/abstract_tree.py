"""`AbstractTreeCache`: LeoAM (section 4). Chunks judged by abstracts of their keys, tokens of the best by the keys."""

from __future__ import annotations

from typing import Any, ClassVar

from ..config import OffloadConfig, SelectiveConfig
from ..core.offload_layer import OffloadLayer
from ..core.planned import LayerKind
from ..core.selective_cache import SelectiveCache
from ..core.selective_layer import SelectiveLayer
from ..history.packing import sealed_groups
from ..memory.plan import LayerPlan
from ..memory.search import Search
from ..model.geometry import Geometry
from ..predictors.abstract_tree import AbstractTreePredictor
from .abstract_tree_config import AbstractTreeConfig
from .abstract_tree_fit import fit_abstract_tree


class AbstractTreeLayer(SelectiveLayer):
    """A layer whose chunks are brought by their abstracts, and whose tokens are chosen within them; each key head has
    chunks of its own."""

    heads_apart: ClassVar[bool] = True

    def make_predictor(self) -> AbstractTreePredictor:
        config, form, storage = self.shared.config, self.history.form, self.shared.storage
        assert isinstance(config, AbstractTreeConfig)
        reserve = sealed_groups(form, config, config.max_context or 0)
        return AbstractTreePredictor(form, self.history.rows, config, storage.account, reserve)

    @classmethod
    def plan_predictor(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        assert isinstance(config, SelectiveConfig)
        chunks = sealed_groups(kind.form, config, context)
        heads = kind.num_heads * kind.batch // kind.rows
        return AbstractTreePredictor.plan(kind.form, config, chunks, kind.rows, heads)

    @classmethod
    def most_kept(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> int:
        return config.attended(context) + config.num_sinks


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
