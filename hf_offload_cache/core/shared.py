"""What the layers of one cache share: settings, storage, the step under way, and whether they agree."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel

from ..config import OffloadConfig
from ..errors import CacheClosedError, SeamLostError, StalledError
from ..fetch.storage import Storage
from ..model import attach
from .step import Step

SEAM_LOST = (
    "something replaced the model's attention implementation while a cache was attached. This step gave no token; "
    "close() the cache, set the implementation first, and construct the cache after"
)


class Shared:
    """Made and closed by the cache; used by the thread that runs the model. Raises as `Storage`.

    Attributes:
        step: the forward under way; None: there is none, or its beginning was not seen.
        unseen: the layer whose keys attention has to see next.
        front: the layer updated last, and what it held before.
        books_changed: units were sealed, slots were made, or layers changed, since the books were last closed.
        take_back: gives what undoes what a forward that does not end has added; set by the cache.
        ends_after: told of each layer whose `update` has taken its tokens in: whether the forward ends there; set by
            `Filling`.
        attend_prompt: attends instead of layers, where calls have several queries; set by `Filling`.
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

    @property
    def broken(self) -> bool:
        """The cache is not to be used until `reset`: layers may differ, or something may be under way unknown."""
        return self.storage.torn or self.storage.prefetcher.interrupted_by is not None

    def check_open(self) -> None:
        """Raises `CacheClosedError`, `ForkedProcessError`, or `RuntimeError` where the cache is broken."""
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
        """All layers change in the same way in here, or the cache is not to be used until `reset`."""
        self.check_open()
        self.books_changed = True
        try:
            yield
        except BaseException:
            self.storage.torn = True
            raise

    def step_failed(self, error: BaseException, *, taken: bool = False) -> None:
        """`error` is on its way out of a layer's part of a forward: it loses the step and no more. What the forward
        has added is taken back at once, or, where the device does not let that happen now, at the next call.

        After a signal's exception nobody knows what was half done: the cache is broken. So it is where the layer has
        `taken` the step's tokens in and the step's beginning was not seen: nobody knows what was held before."""
        if not isinstance(error, Exception) or (taken and self.step is None):
            self.storage.torn = True
            return
        try:
            if (take_back := self.take_back()) is not None:
                take_back()
        except Exception as failed:
            error.add_note(f"what the step had added is not taken back yet: {failed}")

    def differ(self) -> None:
        """Layers of one forward are updated in order and all hold the same before it; these do not: one was
        interrupted. Raises `RuntimeError`."""
        self.storage.torn = True
        self.check_open()

    def check_seam(self) -> None:
        """Raise when keys that stand for a history were handed out and no attention of ours saw them."""
        if self.unseen is not None:
            raise SeamLostError(
                f"the keys of layer {self.unseen} did not reach hf_offload_cache's attention: {SEAM_LOST}"
            )

    def mend(self) -> None:
        """All layers are about to be emptied: forget what was broken. Raises `StalledError` while something that did
        not end in time is still under way."""
        self.storage.check_process()
        self.storage.prefetcher.recover()
        self.storage.torn = False
        self.step = self.unseen = self.front = None


def shut_down(storage: Storage, model: weakref.ref[PreTrainedModel], token: int) -> None:
    """Give back the storage and the seams of a cache that is closed or gone. `token`: of `attach.attach`."""
    try:
        storage.close()
    finally:
        attach.release(model(), token)
