"""What a cache will take on the disk, once it is a context."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from ..stores.base import DEVICE_BLOCK
from .kept_layers import capture_kept
from .protocol import ContextCache, StoredLayer
from .state import tensor_bytes


def bytes_of(cache: ContextCache, kept: Collection[tuple[int, int]] = ()) -> int:
    """What a frozen cache will take on the disk beside the files `kept`, but for what describes it."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, StoredLayer):
            stores = layer.freeze()
            for store, live in zip(stores, layer.live(stores), strict=True):
                if (store.written & ~live).any():  # it will be a copy without them
                    total += int(np.count_nonzero(store.written & live)) * store.record_bytes
                elif store.inode not in kept:
                    total += store.capacity * store.record_bytes
            state: Any = layer.capture()
        else:
            state = capture_kept(layer)
        total += -(-tensor_bytes(state) // DEVICE_BLOCK) * DEVICE_BLOCK
    return total

