"""Choosing a cache and its fields by measurement. Names are imported when first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .by_trial import LEAD as LEAD
    from .by_trial import RECITED as RECITED
    from .by_trial import Nearness as Nearness
    from .by_trial import Trial as Trial
    from .by_trial import distance as distance
    from .by_trial import divergence as divergence
    from .by_trial import perplexity_over as perplexity_over
    from .measure_caches import TURN as TURN
    from .measure_caches import Contender as Contender
    from .measure_caches import follow_in_turns as follow_in_turns
    from .measure_caches import together as together
    from .measure_caches import without_seams as without_seams
    from .sample import bundled_prose as bundled_prose
    from .sample import bundled_text as bundled_text
    from .sample import sample_ids as sample_ids
    from .sample import windows as windows
    from .task import Tuned as Tuned
    from .which_cache import ComparedPlan as ComparedPlan
    from .which_cache import compare_plans as compare_plans
    from .which_cache import identity_of as identity_of
    from .which_cache import measured_caches as measured_caches
    from .which_cache import shape_of as shape_of

_HOME = {
    "ComparedPlan": "which_cache",
    "Contender": "measure_caches",
    "LEAD": "by_trial",
    "Nearness": "by_trial",
    "RECITED": "by_trial",
    "TURN": "measure_caches",
    "Trial": "by_trial",
    "Tuned": "task",
    "bundled_prose": "sample",
    "bundled_text": "sample",
    "compare_plans": "which_cache",
    "distance": "by_trial",
    "divergence": "by_trial",
    "follow_in_turns": "measure_caches",
    "identity_of": "which_cache",
    "measured_caches": "which_cache",
    "perplexity_over": "by_trial",
    "sample_ids": "sample",
    "shape_of": "which_cache",
    "together": "measure_caches",
    "windows": "sample",
    "without_seams": "measure_caches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
