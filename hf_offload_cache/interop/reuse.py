"""Requests that begin with a context of a library, and leave their own there for the next ones."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..contexts.library import ContextLibrary
from ..contexts.open import closed_on_error
from ..core.cache import OffloadCache
from ..errors import BudgetError, ContextError, StoreError, StoreFullError
from ..model.fingerprint import full_fingerprint
from ..model.own_generate import Request

LEAST = 16
"""Fewest tokens for which a context is opened or kept."""


class Reuse:
    """A library in the service of requests, of any thread. `close` waits until everything is saved.

    Args:
        library: a `ContextLibrary`, or the folder of one.
    """

    def __init__(self, library: ContextLibrary | str | Path) -> None:
        self.library = library if isinstance(library, ContextLibrary) else ContextLibrary(library)
        self.trouble: list[str] = []
        """Why contexts were not used or not kept, a sentence each, each once."""
        self._private = threading.local()
        self._saver = ThreadPoolExecutor(1, "hf-offload-cache-contexts")
        self._saving: set[Future[None]] = set()

    def serves(self, request: Request) -> bool:
        """Whether the request's ids identify its content, and it may use the library."""
        return request.ids is not None and not getattr(self._private, "now", False)

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        """Within it, requests of this thread use no context and leave none."""
        before, self._private.now = getattr(self._private, "now", False), True
        try:
            yield
        finally:
            self._private.now = before

    def take(
        self, request: Request, model: Any, cls: type[OffloadCache], limits: Sequence[int | str | None], **fields: Any
    ) -> tuple[OffloadCache, int] | None:
        """A cache with the longest beginning of the request that the library has, and the number of its tokens a
        sequence; the caller closes it. None: there is none, or none that can be used.

        Waits for contexts that are being saved: the next turn of a conversation continues one of them. `limits`:
        memory budgets, of which the first that is enough is used.
        """
        self.settle()
        ids = request.ids
        assert ids is not None
        for memory in limits:
            try:
                found = self.library.open(
                    ids, model, cls, attention_mask=request.mask, least=LEAST, memory=memory,
                    max_context=request.tokens, max_batch=request.rows, **fields,
                )  # fmt: skip
                if found is None or len(ids) == request.rows:
                    return found
                with closed_on_error(found[0]):
                    found[0].batch_repeat_interleave(request.rows // len(ids))
                return found
            except BudgetError as error:
                why = f"a stored context does not fit: {error}"
            except (ContextError, StoreError) as error:
                why = f"the library could not be read: {error}"
        self.note(why)
        return None

    def leave(self, cache: OffloadCache, request: Request) -> None:
        """Save the content of `cache` and close it, in another thread. Raises nothing."""
        if cache.adapters != {"adapters": "none"}:
            cache.identity = full_fingerprint(cache.given_model)  # the next request may switch them
        saved = self._saver.submit(self._save, cache, request)
        self._saving.add(saved)
        saved.add_done_callback(self._saving.discard)

    def _save(self, cache: OffloadCache, request: Request) -> None:
        try:
            with cache:
                assert request.ids is not None
                each = cache.sequences // max(1, len(request.ids))
                if each > 1:  # beams, and several answers to a prompt, share its tokens
                    cache.crop(min(0, request.ids.shape[1] - cache.tokens))
                    cache.batch_select_indices(torch.arange(0, cache.sequences, each, device="cpu"))
                if cache.tokens >= LEAST:
                    self.library.save(cache, instead=True)
        except (OSError, ValueError, RuntimeError) as error:  # what `save` raises
            self.note(f"a context was not kept: {error}")

    def note(self, why: str) -> None:
        """Warn, once, and keep it in `trouble`."""
        if why not in self.trouble:
            self.trouble.append(why)
            warnings.warn(why, UserWarning, stacklevel=3)

    def settle(self) -> None:
        """Wait for contexts that are being saved."""
        for saved in tuple(self._saving):
            saved.exception()

    def close(self) -> None:
        self._saver.shutdown()


def can_repeat(error: BaseException) -> bool:
    """Whether a generation that failed with `error` may succeed without the library's context."""
    return isinstance(error, StoreError) and not isinstance(error, StoreFullError)
