"""Every compared method by name: how its cache is made, within one memory budget, on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import OffloadCache
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES, cache_class
from hf_offload_cache.tuning import without_seams

from .baselines.all_keys import ChunkJudgedCache, FixedChunksCache, FlexGenCache, TokenJudgedCache
from .profiles import PROFILES, throttle
from .synthetic import Shape, build_model

OWN, NO_REUSE, SINGLE = "DiskSwapCache", "no reuse", "single tokens"
FULL = "FlexGen"
IN_MEMORY = ("DynamicCache", "StaticCache")
NUM_SELECTED = 400
"""The paper's MG (KVSwap, section 4.3)."""
JUDGED = ("all keys", "all keys, by chunk")
"""`AbstractTreeCache`'s baselines: token by token when the query is known, and chunk by chunk, read ahead."""
SLOW = (FULL, *JUDGED, "DynamicCache")
"""Methods whose step moves the complete history: `DynamicCache` copies it to append a token."""

_VARIANTS: dict[str, tuple[type[OffloadCache], dict[str, Any]]] = {
    NO_REUSE: (DiskSwapCache, {"reuse_capacity": 0}),
    SINGLE: (DiskSwapCache, {"reuse_capacity": 0, "group_size": 1}),
}
_UNBOUND: dict[str, tuple[type[OffloadCache], dict[str, Any]]] = {
    "fixed chunks": (FixedChunksCache, {"reuse_capacity": 0}),
    JUDGED[0]: (TokenJudgedCache, {}),
    JUDGED[1]: (ChunkJudgedCache, {}),
    FULL: (FlexGenCache, {}),
}
"""Baselines without a memory budget."""
_PLANNED = {cls.__name__: (cls, dict[str, Any]()) for cls in map(cache_class, CACHES)} | _VARIANTS
"""Registered caches, and variants of `DiskSwapCache` that keep its rank and so show the effect of one part."""
METHODS = (*_PLANNED, *_UNBOUND, *IN_MEMORY)


@dataclass(frozen=True)
class Setting:
    """Setting that all contenders of a run share."""

    shape: Shape
    tokens: int
    batch: int = 1
    memory: Fraction = Fraction(1, 13)
    """Share of the full KV."""
    depth: int | None = None
    """Layers of the model that `shape` stands for, which share staging buffers; None: `shape.layers`."""
    path: str | None = None
    profile: str = "own"
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of registered caches and their variants, if they have them; they replace what `memory` gives."""
    room: int = 1024
    """Tokens to come that memory is planned for."""

    @property
    def full_kv_bytes(self) -> int:
        return self.batch * self.tokens * self.shape.token_bytes


def models(setting: Setting) -> tuple[Any, Any]:
    """One model twice, with the same weights: without our seams for transformers' caches, and for ours."""
    model = build_model(setting.shape)
    return without_seams(model), model


def reason_against(name: str, setting: Setting) -> str | None:
    """Why `name` cannot run in `setting`; None: it can."""
    if setting.profile != "own" and name in IN_MEMORY:
        return f"does not read through a store, so {setting.profile!r} cannot slow it down"
    try:
        fields_of(name, setting)
    except BudgetError as error:
        return str(error)
    return None


def needs(name: str, setting: Setting) -> tuple[int, int]:
    """Approximate bytes of memory and of disk for the context of `name`."""
    full = setting.full_kv_bytes
    if name in IN_MEMORY:
        return full, 0
    return 3 * full // setting.shape.layers if name in JUDGED else full // 8, full


def make(name: str, setting: Setting, plain: Any, attached: Any) -> Cache:
    """An empty cache of `METHODS`, which the caller closes."""
    if name == "StaticCache":
        return StaticCache(config=plain.config, max_cache_len=setting.tokens + setting.room)
    if name == "DynamicCache":
        return DynamicCache(config=plain.config)
    cls, _ = {**_PLANNED, **_UNBOUND}[name]
    cache = cls(attached, setting.path, **fields_of(name, setting))
    throttle(cache, PROFILES[setting.profile])
    return cache


def fields_of(name: str, setting: Setting) -> dict[str, Any]:
    """Fields that keep `name` within the setting's memory. Raises `BudgetError` if nothing fits."""
    if name not in _PLANNED:
        engine = {key: value for key, value in setting.fields.items() if key == "engine"}
        return {**_UNBOUND[name][1], **engine} if name in _UNBOUND else {}
    cls, differs = _PLANNED[name]
    default = cls.config_class()
    given = {key: value for key, value in setting.fields.items() if hasattr(default, key)}
    shape, depth = setting.shape, setting.depth or setting.shape.layers
    geometry = Geometry.uniform(depth, shape.heads, shape.kv_heads, shape.head_dim)
    budget = int(setting.memory * geometry.full_kv_bytes(setting.tokens, setting.batch))
    decides = {key: given[key] for key in ("reuse_capacity", "group_size") if key in given}
    asked = {"num_selected": NUM_SELECTED, **decides}
    config = cls.fit(geometry, budget, setting.tokens + setting.room, setting.batch, asked)
    planned = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    # Without the limit: a replay has only a part of the layers.
    planned = {
        key: value
        for key, value in planned.items()
        if key not in ("memory", "max_batch") and (value != getattr(default, key) or key in asked)
    }
    return {**planned, **given, **differs}


def in_turns(contenders: Sequence[Any], steps: int, turn: int) -> Iterator[tuple[Any, int]]:
    """Each contender and step, `turn` steps at a time, forth and back (ABBA)."""
    for number, first in enumerate(range(0, steps, turn)):
        for one in contenders if number % 2 == 0 else contenders[::-1]:
            for step in range(first, min(first + turn, steps)):
                yield one, step
