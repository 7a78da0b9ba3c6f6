"""What comes along with a context's chunks: state fitted to its queries, and which blocks they attend to."""

from __future__ import annotations

from typing import Any

import torch

from ..contexts.state import unpack
from ..core.cache import OffloadCache
from ..core.filling import Filling
from ..stores.encryption import decrypt
from .publish import form_of
from .sparse_prefill import ActiveBlocks, SparsePrefill
from .stream_manifest import ACTIVE, LEARNT, StreamManifest, StreamObject, binding
from .streaming_lane import StreamingLane, line_of


class Teacher:
    """Makes use of it as soon as it is there, whatever is held by then: computing does not wait for it. In the thread
    that runs the model. What cannot be used is told in the lane's `trouble`."""

    def __init__(
        self, manifest: StreamManifest, cache: OffloadCache, filling: Filling, key: bytes | None, *, sparse: bool,
        private: bool,
    ) -> None:  # fmt: skip
        self._manifest, self._cache, self._filling, self._key = manifest, cache, filling, key
        self.sparse: SparsePrefill | None = None
        """What computing attends with; None: everything is attended to."""
        self.wanted: dict[str, StreamObject] = {}
        """Objects for the lane, the first one first."""
        self._of_use = (manifest.cache, manifest.config) == (type(cache).__name__, form_of(cache))
        self.trouble: list[str] = []
        if private:  # both are of all queries
            if sparse:
                self.trouble.append("active blocks: not asked for with private ranges: everything is attended to")
            return
        if sparse and manifest.active is None:
            self.trouble.append("active blocks: none were published (active_mass=.98): everything is attended to")
        elif sparse and manifest.active is not None:
            self.wanted[ACTIVE] = manifest.active
        if manifest.learnt is not None:
            self.wanted[LEARNT] = manifest.learnt

    def look(self, lane: StreamingLane) -> None:
        """Use what has come since the last call."""
        own = self._cache.model.device
        for name, use, device in ((ACTIVE, self._attend, torch.device("cpu")), (LEARNT, self._teach, own)):
            if (data := lane.taken(name)) is None:
                continue
            try:
                if self._key is not None:
                    data = decrypt(self._key, data, binding(self._manifest.context, name))
                use(unpack(data, device, "a published context"))
            except Exception as error:  # whatever someone has put in there: it can be done without
                self.trouble.append(line_of(f"{name}: {type(error).__name__}: {error}"))

    def expects(self, lane: StreamingLane) -> bool:
        """Fitted state may still arrive, and is of use to this cache."""
        return self._of_use and LEARNT in lane.beside

    def _attend(self, tree: Any) -> None:
        manifest, account = self._manifest, self._cache.storage.account
        sizes = manifest.tokens, manifest.layers, manifest.heads
        blocks = ActiveBlocks.restored(tree, *sizes, lambda nbytes: account.hold(ACTIVE, nbytes))
        self.sparse = SparsePrefill(blocks, self._cache.warn)

    def _teach(self, tree: Any) -> None:
        lessons = tree["lessons"] if self._of_use else {}
        self._filling.teach(lessons, tree["states"])
