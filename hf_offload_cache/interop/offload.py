"""`offload`: calls of a model's `generate` get an offloading cache, without any change to the caller."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import parse_memory, parse_size
from ..contexts.library import ContextLibrary
from ..core.budget import check_limits
from ..core.cache import OffloadCache
from ..errors import OURS, BudgetError, CacheUnusedError, ConfigError, StoreError, UnsupportedModelError, is_full
from ..model.geometry import Geometry
from ..model.own_generate import InRequest, OwnGenerate, Replay, Request, Run, every_generate
from ..model.place import (
    generates_by_parts,
    has_own_generate,
    has_own_loop,
    inner_model,
    is_model,
    no_place,
    nothing_to_offload,
)
from ..model.plain_caches import CONTINUOUS, plain_caches
from ..registry import cache_class
from ..report.report import CacheReport, html_table
from .pages import PagedReuse
from .reuse import Reuse

FLOOR = "64MiB"
"""Default memory budget per sequence of a request whose share is too small for any cache."""
_NO_REQUEST = (
    "no call of generate has ended yet; calls that pass past_key_values, a cache_implementation or use_cache=False "
    "are left as they are, and not counted"
)


def request_cache(
    cls: type[OffloadCache],
    model: Any,
    tokens: int,
    rows: int = 1,
    *,
    memory: int | str | None = None,
    goal: str | None = None,
    floor: int | str = FLOOR,
    strict: bool = False,
    always: bool = False,
    path: str | Path | None = None,
    **fields: Any,
) -> OffloadCache | None:
    """A cache for `rows` sequences of up to `tokens` tokens; the caller closes it. None: `DynamicCache` is better.

    A share of a request's full KV may be too small for any cache, especially if the request is short. Such a request
    has the budget `floor` per sequence instead: if its full KV fits, the result is None, else a cache of that budget.
    If `memory` is in bytes, the result is None if no cache fits and the full KV does.

    Args:
        memory: the memory budget: bytes, "300MiB", or a share of what `DynamicCache` would take ("1/13"); None: as much
            as `fields` need.
        goal: with `memory`, what fields are chosen for, as in `for_budget`.
        floor: bytes or a size, per sequence.
        strict: raise `BudgetError` instead.
        always: make a cache of the budget `floor` even where `DynamicCache` takes no more memory.
        path, fields: arguments of the cache.

    Raises the errors of `for_budget` and the constructor, such as `BudgetError` if `floor` is too small as well, and
    `ConfigError` for a goal without `memory`.
    """
    check_limits(cls, memory, goal, fields)
    if memory is None:
        return cls(model, path=path, **fields)

    def make(budget: int | str) -> OffloadCache:
        return cls.for_budget(model, budget, tokens, rows, path=path, goal=goal, **fields)

    try:
        return make(memory)
    except BudgetError as error:
        if strict:
            raise
        full = Geometry.of(model).full_kv_bytes(tokens, rows)
        limit = _limit(memory, full, rows, floor)
        if full <= limit:
            return _without_notes(cls, model, limit, tokens, rows, goal, path, fields) if always else None
        return in_floor(make, error, memory, full, rows, floor)


def _without_notes(
    cls: type[OffloadCache], model: Any, memory: int, tokens: int, rows: int, goal: str | None,
    path: str | Path | None, fields: dict[str, Any],
) -> OffloadCache:  # fmt: skip
    """As `for_budget`, for a request that is too short for its notes to matter."""
    geometry = Geometry.of(model)
    fields = cls.choose_store(geometry, (memory, tokens, rows), fields, path, goal)
    return cls(model, path=path, config=cls.fit(geometry, memory, tokens, rows, fields, goal))


def beyond_share(cache: OffloadCache, model: Any, memory: int | str | None) -> bool:
    """Whether `request_cache` gave this cache `floor`, because its share of `memory` was too small."""
    config = cache.config
    if memory is None or config.memory is None or config.max_context is None:
        return False
    full = Geometry.of(model).full_kv_bytes(config.max_context, config.max_batch or 1)
    return parse_memory(config.memory, full) > parse_memory(memory, full)


def in_floor(
    make: Callable[[int], OffloadCache], error: BudgetError, memory: int | str, full: int, rows: int, floor: int | str
) -> OffloadCache:
    """The result of `make` with `floor` bytes per sequence, with a warning, after `memory`, a share of the `full` KV's
    bytes, was too small and raised `error`. Raises that `error` if `memory` is in bytes or not less, or if `floor` is
    too small as well."""
    limit = _limit(memory, full, rows, floor)
    if limit == parse_memory(memory, full):
        raise error
    try:
        cache = make(limit)
    except BudgetError:
        raise error from None  # it states the memory needed
    cache.warn(
        f"memory={memory!r} of this request is too small for {type(cache).__name__}: such requests may use {floor} per "
        "sequence; set another floor, or strict=True to raise BudgetError",
        stacklevel=3,
    )
    return cache


def _limit(memory: int | str, full: int, rows: int, floor: int | str) -> int:
    """Upper bound on the bytes of a request's cache."""
    limit = parse_memory(memory, full)
    return max(limit, rows * parse_size(floor, "floor")) if "/" in str(memory) else limit


