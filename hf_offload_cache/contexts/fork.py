"""A second cache over the same records: what either adds is its own."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, TypeVar

from ..stores.engines import share_store
from .configuration import fields_in_states
from .kept_layers import capture_kept, restore_kept
from .open import closed_on_error
from .protocol import ContextCache, StoredLayer

Fork = TypeVar("Fork", bound=ContextCache)


def fork(cache: Fork) -> Fork:
    """See `OffloadCache.fork`."""
    cache.freeze()
    storage, key = cache.storage, cache.storage.key
    own_key = None if key is None else (lambda: key)  # the user's function might give another one by now
    own: dict[str, Any] = {"engine": storage.engine, "trace": None, "encryption_key": own_key}
    config = dataclasses.replace(cache.config, **own, **fields_in_states(cache.config_class))
    twin = type(cache)(cache.given_model, path=storage.directory, config=config)
    with closed_on_error(twin):
        for layer_idx, (layer, other) in enumerate(zip(cache.layers, twin.layers, strict=True)):
            if isinstance(layer, StoredLayer) and isinstance(other, StoredLayer):
                _fork_layer(layer, other, twin)
            else:
                restore_kept(other, capture_kept(layer), f"layer {layer_idx}", known=True)
        if cache.sequences:
            twin.restore(cache.capture())
    return twin


def _fork_layer(layer: StoredLayer, other: StoredLayer, twin: ContextCache) -> None:
    with contextlib.ExitStack() as undo:
        parts = []
        for part in layer.freeze():
            parts.append(share_store(part, twin.storage.ring))
            undo.callback(parts[-1].close)
        other.restore(layer.capture(), parts, layer.history_device)
        undo.pop_all()
