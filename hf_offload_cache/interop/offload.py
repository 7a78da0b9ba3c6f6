"""`offload`: whoever calls a model's `generate` has its KV cache offloaded, and changes nothing."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import parse_memory, parse_size
from ..core.cache import OffloadCache
from ..errors import BudgetError, CacheUnusedError, ConfigError, UnsupportedModelError
from ..model.geometry import Geometry
from ..model.own_generate import InRequest, OwnGenerate, Request, every_generate
from ..model.place import (
    generates_by_parts,
    has_own_generate,
    has_own_loop,
    inner_model,
    is_model,
    no_place,
    nothing_to_offload,
)
from ..model.plain_caches import plain_caches
from ..registry import cache_class
from ..report.report import CacheReport

# A cache for one request of a known size, where one is of use

FLOOR = "64MiB"
"""What a sequence of a short request may hold, whatever share it was given: by default."""


def request_cache(
    cls: type[OffloadCache],
    model: Any,
    tokens: int,
    rows: int = 1,
    *,
    memory: int | str | None = None,
    floor: int | str = FLOOR,
    strict: bool = False,
    path: str | Path | None = None,
    **fields: Any,
) -> OffloadCache | None:
    """A cache for `rows` sequences of up to `tokens` tokens; the caller closes it. None: `DynamicCache` is better.

    A share of a request's full KV may be less than any plan needs, of a short one above all. Such a request may hold
    `floor` a sequence: where all its KV fits in that, the answer is None, and else the cache has that as its budget.
    Where `memory` is in bytes, the answer is None if no plan fits in them and all the KV does. So no request holds more
    than `memory`, or `floor` a sequence where that is more and a share does not do.

    Args:
        memory: the most that the cache may hold: bytes, "300MiB", or a share of what `DynamicCache` would hold
            ("1/13"); None: what `fields` come to.
        floor: bytes or a size, of each sequence.
        strict: raise `BudgetError` instead.
        path, fields: as of the cache.

    Raises as `for_budget` and the constructor do: `BudgetError` where `floor` does not do either.
    """
    if memory is None:
        return cls(model, path=path, **fields)

    def make(budget: int | str) -> OffloadCache:
        return cls.for_budget(model, budget, tokens, rows, path=path, **fields)

    try:
        return make(memory)
    except BudgetError as error:
        if strict:
            raise
        full = Geometry.of(model).full_kv_bytes(tokens, rows)
        if full <= _most(memory, full, rows, floor):
            return None
        return in_floor(make, error, memory, full, rows, floor)


def beyond_share(cache: OffloadCache, model: Any, memory: int | str | None) -> bool:
    """Whether `request_cache` gave this one `floor`, since its share of `memory` was too little."""
    config = cache.config
    if memory is None or config.memory is None or config.max_context is None:
        return False
    full = Geometry.of(model).full_kv_bytes(config.max_context, config.max_batch or 1)
    return parse_memory(config.memory, full) > parse_memory(memory, full)


def in_floor(
    make: Callable[[int], OffloadCache], error: BudgetError, memory: int | str, full: int, rows: int, floor: int | str
) -> OffloadCache:
    """What `make` makes in `floor` bytes a sequence, where `memory`, a share of the `full` KV's bytes, was too little
    for it by `error`. Warns; raises `error` where `memory` is in bytes, or is as much, or the floor does not do either.
    """
    most = _most(memory, full, rows, floor)
    if most == parse_memory(memory, full):
        raise error
    try:
        own = make(most)
    except BudgetError:
        raise error from None  # the share's: it names what would do
    own.warn(
        f"memory={memory!r} of this request is less than {type(own).__name__} can do with: such requests may hold "
        f"{floor} a sequence; change that by floor, or refuse them by strict",
        stacklevel=3,
    )
    return own


def _most(memory: int | str, full: int, rows: int, floor: int | str) -> int:
    """Bytes that a request may hold at most."""
    limit = parse_memory(memory, full)
    return max(limit, rows * parse_size(floor, "floor")) if "/" in str(memory) else limit


@dataclass
class Offloading:
    """What was done within an `offload`. Any thread."""

    requests: int = 0
    """That have ended, each with a cache of its own."""
    requests_at_floor: int = 0
    """Those of them whose share was less than any such cache needs, and that held up to `floor` a sequence."""
    requests_left_plain: int = 0
    """With transformers' own cache, since ours was of no use or not used: short ones (see `request_cache`), within
    `offload_all` those of models with nothing to offload, and generations that made a cache of their own (continuous
    batching, a model's own loop, a forward with `use_cache=True`)."""
    report: CacheReport | None = None
    """Of the latest of `requests`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def _note(self, report: CacheReport, at_floor: bool) -> None:
        with self._lock:
            self.requests, self.report = self.requests + 1, report
            self.requests_at_floor += at_floor

    def _note_plain(self) -> None:
        with self._lock:
            self.requests_left_plain += 1


@contextlib.contextmanager
def offload(
    model: Any,
    cache: str | type[OffloadCache] = "disk-swap",
    *,
    memory: int | str | None = None,
    floor: int | str = FLOOR,
    strict: bool = False,
    path: str | Path | None = None,
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
        floor: budget per sequence of a request whose share is too small for any cache. A request whose full KV takes no
            more than that gets transformers' own cache, counted in `requests_left_plain`.
        strict: such a request raises `BudgetError`. A generation that makes its own cache raises
            `UnsupportedModelError`, and one that left its cache unused `CacheUnusedError`; without `strict` both warn
            once per model.
        path: folder on the disk to use; None: the temporary folder.
        fields: fields of the cache's configuration.

    Yields a record of the requests. Raises `ConfigError` for an invalid name, field or memory, and
    `UnsupportedModelError` for a model that has no place for a cache, before anything is replaced. `generate` then
    raises the cache's errors, such as `BudgetError` for a budget that is too small, before the model runs.
    """
    inner, way = inner_model(model), _Way(_checked(cache, fields, floor, memory), memory, floor, strict, path, fields)
    why = no_place(model)
    if why is not None and not generates_by_parts(inner):
        raise UnsupportedModelError(why)
    parts = weakref.WeakSet(module for module in inner.modules() if is_model(module))

    def told(one: Any, what: str) -> None:
        if one in parts:
            way.note_unseen(one, what)

    with plain_caches(told, way.within):
        if has_own_generate(inner) and not has_own_loop(inner):
            # it may call this class's or a part's, past what lies on the model itself
            with every_generate(
                lambda one, request: way.cache(one, request) if one in parts else contextlib.nullcontext(), way.within
            ):
                yield way.done
            return
        make = functools.partial(way.cache, model)
        ours = OwnGenerate(inner, vars(inner).get("generate"), make, way.within)
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
    floor: int | str = FLOOR,
    strict: bool = False,
    path: str | Path | None = None,
    **fields: Any,
) -> Iterator[Offloading]:
    """As `offload`, for every model of this process, whoever loads it and when: a server's, say. A model that has no
    place for such a cache (an encoder-decoder, a prefix of PEFT's), or nothing to offload (Mamba, RWKV, sliding windows
    alone), is left alone, after one warning."""
    way = _Way(_checked(cache, fields, floor, memory), memory, floor, strict, path, fields)
    @contextlib.contextmanager
    def make(model: Any, request: Request) -> Iterator[OffloadCache | None]:
        why = nothing_to_offload(model)
        if why is None:
            with way.cache(model, request) as own:
                yield own
            return
        way.warn_plain(model, why)
        yield None
        way.done._note_plain()

    def told(model: Any, what: str) -> None:
        way.note_unseen(model, f"{what}; offload(model) gives that loop another" if has_own_loop(model) else what)

    with plain_caches(told, way.within), every_generate(make, way.within):
        yield way.done