def budgets(
    model: Any, tokens: int, rows: int, memory: int | str | None, floor: int | str, strict: bool
) -> list[int | str | None]:
    """Memory budgets of a request, the first one to try first: `memory`, and `floor` per sequence if that is more."""
    if memory is None or strict:
        return [memory]
    full = Geometry.of(model).full_kv_bytes(tokens, rows)
    limit = _limit(memory, full, rows, floor)
    return [memory, limit] if limit > parse_memory(memory, full) else [memory]


@dataclass
class Offloading:
    """Record of the requests within an `offload`. For any thread."""

    requests: int = 0
    """Finished requests with an offloading cache."""
    requests_at_floor: int = 0
    """Requests among them whose share was too small, and that used `floor` per sequence."""
    requests_left_plain: int = 0
    """Requests with transformers' own cache, because an offloading one was of no use or not used: short ones (see
    `request_cache`), those of models with nothing to offload (in `offload_all`), and generations that made their own
    cache (a manager of continuous batching, a model's own loop, a forward with `use_cache=True`); with a library, also
    requests whose disk was full."""
    plain_reasons: dict[str, int] = field(default_factory=dict)
    """Number of `requests_left_plain` for each reason."""
    requests_repeated: int = 0
    """Requests that were computed from the start after all: they began with a context of the library which a step could
    not read or which left too little memory, or their disk was full."""
    tokens_reused: int = 0
    """Tokens of prompts, over all requests and sequences, that came from the library."""
    report: CacheReport | None = None
    """Report of the latest of `requests`."""
    reuse: Reuse | None = field(default=None, repr=False)
    """The library of the requests; None: none."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def private(self) -> AbstractContextManager[None]:
        """Within it, requests of this thread take nothing from the library and leave nothing there."""
        return contextlib.nullcontext() if self.reuse is None else self.reuse.private()

    def _note(self, report: CacheReport, at_floor: bool, reused: int) -> None:
        with self._lock:
            self.requests, self.report = self.requests + 1, report
            self.requests_at_floor += at_floor
            self.tokens_reused += reused

    def _note_reused(self, tokens: int) -> None:
        with self._lock:
            self.tokens_reused += tokens

    def _note_repeated(self) -> None:
        with self._lock:
            self.requests_repeated += 1

    def _note_plain(self, why: str) -> None:
        with self._lock:
            self.requests_left_plain += 1
            self.plain_reasons[why] = self.plain_reasons.get(why, 0) + 1

    def __str__(self) -> str:
        """What happened to the requests, with the latest report, for a terminal."""
        counts = [f"{self.requests} requests were offloaded"]
        if self.requests_at_floor:
            counts[0] += f" ({self.requests_at_floor} of them used `floor`, because their share was too small)"
        if self.requests_left_plain:
            counts.append(f"{self.requests_left_plain} were left plain")
        if self.reuse is not None:
            counts.append(f"{self.tokens_reused:,} tokens of their prompts came from the library")
            if self.reuse.without_pages:
                computed = "computed a stored beginning, because too few pages were free"
                counts.append(f"{self.reuse.without_pages} {computed}")
        if self.requests_repeated:
            counts.append(
                f"{self.requests_repeated} were computed again without it, because a context could not be read or did "
                "not fit, or the disk was full"
            )
        lines = [", ".join(counts), *(f"left plain: {count}, {why}" for why, count in [*self.plain_reasons.items()])]
        if not self.requests and not self.requests_left_plain:
            lines.append(_NO_REQUEST)
        return "\n".join(lines if self.report is None else [*lines, f"the latest one:\n{self.report}"])

    def _repr_html_(self) -> str:
        """The same as tables for a notebook."""
        rows = [("offloaded", str(self.requests))]
        rows += [("of them at `floor`", str(self.requests_at_floor))] if self.requests_at_floor else []
        rows.append(("left plain", str(self.requests_left_plain)))
        rows += [(f"{count} of them", why) for why, count in [*self.plain_reasons.items()]]
        if self.reuse is not None:
            rows.append(("tokens from the library", f"{self.tokens_reused:,}"))
            rows.append(("computed again without it", str(self.requests_repeated)))
            rows += [("without free pages", str(self.reuse.without_pages))] if self.reuse.without_pages else []
        if not self.requests and not self.requests_left_plain:
            rows.append(("note", _NO_REQUEST))
        return html_table("requests", rows) + ("" if self.report is None else self.report._repr_html_())


@contextlib.contextmanager
def offload(
    model: Any,
    cache: str | type[OffloadCache] = "disk-swap",
    *,
    memory: int | str | None = None,
    goal: str | None = None,
    floor: int | str = FLOOR,
    strict: bool = False,
    path: str | Path | None = None,
    library: ContextLibrary | str | Path | None = None,
    library_memory: int | str = 0,
    **fields: Any,
) -> Iterator[Offloading]:
    """Within the `with`, `model.generate(...)` uses such a cache unless its caller names one. This includes pipelines,
    and servers that call it, in any thread. Each call gets its own cache, which is closed when the call returns or
    raises.

    Args:
        model: a `PreTrainedModel`, or a PEFT or `torch.compile` wrapper of one. The `with` restores it at its end; if
            two do not end in turn, a method stays that does nothing of its own. If its `generate` calls that of a model
            within it (BLIP-2's language model), the inner calls are the requests.
        cache: a registered name ("disk-swap", "abstract-tree", "cluster", "spec"), "module:Class", or a class.
        memory: each request's memory budget: bytes, "300MiB", or a share of what `DynamicCache` would take for the
            prompt and all that may be generated ("1/13"); None: as much as `fields` need.
        goal: with `memory`, what fields are chosen for, as in `for_budget`.
        floor: budget per sequence of a request whose share is too small for any cache. A request whose full KV takes no
            more than that gets transformers' own cache, counted in `requests_left_plain`.
        strict: such a request raises `BudgetError`. A generation that makes its own cache raises
            `UnsupportedModelError`, and one that left its cache unused `CacheUnusedError`; without `strict` both warn
            once per model.
        path: folder on the disk to use; None: the library's, or the temporary folder.
        library: a `ContextLibrary`, or the folder of one. A request starts from the longest beginning of its prompt
            that an earlier one has left there, in whichever process, and leaves its own text, which is saved after its
            result has been returned. The end of the `with` waits for that. Pictures and sounds match by a digest of
            their inputs, for the models that the documentation lists. Prompts with others, or with embeddings, do not
            use it, nor do beginnings of less than 1/32 of the prompt. A request that meets a damaged context is
            computed from the start. So is one whose disk is full, after contexts were evicted. If it is still full, the
            request has `DynamicCache`, unless that takes more than `floor`. With a library short requests, too, have an
            offloading cache.
        library_memory: maximum memory, bytes or a size, of the latest contexts, which stay open after they were saved,
            so that a request begins with one of them sooner. It is not part of a request's `memory`.
        fields: fields of the cache's configuration.

    Yields a record of the requests. Raises `ConfigError` for an invalid name, field, memory or goal, and
    `UnsupportedModelError` for a model that has no place for a cache, before anything is replaced. `generate` then
    raises the cache's errors, such as `BudgetError` for a budget that is too small, before the model runs.
    """
    cls = _checked(cache, fields, floor, memory, goal)
    inner = inner_model(model)
    why = no_place(model)
    if why is not None and not generates_by_parts(inner):
        raise UnsupportedModelError(why)
    parts = weakref.WeakSet(module for module in inner.modules() if is_model(module))

    with _way(cls, memory, goal, floor, strict, path, library, library_memory, fields) as way:

        def note(part: Any, why: str) -> None:
            if part in parts:
                way.note_unseen(part, why)

        def serve_pages(part: Any, manager: Any) -> None:
            if part in parts:
                way.serve_pages(part, manager)

        with plain_caches(note, way.within, serve_pages):
            if has_own_generate(inner) and not has_own_loop(inner):
                # it may call the class's or a part's `generate`, not the model's attribute
                def serve_part(part: Any, request: Request, run: Run, kwargs: Mapping[str, Any]) -> Any:
                    return way.serve(part, request, run, kwargs) if part in parts else run(None)

                with every_generate(serve_part, way.within):
                    yield way.done
                return
            serve = functools.partial(way.serve, model)
            ours = OwnGenerate(inner, vars(inner).get("generate"), serve, way.within)
            inner.__dict__["generate"] = ours
            try:
                yield way.done
            finally:
                ours.stop()
                OwnGenerate.unlink(inner, lambda method: method is ours)


@contextlib.contextmanager
def offload_all(
    cache: str | type[OffloadCache] = "disk-swap",
    *,
    memory: int | str | None = None,
    goal: str | None = None,
    floor: int | str = FLOOR,
    strict: bool = False,
    path: str | Path | None = None,
    library: ContextLibrary | str | Path | None = None,
    library_memory: int | str = 0,
    **fields: Any,
) -> Iterator[Offloading]:
    """As `offload`, for every model of this process, also one that is loaded later, such as a server's. A model without
    a place for such a cache (an encoder-decoder, PEFT's prefix tuning), or with nothing to offload (Mamba, RWKV, only
    sliding windows), is left alone, after one warning."""
    cls = _checked(cache, fields, floor, memory, goal)
    with _way(cls, memory, goal, floor, strict, path, library, library_memory, fields) as way:

        def serve(model: Any, request: Request, run: Run, kwargs: Mapping[str, Any]) -> Any:
            why = nothing_to_offload(model)
            if why is None:
                return way.serve(model, request, run, kwargs)
            way.warn_plain(model, why)
            result = run(None)
            way.done._note_plain(f"{type(model).__name__}: {why}")
            return result

        def note(model: Any, why: str) -> None:
            way.note_unseen(model, f"{why}; offload(model) gives that loop another" if has_own_loop(model) else why)

        with plain_caches(note, way.within, way.serve_pages), every_generate(serve, way.within):
            yield way.done


def _checked(
    cache: str | type[OffloadCache], fields: dict[str, Any], floor: int | str, memory: int | str | None,
    goal: str | None,
) -> type[OffloadCache]:
    cls = cache_class(cache) if isinstance(cache, str) else cache
    if not (isinstance(cls, type) and issubclass(cls, OffloadCache)):
        raise ConfigError(f"cache must be a name, or a class of an offloading cache, got {cache!r}")
    cls.config_class.load(None, dict(fields))
    parse_size(floor, "floor")
    check_limits(cls, memory, goal, fields)
    return cls


@contextlib.contextmanager
def _way(
    cls: type[OffloadCache], memory: int | str | None, goal: str | None, floor: int | str, strict: bool,
    path: str | Path | None, library: ContextLibrary | str | Path | None, library_memory: int | str,
    fields: dict[str, Any],
) -> Iterator[_Way]:  # fmt: skip
    if library is None and library_memory:
        raise ConfigError("library_memory is for contexts of a library: give library too, or leave library_memory out")
    if library is not None and "encryption_key" in fields:
        raise ConfigError("encryption_key is that of the library: give it as ContextLibrary(FOLDER, key=FILE)")
    reuse = None if library is None else Reuse(library, library_memory)
    with contextlib.nullcontext() if reuse is None else contextlib.closing(reuse):
        if reuse is not None:
            fields = {**fields, **reuse.library.key_fields}
            path = reuse.library.folder if path is None else path  # where records can be linked into it
        way = _Way(cls, memory, goal, floor, strict, path, fields, Offloading(reuse=reuse))
        try:
            yield way
        finally:
            for pages in list(way.pages):
                pages.close()


@dataclass(frozen=True)
class _Way:
    """Settings by which requests get their caches."""

    cls: type[OffloadCache]
    memory: int | str | None
    goal: str | None
    floor: int | str
    strict: bool
    path: str | Path | None
    fields: dict[str, Any]
    done: Offloading
    within: InRequest = field(default_factory=InRequest)
    warned: weakref.WeakKeyDictionary[Any, set[str]] = field(default_factory=weakref.WeakKeyDictionary)
    pages: weakref.WeakSet[PagedReuse] = field(default_factory=weakref.WeakSet)
    """Each lives as long as its manager."""

    def serve(self, model: Any, request: Request, run: Run, kwargs: Mapping[str, Any]) -> Any:
        """The result of this request, with a cache unless `DynamicCache` is better."""
        reuse = self.done.reuse
        identified = None if reuse is None else reuse.identified(request, model, kwargs)
        if reuse is None or identified is None:
            return self._with_cache(model, request, self._made(model, request), run)
        request = identified
        opened = self._opened(model, request, reuse)
        replay = Replay(model, kwargs)
        try:
            cache, reused = opened or (self._made(model, request, always=True), 0)
            return self._with_cache(model, request, cache, functools.partial(run, **replay.first), reuse, reused)
        except BudgetError as error:
            if opened is None:
                raise
            reuse.note(f"a request was computed from the start, because its context does not fit: {error}")
        except StoreError as error:
            if is_full(error):
                reuse.make_room(self.path, Geometry.of(model).full_kv_bytes(request.tokens, request.rows))
                reuse.note(f"a request was computed from the start, because its disk was full: {error}")
            elif opened is None:
                raise
            else:
                reuse.note(f"a request was computed from the start, because its context could not be read: {error}")
        self.done._note_repeated()
        try:
            again = functools.partial(run, **replay.second())
            return self._with_cache(model, request, self._made(model, request, always=True), again, reuse)
        except StoreError as error:
            if not is_full(error) or not self._may_be_plain(model, request):
                raise
            reuse.note(f"a request kept its keys and values in memory, because its disk was full: {error}")
        result = run(None, **replay.second())
        self.done._note_plain("the disk was full")
        return result

    def _may_be_plain(self, model: Any, request: Request) -> bool:
        """Whether `DynamicCache` takes no more memory than this request may use."""
        full = Geometry.of(model).full_kv_bytes(request.tokens, request.rows)
        floor = request.rows * parse_size(self.floor, "floor")
        return not self.strict and full <= (
            floor if self.memory is None else _limit(self.memory, full, request.rows, self.floor)
        )

    def _made(self, model: Any, request: Request, always: bool = False) -> OffloadCache | None:
        """A new cache for this request; None if `DynamicCache` is better."""
        return request_cache(
            self.cls, model, request.tokens, request.rows, memory=self.memory, goal=self.goal, floor=self.floor,
            strict=self.strict, always=always, path=self.path, **self._fields(request),
        )  # fmt: skip

    def _opened(self, model: Any, request: Request, reuse: Reuse) -> tuple[OffloadCache, int] | None:
        """A cache that holds the beginning of this request, and the number of its tokens in all sequences."""
        limits = budgets(model, request.tokens, request.rows, self.memory, self.floor, self.strict)
        make = functools.partial(self._made, model, request, always=True)
        return reuse.take(request, model, self.cls, limits, make, path=self.path, **self._fields(request))

    @property
    def _plain_limit(self) -> str:
        """The memory within which a request is left plain, as the user wrote it."""
        return f"`floor`, {self.floor} a sequence" if "/" in str(self.memory) else f"`memory`, {self.memory}"

    def _fields(self, request: Request) -> dict[str, Any]:
        return {"candidates": True, **self.fields} if request.candidates else self.fields

    def _with_cache(
        self, model: Any, request: Request, cache: OffloadCache | None, run: Run, reuse: Reuse | None = None,
        reused: int = 0,
    ) -> Any:  # fmt: skip
        """The result of `run` with this cache, which is counted, and closed or left to the library."""
        if cache is None:
            result = run(None)
            self.done._note_plain(f"all keys and values of such a request fit {self._plain_limit}")
            return result
        with contextlib.ExitStack() as closing:
            closing.enter_context(cache)
            try:
                result = run(cache)
            except Exception as error:
                if reuse is not None and not isinstance(error, OURS) and cache.held():  # the text up to there is whole
                    reuse.leave(cache, request)
                    closing.pop_all()
                raise
            if not cache.held():
                self._note_unused(model)
                return result
            self.done._note(cache.report(), beyond_share(cache, model, self.memory), reused)
            if reuse is not None:
                reuse.leave(cache, request)
                closing.pop_all()
            return result

    def note_unseen(self, model: Any, why: str) -> None:
        """Note that `model` begins a generation with its own cache. With `strict`, and a place for a cache of this
        library, raises `UnsupportedModelError`."""
        if self.strict and no_place(model) is None:
            raise UnsupportedModelError(f"{type(model).__name__} would keep its own cache: {why}; or leave strict out")
        self.warn_plain(model, why)
        self.done._note_plain(f"{type(model).__name__}: {why}")

    def serve_pages(self, model: Any, manager: Any) -> None:
        """Let the library serve the requests of `manager`, the model's `ContinuousBatchingManager`."""
        if self.done.reuse is not None and not any(pages.manager is manager for pages in self.pages):
            told = self.done._note_reused
            self.pages.add(PagedReuse(self.done.reuse, model, manager, self.cls, self.fields, self.path, told))

    def _note_unused(self, model: Any) -> None:
        """Note that a request of `model` has ended without using its cache."""
        if self.strict:
            raise CacheUnusedError(f"{type(model).__name__} did not use the cache of this request; leave strict out")
        why = "generate was given a cache of this library and did not use it"
        self.warn_plain(model, why)
        self.done._note_plain(f"{type(model).__name__}: {why}")

    def warn_plain(self, model: Any, why: str) -> None:
        """Warn once per model and reason that a model keeps its own cache, and which use it makes of a library."""
        known = self.warned.setdefault(model, set())
        if why in known:
            return
        known.add(why)
        text = f"{type(model).__name__} keeps its own cache: {why}"
        if self.done.reuse is not None and why.startswith(CONTINUOUS):
            text += "; such requests begin with contexts of the library if their pages allow it"
        elif self.done.reuse is not None:
            text += "; such requests use no context of the library, and leave none"
            self.done.reuse.trouble += [text] if text not in self.done.reuse.trouble else []
        warnings.warn(text, stacklevel=4)
