"""Decoding steps in a CUDA graph, on a device that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_device import Counts, Fake, on_the_device, values_of
from harness import COMMON, build, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.interop.graphed_step import graphed_step

TOKENS, STEPS, LAYERS = 640, 60, COMMON["num_hidden_layers"]


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 8192}))


@contextmanager
def a_device(rows: int = 1, seed: int | None = None, **fields: Any) -> Iterator[tuple[Any, Any, Counts]]:
    """A model, a cache with its records in pinned host memory, and the device's counts."""
    with on_the_device(llama(), seed) as (model, counts):
        sizes = {"num_selected": 128, "engine": "memory"}
        with DiskSwapCache(model, **{**sizes, **fields}) as cache:
            yield model, cache, counts


def greedy(step: Any, first: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, steps), and logits (B, steps, vocabulary) of each step."""
    token, found, logits = first, [], []
    for _ in range(steps):
        logits.append(values_of(step(Fake(token)).logits))
        token = logits[-1].argmax(2)
        found.append(token)
    return torch.cat(found, 1), torch.cat(logits, 1)


def prefilled(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The first token (B, 1) after a prompt."""
    with torch.no_grad():
        return values_of(model(Fake(ids), past_key_values=cache, logits_to_keep=1).logits).argmax(2)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_eager_steps(seed: int) -> None:
    ids = prompt(llama(), 1, TOKENS)
    with a_device(1, seed) as (model, cache, _):
        first = prefilled(model, cache, ids)
        with torch.no_grad():
            expected = greedy(lambda token: model(token, past_key_values=cache), first, STEPS)
    with a_device(1, seed) as (model, cache, counts):
        first = prefilled(model, cache, ids)
        step = graphed_step(model, cache)
        reasons = []

        def called(token: Any) -> Any:
            output = step(token)
            reasons.append(step.reason)
            return output

        found = greedy(called, first, STEPS)
    print(reasons, step.replays, step.captures)
    torch.testing.assert_close(found[1], expected[1])
    assert torch.equal(found[0], expected[0])
