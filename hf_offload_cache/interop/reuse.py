"""Requests that begin with a context of a library, and leave their own there for the next ones."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config import parse_size
from ..contexts.library import ContextLibrary, Match
from ..contexts.listing import total_bytes
from ..contexts.open import closed_on_error
from ..contexts.save import empty_twin, fork
from ..core.cache import OffloadCache
from ..core.filling import Filling, Opened, Source
from ..errors import BudgetError, ContextError, StoreError
from ..memory.machine import free_descriptors
from ..model.conversation import beyond_positions
from ..model.fingerprint import full_fingerprint
from ..model.media import Media, Medium, media_of, of_row, whole
from ..model.own_generate import Request, beside_text
from ..model.place import inner_model

Result = TypeVar("Result")

LEAST = 16
"""Fewest tokens for which a context is opened or kept."""
LEAST_COPIED = 64
"""Fewest tokens that are copied from each context of a batch's rows, on average: fewer are computed sooner. In a trial
with 135M parameters, opening and copying a context took as long as computing 70 tokens."""

_BLOCK = 64
"""Tokens of a context that are read at a time for a row."""


class Reuse:
    """A library in the service of requests, of any thread. `close` waits until everything is saved.

    Args:
        library: a `ContextLibrary`, or the folder of one.
        memory: maximum memory of the contexts that stay open after they were saved, the latest ones, for requests that
            begin with them. They also leave requests half of the descriptors that this process may open.
    """

    def __init__(self, library: ContextLibrary | str | Path, memory: int | str = 0) -> None:
        self.library = library if isinstance(library, ContextLibrary) else ContextLibrary(library)
        self.without_pages = 0
        """Requests of continuous batching that computed a beginning which the library has, because no pages were free
        for it."""
        self.trouble: list[str] = []
        """Why contexts were not used or not kept, a sentence each, each once."""
        self._private = threading.local()
        self._memory = parse_size(memory, "library_memory")
        self._others: list[Any] = []
        """Objects of the process that this one was forked from. They may not be ended here."""
        self._begin()

    def _begin(self) -> None:
        """Make the thread, the list of saves and the table of open caches, which belong to one process."""
        self._process, self._free = os.getpid(), free_descriptors()
        self._saver = ThreadPoolExecutor(1, "hf-offload-cache-contexts")
        self._saver.submit(int)  # starts its thread: what fails to start one would stay in the queue
        self._saving: list[Future[None]] = []
        self._open: dict[Path, OffloadCache] = {}
        """Saved caches by the path of their contexts, the least recently used one first."""
        self._at_end = weakref.finalize(self, _close_all, self._open, self._process)
        self._lock = threading.Lock()
        """For `_saving` and `_open`, and while an open one is forked."""

    def _check_process(self) -> None:
        """Begin anew in a forked process, which has neither the thread nor the caches of the first one."""
        if self._process != os.getpid():
            self._others += [self._saver, self._saving, self._open]
            self._begin()

    def identified(self, request: Request, model: Any, call: Mapping[str, Any]) -> Request | None:
        """The request with the model's fingerprint before it, and with its pictures and sounds told apart, of which the
        keyword arguments `call` have the content. None: it may not use the library, or ids and media do not identify
        its content, which `trouble` then says."""
        self._check_process()
        ids, inner = request.ids, inner_model(model)
        if ids is None or self.is_private:
            return None
        request = request._replace(identity=full_fingerprint(model))
        if not request.has_others:
            return request
        media: Media | str = media_of(inner, ids, beside_text(call))
        if isinstance(media, Media) and len(media.marks) > 1 and request.rows != len(ids):
            media = "it has several of them, and several sequences to a prompt (beams, or several answers)"
        configs = (call, vars(call.get("generation_config") or inner.generation_config))
        if isinstance(media, Media) and media.marks and any(one.get("prefill_chunk_size") for one in configs):
            media = "prefill_chunk_size divides its prompt"
        if isinstance(media, str):
            self.note(f"a prompt of {type(inner).__name__} neither used the library nor was stored: {media}")
            return None
        return request._replace(media=media)

    @property
    def is_private(self) -> bool:
        """Whether this thread is within `private`."""
        return bool(getattr(self._private, "now", False))

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        """Within it, requests of this thread use no context and leave none."""
        before, self._private.now = self.is_private, True
        try:
            yield
        finally:
            self._private.now = before

    def take(
        self, request: Request, model: Any, cls: type[OffloadCache], limits: Sequence[int | str | None],
        make: Callable[[], OffloadCache | None] | None = None, **fields: Any,
    ) -> tuple[OffloadCache, int] | None:  # fmt: skip
        """A cache with the longest beginning of the request that the library has, and the number of its tokens in all
        sequences; the caller closes it. None: there is none, or none that can be used.

        Waits for contexts that are being saved: the next turn of a conversation continues one of them. `limits`:
        memory budgets, of which the first that is enough is used. `make`: a new cache for the request, into which the
        beginnings of a batch's rows are copied, each from a context of its own; None: they are not.
        """
        self.settle()
        rows = None if make is None else self._rows(request, model, cls, fields)
        found = None if rows is None or make is None else self._copied(request, rows, model, cls, make, fields)
        found = found or self._whole(request, model, cls, limits, fields)
        if found is not None and request.media.marks:
            found[0].media = request.media
            # before 5.23 transformers adds the stored offset even to positions behind further pictures
            found[0].contents.conversation.forget_positions()
        return found

    def _whole(
        self, request: Request, model: Any, cls: type[OffloadCache], limits: Sequence[int | str | None],
        fields: dict[str, Any],
    ) -> tuple[OffloadCache, int] | None:  # fmt: skip
        """As `take`, from one context with all rows."""
        ids, media = request.ids, request.media.marks
        assert ids is not None
        size = {"max_context": request.tokens, "max_batch": request.rows}

        def within(memory: int | str | None) -> tuple[OffloadCache, int] | None:
            return self._forked(request, model, cls, memory, fields) or _opened(
                memory, self.library, ids, model, cls, attention_mask=request.mask, media=media,
                identity=request.identity, **size, **fields,
            )  # fmt: skip

        try:
            found = _first_enough(limits, within)
            return None if found is None else (_repeated(found[0], request), found[1] * request.rows)
        except BudgetError as error:
            self.note(f"a stored context does not fit: {error}")
        except (ContextError, StoreError) as error:
            self.note(f"the library could not be read: {error}")
        return None

    def _rows(
        self, request: Request, model: Any, cls: type[OffloadCache], fields: dict[str, Any]
    ) -> tuple[list[Match | None], int] | None:
        """The context of each row of a batch, and the number of columns for which the library has all rows. None: the
        request is no such batch, or a context of the batch has as much, or copying does not pay."""
        if request.ids is None or len(request.ids) < 2 or (pads := _left_padding(request.mask)) is None:
            return None
        pads = pads or [0] * len(request.ids)
        found, ends = dict[tuple[bytes, tuple[Medium, ...]], Match | None](), list[int]()
        matches, marks = list[Match | None](), request.media.marks
        for row, (ids, pad) in enumerate(zip(request.ids.cpu(), pads, strict=True)):
            media = of_row(marks, row, pad)
            name = ids[pad:].numpy().tobytes(), media
            if name not in found:
                find = functools.partial(self.library.find, like=fields, media=media, identity=request.identity)
                found[name] = find(ids[pad:], model, cls) if pad < len(ids) else None
            match = found[name]
            matches.append(match)
            ends.append(pad + (0 if match is None else match.matched))
        width = whole(marks, min(ends))
        read = {match.path for match, pad in zip(matches, pads, strict=True) if match is not None and pad < width}
        if not read or sum(max(0, width - pad) for pad in pads) < LEAST_COPIED * len(read):
            return None
        batch = self.library.find(
            request.ids, model, cls, attention_mask=request.mask, least=LEAST, like=fields, media=marks,
            identity=request.identity,
        )  # fmt: skip
        return (matches, width) if batch is None or batch.matched < width else None

    def _copied(
        self, request: Request, rows: tuple[list[Match | None], int], model: Any, cls: type[OffloadCache],
        make: Callable[[], OffloadCache | None], fields: dict[str, Any],
    ) -> tuple[OffloadCache, int] | None:  # fmt: skip
        """A new cache of the request with the first columns of its rows, copied from their contexts. None: its model
        does not allow it, or a context cannot be read."""
        (matches, width), ids = rows, request.ids
        assert ids is not None
        padding = torch.zeros_like(ids[:, :width], dtype=torch.bool)
        if request.mask is not None:
            padding = request.mask[:, :width] == 0
        cache = make()
        if cache is None:
            return None
        hidden = padding.all(1).tolist()
        used = {match.path: match for match, row in zip(matches, hidden, strict=True) if match is not None and not row}
        try:
            with closed_on_error(cache), contextlib.ExitStack() as closing:
                found = dict[Path, Source | None]()
                if Filling.reason_against_rows(cache, padded=bool(padding.any())) is None:
                    found = {path: self.source(match, model, cls, fields, closing) for path, match in used.items()}
                sources = {path: source for path, source in found.items() if source is not None}
                if len(sources) == len(used):
                    given = [None if row or match is None else (sources[match.path], 0)
                             for match, row in zip(matches, hidden, strict=True)]  # fmt: skip
                    Filling(cache).copy(ids[:, :width], padding, given, ids.shape[1] - width)
                    return _repeated(cache, request), int((~padding).sum()) * (request.rows // len(ids))
        except (BudgetError, ContextError, StoreError) as error:
            self.note(f"rows of a batch were computed from the start: {error}")
        cache.close()
        return None

    def source(
        self, match: Match, model: Any, cls: type[OffloadCache], fields: dict[str, Any], closing: contextlib.ExitStack,
        block_tokens: int = _BLOCK,
    ) -> Source | None:  # fmt: skip
        """A context to be read until the end of `closing`, in blocks of so many tokens; None: the model's own code
        keeps a state for it."""
        with self._lock:
            cache = self._open.get(match.path)
            if cache is not None and _is_on(cache, model):
                self._open[match.path] = self._open.pop(match.path)  # used last
                twin = closing.enter_context(fork(cache))
                return None if beyond_positions(twin.contents.conversation.capture()) else Opened(twin)
        fields = {**fields, "block_tokens": block_tokens}
        context = closing.enter_context(contextlib.closing(self.library.open_match(match, model, cls, **fields)))
        return None if context.has_model_state else context

    def _forked(
        self, request: Request, model: Any, cls: type[OffloadCache], memory: int | str | None, fields: dict[str, Any]
    ) -> tuple[OffloadCache, int] | None:
        """A fork of the open cache of the context that the library would open; None: that one is not open here."""
        if not self._open or request.ids is None:
            return None
        least = least_of(request.ids.shape[1])
        match = self.library.find(
            request.ids, model, cls, attention_mask=request.mask, least=least, like=fields, media=request.media.marks,
            identity=request.identity,
        )  # fmt: skip
        with self._lock:
            cache = None if match is None else self._open.get(match.path)
            if cache is None or match is None or not _is_on(cache, model):
                return None
            self._open[match.path] = self._open.pop(match.path)  # used last
            limits = {"max_context": request.tokens, "max_batch": request.rows}
            twin = fork(cache, memory, **limits, **{name: fields[name] for name in ("candidates",) if name in fields})
        with closed_on_error(twin):
            self.library.watch(twin, match)
            if match.matched < match.tokens:  # a sliding window cannot even be cropped by nothing
                twin.crop(match.matched - match.tokens)
        return twin, match.matched

    def leave(self, cache: OffloadCache, request: Request) -> None:
        """Save the content of `cache` and close it, in another thread. Raises nothing."""
        cache.identity = request.identity  # weights and adapters may change before it is saved
        self.later(self._save, cache, request, cache.given_model)

    def later(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Call `function`, which raises nothing, in the thread that saves contexts, after what that has to do; in this
        thread, if that one has ended."""
        try:
            saved = self._saver.submit(function, *args)
        except RuntimeError:  # after `close`, or after the main thread's end, for a request that began before
            function(*args)
            saved = Future()
            saved.set_result(None)
        with self._lock:
            self._saving = [one for one in self._saving if not one.done()] + [saved]
        return saved

    def _save(self, cache: OffloadCache, request: Request, model: Any) -> None:
        """`model` is kept alive until then: the cache does not do that."""
        try:
            with contextlib.ExitStack() as closing:
                closing.enter_context(cache)
                cache.freeze()  # removes what an interrupted forward added
                assert request.ids is not None
                each = cache.sequences // max(1, len(request.ids))
                if each > 1:  # beams, and several answers to a prompt, share its tokens
                    cache.crop(min(0, request.ids.shape[1] - cache.tokens))
                    cache.batch_select_indices(torch.arange(0, cache.sequences, each, device="cpu"))
                if request.media.marks:
                    _mark(cache, request.media.marks)
                pads = _left_padding(cache.attention_mask) if cache.sequences > 1 else None
                if pads is not None and Filling.reason_against_rows(cache, padded=any(pads)) is None:
                    for row, pad in enumerate(pads):
                        if cache.tokens - pad >= LEAST:
                            self.keep(_alone(cache, row, pad))
                    return
                closing.pop_all()
                self.keep(cache)
        except (OSError, ValueError, RuntimeError) as error:  # what `save` raises
            self.note(f"a context was not kept: {error}")

    def keep(self, cache: OffloadCache) -> None:
        """Save a cache, and close it or keep it open."""
        with contextlib.ExitStack() as closing:
            closing.enter_context(cache)
            if cache.tokens >= LEAST:
                path = self.library.save(cache, instead=True)
                if self._memory:
                    closing.pop_all()
                    self._keep_open(path, cache)

    def _keep_open(self, path: Path, cache: OffloadCache) -> None:
        """Keep a saved cache open, and close the least recently used ones that exceed the memory, or for which this
        process has too few descriptors left: half of those that were free are for requests."""
        with self._lock:
            before = self._open.pop(path, None)
            self._open[path] = cache
            leaving = [] if before is None else [before]
            while self._open and sum(one.memory_bytes for one in self._open.values()) > self._memory:
                leaving.append(self._open.pop(next(iter(self._open))))
        for one in leaving:
            one.close()
        while self._free is not None and (free_descriptors() or 0) < self._free // 2:
            with self._lock:
                if not self._open:
                    return
                oldest = self._open.pop(next(iter(self._open)))
            oldest.close()

    def make_room(self, path: str | Path | None, size: int) -> None:
        """Close the open contexts, and evict least recently used ones of `size` bytes if they are on the disk of
        `path`. Raises nothing."""
        self._close_open()
        try:
            if path is not None and os.stat(path).st_dev == os.stat(self.library.folder).st_dev:
                self.library.evict(max(0, total_bytes(self.library.entries()) - size))
        except (OSError, ValueError) as error:
            self.note(f"the library could not make room: {error}")

    def note(self, why: str) -> None:
        """Warn, once, and keep it in `trouble`."""
        if why not in self.trouble:
            self.trouble.append(why)
            warnings.warn(why, UserWarning, stacklevel=3)

    @property
    def memory_bytes(self) -> int:
        """Memory in use by contexts that are kept open, in bytes."""
        with self._lock:
            return sum(cache.memory_bytes for cache in self._open.values())

    def settle(self) -> None:
        """Wait for contexts that are being saved."""
        for saved in self._saving:  # replaced, never changed
            saved.exception()

    def close(self) -> None:
        self._saver.shutdown()
        self._memory = 0  # what a later request leaves does not stay open
        self._close_open()

    def _close_open(self) -> None:
        with self._lock:
            leaving = list(self._open.values())
            self._open.clear()
        for one in leaving:
            one.close()


