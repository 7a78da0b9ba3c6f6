"""State that a cache's layers share: settings, storage, the current step, and whether the layers agree."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..config import OffloadConfig
from ..errors import CacheClosedError, SeamLostError, StalledError
from ..fetch.storage import Storage
from ..model import attach
from .step import ForwardEnded, Step

SEAM_LOST = (
    "something replaced the model's attention implementation while a cache was attached. This step gave no token; "
    "close() the cache, set the implementation first, and construct the cache after"
)


class Shared:
    """Made and closed by the cache; used by the thread that runs the model. Raises as `Storage` does.

    Attributes:
        step: the current forward; None: none is running, or its beginning was not seen.
        unseen: the layer whose keys attention has to see next.
        front: the layer updated last, and its length before.
        books_changed: units were sealed, slots were made, or layers changed, since the account was last updated.
        take_back: returns a function that removes what an unfinished forward has added; set by the cache.
        ends_after: called with each layer that has added its tokens; returns whether the forward ends there; set by
            `Filling`.
        attend_prompt: replaces layers' attention in calls with several queries; set by `Filling`.
        visible: which stored tokens are not padding, bool (B, T), for layers that learn without queries; None: all are;
            set by `Filling`.
        indexing: state that layers share whose model chooses by an indexer what it attends to; None: there are none.
        graphed: most steps are replays of a CUDA graph, which estimate no mass; set by `GraphedStep` for the others.
    """

    def __init__(self, config: OffloadConfig, storage: Storage) -> None:
        self.config, self.storage = config, storage
        self.step: Step | None = None
        self.unseen: int | None = None
        self.front: tuple[int, int] | None = None
        self.books_changed = True
        self.take_back: Callable[[], Callable[[], object] | None] = lambda: None
        self.ends_after: Callable[[int], bool] | None = None
        self.attend_prompt: Callable[[Any, Any], Any] | None = None
        self.visible: torch.Tensor | None = None
        self.indexing: Any = None
        self.graphed = False

    @property
    def broken(self) -> bool:
        """The cache cannot be used until `reset`: layers may differ, or an unknown operation may be running."""
        return self.storage.torn or self.storage.prefetcher.interrupted_by is not None

    def check_open(self) -> None:
        """Raise `CacheClosedError`, `ForkedProcessError`, or `RuntimeError` if the cache is broken."""
        storage, trouble = self.storage, self.storage.prefetcher.interrupted_by
        if storage.process.id != os.getpid():
            storage.check_process()
        if storage.closed:
            raise CacheClosedError("this cache is closed and its data is gone: construct a new one")
        if not storage.torn and trouble is None:
            return
        if isinstance(trouble, StalledError):
            raise RuntimeError(
                f"the device stalled in an earlier step ({trouble.strerror}), or reset() it once the device answers"
            ) from trouble
        raise RuntimeError(
            "an earlier forward or change was interrupted: some layers may have it and others not; "
            "reset() the cache, or use a new one"
        )

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, all layers change in the same way; otherwise the cache cannot be used until `reset`."""
        self.check_open()
        self.books_changed = True
        try:
            yield
        except BaseException:
            self.storage.torn = True
            raise

    def step_failed(self, error: BaseException, *, taken: bool = False) -> None:
        """Handle an `error` that leaves a layer's part of a forward: only the step is lost. What the forward has added
        is removed at once, or at the next call if the device does not allow it now.

        After a signal's exception the state is unknown, and the cache is broken. The same holds if the layer has
        `taken` the step's tokens and the step's beginning was not seen, because the length before it is unknown."""
        if isinstance(error, ForwardEnded):  # what was added stays
            return
        if not isinstance(error, Exception) or (taken and self.step is None):
            self.storage.torn = True
            return
        try:
            if (take_back := self.take_back()) is not None:
                take_back()
        except Exception as failed:
            error.add_note(f"the step's tokens are not removed yet: {failed}")

    def chose(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """See `Attachable.leave_indexer`."""
        return None if self.indexing is None else cast(torch.Tensor | None, self.indexing.chose(chosen, self.step))

    def run_indexer(self, layer_idx: int, forward: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor:
        """See `Attachable`."""
        chosen = forward(**given) if self.indexing is None else self.indexing.run(layer_idx, forward, given)
        return cast(torch.Tensor, chosen)

    def differ(self) -> None:
        """Handle layers whose lengths differ before a forward: one was interrupted. Raises `RuntimeError`."""
        self.storage.torn = True
        self.check_open()

    def check_seam(self) -> None:
        """Raise `SeamLostError` if keys that stand for a history were returned and our attention did not see them."""
        if self.unseen is not None:
            raise SeamLostError(
                f"the keys of layer {self.unseen} did not reach hf_offload_cache's attention: {SEAM_LOST}"
            )

    def mend(self) -> None:
        """Drop the errors, before all layers are emptied. Raises `StalledError` while an operation that timed out is
        still running."""
        self.storage.check_process()
        self.storage.prefetcher.recover()
        self.storage.torn = False
        self.step = self.unseen = self.front = None


def shut_down(storage: Storage, model: weakref.ref[PreTrainedModel], token: int) -> None:
    """Free the storage and the seams of a cache that is closed or collected. `token`: from `attach.attach`."""
    try:
        storage.close()
    finally:
        attach.release(model(), token)
