"""A store that grows, made immutable for contexts and forks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..fetch.storage import Storage
from ..stores.base import Store, require_freezable
from ..stores.layered import LayeredStore


def frozen(
    storage: Storage, store: Store, name: str, named: Callable[[int], np.ndarray], moved: Callable[[Store], None]
) -> LayeredStore:
    """`store` with all its records frozen and its latest parts merged, in a layered store that takes its place: `moved`
    is told where that is new. `named(count)`: which of the first `count` records are held, (count,) bool.

    Blocks until all writes are done; raises what one failed with, with nothing changed, as long as a record that was
    lost so is held; and as `LayeredStore.merge`, with all frozen and readable as before. Raises `TypeError` for a store
    that cannot be frozen.
    """
    freezable = require_freezable(store)
    storage.prefetcher.flush(freezable)
    storage.prefetcher.check_written(freezable, named(freezable.capacity).nonzero()[0])
    freezable.freeze()
    if not isinstance(freezable, LayeredStore):
        layered = storage.layer_store([freezable], freezable.record_bytes, name)
        moved(layered)
        storage.stores.remove(freezable)
        assert isinstance(layered, LayeredStore)
        freezable = layered
    freezable.merge(named(freezable.capacity))
    return freezable