def _close_all(opened: dict[Path, OffloadCache], process: int) -> None:
    """Close caches at this process's end, while torch can still do that, if nobody closed the `Reuse`."""
    while opened and process == os.getpid():
        opened.popitem()[1].close()


def opened_within(
    limits: Sequence[int | str | None], library: ContextLibrary, ids: torch.Tensor, model: Any,
    cls: type[OffloadCache], **fields: Any,
) -> tuple[OffloadCache, int] | None:  # fmt: skip
    """The result of `library.open` for ids (B, T) with the first of these memory budgets that is enough. Raises its
    errors, `BudgetError` if none is."""
    return _first_enough(limits, lambda memory: _opened(memory, library, ids, model, cls, **fields))


def _opened(
    memory: int | str | None, library: ContextLibrary, ids: torch.Tensor, model: Any, cls: type[OffloadCache],
    **fields: Any,
) -> tuple[OffloadCache, int] | None:  # fmt: skip
    return library.open(ids, model, cls, least=least_of(ids.shape[1]), alike=True, memory=memory, **fields)


def _first_enough(limits: Sequence[int | str | None], made: Callable[[int | str | None], Result]) -> Result:
    """The result of `made` for the first of these memory budgets that is enough. Raises the last `BudgetError`."""
    for memory in limits[:-1]:
        with contextlib.suppress(BudgetError):
            return made(memory)
    return made(limits[-1])


