"""What a cache will take on the disk, once it is a context."""

from __future__ import annotations

import os
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
                elif _inode(store) not in kept:
                    total += store.capacity * store.record_bytes
            state: Any = layer.capture()
        else:
            state = capture_kept(layer)
        total += -(-tensor_bytes(state) // DEVICE_BLOCK) * DEVICE_BLOCK
    return total


def _inode(store: Any) -> tuple[int, int] | None:
    """Of the file that a store's records lie in; None: they are in memory."""
    file = getattr(store, "_file", None)
    if file is None:
        return None
    there = os.fstat(file.fd)
    return there.st_dev, there.st_ino
