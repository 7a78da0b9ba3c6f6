"""A cache serves the model it was made for, and its parts; any other is refused before anything is taken in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import CASES, SMALL, assert_exact, fresh, prompt, reference, tiny
from pairwise import combinations
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import PromptError

MODES: dict[str, dict[str, Any]] = {"exact": {"exact": True}, "bitwise": {"exact": "bitwise"}, "sparse": {}}


@pytest.fixture(params=MODES)
def cache(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A cache of the tiny llama."""
    with DiskSwapCache(tiny("llama"), engine="memory", **SMALL, **MODES[request.param]) as cache:
        yield cache


@pytest.mark.parametrize(("other", "attached", "held"), combinations(("llama", "qwen3"), (False, True), (0, 12)))
def test_another_model_is_refused(cache: Any, other: str, attached: bool, held: int) -> None:
    stranger = fresh(other, seed=3)
    its_cache = DiskSwapCache(stranger, exact=True, engine="memory") if attached else None
    own = tiny("llama")
    with torch.no_grad():
        if held:
            own(prompt(own)[:, :held], past_key_values=cache)
        for call in (stranger, stranger.model):
            named = rf"made for LlamaForCausalLM .* given to {type(stranger).__name__[:5]}"
            with pytest.raises(PromptError, match=named):
                call(prompt(stranger, 1, 9), past_key_values=cache)
            assert (cache.get_seq_length(), cache.tokens) == (held, held)
        with pytest.raises(PromptError):
            CASES["greedy"](stranger, cache)
    assert_exact(reference("llama", "greedy"), CASES["greedy"](own, cache))
    if its_cache is not None:
        its_cache.close()


def test_a_copy_of_its_model_is_another(cache: Any) -> None:
    """It carries the seams of the original, which nobody counts there."""
    twin = copy.deepcopy(tiny("llama"))
    with pytest.raises(PromptError, match="given to LlamaForCausalLM"):
        CASES["greedy"](twin, cache)


def test_parts_of_its_model_are_its_own(cache: Any) -> None:
    """The model under the head, called directly; with a cache of that model's attached, too."""
    model = tiny("llama")
    ids = prompt(model)
    plain = DynamicCache(config=model.config)
    with torch.no_grad(), DiskSwapCache(model.model, exact=True, engine="memory") as inner:
        for part in (ids[:, :30], ids[:, 30:36]):
            expected = model.model(part, past_key_values=plain).last_hidden_state
            for held in (cache, inner):
                found = model.model(part, past_key_values=held).last_hidden_state
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert model(ids[:, 36:], past_key_values=inner).logits.shape[1] == ids.shape[1] - 36
        assert inner.get_seq_length() == ids.shape[1]


def test_a_cache_that_is_driven_by_hand(cache: Any) -> None:
    """No model runs: `update` takes what it is given."""
    keys = torch.randn(1, 2, 5, 16)
    returned, _ = cache.update(keys, keys, 0)
    assert torch.equal(returned, keys)
