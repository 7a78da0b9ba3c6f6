"""A cache that a model is given and does not use: an error before a token comes out, with what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from harness import CASES, COMMON, assert_exact, build, fresh, generate, prompt, tiny, unchanged
from pairwise import combinations
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.generation import GenerateDecoderOnlyOutput

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache, offload, offload_all
from hf_offload_cache.errors import CacheUnusedError, PromptError, UnsupportedModelError
from hf_offload_cache.model import place

FIELDS: dict[str, Any] = {"exact": True, "engine": "memory"}
CACHES = (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache)


# ---------------------------------------------------------------------------------------------- gradient checkpointing


def _all(model: Any) -> None:
    model.train()
    model.gradient_checkpointing_enable()


def _one_layer(model: Any) -> None:
    model.train()
    model.model.layers[1].gradient_checkpointing = True


def _one_layer_trains(model: Any) -> None:
    model.model.layers[1].gradient_checkpointing = True
    model.model.layers[1].train()


@pytest.mark.parametrize(("cls", "put_on"), combinations(CACHES, (_all, _one_layer, _one_layer_trains)))
def test_gradient_checkpointing_in_training_raises_before_anything_runs(cls: Any, put_on: Callable[..., None]) -> None:
    """Its layers are given no cache. Nothing ran, and the cache goes on once the model is in `eval` again."""
    model, ran = fresh("llama"), []
    expected = CASES["greedy"](model, DynamicCache(config=model.config))
    with cls(model, **FIELDS) as cache:
        put_on(model)
        handle = model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
        with pytest.raises(UnsupportedModelError, match=r"call model\.eval\(\), or model\.gradient_checkpointing_dis"):
            generate(model, cache, prompt(model), max_new_tokens=3)
        with pytest.raises(UnsupportedModelError, match="in training mode with gradient checkpointing"):
            model(prompt(model), past_key_values=cache)
        assert not ran and cache.held() == 0
        handle.remove()
        model.eval()
        assert_exact(expected, CASES["greedy"](model, cache))


def test_gradient_checkpointing_of_peft_and_of_models_that_drop_the_cache_themselves() -> None:
    """GPT-2's blocks are given none by the model around them; within `offload` the same is raised."""
    wrapped = peft.get_peft_model(copy.deepcopy(tiny("llama")), peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    gpt2 = build(GPT2LMHeadModel, GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4))
    for model in (wrapped, gpt2):
        ids = torch.full((1, 20), 7)
        _all(model)
        with DiskSwapCache(model, **FIELDS) as cache, pytest.raises(UnsupportedModelError, match="checkpointing"):
            model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        for one in (offload, offload_all):
            with one(*((model,) if one is offload else ()), **FIELDS) as done:
                with pytest.raises(UnsupportedModelError, match="checkpointing"):
                    model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
                assert done.requests == 0


def test_training_and_checkpointing_alone_work() -> None:
    model = fresh("llama")
    expected = CASES["greedy"](model, DynamicCache(config=model.config))
    with DiskSwapCache(model, **FIELDS) as cache:
        model.train()
        assert_exact(expected, CASES["greedy"](model, cache))
        cache.reset()
        model.gradient_checkpointing_enable()
        model.eval()
        assert_exact(expected, CASES["greedy"](model, cache))


# ---------------------------------------------------------------------------------------------- what a model drops


