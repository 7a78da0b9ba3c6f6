"""Every method that is compared, by name: how its cache is made, within one memory, on one device."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import OffloadCache
from hf_offload_cache.registry import CACHES, cache_class, class_named

from .baselines.all_keys import ChunkJudgedCache, FixedChunksCache, TokenJudgedCache
from .baselines.flexgen import FlexGenCache
from .baselines.infinigen import GroupedInfiniGenCache, InfiniGenCache
from .baselines.loki import LokiCache
from .baselines.paged import PagedCache
from .baselines.shadowkv import ShadowKVCache
from .equal_memory import fields_for
from .profiles import PROFILES, throttle
from .synthetic import Shape, build_model, static_cache

OWN, NO_REUSE, SINGLE = "DiskSwapCache", "no reuse", "single tokens"
FULL, STREAMED = "FlexGen", "FlexGen, streamed"
PAGED = "paged DynamicCache"
IN_MEMORY = ("DynamicCache", "StaticCache")
RELOADS = (FULL, STREAMED, PAGED)
"""Methods that bring the whole history back in each step."""
FIXED = "fixed chunks"
"""`AbstractTreeCache`'s baseline that attends to whole chunks; what it holds is no part of any memory."""
JUDGED_WHOLE = ("all keys", "all keys, by chunk")
"""`AbstractTreeCache`'s baselines: token by token when the query is known, and chunk by chunk, read ahead. What they
hold is no part of any memory."""
SLOW = (*RELOADS, *JUDGED_WHOLE, "DynamicCache")
"""Methods whose step moves the whole history: `DynamicCache` copies it to append a token."""

_TWINS: dict[str, tuple[type[OffloadCache], str, dict[str, Any]]] = {
    **{cls.__name__: (cls, cls.__name__, {}) for cls in map(cache_class, CACHES)},
    NO_REUSE: (DiskSwapCache, "DiskSwapCache", {"reuse_capacity": 0}),
    SINGLE: (DiskSwapCache, "DiskSwapCache", {"reuse_capacity": 0, "group_size": 1}),
    "InfiniGen": (InfiniGenCache, "InfiniGen", {}),
    "InfiniGen*": (GroupedInfiniGenCache, "InfiniGen*", {}),
    "InfiniGen*+ru": (GroupedInfiniGenCache, "InfiniGen*+ru", {}),
    "Loki": (LokiCache, "Loki", {}),
    "ShadowKV": (ShadowKVCache, "ShadowKV", {}),
    FIXED: (FixedChunksCache, "", {"reuse_capacity": 0}),
    JUDGED_WHOLE[0]: (TokenJudgedCache, "", {}),
    JUDGED_WHOLE[1]: (ChunkJudgedCache, "", {}),
}
"""Name -> cache, whose memory is reckoned how ("": it is not), and what differs: the registered caches, then variants
and twins. "no reuse" and "single tokens" keep the rank of `DiskSwapCache`: they show one part's effect alone."""

METHODS = (*_TWINS, FULL, STREAMED, PAGED, *IN_MEMORY)


@dataclass(frozen=True)
class Setting:
    """What all contenders of a run have in common."""

    shape: Shape
    tokens: int
    batch: int = 1
    memory: Fraction | None = Fraction(1, 13)
    """Share of the full KV; None: each method's own defaults."""
    depth: int | None = None
    """Layers of the model that `shape` stands for, which share staging buffers; None: `shape.layers`."""
    path: str | None = None
    profile: str = "own"
    device: str = "cpu"
    fields: dict[str, Any] = field(default_factory=dict)
    """Of registered caches that have them, and of their variants, on top of what `memory` gives; `reuse_capacity` and
    `group_size` also decide what it gives."""
    room: int = 1024
    """Tokens to come that memory is reckoned for."""
    by_method: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of single methods, instead of what `memory` gives."""

    @property
    def full_kv_bytes(self) -> int:
        return self.batch * self.tokens * self.shape.token_bytes


def models(setting: Setting) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """One model twice, with the same weights: for transformers' own caches, without our seams, and for ours."""
    plain = build_model(setting.shape, device=setting.device)
    return plain, copy.deepcopy(plain, {id(tensor): tensor for tensor in plain.parameters()})


def reason_against(name: str, setting: Setting) -> str | None:
    """Why `name` cannot run in `setting`; None: it can."""
    if setting.profile != "own" and name in (PAGED, *IN_MEMORY):
        return f"does not read through a store, so {setting.profile!r} cannot slow it down"
    if name == PAGED and setting.device != "cpu":
        return "lies in host memory"
    if name in _TWINS and name not in setting.by_method:
        try:
            _fields(*_TWINS[name], setting)
        except ValueError as error:  # too little memory for what the method cannot do without
            return str(error)
    return None


def needs(name: str, setting: Setting) -> tuple[int, int]:
    """Bytes of host or device memory, and of disk, that the context of `name` takes, nearly."""
    full = setting.full_kv_bytes
    if name in IN_MEMORY:
        return full, 0
    if name in JUDGED_WHOLE:  # a layer at a time is read, and looked into
        return 3 * full // setting.shape.layers, full
    if name in ("InfiniGen", "Loki"):  # a record of a block for the keys and values of one head
        padding = max(1, 4096 // (4 * setting.shape.head_dim))
        return full // 8, full * padding
    return full // 8, full


def make(name: str, setting: Setting, plain: LlamaForCausalLM, attached: LlamaForCausalLM, room: int) -> Cache:
    """An empty cache of `METHODS`. `room`: tokens that a `StaticCache` is made for. The caller closes it."""
    if name == "StaticCache":
        return static_cache(plain, room)
    if name == "DynamicCache":
        return DynamicCache(config=plain.config)
    if name == PAGED:
        limit = int((setting.memory or Fraction(1, 13)) * setting.full_kv_bytes)
        return PagedCache(plain.config, limit, setting.path)
    if name in (FULL, STREAMED):
        engine = {key: value for key, value in setting.fields.items() if key == "engine"}
        exact = True if name == STREAMED else "bitwise"
        cache: OffloadCache = FlexGenCache(attached, setting.path, exact=exact, **engine)
    else:
        kind, method, differs = _TWINS[name]
        fields = setting.by_method.get(name) or _fields(kind, method, differs, setting)
        cache = kind(attached, setting.path, **fields)
    throttle(cache, PROFILES[setting.profile])
    return cache


def _fields(kind: type[OffloadCache], method: str, differs: dict[str, Any], setting: Setting) -> dict[str, Any]:
    fields_of = dataclasses.fields(kind.config_class) if not method or class_named(method) else ()
    known = {one.name for one in fields_of} or {"engine"}
    own = {name: value for name, value in setting.fields.items() if name in known}
    fields: dict[str, Any] = {}
    if setting.memory is not None and method:
        fields = fields_for(
            method,
            setting.shape,
            setting.tokens,
            setting.batch,
            setting.memory,
            depth=setting.depth,
            reuse=own.get("reuse_capacity"),
            group_size=own.get("group_size"),
            room=setting.room,
        )
    return {**fields, **own, **differs}


def synchronise(device: str) -> None:
    """Wait for what was given to a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
