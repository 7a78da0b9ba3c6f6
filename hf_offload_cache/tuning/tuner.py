"""`tune`: measures, decides, and returns a `Tuned`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import at_least, parse_memory
from ..core.selective_cache import SelectiveCache
from ..errors import ConfigError, UnsupportedModelError
from ..model.geometry import Geometry
from ..model.place import inner_model
from ..registry import cache_class
from .by_trial import tune_by_trial
from .task import Task, Tuned, refuse

# The caches and fields that can be tuned

_NO_PART = ("memory", "max_context", "max_batch", "exact", "trace")
"""Fields without a part in tuning."""


def tunable(cache: str | type[Any]) -> type[SelectiveCache]:
    """The class of that name. Raises `ConfigError` if tuning could measure nothing."""
    kind = cache_class(cache) if isinstance(cache, str) else cache
    if not issubclass(kind, SelectiveCache) or not (kind.solver or kind.to_try({})):
        raise ConfigError(
            f"cache must have a `solver`, like DiskSwapCache, or values `to_try`, got {kind.__name__}: use "
            f"{kind.__name__}.for_budget, which needs no measurement"
        )
    return kind


def settings_of(measured: type[SelectiveCache], fields: dict[str, Any]) -> Any:
    """The configuration of the user's `fields`. Raises `ConfigError`."""
    refuse(_NO_PART, fields)
    for name, value in fields.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(
                f"{name} must fit the JSON file of the result, got {type(value).__name__}: pass it as text, or "
                "to the cache that opens the file"
            ) from None
    return measured.config_class.load(None, fields)


_SECONDS, _QUICK_SECONDS = 1500.0, 120.0


def tune(
    model: Any,
    tokenizer: Any = None,
    *,
    cache: str | type[Any] = "disk-swap",
    memory: int | str,
    max_context: int,
    max_batch: int = 1,
    texts: Iterable[Any] | str | None = None,
    path: str | Path | None = None,
    quick: bool = False,
    samples: int | None = None,
    alpha: float = 0.15,
    delta: int | None = None,
    sigma_max: float = 32.0,
    max_group_size: int = 16,
    time_limit: float | None = None,
    progress: bool = True,
    **fields: Any,
) -> Tuned:
    """Fields of a cache for each batch size and context, chosen for this model, machine and disk.

    `tune(model, tokenizer, memory="1/13", max_context=32768, max_batch=8).save("config.json")`, and later
    `DiskSwapCache(model, config="config.json")`. Writes only an unnamed scratch file, which is gone on return and after
    an interruption.

    Args:
        model: a decoder `PreTrainedModel` whose layers all have full attention.
        tokenizer: the model's; needed unless `texts` are token ids.
        cache: a registered name, "module:Class", or the class. KVSwap's solver tunes `DiskSwapCache` and its
            subclasses, from tables and profiles; a class with `to_try` is tuned by trial.
        memory: for `max_batch` sequences: bytes, "300MiB", or a fraction of the full KV of `max_context` x `max_batch`
            such as "1/13". Each row gets its share for each of its sequences.
        max_context: the largest to tune for, tokens per sequence.
        max_batch: the largest to tune for, sequences.
        texts: texts to measure on: a string, or strings, or token ids; None: Python's help texts.
        path: folder on the disk to tune for; None: the temporary folder.
        quick: under 3 minutes for a small model on two cores, instead of under 30: fewer samples, a coarser grid.
        samples: stretches of text, 20 by default (quick: 3). Fewer are read if time runs out; at least two by the
            solver, if that many are allowed, and one by trial.
        alpha: for the solver only, like the next two: share of the reads that need not be hidden.
        delta: tokens by which the reuse buffer grows if reads are not hidden; None: a quarter of `num_selected`.
        sigma_max: the largest compression of keys to try.
        max_group_size: for the solver only, G_max, tokens.
        time_limit: target duration in seconds, instead of the above.
        progress: show a bar on stderr; in a notebook a widget, without a terminal one line at the end.
        **fields: fields of the configuration for every row, such as `num_selected` or `engine`.

    Raises `ConfigError`, `UnsupportedModelError`, `StoreError`, and `BudgetError` if the memory is too small for the
    largest context and batch.
    """
    measured = tunable(cache)
    settings = settings_of(measured, fields)
    inner = inner_model(model)
    at_least(max_context=max_context, max_batch=max_batch, max_group_size=max_group_size, samples=samples or 1)
    geometry = Geometry.of(inner)
    if geometry.kept or not geometry.layers:
        raise UnsupportedModelError(
            f"{type(inner).__name__} keeps {len(geometry.kept)} of its layers in memory (sliding windows or linear "
            "states): only models whose layers all have full attention can be tuned; use for_budget, or choose the "
            "fields by hand"
        )
    budget = parse_memory(memory, geometry.full_kv_bytes(max_context, max_batch))
    task = Task(
        inner, measured, geometry, budget, max_context, max_batch, fields, texts, tokenizer, path, quick, samples,
        time_limit or (_QUICK_SECONDS if quick else _SECONDS), progress,
    )  # fmt: skip
    if measured.solver is None:
        return tune_by_trial(task, settings)
    module, _, function = measured.solver.partition(":")
    solve = getattr(import_module(module), function)
    tuned: Tuned = solve(task, settings, alpha, delta, sigma_max, max_group_size)
    return tuned
