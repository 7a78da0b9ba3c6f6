"""`offload_cache`: a cache for a memory, chosen by what was measured of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import parse_memory
from ..core.offload_cache import OffloadCache
from ..model.geometry import Geometry
from ..registry import cache_class
from ..stores.engines import resolve_engine
from ..tuning.compare_plans import compare_plans
from ..tuning.measured_model import identity_of
from ..tuning.which_cache import measured_caches, which_cache


def offload_cache(
    model: Any,
    memory: int | str,
    max_context: int,
    max_batch: int = 1,
    *,
    goal: str = "fidelity",
    hint: str = "long-prompt",
    measured: str | Path | None = None,
    path: str | Path | None = None,
    **fields: Any,
) -> OffloadCache:
    """The cache of the registry that does best in `memory`, planned for it: as `for_budget` of the one that is chosen,
    with another `num_selected` where a step that attends to more was measured to be the better one.

        with offload_cache(model, memory="1/13", max_context=8192) as cache:
            print(cache.why)

    Args:
        model: a decoder-only `PreTrainedModel`, or PEFT's wrapper of one.
        memory: the most that it may hold: bytes, "300MiB", or a share of the full KV such as "1/13".
        max_context: tokens a sequence, those that are generated included.
        max_batch: sequences, beams included.
        goal: "fidelity": what finds most facts and is nearest to `DynamicCache`; "speed": the fastest of those that are
            near to it (`which_cache`).
        hint: "long-prompt", or "long-output" where most of what is held will have been generated: it decides for
            fidelity, where something was measured after long outputs in such a memory.
        measured: a file of `hf-offload-cache tune --compare`, of this machine, and of this model and `fields`: one of
            others is refused. None: the shipped table, which was measured with SmolLM2-135M on two cores: its order of
            caches is a first guess for others.
        path: folder on the disk to use; None: the temporary folder.
        fields: fields that all caches have, to stay as they are.

    The cache is the caller's to close; its `why` says what was measured of it and of the others. Raises `ConfigError`,
    `UnsupportedModelError`, and `BudgetError` where no cache fits.
    """
    geometry = Geometry.of(model)
    full = geometry.full_kv_bytes(max_context, max_batch)
    limit = parse_memory(memory, full)
    plans = compare_plans(geometry, limit, max_context, max_batch, resolve_engine(fields, path), wider=True)
    cells = measured_caches(measured, None if measured is None else identity_of(model), fields)
    chosen = which_cache(plans, cells, limit / full, max_context, goal, hint)
    cache: OffloadCache = cache_class(chosen.name)(model, path=path, config=chosen.plan.config)
    cache.why = chosen.why
    return cache
