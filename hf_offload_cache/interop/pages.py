"""Contexts of a library in the pages of transformers' continuous batching, and pages in the library."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..contexts.library import Match
from ..contexts.listing import touch
from ..contexts.open import closed_on_error
from ..core.cache import OffloadCache
from ..core.filling import PIECE, Filling, Source, extend, in_order
from ..errors import OURS
from ..model.fingerprint import full_fingerprint
from .reuse import LEAST, Reuse, least_of

_NAMES = {
    "manager": (
        "_create_batch_processor", "batch_processor", "add_request", "stop", "is_running", "distributed_helper",
    ),
    "processor": ("cache", "scheduler", "offloading_manager.offload_requests", "inputs_and_outputs.compute_stream"),
    "cache": (
        "search_prefix_match", "use_prefix_sharing", "allow_block_sharing", "cache_allocators", "free_blocks",
        "can_store_request_tokens", "evict_cached_blocks", "mark_complete_blocks", "device",
    ),
    "scheduler": ("finish_request", "active_requests"),
    "allocator": (
        "tokens_per_page", "layer_indices", "block_table", "num_key_value_heads", "head_dim", "cache_dtype",
        "match_prefix_blocks", "acquire_prefix_blocks", "get_read_indices", "get_write_indices", "update",
    ),
}  # fmt: skip
"""Attributes of transformers' objects that are used here. None of them is documented."""
_CHILD = "__child#"
"""Between the id of a request and the number of a further answer to it."""
_MOST_KNOWN = 1000
"""Requests whose look-up is remembered."""


