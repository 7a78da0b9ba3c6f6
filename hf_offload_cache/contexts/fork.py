"""A second cache over the same records: what either adds is its own."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..core.kept_layers import capture_kept, restore_kept
from ..core.offload_layer import OffloadLayer
from ..stores.engines import share_store

if TYPE_CHECKING:
    from ..core.offload_cache import OffloadCache

Fork = TypeVar("Fork", bound="OffloadCache")


def fork(cache: Fork) -> Fork:
    """See `OffloadCache.fork`."""
    cache.freeze()
    key = cache.shared.key
    own_key = None if key is None else (lambda: key)  # the user's function might give another one by now
    own: dict[str, Any] = {"adapter": None} if hasattr(cache.config, "adapter") else {}  # it is in the layers' states
    config = dataclasses.replace(
        cache.config, engine=cache.shared.engine, trace=None, encryption_key=own_key, **own
    )
    twin = type(cache)(cache.given_model, path=cache.shared.directory, config=config)
    try:
        for layer, other in zip(cache.layers, twin.layers, strict=True):
            if isinstance(layer, OffloadLayer) and isinstance(other, OffloadLayer):
                _fork_layer(layer, other)
            else:
                restore_kept(other, capture_kept(layer))
        if cache.sequences:
            twin.restore(cache.capture())
    except BaseException:
        twin.close()
        raise
    return twin


def _fork_layer(layer: OffloadLayer, other: OffloadLayer) -> None:
    with contextlib.ExitStack() as undo:
        parts = []
        for part in layer.freeze():
            parts.append(share_store(part, other.shared.ring))
            undo.callback(parts[-1].close)
        device = layer.history.device if layer.is_initialized else torch.device("cpu")
        other.restore(layer.capture(), parts, device)
        undo.pop_all()
