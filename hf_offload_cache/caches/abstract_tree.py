"""`AbstractTreeCache`: LeoAM (section 4). Chunks judged by abstracts of their keys, tokens of the best by the keys."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, ClassVar

from ..config import OffloadConfig
from ..core.offload_layer import OffloadLayer
from ..core.selective_cache import SelectiveCache
from ..core.selective_layer import SelectiveLayer
from ..errors import ConfigError, not_whole
from ..fetch.link import Rates
from ..history.chunk_history import ChunkHistory
from ..memory.search import Search
from ..model.geometry import Geometry
from .abstract_tree_config import AbstractTreeConfig
from .abstract_tree_fit import fit_abstract_tree, tree_shortfalls, whole_chunks
from .abstract_tree_layer import AbstractTreeLayer


class AbstractTreeCache(SelectiveCache):
    """Keeps the KV cache on disk, in chunks, and in memory the least and the largest of each component of their keys.

    `model.generate(..., past_key_values=AbstractTreeCache(model))`. See `AbstractTreeConfig` for the fields. Prefill is
    exact. A step of decoding brings the chunks whose keys can score highest, and attends to the best tokens in them,
    by their keys, beside the first tokens and the latest ones.
    """

    config_class: ClassVar[type[OffloadConfig]] = AbstractTreeConfig
    layer_class: ClassVar[type[OffloadLayer]] = AbstractTreeLayer
    config: AbstractTreeConfig
    _early = 0
    """Early steps to come."""

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        sizes = self.config.chunk_size
        if isinstance(sizes, tuple) and len(sizes) != len(self.offloaded):
            raise ConfigError(
                f"chunk_size must name each offloaded layer's, got {len(sizes)} for {len(self.offloaded)} layers: were "
                "they measured with another model? See calibrate_chunks"
            )
        rates: Rates = {}
        for layer in self.selective:
            assert isinstance(layer, AbstractTreeLayer)
            layer.num_layers, layer.rates = len(self.selective), rates
        if self.config.keeps_pages:
            for layer, following in pairwise(self.selective):
                assert isinstance(layer, AbstractTreeLayer) and isinstance(following, AbstractTreeLayer)
                layer.following = following

    def rest(self) -> None:
        """As `SelectiveCache.rest`: after a prompt come early steps."""
        super().rest()
        self._early = self.config.early_steps

    def before_selecting(self) -> None:
        if self.selecting is not None:
            self.selecting.widen(self._early > 0)
        for resident in self.selective[: int(self.config.residents)]:
            assert isinstance(resident, AbstractTreeLayer)
            resident.keep_all()
        if self.selective and self.config.keeps_pages:
            first = self.selective[0]  # none is before it
            assert isinstance(first, AbstractTreeLayer)
            first.begin_look()

    def end_step(self, output: Any = None) -> Any:
        step = self.shared.step
        if step is not None and step.selects:  # one that failed is made once more
            self._early = max(0, self._early - 1)
        changed = super().end_step(output)
        kept = [layer for layer in self.selective if layer.config.keeps_replicas]  # type: ignore[attr-defined]
        if kept and all(map(_has_no_replicas, kept)):
            useless = (
                f"compress={self.config.compress!r} does nothing: in 4 bits chunks of {self.config.chunk_size} tokens "
                "take no less of the disk, whose blocks are 4 KiB; give a larger chunk_size"
            )
            if useless not in self.warnings:
                self._warn(useless)
        return changed

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "early": self._early}

    def restore(self, tree: dict[str, Any]) -> None:
        super().restore(tree)
        left = tree.get("early", 0)  # contexts of before there were such steps
        if type(left) is not int or left < 0:
            raise not_whole("the cache", f"early steps that are left must be a number from 0, got {left!r:.80}")
        self._early = min(left, self.config.early_steps)

    @classmethod
    def to_try(cls, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Smaller chunks, whose bounds say more, and more of them that are looked into."""
        sizes = [{"chunk_size": size} for size in (64, 32, 16)] if given.get("group_size") is None else [{}]
        wanted = given.get("num_selected", 400)
        if wanted is None or given.get("num_opened") is not None:
            return sizes
        return [{**size, **more} for size in sizes for more in ({}, {"num_opened": 8 * wanted})]

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        found = super().shortfalls(config, geometry, given)
        return found if config.exact else [*found, *tree_shortfalls(config, given)]

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        if search.fields.get("exact"):
            return super().choose_fields(whole_chunks(search), geometry)
        return fit_abstract_tree(search)


def _has_no_replicas(layer: SelectiveLayer) -> bool:
    """Nor will have."""
    return layer.is_initialized and isinstance(layer.history, ChunkHistory) and layer.history.replicas is None
