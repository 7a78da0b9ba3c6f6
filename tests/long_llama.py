"""One tiny llama with a long context, and a sparse cache on it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from harness import COMMON, Decoded, build, generate, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache, SpecCache

SPARSE: dict[str, Any] = {
    "group_size": 4,
    "num_recent": 8,
    "block_tokens": 64,
    "num_selected": 40,
    "look_ahead": True,
    "reuse_capacity": 60,
    "num_sinks": 4,
    "engine": "memory",
}
LENGTH = 640
LONG = 700
"""Tokens of a prompt: more than the 512 that an adapter is made of, 16 times what a step selects."""


@functools.cache
def long_model() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 8192}))


def some(method: str | type[Any]) -> dict[str, Any]:
    """Fields to select a sixteenth of a prompt of `LENGTH` tokens, which is enough for any method to learn from.
    `SpecCache` looks ahead in its own way."""
    sizes = {"group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 40, "reuse_capacity": 60}
    return {**sizes, "look_ahead": method not in ("spec", SpecCache), "engine": "memory"}


def sparse(**fields: Any) -> DiskSwapCache:
    """A cache that selects."""
    return DiskSwapCache(long_model(), **{**SPARSE, **fields})


def dynamic() -> DynamicCache:
    return DynamicCache(config=long_model().config)


def run(cache: Any, rows: int = 1, length: int = LONG, **options: Any) -> Decoded:
    return generate(long_model(), cache, prompt(long_model(), rows, length), **{"max_new_tokens": 8, **options})


def feed(cache: Any, ids: torch.Tensor, chunk: int = 512) -> torch.Tensor:
    """The logits of the last token."""
    with torch.no_grad():
        for part in ids.split(chunk, 1):
            logits = long_model()(part, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1]


def same(one: Decoded, other: Decoded) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.logits, other.logits)
