"""What is written to a cache's layers counts, or raises: nothing is dropped without a word."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import COMMON, build, generate, prompt
from long_llama import long_model
from pairwise import combinations
from transformers import DynamicCache, FalconH1Config, FalconH1ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache
from hf_offload_cache.errors import ReadOnlyError

CACHES = [DiskSwapCache, ClusterCache, AbstractTreeCache, SpecCache]
LENGTH = 100


def filled(cache_class: Any = DiskSwapCache, model: Any = None, **fields: Any) -> Any:
    model = long_model() if model is None else model
    cache = cache_class(model, **fields)
    with torch.no_grad():
        model(prompt(model, 1, LENGTH), past_key_values=cache)
    return cache


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :, ::2].contiguous()


ASSIGNED: dict[str, Callable[[Any], Any]] = {
    "keys": lambda cache: setattr(cache.layers[1], "keys", half(cache.layers[1].keys)),
    "values": lambda cache: setattr(cache.layers[1], "values", half(cache.layers[1].values)),
    "none": lambda cache: setattr(cache.layers[1], "keys", None),
    "is_initialized": lambda cache: setattr(cache.layers[1], "is_initialized", False),
    "layer": lambda cache: operator.setitem(cache.layers, 0, DynamicCache(config=cache.model.config).layers[0]),
    "append": lambda cache: cache.layers.append(cache.layers[0]),
    "pop": lambda cache: cache.layers.pop(),
    "layers": lambda cache: setattr(cache, "layers", list(cache.layers)),
}
WRITTEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda keys: operator.setitem(keys, (slice(None), slice(None), 0), 0),
    "copy_": lambda keys: keys.copy_(torch.zeros_like(keys)),
    "of a view": lambda keys: keys[:, :, 4:].transpose(1, 2).zero_(),
    "in place": lambda keys: operator.imul(keys, 2),
    "out": lambda keys: torch.add(keys.clone(), 1, out=keys),
    "index_copy_": lambda keys: keys.index_copy_(2, torch.tensor([3]), keys[:, :, :1].clone()),
    "data": lambda keys: setattr(keys, "data", torch.zeros(1)),
    "of data": lambda keys: keys.data.zero_(),
    "inplace=True": lambda keys: torch.nn.functional.relu(keys, inplace=True),
}


@pytest.mark.parametrize(("cache_class", "how"), combinations(CACHES, ASSIGNED.keys()))
def test_an_assignment_raises_and_changes_nothing(cache_class: Any, how: str) -> None:
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=4)
    with cache_class(model, exact=True) as cache:
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
        with pytest.raises(ReadOnlyError, match="DynamicCache"):
            ASSIGNED[how](cache)
        assert len(cache.layers) == 3 and cache.get_seq_length() == LENGTH - 1
        found = generate(model, cache, ids, max_new_tokens=4)
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize(
    ("how", "grad"), combinations(WRITTEN.keys(), (torch.no_grad, torch.inference_mode, torch.enable_grad))
)
def test_a_write_in_place_raises(how: str, grad: Any) -> None:
    with filled() as cache, grad():
        keys = cache.layers[0].keys
        with pytest.raises(ReadOnlyError, match="cannot be written to"):
            WRITTEN[how](keys)


@pytest.mark.parametrize("cache_class", CACHES)
def test_what_is_read_is_what_a_dynamic_cache_holds(cache_class: Any) -> None:
    model, plain = long_model(), DynamicCache(config=long_model().config)
    with torch.no_grad():
        model(prompt(model, 1, LENGTH), past_key_values=plain)
    with filled(cache_class, model, exact=True) as cache:
        for own, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(own.keys, theirs.keys) and torch.equal(own.values, theirs.values)
            mine = own.keys.clone()
            mine[:, :, 0] = 0  # a tensor of one's own
            computed = own.keys + 1
            computed.zero_()
            assert type(mine) is type(computed) is torch.Tensor
            assert torch.equal(own.keys, theirs.keys)


def test_arrays_of_what_is_read_are_not_writeable() -> None:
    with filled() as cache, torch.no_grad():
        for array in (cache.layers[0].keys.numpy(), np.asarray(cache.layers[0].values[:, :, 3:])):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_what_is_read_goes_through_transformations() -> None:
    with filled() as cache:
        keys = cache.layers[0].keys
        assert torch.equal(torch.vmap(lambda one: 2 * one)(keys), 2 * keys)
        found = torch.func.grad(lambda factor: (factor * keys).sum())(torch.ones(()))
        torch.testing.assert_close(found, keys.clone().sum())
        assert copy.copy(cache.layers) == list(cache.layers)


def test_what_is_read_is_saved_and_copied_as_any_tensor() -> None:
    with filled() as cache:
        keys, data = cache.layers[0].keys, io.BytesIO()
        torch.save(keys, data)
        data.seek(0)
        loaded = torch.load(data, weights_only=True)
        assert torch.equal(loaded, keys) and type(loaded) is torch.Tensor
        assert torch.equal(copy.deepcopy(keys), keys)


@pytest.mark.parametrize("cache_class", CACHES)
def test_a_layer_tells_its_type_and_its_device(cache_class: Any) -> None:
    model = long_model()
    with cache_class(model) as cache:
        layer = cache.layers[0]
        assert layer.dtype is None and layer.device is None and layer.keys is None and not layer.is_initialized
        with torch.no_grad():
            model(prompt(model, 1, LENGTH), past_key_values=cache)
        for one in (cache, cache.fork()):
            layer = one.layers[0]
            assert (layer.dtype, layer.device, layer.is_initialized) == (model.dtype, model.device, True)
        one.close()
        cache.reset()
        assert not cache.layers[0].is_initialized and cache.layers[0].keys is None


def test_layers_that_are_not_offloaded_take_what_is_written() -> None:
    sizes = {"num_hidden_layers": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
    types = ["sliding_attention", "full_attention"]
    model = build(Gemma3ForCausalLM, Gemma3TextConfig(**{**COMMON, **sizes, "layer_types": types}))
    with filled(model=model) as cache:
        cache.layers[0].keys = torch.zeros_like(cache.layers[0].keys)
        assert not cache.layers[0].keys.any()
        with pytest.raises(ReadOnlyError, match="keys of layer 1"):
            cache.layers[1].keys = cache.layers[1].keys.clone()


def test_a_hybrid_layer_has_the_type_of_a_dynamic_one() -> None:
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    model = build(FalconH1ForCausalLM, FalconH1Config(**{**COMMON, **sizes, "mamba_chunk_size": 16}))
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(model, 1, LENGTH), past_key_values=plain)
    with filled(model=model) as cache:
        own, theirs = cache.layers[0], plain.layers[0]
        assert (own.dtype, own.device) == (theirs.dtype, theirs.device)
        with cache.fork() as twin:
            assert (twin.layers[0].dtype, twin.layers[0].device) == (theirs.dtype, theirs.device)
        with pytest.raises(ReadOnlyError):
            own.values = theirs.values


@pytest.mark.parametrize("cache_class", CACHES)
def test_layers_may_be_initialised_early(cache_class: Any) -> None:
    model = long_model()
    ids, text = prompt(model, 2, LENGTH), model.config
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=4)
    with cache_class(model, exact=True) as cache:
        heads, size = text.num_key_value_heads, text.hidden_size // text.num_attention_heads
        cache.early_initialization(2, heads, size, model.dtype, model.device)
        assert cache.is_initialized and cache.get_seq_length() == 0
        assert torch.equal(generate(model, cache, ids, max_new_tokens=4).tokens, expected.tokens)
