"""The contenders of `eval.fidelity`: names, and the fields that each is opened with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import is_optimum_quanto_available

from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES, cache_class

FIXED = ("4-bit", "2-bit")
"""transformers' quantized caches: of a memory of their own."""
FLOORS: dict[str, dict[str, Any]] = {
    "random": {"cache": "eval.baselines.swap_variants:RandomSwapCache"},
    "window": {"cache": "window"},
}
"""Contenders that choose without looking: `DiskSwapCache` with groups drawn at random, and first and latest tokens."""


def _fields(name: str) -> dict[str, Any]:
    return FLOORS.get(name, {"cache": name})


def missing(name: str, model: PreTrainedModel) -> str | None:
    """Why this one cannot run here with this model, and what to install; None: it can."""
    if name in FIXED:
        if Geometry.of(model).kept:
            return "transformers' quantized cache takes only models whose layers all have full attention"
        return None if is_optimum_quanto_available() else "transformers' quantized cache needs optimum-quanto"
    cache = _fields(name)["cache"]
    return cache_class(cache).missing() if cache in CACHES else None


def contenders(names: Sequence[str], memories: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> fields: each cache in each memory, as "disk-swap 1/13"."""
    found = {}
    for name in names:
        for memory in ("itself",) if name in FIXED else memories:
            found[f"{name} {memory}"] = {**_fields(name), "memory": "1/1" if name in FIXED else memory}
    return found
