"""What of a model decides memory is found once for each class and configuration, and holds no model."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from harness import COMMON, build, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import offload
from hf_offload_cache.model import Geometry, geometry


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations of those that are made, from now on."""
    geometry._probe.cache_clear()
    made, make = [], LlamaForCausalLM._from_config.__func__

    def noting(cls: Any, config: Any, **options: Any) -> Any:
        made.append(config)
        return make(cls, config, **options)

    monkeypatch.setattr(LlamaForCausalLM, "_from_config", classmethod(noting))
    return made


def test_requests_share_a_twin(twins: list[Any], tmp_path: Path) -> None:
    model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
    with offload(model, memory="8MiB", path=tmp_path) as done:
        for length in (40, 60):
            model.generate(prompt(model, 1, length), max_new_tokens=2, do_sample=False)
    assert done.requests == 2 and len(twins) == 1


def test_what_is_known_is_of_the_model_as_it_is_now(twins: list[Any]) -> None:
    """Another configuration, also of the same model; another type; weights that an adapter adds."""
    model = copy.deepcopy(build(LlamaForCausalLM, LlamaConfig(**COMMON)))
    first = Geometry.of(model)
    assert Geometry.of(model) == first == Geometry.of(copy.deepcopy(model)) and len(twins) == 1
    half = Geometry.of(copy.deepcopy(model).to(torch.float16))
    assert half.dtype == torch.float16 and half.layers == first.layers and 2 * half.weight_bytes == first.weight_bytes
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    assert Geometry.of(adapted).layers == first.layers and Geometry.of(adapted).weight_bytes > first.weight_bytes
    assert len(twins) == 1
    model.config.num_key_value_heads = 1
    (other,) = set(Geometry.of(model).layers)
    assert {layer.num_key_heads for layer in first.layers} == {2} and other.num_key_heads == 1 and len(twins) == 2
    shorter = copy.deepcopy(model.config)
    shorter.num_hidden_layers = 1
    with torch.device("meta"):
        assert Geometry.of(LlamaForCausalLM(shorter)).num_blocks == 1


def test_no_model_is_kept(twins: list[Any]) -> None:
    model = copy.deepcopy(build(LlamaForCausalLM, LlamaConfig(**COMMON)))
    held = [weakref.ref(one) for one in (model, model.model.layers[0], model.lm_head.weight)]
    Geometry.of(model)
    assert len(twins) == 1
    del model
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
