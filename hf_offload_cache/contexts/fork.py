"""A second cache over the same records: what either adds is its own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import torch

from ..kept import capture_kept, restore_kept
from ..layer import OffloadLayer

if TYPE_CHECKING:
    from ..cache import OffloadCache

Fork = TypeVar("Fork", bound="OffloadCache")


def fork(cache: Fork) -> Fork:
    """See `OffloadCache.fork`."""
    cache.freeze()
    config = dataclasses.replace(cache.config, engine=cache.shared.engine, trace=None)
    twin = type(cache)(cache.model, path=cache.shared.directory, config=config)
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
    parts = [part.share(other.shared.ring) for part in layer.freeze()]
    try:
        device = layer.history.device if layer.is_initialized else torch.device("cpu")
        other.restore(layer.capture(), parts, device)
    except BaseException:
        for part in parts:
            part.close()
        raise