def _checked(
    cache: str | type[OffloadCache], fields: dict[str, Any], floor: int | str, memory: int | str | None
) -> type[OffloadCache]:
    cls = cache_class(cache) if isinstance(cache, str) else cache
    if not (isinstance(cls, type) and issubclass(cls, OffloadCache)):
        raise ConfigError(f"cache must be a name, or a class of an offloading cache, got {cache!r}")
    cls.config_class.load(None, dict(fields))
    parse_size(floor, "floor")
    if memory is not None:
        parse_memory(memory, sys.maxsize)  # a share's form, of whatever request
    return cls


@dataclass(frozen=True)
class _Way:
    """How requests get their caches."""

    cls: type[OffloadCache]
    memory: int | str | None
    floor: int | str
    strict: bool
    path: str | Path | None
    fields: dict[str, Any]
    done: Offloading = field(default_factory=Offloading)
    within: InRequest = field(default_factory=InRequest)
    warned: weakref.WeakKeyDictionary[Any, set[str]] = field(default_factory=weakref.WeakKeyDictionary)

    @contextlib.contextmanager
    def cache(self, model: Any, request: Request) -> Iterator[OffloadCache | None]:
        """One for this request, closed and counted in the end; None where it is better without."""
        own = request_cache(
            self.cls, model, request.tokens, request.rows,
            memory=self.memory, floor=self.floor, strict=self.strict, path=self.path, **self.fields,
        )  # fmt: skip
        if own is None:
            yield None
            self.done._note_plain()
            return
        with own:
            yield own
            if not own.held():
                self._note_unused(model)
                return
            self.done._note(own.report(), beyond_share(own, model, self.memory))

    def note_unseen(self, model: Any, what: str) -> None:
        """Note that `model` begins a generation with its own cache. With `strict`, and a place for a cache of this
        library, raises `UnsupportedModelError`."""
        if self.strict and no_place(model) is None:
            raise UnsupportedModelError(f"{type(model).__name__} would keep its own cache: {what}; or leave strict out")
        self.warn_plain(model, what)
        self.done._note_plain()

    def _note_unused(self, model: Any) -> None:
        """A request of `model` has ended, and its cache never had a token."""
        if self.strict:
            raise CacheUnusedError(f"{type(model).__name__} did not use the cache of this request; leave strict out")
        self.warn_plain(model, "generate was given a cache of this library and did not use it")
        self.done._note_plain()

    def warn_plain(self, model: Any, what: str) -> None:
        """Warn of a model, once for each reason, that it is left plain."""
        known = self.warned.setdefault(model, set())
        if what not in known:
            known.add(what)
            warnings.warn(f"{type(model).__name__} keeps its own cache: {what}", stacklevel=4)
