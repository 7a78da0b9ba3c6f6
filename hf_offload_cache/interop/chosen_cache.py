"""`offload_cache`: a cache for a memory, chosen by what was measured of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import at_least, parse_memory
from ..contexts.open import closed_on_error
from ..core.cache import OffloadCache
from ..errors import ConfigError, UnsupportedModelError
from ..model.config_values import config_value
from ..model.geometry import Geometry
from ..model.place import inner_model, nothing_to_offload
from ..registry import cache_class
from ..stores.engines import resolve_engine
from ..tuning.which_cache import compare_plans, identity_of, measured_caches, not_measured, which_cache


def offload_cache(
    model: Any,
    memory: int | str,
    max_context: int | None = None,
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
        max_context: tokens a sequence, those that are generated included; None: as many as the model has positions for.
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

    The cache is the caller's to close; its `why` says what was measured of it and of the others, and where a shipped
    figure is of other fields. Where `exact` is asked for, all caches say the same, and the first that fits is taken.
    Raises `ConfigError`, `UnsupportedModelError` for a model that nothing can be offloaded of, too, and `BudgetError`
    where no cache fits.
    """
    if (nothing := nothing_to_offload(model)) is not None:
        raise UnsupportedModelError(nothing)
    max_context = _positions(model) if max_context is None else max_context
    at_least(max_context=max_context, max_batch=max_batch)
    geometry = Geometry.of(model)
    full = geometry.full_kv_bytes(max_context, max_batch)
    limit = parse_memory(memory, full)
    used = resolve_engine(fields, path)
    plans = compare_plans(geometry, limit, max_context, max_batch, used, wider=True, installed=True)
    cells = measured_caches(measured, None if measured is None else identity_of(model), fields)
    chosen = which_cache(plans, cells, limit / full, max_context, goal, hint)
    cache: OffloadCache = cache_class(chosen.name)(model, path=path, config=chosen.plan.config)
    cache.why = chosen.why
    with closed_on_error(cache):
        for note in chosen.plan.notes:
            cache.warn(note)
    if chosen.plan.plan is not None and (needless := chosen.plan.plan.needless) is not None:
        cache.why += f"\n{needless}"
    if measured is None and cells and (others := not_measured(fields, cache.config)):
        cache.why += f"\nmeasured without the fields {others}: `tune --compare` measures with them"
    return cache


def _positions(model: Any) -> int:
    """Tokens that the model has positions for."""
    found = config_value(inner_model(model).config.get_text_config(decoder=True), "max_position_embeddings")
    if not isinstance(found, int):
        raise ConfigError("max_context must be given, in tokens: the model's configuration has no most that it takes")
    return found
