"""`offload_cache`: the best cache for a memory budget, according to measurements of all caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import at_least, parse_memory
from ..contexts.open import closed_on_error
from ..core.cache import OffloadCache
from ..errors import BudgetError, ConfigError, UnsupportedModelError
from ..model.config_values import config_value
from ..model.geometry import Geometry
from ..model.place import inner_model, nothing_to_offload
from ..registry import cache_class
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
    """The best registered cache for the budget `memory`, configured by its `for_budget`.

        with offload_cache(model, memory="1/13", max_context=8192) as cache:
            print(cache.why)

    Args:
        model: a decoder-only `PreTrainedModel`, or PEFT's wrapper of one.
        memory: the memory limit: bytes, "300MiB", or a share of the full KV such as "1/13".
        max_context: tokens per sequence, including generated ones; None: as many as the model has positions for.
        max_batch: sequences, including beams.
        goal: "fidelity": the cache that retrieves most needles and is closest to `DynamicCache`; "speed": the fastest
            of those that are close to it (`which_cache`).
        hint: "long-prompt", or "long-output" if most tokens will be generated. It matters for fidelity, if there are
            measurements after long outputs at such a budget.
        measured: a file that `hf-offload-cache tune --compare` wrote on this machine, for this model and these
            `fields`. None: the shipped table, measured with SmolLM2-135M on two cores: a first guess for other models.
        path: folder on the disk to use; None: the temporary folder.
        fields: values for fields that all caches have.

    The caller closes the cache. Its `why` has the measurements behind the choice, and says if a shipped figure is for
    other fields. With `exact`, all caches give the same tokens, and the first that fits is chosen. Raises `ConfigError`
    (also for a `measured` file of another model or other fields), `UnsupportedModelError` (also for a model with
    nothing to offload), and `BudgetError` if no cache fits.
    """
    if (nothing := nothing_to_offload(model)) is not None:
        raise UnsupportedModelError(nothing)
    max_context = _positions(model) if max_context is None else max_context
    at_least(max_context=max_context, max_batch=max_batch)
    geometry = Geometry.of(model)
    full = geometry.full_kv_bytes(max_context, max_batch)
    limit = parse_memory(memory, full)
    fastest = "speed" if goal == "speed" else None
    cells = measured_caches(measured, None if measured is None else identity_of(model), fields)
    plans = compare_plans(geometry, limit, max_context, max_batch, fields, installed=True, goal=fastest, path=path)
    chosen = which_cache(plans, cells, limit / full, max_context, goal, hint)
    cache: OffloadCache = cache_class(chosen.name)(model, path=path, config=chosen.plan.config)
    cache.why = chosen.why
    with closed_on_error(cache):
        for note in chosen.plan.notes:
            cache.warn(note)
        if chosen.plan.plan is not None and (needless := chosen.plan.plan.needless) is not None:
            cache.why += f"\n{needless}"
        if measured is None and cells and fields:
            try:
                engine = cache.choose_store(geometry, (limit, max_context, max_batch), {}, path, fastest)
                usual = type(cache).fit(geometry, limit, max_context, max_batch, engine, fastest)
            except BudgetError:
                usual = type(cache.config)()
            if others := not_measured(fields, usual):
                cache.why += f"\nmeasured without the fields {others}: `tune --compare` measures with them"
    return cache


def _positions(model: Any) -> int:
    """Tokens that the model has positions for. Raises `ConfigError` if its configuration does not say."""
    positions = config_value(inner_model(model).config.get_text_config(decoder=True), "max_position_embeddings")
    if not isinstance(positions, int):
        raise ConfigError("max_context must be given, in tokens: the model's configuration states no maximum")
    return positions
