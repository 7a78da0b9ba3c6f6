"""`offload`: whoever calls a model's `generate` has its KV cache offloaded, and changes nothing."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.offload_cache import OffloadCache
from ..errors import ConfigError, UnsupportedModelError
from ..model.inner_model import inner_model
from ..model.own_generate import OwnGenerate, Request, every_generate
from ..registry import cache_class
from ..report.cache_report import CacheReport


@dataclass
class Offloading:
    """What was done within an `offload`. Any thread."""

    requests: int = 0
    """That have ended, each with a cache of its own."""
    report: CacheReport | None = None
    """Of the latest of them."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def _note(self, report: CacheReport) -> None:
        with self._lock:
            self.requests, self.report = self.requests + 1, report


@contextlib.contextmanager
def offload(
    model: Any,
    cache: str | type[OffloadCache] = "disk-swap",
    *,
    memory: int | str | None = None,
    path: str | Path | None = None,
    **fields: Any,
) -> Iterator[Offloading]:
    """Within the `with`, `model.generate(...)` uses such a cache wherever its caller names none: so do pipelines, and
    servers that call it, in any thread. Each call has a cache of its own, which is closed when it returns or raises.

    Args:
        model: a `PreTrainedModel`, or PEFT's or `torch.compile`'s wrapper of one. It is as it was after the `with`; of
            two that do not end in turn a method stays that does nothing of its own.
        cache: a name of the registry ("disk-swap", "abstract-tree", "cluster", "spec"), "module:Class", or a class.
        memory: the most that a cache may hold: bytes, "300MiB", or a share of what `DynamicCache` would hold of the
            prompt and all that may be generated ("1/13"), of each request; None: what `fields` come to.
        path: folder on the disk to use; None: the temporary folder.
        fields: of the cache's configuration.

    Yields what is known of the requests. Raises `ConfigError` for a name or a field that there is not, before anything
    is replaced; `generate` then raises as the cache does, `BudgetError` for a memory that does not do among others.
    """
    cls, inner, done = _checked(cache, fields), inner_model(model), Offloading()

    def make(request: Request) -> AbstractContextManager[OffloadCache]:
        return _made(cls, model, request, done, memory, path, fields)

    ours = OwnGenerate(inner, vars(inner).get("generate"), make)
    inner.__dict__["generate"] = ours
    try:
        yield done
    finally:
        ours.stop()
        if vars(inner).get("generate") is ours:
            OwnGenerate.take_off(inner)


@contextlib.contextmanager
def offload_all(
    cache: str | type[OffloadCache] = "disk-swap",
    *,
    memory: int | str | None = None,
    path: str | Path | None = None,
    **fields: Any,
) -> Iterator[Offloading]:
    """As `offload`, for every model of this process, whoever loads it and when: a server's, say. A model that has no
    place for such a cache (an encoder-decoder) is left alone, after a warning."""
    cls, done = _checked(cache, fields), Offloading()

    @contextlib.contextmanager
    def make(model: Any, request: Request) -> Iterator[OffloadCache | None]:
        with contextlib.ExitStack() as stack:
            try:
                own = stack.enter_context(_made(cls, model, request, done, memory, path, fields))
            except UnsupportedModelError as error:
                warnings.warn(f"{type(model).__name__} keeps its own cache: {error}", stacklevel=2)
                yield None
                return
            yield own

    with every_generate(make):
        yield done


def _checked(cache: str | type[OffloadCache], fields: dict[str, Any]) -> type[OffloadCache]:
    cls = cache_class(cache) if isinstance(cache, str) else cache
    if not (isinstance(cls, type) and issubclass(cls, OffloadCache)):
        raise ConfigError(f"cache must be a name, or a class of an offloading cache, got {cache!r}")
    cls.config_class.load(None, dict(fields))
    return cls


@contextlib.contextmanager
def _made(
    cls: type[OffloadCache], model: Any, request: Request, done: Offloading, memory: int | str | None,
    path: str | Path | None, fields: dict[str, Any],
) -> Iterator[OffloadCache]:  # fmt: skip
    if memory is None:
        own = cls(model, path=path, **fields)
    else:
        own = cls.for_budget(model, memory, request.tokens, request.rows, path=path, **fields)
    with own:
        yield own
        done._note(own.report())
