"""The layers of a cache for a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..contexts.open import capture_kept, restore_kept
from ..stores.base import FreezableStore
from .layer import OffloadLayer
from .shared import Shared

# Layers of hybrid models: linear-attention state, kept as transformers keeps it, beside an offloaded history

class _HybridMethods:
    """Puts transformers' own linear-attention state beside what an `OffloadLayer` offloads (see `hybrid`)."""

    is_croppable = LinearAttentionLayer.is_croppable

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # type: ignore[arg-type]
        else:
            super().lazy_initialization(*args)  # type: ignore[misc]

    def reset(self) -> None:
        states = self._states()
        recording = getattr(self, "record_past", False)
        LinearAttentionLayer.__init__(self, **states)  # type: ignore[arg-type]  # `reset` would keep the batch size
        self.record_past = recording
        super().reset()  # type: ignore[misc]

    def select_rows(self, rows: torch.Tensor) -> None:
        states = (self.conv_states, self.recurrent_states)  # type: ignore[attr-defined]
        for place, key, state in [(held, key, state) for held in states for key, state in held.items()]:
            if state is not None:
                place[key] = state.index_select(0, rows.to(state.device))
        super().select_rows(rows)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)  # type: ignore[arg-type]
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "linear": capture_kept(self, self._linear_names())}  # type: ignore[misc]

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        super().restore(tree, parts, device)  # type: ignore[misc]
        place = f"layer {self.layer_idx}"  # type: ignore[attr-defined]
        rows = self.batch or None  # type: ignore[attr-defined]
        restore_kept(self, tree["linear"], place, self._linear_names(), rows)

    def _linear_names(self) -> list[str]:
        return list(vars(LinearAttentionLayer(**self._states())))

    def _states(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("number_of_states",) if hasattr(self, name)}


@functools.cache
def hybrid(layer_class: type[OffloadLayer]) -> type[OffloadLayer]:
    """The class of layers that hold linear-attention states beside what `layer_class` offloads: one for each."""
    bases = (_HybridMethods, layer_class, LinearAttentionAndFullAttentionLayer)
    names = {"__module__": layer_class.__module__, "__doc__": f"A `{layer_class.__name__}` beside a linear state."}
    return type(f"Hybrid{layer_class.__name__}", bases, names)


def make_layers(model: PreTrainedModel, layer_class: type[OffloadLayer], shared: Shared) -> list[Any]:
    """transformers' own layers for this model, with every full-attention one replaced by one of `layer_class`."""
    layers: list[Any] = list(DynamicCache(config=model.config).layers)
    place = 0
    for layer_idx, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[layer_idx] = layer_class(shared, layer_idx, place)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            states = {name: getattr(layer, name) for name in ("number_of_states",) if hasattr(layer, name)}
            layers[layer_idx] = hybrid(layer_class)(shared, layer_idx, place, **states)
        else:
            continue
        place += 1
    return layers


def has_linear_state(layer: Any) -> bool:
    """Whether a layer keeps a state of linear attention, which every token changes."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)
