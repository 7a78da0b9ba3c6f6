"""What an exact cache is compared with."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache

from .place import inner_model


def dynamic_cache(model: Any) -> DynamicCache:
    """transformers' own cache, new, for `model`."""
    return DynamicCache(config=inner_model(model).config)
