"""What the fields given to `open` do: the configuration decides, what was captured fills what it leaves open."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Decoded, build, config_of, prompt
from saved_contexts import same
from transformers import LlamaForCausalLM

from hf_offload_cache import DiskSwapCache, calibrate
from hf_offload_cache.errors import ConfigError

FIELDS: dict[str, Any] = {
    "group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 48, "reuse_capacity": 16, "rank": 8,
    "engine": "mapped", "look_ahead": True,
}  # fmt: skip
LONG = 620
"""Tokens of a prompt: more than the 512 that an adapter is made of."""
@functools.cache
def model() -> Any:
    """Three offloaded layers."""
    config = config_of("llama")
    config.max_position_embeddings = 2048
    return build(LlamaForCausalLM, config)


def prefilled(**fields: Any) -> DiskSwapCache:
    cache = DiskSwapCache(model(), **{**FIELDS, **fields})
    feed(cache, prompt(model(), 1, LONG))
    return cache


def feed(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model()(tokens, past_key_values=cache).logits[:, -1]


def answer(cache: Any) -> Decoded:
    token, tokens, logits = torch.tensor([[17]]), [], []
    for _ in range(4):
        logits.append(feed(cache, token))
        token = logits[-1].argmax(-1, keepdim=True)
        tokens.append(token)
    return Decoded(torch.cat(tokens, 1), torch.stack(logits))


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    """What is stored was made with another one, or with none."""
    texts = [prompt(model(), 1, 560, seed=3)]
    calibrate(model(), texts, rank=8).save(tmp_path / "adapter")
    for own in (None, str(tmp_path / "adapter")):
        (tmp_path / str(own is None)).mkdir()
        context = tmp_path / str(own is None) / "context"
        with prefilled(adapter=own) as cache:
            cache.save(context)
            before = answer(cache)
        with pytest.raises(ConfigError, match="adapter is fixed in a saved context"):
            DiskSwapCache.open(context, model(), adapter=str(tmp_path / "adapter"))
        with DiskSwapCache.open(context, model(), adapter=None) as cache:
            assert same(answer(cache), before)


@pytest.mark.parametrize(("field", "value"), [("group_size", 8), ("rank", 4), ("summary_dtype", "float32")])
def test_the_stored_format_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    context = tmp_path / "context"
    with prefilled() as cache:
        cache.save(context)
    with pytest.raises(ConfigError, match=f"{field} is fixed in a saved context"):
        DiskSwapCache.open(context, model(), **{field: value})