def exact_fields(cls: type[OffloadCache], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an exact cache of this class, for keys and values that full attention computed: those of `fields`
    about the store."""
    kept = ("engine", "group_size", "write_queue", "verify", "io_timeout", "encryption_key")
    return {"exact": True, **{name: fields[name] for name in kept if name in fields}}


@dataclasses.dataclass
class _Prefix:
    """The part of transformers' `RequestState` that a page cache reads."""

    request_id: str
    initial_tokens: list[int]
    position_offset: int
    generated_tokens: list[int] = dataclasses.field(default_factory=list)
    status: None = None

    def current_len(self) -> int:
        return self.position_offset


class PagedReuse:
    """A library in the service of one `ContinuousBatchingManager`.

    Before the manager looks for pages with a request's beginning, the library's keys and values are copied to free
    pages, as if a request had computed them, so the manager finds them by their tokens. After a request, its complete
    pages stay in use until the library's thread has saved them. All methods called by the manager run in its thread;
    errors are noted in `Reuse.trouble`, and never end its loop.

    Args:
        reuse: the library; closed after this.
        cls, fields, path: class of the contexts' caches, the user's fields, of which `exact_fields` are used, and the
            folder for their files.
        reused: called with a number of tokens that came from the library.
    """

    def __init__(
        self, reuse: Reuse, model: Any, manager: Any, cls: type[OffloadCache], fields: dict[str, Any],
        path: str | Path | None, reused: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.manager = manager
        self._reuse, self._cls, self._path, self._reused = reuse, cls, path, reused
        self._model = _twin(model)
        self._fields = exact_fields(cls, fields)
        self._identity = dict[str, str]()
        """The model's fingerprint when the pages were new. Pages computed by other weights or adapters are not
        exchanged with the library."""
        self._on = True
        self._replaced: list[tuple[Any, str, Any]] = []
        self._processor: Any = None
        self._found: dict[str, Match | None] = {}
        """Look-ups of requests that have not begun."""
        self._without_pages: set[str] = set()
        self._private: set[str] = set()
        self._held: dict[str, Future[None]] = {}
        """Names under which pages are in use until the library has them."""
        self._count = itertools.count()
        if missing := _missing(manager, "manager"):
            self._say_unused(missing)
            return
        self._replace(manager, "_create_batch_processor", self._create)
        self._replace(manager, "add_request", self._add)
        self._replace(manager, "stop", self._stop)

    # --- the manager's methods ---------------------------------------------------------------------------------

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Call `method` with the plain method and its arguments instead of `owner.name`."""
        ours = functools.partial(method, getattr(owner, name))
        self._replaced.append((owner, name, ours))
        setattr(owner, name, ours)

    def _restore(self, *owners: Any) -> None:
        """Restore the methods of these objects, except where something else replaced ours: there it stays, inert."""
        for owner, name, ours in [one for one in reversed(self._replaced) if any(one[0] is owner for owner in owners)]:
            if vars(owner).get(name) is ours:
                plain = ours.args[0]
                delattr(owner, name)
                if getattr(owner, name) != plain:  # it had been replaced before
                    setattr(owner, name, plain)
        self._replaced = [one for one in self._replaced if not any(one[0] is owner for owner in owners)]

    def _create(self, plain: Callable[[], Any]) -> Any:
        self._wait()
        processor = plain()
        if self._on and processor is not self._processor:
            self._processor = processor
            try:
                reason = self._reason_against(processor)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if reason is None:
                self._identity = full_fingerprint(self._model)
                self._replace(processor.cache, "search_prefix_match", self._search)
                self._replace(processor.scheduler, "finish_request", self._finish)
                self._replace(processor.offloading_manager, "offload_requests", self._offload)
            else:
                self._say_unused(reason)
        return processor

    def _say_unused(self, reason: str) -> None:
        self._reuse.note(f"continuous batching uses no context of the library, and leaves none: {reason}")

    def _reason_against(self, processor: Any) -> str | None:
        """The reason why the library's contexts cannot be in these pages; None: they can."""
        if missing := _missing(processor, "processor"):
            return missing
        if missing := _missing(processor.cache, "cache") or _missing(processor.scheduler, "scheduler"):
            return missing
        cache = processor.cache
        if not cache.use_prefix_sharing:
            return (
                "its model has layers with sliding windows, whose pages do not keep a text from its beginning"
                if cache.allow_block_sharing
                else "allow_block_sharing is off, so that a prompt uses no page of another one"
            )
        if getattr(self.manager.distributed_helper, "tp_size", 1) > 1:
            return "its model is split over several processes"
        allocators = list(cache.cache_allocators.values())
        if len(allocators) != 1:
            return "its layers have several kinds of pages"
        if missing := _missing(allocators[0], "allocator"):
            return missing
        with self._cls(self._model, path=self._path, **{**self._fields, "engine": "memory"}) as probe:
            if (reason := Filling.reason_against(probe)) is not None:
                return reason
            if sorted(allocators[0].layer_indices) != [layer.layer_idx for layer in probe.offloaded]:
                return "its layers have other numbers in its pages than in a cache"
        return None

    def _add(self, plain: Callable[..., Any], input_ids: Any, request_id: str | None = None, *args: Any,
             **kwargs: Any) -> Any:  # fmt: skip
        if self._on and self._reuse.is_private:
            request_id = f"private_{secrets.token_hex(8)}" if request_id is None else request_id
            self._private.add(request_id)
        return plain(input_ids, request_id, *args, **kwargs)

    def _is_private(self, request_id: str) -> bool:
        return request_id.partition(_CHILD)[0] in self._private

    def _stop(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if not self.manager.is_running():
            self._wait()
            if self.manager.batch_processor is None:  # its pages are gone; it may start again with new ones
                self._forget_pages()
        return result

    def _forget_pages(self) -> None:
        if (processor := self._processor) is not None:
            self._processor = None
            self._restore(processor.cache, processor.scheduler, processor.offloading_manager)

    def close(self) -> None:
        """Wait for what is being saved, and restore the manager's methods; those of a running one become inert."""
        self._on = False
        wait(list(self._held.values()))
        if not self.manager.is_running():
            self._release()
            self._forget_pages()
            self._restore(self.manager)

    # --- from the library --------------------------------------------------------------------------------------

    @property
    def _allocator(self) -> Any:
        (allocator,) = self._processor.cache.cache_allocators.values()
        return allocator

    def _search(self, plain: Callable[[str, list[int]], int], request_id: str, prompt_ids: list[int]) -> int:
        self._guarded(self._fetch, plain, request_id, prompt_ids)
        return plain(request_id, prompt_ids)

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Call `step` if the library is to be used. An error costs a request its context only."""
        self._release()
        if not self._on:
            return
        try:
            step(*args)
        except OURS as error:
            self._reuse.note(f"the library could not be read: {error}")
        except Exception as error:
            self._reuse.note(f"a context was not exchanged with pages: {type(error).__name__}: {error}")

    def _fetch(self, plain: Callable[[str, list[int]], int], request_id: str, prompt_ids: list[int]) -> None:
        """Copy the prompt's longest stored beginning to pages, if it has more than the pages have by now."""
        allocator, known = self._allocator, self._found
        page = allocator.tokens_per_page
        least, most = max(page, least_of(len(prompt_ids))), (len(prompt_ids) - 1) // page * page
        if self._is_private(request_id) or most < least or (request_id in known and known[request_id] is None):
            return
        present = len(allocator.match_prefix_blocks(prompt_ids)) * page
        if most - present < least:
            return
        if request_id not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[request_id] = self._find(prompt_ids)
        match = known[request_id]
        tokens = 0 if match is None else match.matched // page * page
        if match is None or tokens - present < least:
            known[request_id] = None
            return
        with contextlib.ExitStack() as closing:
            source = self._reuse.source(match, self._model, self._cls, self._fields, closing, PIECE)
            copied = None if source is None else self._copy(plain, prompt_ids, tokens, source)
        if copied == 0:  # asked again while it waits
            self._reuse.without_pages += request_id not in self._without_pages
            self._without_pages.add(request_id)
            return
        known[request_id] = None
        if request_id in self._without_pages:
            self._without_pages.discard(request_id)
            self._reuse.without_pages -= 1
        self._reused(copied or 0)

    def _find(self, prompt_ids: list[int]) -> Match | None:
        if not self._is_unchanged():
            return None
        ids = torch.tensor([prompt_ids], device="cpu")
        return self._reuse.library.find(ids, self._model, self._cls, least=LEAST, like=self._fields)

    def _is_unchanged(self) -> bool:
        """Whether the model computes what it did when the pages were new."""
        if full_fingerprint(self._model) == self._identity:
            return True
        self._reuse.note(
            "the model's adapters or weights changed after its manager of continuous batching had started: its "
            "requests use no context of the library, and leave none, until a new manager starts"
        )
        return False

    def _copy(self, plain: Callable[[str, list[int]], int], ids: list[int], tokens: int, source: Source) -> int:
        """Copy the first `tokens` of `ids` to pages, behind those that pages have. Returns how many were copied: 0 if
        too few pages are free."""
        cache, allocator, name = self._processor.cache, self._allocator, f"library {next(self._count)}"
        (kind,) = cache.cache_allocators
        present = plain(name, ids)  # their pages are in use now
        prefix = _Prefix(name, ids, present)
        try:
            fits = cache.can_store_request_tokens(prefix, tokens - present) or (
                cache.evict_cached_blocks() and cache.can_store_request_tokens(prefix, tokens - present)
            )
            if not fits:
                return 0
            with self._on_stream():
                rows = torch.tensor(allocator.get_write_indices(name, present, tokens - present), device=cache.device)
                for layer_idx in allocator.layer_indices:
                    self._write(source, layer_idx, present, rows)
            cache.mark_complete_blocks(prefix, {kind: (tokens - present) // allocator.tokens_per_page})
            return tokens - present
        finally:
            cache.free_blocks(name)  # with hashes by now, or unused

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, work of a GPU follows the forwards that the manager has begun."""
        stream = self._processor.inputs_and_outputs.compute_stream
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def _write(self, source: Source, layer_idx: int, present: int, rows: torch.Tensor) -> None:
        """Copy a layer's tokens from `present` on to these `rows` (t,) int64 of the pages."""
        allocator, tokens, begin = self._allocator, present + len(rows), 0
        nothing = rows[:0]
        with source.layer(layer_idx) as layer, contextlib.closing(in_order(layer, tokens)) as blocks:
            for block in blocks:
                first, end = max(begin, present), begin + block[0].shape[2]
                if first < end:
                    keys, values = (part[0, :, first - begin :].transpose(0, 1).to(rows.device) for part in block)
                    if keys.dtype != allocator.cache_dtype:
                        raise TypeError(f"the context has {keys.dtype}, and the pages {allocator.cache_dtype}")
                    allocator.update(keys, values, layer_idx, nothing, rows[first - present : end - present])
                begin = end

    # --- to the library ----------------------------------------------------------------------------------------

    def _finish(self, plain: Callable[[str], None], request_id: str) -> None:
        self._guarded(self._hold, request_id)
        plain(request_id)

    def _hold(self, request_id: str) -> None:
        """Keep the complete pages of a request that has ended in use, until the library has them."""
        state, allocator = self._processor.scheduler.active_requests.get(request_id), self._allocator
        self._found.pop(request_id, None)
        self._without_pages.discard(request_id)
        if state is None or state.status.name != "FINISHED" or self._is_private(request_id):
            return
        ids, blocks = state.initial_tokens + state.generated_tokens, allocator.block_table.get(request_id, [])
        page = allocator.tokens_per_page
        tokens = min((len(ids) - 1) // page, len(blocks)) * page  # the last token was not computed
        if tokens >= LEAST:
            name = f"library {next(self._count)}"
            allocator.acquire_prefix_blocks(name, tokens, list(blocks))
            save = functools.partial(self._save, self._processor.cache, allocator, name)
            try:
                self._held[name] = self._reuse.later(save, ids[: tokens + 1])
            except BaseException:
                self._processor.cache.free_blocks(name)
                raise

    def _save(self, cache: Any, allocator: Any, name: str, ids: list[int]) -> None:
        """Save the pages in use under `name`, which have all but the last of these ids. In the library's thread."""
        library, tokens = self._reuse.library, len(ids) - 1
        given = torch.tensor([ids], device="cpu")
        try:
            if not self._is_unchanged():
                return
            match = library.find(given, self._model, self._cls, least=LEAST, like=self._fields)
            if match is not None and match.matched == tokens:
                touch(match.path)
                return
            opened = library.open(
                given, self._model, self._cls, least=LEAST, alike=True, path=self._path, **self._fields
            )
            made, known = opened or (self._cls(self._model, path=self._path, **self._fields), 0)
            with closed_on_error(made):
                made.identity = self._identity
                rows = torch.tensor(allocator.get_read_indices(name, tokens, 0)[known:], device=cache.device)
                extend(made, given[:, known:tokens], functools.partial(_pages, allocator, rows))
            self._reuse.keep(made)
        except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
            self._reuse.note(f"a context was not kept: {error}")

    def _offload(self, plain: Callable[[], bool]) -> bool:
        """Before requests lose their pages, for want of free ones, give back those that wait to be saved."""
        self._wait()
        return plain()

    def _wait(self) -> None:
        """Wait until held pages are saved, and release them. In the manager's thread, or while it does not run."""
        wait(list(self._held.values()))
        self._release()

    def _release(self) -> None:
        """Release the pages that the library has. As `_wait`."""
        for name in [name for name, saved in self._held.items() if saved.done()]:
            del self._held[name]
            self._processor.cache.free_blocks(name)


def _twin(model: Any) -> Any:
    """A shallow copy of a model for caches beside its forwards: with the same weights, but with its own hooks, and with
    a configuration that the forwards do not change (one with `is_causal` among its arguments does, until it ends)."""
    twin = copy.copy(model)
    twin.config = copy.deepcopy(model.config)
    for name in [name for name, value in vars(twin).items() if "_hooks" in name and isinstance(value, dict)]:
        vars(twin)[name] = type(vars(twin)[name])()
    return twin


def _missing(owner: Any, kind: str) -> str | None:
    """The reason why `owner`, one of transformers' objects, cannot be used; None: it has all `_NAMES` of its kind."""
    lacking = []
    for path in _NAMES[kind]:
        at = owner
        for name in path.split("."):
            if not hasattr(at, name):
                lacking.append(f"{kind}.{path}")
                break
            at = getattr(at, name)
    if not lacking:
        return None
    return f"this version of transformers ({version('transformers')}) has no {', '.join(lacking)}"


def _pages(allocator: Any, rows: torch.Tensor, layer_idx: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (1, Hk, t, D) of a layer in these `rows` (T,) int64 of the pages, on their device, in pieces that
    are new."""
    shape = 0, allocator.num_key_value_heads, allocator.head_dim
    none = torch.empty(shape, dtype=allocator.cache_dtype, device=rows.device)
    for part in rows.split(PIECE):
        keys, values = allocator.update(none, none, layer_idx, part, rows[:0])  # writes nothing
        yield keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