def _left_padding(mask: torch.Tensor | None) -> list[int] | None:
    """Number of padded tokens at the beginning of each row; an empty list without a mask. None: there are others."""
    if mask is None:
        return []
    pads = (mask == 0).sum(1).tolist()
    return None if any(bool((row[pad:] == 0).any()) for row, pad in zip(mask, pads, strict=True)) else pads


def _mark(cache: OffloadCache, marks: Sequence[Medium]) -> None:
    """Note the pictures and sounds of a prompt that the cache has stored completely."""
    cache.contents.tokens.media = tuple(mark for mark in marks if mark.stop <= cache.contents.tokens.length)


def _alone(cache: OffloadCache, row: int, pad: int) -> OffloadCache:
    """One sequence of `cache` without the `pad` tokens at its beginning; the caller closes both."""
    twin = fork(cache)
    with closed_on_error(twin):
        twin.batch_select_indices(torch.tensor([row], device="cpu"))
        twin.identity = cache.identity
    if not pad:
        return twin
    with twin:
        single = empty_twin(cache)
        with closed_on_error(single):
            ids = twin.input_ids[:, pad:]
            Filling(single).copy(ids, torch.zeros_like(ids, dtype=torch.bool), [(Opened(twin), pad)], 0)
            single.contents.conversation.restore(twin.contents.conversation.capture(), 1)
            single.adapters, single.identity = cache.adapters, cache.identity
            _mark(single, of_row(twin.contents.tokens.media, 0, pad))
        return single


def _repeated(cache: OffloadCache, request: Request) -> OffloadCache:
    """`cache` with each of the request's prompts as often as it has rows. It is closed on an error."""
    assert request.ids is not None
    if (each := request.rows // len(request.ids)) > 1:
        with closed_on_error(cache):
            cache.batch_repeat_interleave(each)
    return cache


def least_of(tokens: int) -> int:
    """Fewest tokens of a prompt of `tokens` that are worth opening a context for: that takes as long as computing some
    50 tokens of a small model, and what follows is then computed behind a history."""
    return max(LEAST, tokens // 32)


def _is_on(cache: OffloadCache, model: Any) -> bool:
    """Whether the cache was made for this very model."""
    try:
        return cache.given_model is model
    except RuntimeError:  # it is gone
        return False
