"""transformers' own cache: what an exact cache is compared with, and whose layers stay where nothing is offloaded."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from .place import inner_model


def dynamic_cache(model: Any) -> DynamicCache:
    """transformers' own cache, new, for `model`."""
    return DynamicCache(config=inner_model(model).config)


def crops_all(layer: Any) -> bool:
    """Whether a layer's `crop` takes back all of its state: the class that last defined the state has its own
    `crop`."""
    classes = type(layer).__mro__
    made, cropped = (
        next((place for place, one in enumerate(classes) if name in vars(one)), len(classes))
        for name in ("__init__", "crop")
    )
    return cropped <= made


def may_crop(model: Any) -> bool:
    """Whether what any cache holds of `model` can be cropped: no window and no state is among it."""
    return not any(
        getattr(layer, "is_sliding", False)
        or isinstance(layer, LinearAttentionCacheLayerMixin)
        or not crops_all(layer)
        for layer in dynamic_cache(model).layers
    )
