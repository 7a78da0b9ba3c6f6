"""The layers of a cache for a model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from .hybrid_layer import hybrid
from .offload_layer import OffloadLayer
from .shared import Shared


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
