"""Case r9: `offload` serves a model whose RoPE changes with the length, over that length and under a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, prompt
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

from hf_offload_cache import offload
from hf_offload_cache.registry import CACHES

ORIGINAL = 64


def model() -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope["original_max_position_embeddings"] = ORIGINAL
    fields = {**COMMON, "max_position_embeddings": 4096, "original_max_position_embeddings": ORIGINAL}
    return build(Phi3ForCausalLM, Phi3Config(**{**fields, "rope_parameters": rope}))


@pytest.mark.parametrize("name", CACHES)
def test_a_strict_request_is_offloaded(name: str, tmp_path: Path) -> None:
    """1,500 tokens in 3/4 of the full KV cache's memory; with `exact` the tokens are those of a `DynamicCache`."""
    own = model()
    ids, options = prompt(own, 1, 1500), {"max_new_tokens": 5, "do_sample": False}
    expected = own.generate(ids, past_key_values=DynamicCache(config=own.config), **options)
    for fields in ({}, {"exact": True}):
        budget = {"memory": "3/4" if not fields else "99/100", "floor": "64KiB"}
        with offload(own, name, strict=True, path=tmp_path, **budget, **fields) as done:
            found = own.generate(ids, **options)
        assert (done.requests, done.requests_left_plain) == (1, 0)
        assert done.report.tokens == 1504 and done.report.peak_memory_bytes <= done.report.memory_budget
        assert not fields or torch.equal(found, expected)
