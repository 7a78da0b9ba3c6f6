"""Every architecture of transformers that generates with a user's cache goes on from a saved context as `DynamicCache`
does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import walk
from harness import SMALL, Decoded, assert_exact, generate, prompt
from transformers import DynamicCache

from hf_offload_cache import OffloadCache
from hf_offload_cache.model import no_place

SOME = ("llama", "gemma3_text", "gpt_neox", "qwen3_next", "minimax_m3_vl_text", "deepseek_v3", "bloom", "inkling_text",
        "gemma3n_text")  # fmt: skip
"""Kinds of layers and of attention that differ; the others are slow."""


def _names() -> list[Any]:
    known = sorted(walk.architectures())
    return [pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in known]


def _turns(model: Any, cache: Any, between: Any) -> tuple[Decoded, Any]:
    first = generate(model, cache, prompt(model, 2, 40), max_new_tokens=5)
    cache = between(cache)
    ids = torch.cat([first.tokens, prompt(model, 2, 9, seed=8)], 1)
    return generate(model, cache, ids, max_new_tokens=8), cache


@pytest.mark.parametrize("name", _names())
def test_a_saved_context_goes_on(name: str, tmp_path: Path) -> None:
    try:
        model = walk.tiny_model(walk.architectures()[name])
        expected, _ = _turns(model, DynamicCache(config=model.config), lambda cache: cache)
    except Exception as error:
        pytest.skip(f"does not build tiny, or does not go on with DynamicCache: {type(error).__name__}")

    if (why := no_place(model)) is not None:
        pytest.skip(why)

    def saved_and_opened(cache: OffloadCache) -> OffloadCache:
        if not cache.tokens:
            pytest.skip("leaves the cache empty")
        if cache.tokens != cache.contents.tokens.length:
            pytest.skip("has keys for more than its tokens: a second turn is refused, saved or not")
        cache.save(tmp_path / "context")
        cache.close()
        return OffloadCache.open(tmp_path / "context", model)

    with OffloadCache(model, **{**SMALL, "block_tokens": 512}) as cache:  # in one block: some models pick by rank
        result, opened = _turns(model, cache, saved_and_opened)
    opened.close()
    assert_exact(expected, result)
