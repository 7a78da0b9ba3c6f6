"""`offload`: whoever calls a model's `generate` has its KV cache offloaded, and changes nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.offload_cache import OffloadCache
from ..errors import ConfigError
from ..model.inner_model import inner_model
from ..model.own_generate import OwnGenerate, Request
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
        model: a `PreTrainedModel`, or PEFT's or `torch.compile`'s wrapper of one. It is as it was after the `with`.
        cache: a name of the registry ("disk-swap", "abstract-tree", "cluster", "spec"), "module:Class", or a class.
        memory: the most that a cache may hold: bytes, "300MiB", or a share of what `DynamicCache` would hold of the
            prompt and all that may be generated ("1/13"), of each request; None: what `fields` come to.
        path: folder on the disk to use; None: the temporary folder.
        fields: of the cache's configuration.

    Yields what is known of the requests. Raises `ConfigError` for a name or a field that there is not, before anything
    is replaced; `generate` then raises as the cache does, `BudgetError` for a memory that does not do among others.
    """
    cls = cache_class(cache) if isinstance(cache, str) else cache
    if not (isinstance(cls, type) and issubclass(cls, OffloadCache)):
        raise ConfigError(f"cache must be a name, or a class of an offloading cache, got {cache!r}")
    cls.config_class.load(None, dict(fields))
    inner, done = inner_model(model), Offloading()

    @contextlib.contextmanager
    def made(request: Request) -> Iterator[OffloadCache]:
        if memory is None:
            own = cls(model, path=path, **fields)
        else:
            own = cls.for_budget(model, memory, request.tokens, request.rows, path=path, **fields)
        with own:
            yield own
            done._note(own.report())

    ours = OwnGenerate(inner, vars(inner).get("generate"), made)
    inner.__dict__["generate"] = ours
    try:
        yield done
    finally:
        ours.stop()
        if vars(inner).get("generate") is ours:
            OwnGenerate.take_off(inner)
