"""Objects of a published context besides its cells: state fitted to its queries, and its active blocks."""

from __future__ import annotations

from typing import Any

import torch

from ..contexts.state import unpack
from ..core.cache import OffloadCache
from ..core.filling import Filling
from ..stores.encryption import decrypt
from .answers import line_of
from .publish import form_of
from .sparse_prefill import ActiveBlocks, SparsePrefill
from .stream_manifest import ACTIVE, FITTED, StreamManifest, StreamObject, binding
from .streaming_lane import StreamingLane


class Extras:
    """Uses these objects as soon as they arrive; computing does not wait for them. For the thread that runs the model.

    Attributes:
        sparse: attention over the active blocks; None: computed tokens attend to everything.
        wanted: objects to request, the first one first.
        trouble: why an object is not used, a line each.
    """

    def __init__(
        self, manifest: StreamManifest, cache: OffloadCache, filling: Filling, key: bytes | None, *, sparse: bool,
        private: bool,
    ) -> None:  # fmt: skip
        self._manifest, self._cache, self._filling, self.key = manifest, cache, filling, key
        self._fits = (manifest.cache, manifest.config) == (type(cache).__name__, form_of(cache))
        self.sparse: SparsePrefill | None = None
        self.wanted: dict[str, StreamObject] = {}
        self.trouble: list[str] = []
        if sparse and any(layer.keeps_more for layer in cache.offloaded):
            self.trouble.append("active blocks: the model chooses by itself what it attends to, and nothing less")
        elif sparse and private:
            self.trouble.append("active blocks: not requested with private ranges: everything is attended to")
        elif sparse and manifest.active is None:
            self.trouble.append("active blocks: none were published (active_mass=.98): everything is attended to")
        elif sparse and manifest.active is not None:
            self.wanted[ACTIVE] = manifest.active
        if manifest.fitted is not None and not private:  # it is fitted to all queries
            self.wanted[FITTED] = manifest.fitted

    def look(self, lane: StreamingLane) -> None:
        """Use the objects that have arrived since the last call."""
        device = self._cache.model.device
        for name, use, place in ((ACTIVE, self._attend, torch.device("cpu")), (FITTED, self._fit, device)):
            if (data := lane.taken(name)) is None:
                continue
            try:
                if self.key is not None:
                    data = decrypt(self.key, data, binding(self._manifest.context, name))
                use(unpack(data, place, "a published context"))
            except Exception as error:  # the object may hold anything, and loading continues without it
                self.trouble.append(line_of(f"{name}: {type(error).__name__}: {error}"))

    def expects(self, lane: StreamingLane) -> bool:
        """Whether fitted state that this cache can use may still arrive."""
        return self._fits and FITTED in lane.pending_objects

    def _attend(self, tree: Any) -> None:
        manifest, account = self._manifest, self._cache.storage.account
        sizes = manifest.tokens, manifest.layers, manifest.heads
        blocks = ActiveBlocks.restored(tree, *sizes, lambda nbytes: account.hold(ACTIVE, nbytes))
        self.sparse = SparsePrefill(blocks, self._cache.warn)

    def _fit(self, tree: Any) -> None:
        self._filling.use_fitted_state(tree["fitted"] if self._fits else {}, tree["states"])
