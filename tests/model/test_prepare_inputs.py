"""`prepare_inputs_for_generation` on a model: the user's own is called while a cache lives, and stays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from harness import CASES, SMALL, assert_exact, fresh, generate, prompt, unchanged
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import PromptError
from hf_offload_cache.model import PrepareInputs

FIELDS: dict[str, Any] = {"exact": True, "engine": "memory", **SMALL}


class Counting:
    """A method that a user put on a model: it calls the class's, and changes one argument to be noticed."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        self.calls += 1
        prepared = type(self.model).prepare_inputs_for_generation(self.model, input_ids, **kwargs)
        return {**prepared, "logits_to_keep": 2}


def test_the_users_own_is_called_and_stays() -> None:
    model = fresh("llama")
    own = Counting(model)
    model.prepare_inputs_for_generation = own
    expected = CASES["greedy"](model, DynamicCache(config=model.config))
    calls, own.calls = own.calls, 0
    with unchanged(model):
        first, second = DiskSwapCache(model, **FIELDS), DiskSwapCache(model, **FIELDS)
        assert_exact(expected, CASES["greedy"](model, first))
        assert own.calls == calls
        with pytest.raises(PromptError, match="token 0 of"):
            generate(model, first, prompt(model, 1, 90, seed=11))
        first.close()
        assert isinstance(vars(model)["prepare_inputs_for_generation"], PrepareInputs)
        second.close()
    assert vars(model)["prepare_inputs_for_generation"] is own


def test_one_that_is_put_on_while_a_cache_lives_stays() -> None:
    model = fresh("llama")
    with DiskSwapCache(model, **FIELDS) as cache:
        ours = model.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = own = lambda ids, **kwargs: ours(ids, **kwargs)
        expected = CASES["greedy"](model, cache)
    assert vars(model)["prepare_inputs_for_generation"] is own
    assert_exact(expected, CASES["greedy"](model, DynamicCache(config=model.config)))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_calls_its_own(how: str) -> None:
    """Nothing in a copy points to the original, and a cache on the copy, closed, leaves the user's method there."""
    model = fresh("llama")
    model.prepare_inputs_for_generation = Counting(model)
    with DiskSwapCache(model, **FIELDS):
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    ours = vars(twin)["prepare_inputs_for_generation"]
    assert ours._model() is twin
    assert ours.given is not vars(model)["prepare_inputs_for_generation"]
    assert ours.given.model is twin
    with DiskSwapCache(twin, **FIELDS) as cache:
        CASES["greedy"](twin, cache)
    assert isinstance(vars(twin)["prepare_inputs_for_generation"], Counting)
    assert vars(model)["prepare_inputs_for_generation"].calls == 0
    assert vars(twin)["prepare_inputs_for_generation"].calls > 0