class Dropped(LlamaForCausalLM):
    """Its forward leaves the cache out once it holds `at` tokens."""

    at = 0

    def forward(self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        if past_key_values.get_seq_length() >= self.at:
            output = super().forward(input_ids, use_cache=False, **kwargs)
            output.past_key_values = past_key_values
            return output
        return super().forward(input_ids, past_key_values=past_key_values, **kwargs)


class Swapped(LlamaForCausalLM):
    """Its forward goes on with a cache of its own."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, past_key_values=None, **kwargs)


@pytest.mark.parametrize("cls", CACHES)
def test_a_forward_that_keeps_nothing_raises_before_its_token(cls: Any) -> None:
    model = build(Dropped, LlamaConfig(**COMMON))
    ids = prompt(model)
    for at, held in ((0, 0), (67, 67), (69, 69)):
        model.at = at
        with cls(model, **FIELDS) as cache:
            with pytest.raises(CacheUnusedError, match=r"and \d+ tokens, and none of its layers used the cache"):
                generate(model, cache, ids, max_new_tokens=5)
            assert cache.held() == held
    model.at = 1000
    with cls(model, **FIELDS) as cache:
        assert generate(model, cache, ids, max_new_tokens=5).tokens.shape == (1, 72)
        assert cache.held() == 71


class Prepared(LlamaForCausalLM):
    """Its `prepare_inputs_for_generation` takes a cache of its own."""

    def prepare_inputs_for_generation(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        own = DynamicCache(config=self.config)
        return super().prepare_inputs_for_generation(input_ids, past_key_values=own, **kwargs)


def test_another_cache_than_was_given_raises() -> None:
    model = build(Prepared, LlamaConfig(**COMMON))
    with DiskSwapCache(model, **FIELDS) as cache, pytest.raises(CacheUnusedError, match="prepares its inputs"):
        generate(model, cache, prompt(model), max_new_tokens=5)
    model = build(Swapped, LlamaConfig(**COMMON))
    with DiskSwapCache(model, **FIELDS) as cache, pytest.raises(CacheUnusedError, match="another, DynamicCache"):
        generate(model, cache, prompt(model), max_new_tokens=5)
    with offload(model, **FIELDS) as done, pytest.raises(CacheUnusedError, match="returned another"):
        model.generate(prompt(model), max_new_tokens=5)
    assert done.requests == 0

    plain = tiny("llama")

    def other(model: Any, input_ids: torch.Tensor, **_: Any) -> Any:
        return GenerateDecoderOnlyOutput(sequences=input_ids, past_key_values=DynamicCache(config=model.config))

    with DiskSwapCache(plain, **FIELDS) as cache, pytest.raises(CacheUnusedError, match="generate of LlamaForCausalLM"):
        plain.generate(prompt(plain), past_key_values=cache, custom_generate=other, max_new_tokens=5)


def test_a_decoder_with_cross_attention_keeps_the_cache_in_another() -> None:
    """Its steps are ours: GPT-2 puts the cache into an `EncoderDecoderCache` and returns that."""
    config = GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, add_cross_attention=True)
    model = build(GPT2LMHeadModel, config)
    ids = prompt(model, 1, 40)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=6)
    for cls in CACHES:
        with unchanged(model), cls(model, **FIELDS) as cache:
            assert_exact(expected, generate(model, cache, ids, max_new_tokens=6))
            assert cache.report().decode_steps == 5 and torch.equal(cache.input_ids, expected.tokens[:, :45])


# ---------------------------------------------------------------------------------------------- use_cache=False

REFUSED: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "argument": lambda model, cache, ids: model.generate(ids, past_key_values=cache, use_cache=False),
    "configuration": lambda model, cache, ids: model.generate(
        ids, generation_config=GenerationConfig(use_cache=False, max_new_tokens=2), past_key_values=cache
    ),
    "by position": lambda model, cache, ids: model.generate(
        ids, GenerationConfig(use_cache=False, max_new_tokens=2), past_key_values=cache
    ),
    "the class's": lambda model, cache, ids: type(model).generate(model, ids, past_key_values=cache, use_cache=False),
    "forward": lambda model, cache, ids: model(ids, past_key_values=cache, use_cache=False),
}


@pytest.mark.parametrize("how", list(REFUSED))
def test_use_cache_false_with_a_cache_is_refused_before_the_prefill(how: str) -> None:
    model, ran = fresh("llama"), []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda *_: ran.append(1))
    with DiskSwapCache(model, **FIELDS) as cache:
        with pytest.raises(
            PromptError, match=r"use_cache=False was given together with this cache.*leave use_cache out"
        ):
            REFUSED[how](model, cache, prompt(model))
        assert not ran and cache.held() == 0
        handle.remove()
        assert generate(model, cache, prompt(model), max_new_tokens=3).tokens.shape == (1, 70)


@pytest.mark.parametrize(
    "named",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "quantized"},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "hybrid"},
        {"use_cache": False},
    ],
    ids=lambda named: str(next(iter(named.values()))),
)
def test_a_checkpoints_own_default_gives_way_to_a_cache_that_is_given(named: dict[str, Any]) -> None:
    model = fresh("llama")
    ids = prompt(model)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=4)
    for name, value in named.items():
        setattr(model.generation_config, name, value)
    before = model.generation_config.to_dict()
    with unchanged(model), DiskSwapCache(model, **FIELDS) as cache:
        for given in ({}, {"generation_config": copy.deepcopy(model.generation_config)}):
            cache.reset()
            assert_exact(expected, generate(model, cache, ids, max_new_tokens=4, **given))
            assert cache.held() == 70
    assert model.generation_config.to_dict() == before


def test_a_config_without_cache_is_no_argument() -> None:
    """`config.use_cache` of a checkpoint: forwards and `generate` fill the cache that they are given."""
    for model_class, config_class in ((LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)):
        model = build(model_class, config_class(**COMMON))
        expected = generate(model, DynamicCache(config=model.config), prompt(model), max_new_tokens=4)
        model.config.use_cache = model.generation_config.use_cache = False
        with DiskSwapCache(model, **FIELDS) as cache:
            assert_exact(expected, generate(model, cache, prompt(model), max_new_tokens=4))
            cache.reset()
            with torch.no_grad():
                model(prompt(model), past_key_values=cache)
                model(prompt(model, 1, 1), past_key_values=cache)
            assert cache.held() == 68


# ------------------------------------------------------------------------------------- a later transformers


class _Renamed(LlamaForCausalLM):
    """As in transformers 5.24, which calls the argument for a cache otherwise."""

    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, past_key_values=cache, **kwargs)

    def prepare_inputs_for_generation(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids, past_key_values=cache, **kwargs)


@pytest.mark.parametrize("version", ["5.24.0", "5.23.0"])
def test_an_argument_of_another_name_names_the_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.transformers, "__version__", version)
    wanted = f"_Renamed takes its cache under another name in transformers {version}, .* install transformers 5.23"
    with pytest.raises(UnsupportedModelError, match=wanted):
        DiskSwapCache(build(_Renamed, LlamaConfig(**COMMON)))
