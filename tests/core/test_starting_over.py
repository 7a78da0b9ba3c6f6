"""Models that make all keys anew at some length (Phi-3's longrope): what the cache holds goes, and the cache stays."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import COMMON, build, prompt
from pairwise import combinations
from transformers import DynamicCache

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache, offload

ORIGINAL = 64
"""Tokens up to which a model rotates by its short factors."""
CACHES = (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache)
FIELDS: dict[str, Any] = {"num_recent": 8, "group_size": 4, "block_tokens": 16}


@functools.cache
def model(name: str = "Phi3") -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope["original_max_position_embeddings"] = ORIGINAL
    fields: dict[str, Any] = {**COMMON, "rope_parameters": rope, "original_max_position_embeddings": ORIGINAL}
    if name == "Phimoe":
        fields.update(num_local_experts=4, rope_parameters={**rope, "short_mscale": 1.0, "long_mscale": 1.0})
    if name == "Phi4Multimodal":
        small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        fields["vision_config"] = {**small, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "crop_size": 28}
        fields["audio_config"] = {**small, "num_blocks": 1}
    config = getattr(transformers, f"{name}Config")(**fields)
    return build(getattr(transformers, f"{name}ForCausalLM"), config)


def generated(own: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"max_new_tokens": 10, "do_sample": False, **options}
    found: torch.Tensor = own.generate(ids, past_key_values=cache, **options)
    return found


@functools.cache
def loses(name: str = "Phi3") -> bool:
    """transformers itself goes on with the latest token and no other: with Phi-4-multimodal, in older versions with
    all three."""
    own = model(name)
    ids, options = prompt(own, 1, 60), {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    held = own.generate(ids, past_key_values=DynamicCache(config=own.config), **options).past_key_values
    return bool(held.get_seq_length() < 69)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "pieces": {"prefill_chunk_size": 70},
}


@pytest.mark.parametrize(
    ("name", "length"), combinations(("Phi3", "Phimoe", "Phi4Multimodal"), (60, ORIGINAL, 150), times=2)
)
def test_it_generates_what_a_dynamic_cache_does(name: str, length: int) -> None:
    own = model(name)
    ids, mask = prompt(own, 2, length), torch.ones(2, length, dtype=torch.long)
    mask[0, :7] = 0
    for options in ({}, {"attention_mask": mask}) if length == 60 else ({"attention_mask": mask},):
        expected = generated(own, DynamicCache(config=own.config), ids, **options)
        with DiskSwapCache(own, exact=True, **FIELDS) as cache:
            assert torch.equal(generated(own, cache, ids, **options), expected)
            lost = loses(name) and length <= ORIGINAL
            assert cache.held() == 1 if lost else cache.held() == expected.shape[1] - 1
            assert ["dropped the tokens" in text for text in cache.warnings] == [True] * lost


@pytest.mark.parametrize(("cls", "way"), combinations(CACHES, WAYS.keys()))
def test_every_cache_goes_on_in_every_way(cls: Any, way: str) -> None:
    own, options = model(), WAYS[way]
    length, exact = (60, "bitwise") if way == "greedy" else (100, True) if way == "pieces" else (60, True)
    ids = prompt(own, 1, length)
    expected = generated(own, DynamicCache(config=own.config), ids, **options)
    with cls(own, exact=exact, **FIELDS) as cache:
        found = generated(own, cache, ids, return_dict_in_generate=True, **options)
        assert found.past_key_values is cache
        assert cache.held() == length + 9 or (loses() and length == 60)
        assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize("cls", CACHES)
def test_what_is_selected_of_is_what_was_made_anew(cls: Any) -> None:
    """A sparse cache decodes across the length, and its books go on."""
    if loses():
        pytest.skip("this version of transformers passes on only the latest token")
    own = model()
    with cls(own, num_selected=32, **FIELDS) as cache:
        generated(own, cache, prompt(own, 2, 60))
        assert cache.selecting.worthwhile
        assert cache.held() == 69 and cache.input_ids.shape == (2, 69)
        assert cache.report().decode_steps == 8  # the step that made all anew is none
        assert cache.report().tokens == 69


@pytest.mark.parametrize("how", ["lookup", "assistant"])
def test_candidates_across_the_length(how: str) -> None:
    """Candidates may be dropped again, so that the model gives its cache up more than once."""
    own = model()
    ids = prompt(own, 1, 11).repeat(1, 6)[:, :61]
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 16}
    if how == "assistant":
        helper = copy.deepcopy(own)
        with torch.no_grad():
            helper.lm_head.weight.add_(0.02 * helper.lm_head.weight.roll(1, 0))
        options = {"assistant_model": helper, "max_new_tokens": 16}
    expected = generated(own, DynamicCache(config=own.config), ids, **options)
    for cls in CACHES:
        with cls(own, exact=True, **FIELDS) as cache:
            assert torch.equal(generated(own, cache, ids, **options), expected)
            assert cache.held() >= 76 or loses()


def _saved(cache: Any, folder: Path) -> Any:
    cache.save(folder / type(cache).__name__)
    return type(cache).open(folder / type(cache).__name__, cache.model)


AGAIN: dict[str, Callable[[Any, Path], Any]] = {
    "itself": lambda cache, folder: cache,
    "fork": lambda cache, folder: cache.fork(),
    "context": _saved,
}


@pytest.mark.parametrize("how", list(AGAIN))
@pytest.mark.parametrize("length", [30, 100], ids=["begun before it", "begun beyond it"])
def test_later_turns_cross_the_length(how: str, length: int, tmp_path: Path) -> None:
    """A second turn, of which the conversation reaches beyond; what others hold of the first stays as it was."""
    own, options = model(), {"max_new_tokens": 4}
    theirs = DynamicCache(config=own.config)
    first = generated(own, theirs, prompt(own, 1, length), **options)
    ids = torch.cat([first, prompt(own, 1, 40, seed=8)], 1)
    expected = generated(own, theirs, ids, **options)
    for cls in CACHES if length < ORIGINAL else CACHES[:1]:
        with cls(own, exact=True, **FIELDS) as cache:
            assert torch.equal(generated(own, cache, prompt(own, 1, length), **options), first)
            with AGAIN[how](cache, tmp_path) as other:
                assert torch.equal(generated(own, other, ids, **options), expected)
                lost = loses() and length < ORIGINAL
                assert bool(other.warnings) == lost and (lost or other.held() == ids.shape[1] + 3)
                if other is not cache:
                    assert cache.held() == length + 3
                    assert torch.equal(generated(own, cache, ids, **options), expected)


@pytest.mark.parametrize("cls", [DiskSwapCache, AbstractTreeCache])
def test_a_budget_holds_beyond_the_length(cls: Any) -> None:
    own, ids = model(), prompt(model(), 1, 1500)
    with cls.for_budget(own, "1/2", 1505, 1) as cache:
        generated(own, cache, ids, max_new_tokens=5)
        report = cache.report()
        assert cache.held() == 1504 and report.peak_memory_bytes <= report.memory_budget
    with offload(own, cls, memory="1/2", floor="1MiB", strict=True) as done:
        own.generate(ids, max_new_tokens=5, do_sample=False)
        assert (done.requests, done.requests_left_plain) == (1, 0)
        assert done.report is not None and done.report.tokens == 1504
