"""The tiny models with room for a prompt that compact keys are made of, and a sparse cache for it."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import harness
import torch
import transformers
import walk
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache

POSITIONS = 2048
"""Positions of the models in here: the matrix's own have too few for a prompt that an adapter is made of."""

SPARSE: dict[str, Any] = {
    "group_size": 4,
    "num_recent": 8,
    "block_tokens": 64,
    "num_selected": 32,
    "look_ahead": True,
    "rank": 8,
    "engine": "memory",
}
"""Fields of a cache that selects an eighteenth of a prompt of `LENGTH`."""

LENGTH = 620
"""Tokens of a prompt: more than the 512 that an adapter is made of."""


@contextlib.contextmanager
def positions() -> Iterator[None]:
    """The walk's tiny models have `POSITIONS` positions in here."""
    before = dict(walk.SIZES)
    walk.SIZES.update({name: POSITIONS for name, size in before.items() if size == walk.POSITIONS})
    try:
        yield
    finally:
        walk.SIZES.update(before)


def walked(name: str) -> Any:
    """A new tiny model of any architecture, with `POSITIONS` positions."""
    with positions(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return walk.tiny_model(walk.architectures()[name])


def long_fresh(name: str, seed: int = 0, **fields: Any) -> Any:
    """A new tiny model of the matrix with `POSITIONS` positions and `fields`."""
    prefix, own = harness.TINY[name]
    config_class = getattr(transformers, harness._CLASS_OF_CONFIG.get(prefix, f"{prefix}Config"))
    fields = {**harness.COMMON, **own, "max_position_embeddings": POSITIONS, **fields}
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    return harness.build(model_class, config_class(**copy.deepcopy(fields)), seed)


@functools.cache
def long_tiny(name: str) -> Any:
    """The model of that name, of the matrix or else of the walk, shared by all tests: close what is attached."""
    return long_fresh(name) if name in harness.TINY else walked(name)


EXACT: dict[str, Any] = {"exact": True, "rank": None, "num_selected": 400}
"""Over the fields of `sparse`."""


def dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits (B, 1, vocabulary) of the last token."""
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=1).logits


def singles(model: Any, rows: int, count: int, seed: int = 11) -> list[torch.Tensor]:
    """`count` further tokens (B, 1)."""
    return list(harness.prompt(model, rows, count, seed).split(1, 1))


def follow(model: Any, cache: Any, tokens: list[torch.Tensor]) -> harness.Decoded:
    """The logits (steps, B, vocabulary) of the tokens, fed one by one."""
    logits = [step(model, cache, token)[:, 0] for token in tokens]
    return harness.Decoded(torch.cat(tokens, 1), torch.stack(logits))


def sparse(model: Any, **fields: Any) -> DiskSwapCache:
    return DiskSwapCache(model, **{**SPARSE, **fields})
