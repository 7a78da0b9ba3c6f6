"""A cache by its name: "disk-swap" and the others that the registry has, "module:Class", or transformers' "dynamic"."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import parse_memory
from ..errors import ConfigError
from ..registry import CACHES, cache_class, name_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

DYNAMIC = "dynamic"
"""transformers' own `DynamicCache`, which keeps everything in memory and has no fields."""


def default_for(context: Path | None) -> str:
    """The name that is meant where none is given: of the cache that saved `context`, else the first of the registry.

    Raises `ContextError` where there is no context, or its manifest cannot be read; `ConfigError` for one that a cache
    which is not registered saved.
    """
    if context is None:
        return next(iter(CACHES))
    from ..contexts.reader import read_manifest

    saved_by = read_manifest(context).cache
    name = name_of(saved_by)
    if name is None:
        raise ConfigError(
            f"context {str(context)!r} was saved by {saved_by!r}, which is not among {', '.join(CACHES)}: name it as "
            f"--cache module:{saved_by}"
        )
    return name


def offloading_class(name: str) -> type[Any]:
    """The class of a cache of this family. Raises `ConfigError`, for "dynamic" too."""
    if name == DYNAMIC:
        raise ConfigError(f"cache {DYNAMIC!r} keeps all in memory and has no fields: name one of {', '.join(CACHES)}")
    return cache_class(name, others=(DYNAMIC,))


def check_fields(
    name: str, fields: Mapping[str, Any], path: str | Path | None = None, memory: int | str | None = None
) -> None:
    """Raises `ConfigError` for what `make_cache` would refuse whatever the model, so before a model is loaded."""
    check_folder(path)
    if name != DYNAMIC:
        offloading_class(name).config_class.load(None, dict(fields))
        if memory is not None:
            parse_memory(memory, sys.maxsize)
    elif fields or path or memory:
        raise ConfigError(f"cache {DYNAMIC!r} keeps all in memory and has no fields, path or memory: leave them out")


def check_folder(path: str | Path | None) -> None:
    """Raise `ConfigError` unless `path` is None or a folder."""
    if path is not None and not Path(path).is_dir():
        raise ConfigError(f"path must be a folder that exists, got {str(path)!r}")


@contextlib.contextmanager
def make_cache(
    name: str,
    model: PreTrainedModel,
    path: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    max_context: int | None = None,
) -> Iterator[Cache]:
    """A cache of that name, closed on leaving, also after an exception.

    With `memory` (bytes, "300MiB", or "1/13" of the full KV), which is for one sequence of `max_context` tokens, the
    best that it allows (see `OffloadCache.for_budget`). Raises `ConfigError` for a name or a field that there is not,
    `BudgetError` for a memory that does not do.
    """
    check_fields(name, fields or {}, path, memory)
    if name == DYNAMIC:
        from transformers import DynamicCache

        yield DynamicCache(config=model.config)
        return
    cls = offloading_class(name)
    if memory is None:
        cache = cls(model, path=path, **(fields or {}))
    elif max_context is None:
        raise ConfigError(f"memory={memory!r} needs max_context, the tokens it is for: give both")
    else:
        cache = cls.for_budget(model, memory, max_context, path=path, **(fields or {}))
    with cache:
        yield cache


@contextlib.contextmanager
def open_cache(
    name: str,
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    max_context: int | None = None,
) -> Iterator[Cache]:
    """As `make_cache`, but what was saved in `directory` is held; that counts as used now.

    Raises `ConfigError` for a name that there is not, and as `OffloadCache.open`.
    """
    from ..contexts.listing import touch

    own = {} if memory is None else {"max_context": max_context}
    with offloading_class(name).open(
        directory, model, memory=memory, path=path, tokenizer=tokenizer, **{**own, **(fields or {})}
    ) as cache:
        touch(directory)
        yield cache
