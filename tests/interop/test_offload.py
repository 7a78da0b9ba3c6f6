"""`offload`: plain calls of `generate`, and what calls it, use a cache of their own, and leave nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from harness import COMMON, assistant_of, build, fresh, prompt
from long_llama import long_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from words import words

from hf_offload_cache import ClusterCache, DiskSwapCache, offload, offload_all
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.registry import CACHES

NEW = 12


def model() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**COMMON))


def generated(own: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    found: torch.Tensor = own.generate(ids, **options)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """No hook, method, thread or descriptor."""
    own = model()
    gc.collect()
    before = dict(vars(own)), threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert (dict(vars(own)), threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("name", list(CACHES))
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}],
    ids=["greedy", "beams", "samples", "candidates"],
)
def test_it_generates_what_a_dynamic_cache_does(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 60)
    expected = generated(own, ids, **options)
    with offload(own, name, path=tmp_path, exact=True) as done:
        assert torch.equal(generated(own, ids, **options), expected)
    assert done.requests == 1 and done.report is not None and done.report.tokens >= 60
    assert torch.equal(generated(own, ids, **options), expected) and done.requests == 1


def test_each_request_has_a_cache_of_its_own_and_a_budget_of_its_size(tmp_path: Path) -> None:
    own, held = long_model(), []
    with offload(own, memory="1/2", path=tmp_path) as done:
        for rows, length in ((1, 1500), (2, 900)):
            generated(own, prompt(own, rows, length))
            assert done.report is not None and done.report.memory_budget is not None
            held.append(done.report.memory_budget)
            assert done.report.peak_memory_bytes <= done.report.memory_budget
    entry = 2 * COMMON["num_hidden_layers"] * 2 * 16 * 4
    assert held == [(1500 + NEW + 1) * entry // 2, 2 * (900 + NEW + 1) * entry // 2]


def test_what_names_a_cache_is_left_alone(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 40)
    with offload(own, path=tmp_path) as done:
        theirs = DynamicCache(config=own.config)
        generated(own, ids, past_key_values=theirs)
        assert theirs.get_seq_length() == 40 + NEW - 1
        generated(own, ids, cache_implementation="static")
        generated(own, ids, use_cache=False)
        generated(own, ids, generation_config=GenerationConfig(cache_implementation="dynamic"))
    assert done.requests == 0


def test_none_is_no_cache_and_a_models_old_default_neither(tmp_path: Path) -> None:
    own, ids = copy.deepcopy(model()), prompt(model(), 1, 40)
    expected = generated(own, ids)
    with offload(own, path=tmp_path, exact=True) as done:
        assert torch.equal(generated(own, ids, past_key_values=None), expected)
        own.generation_config.cache_implementation = "hybrid"
        assert torch.equal(generated(own, ids), expected)
        own.generation_config.cache_implementation = "static"
        generated(own, ids)
    assert done.requests == 2


def test_a_request_is_as_large_as_generate_finds_it(tmp_path: Path) -> None:
    """Given by position, and what is not given is the model's."""
    own, ids = copy.deepcopy(long_model()), prompt(long_model(), 1, 900)
    entry = 2 * COMMON["num_hidden_layers"] * 2 * 16 * 4
    with offload(own, memory="1/2", path=tmp_path) as done:
        own.generate(ids, GenerationConfig(max_new_tokens=60, do_sample=False))
        assert done.report is not None and done.report.memory_budget == 961 * entry // 2
        own.generation_config.max_new_tokens, own.generation_config.num_beams = 70, 2
        own.generate(ids, generation_config=GenerationConfig(do_sample=False))
        assert done.report.memory_budget == 971 * entry
        own.generation_config.num_beams = 1
        generated(own, ids, prompt_lookup_num_tokens=40)
        assert done.report.memory_budget == (900 + NEW + 41) * entry // 2
    assert done.requests == 3


def test_what_is_returned_holds_no_closed_cache(tmp_path: Path) -> None:
    own = model()
    with offload(own, path=tmp_path):
        found = generated(own, prompt(own, 1, 40), return_dict_in_generate=True)
    assert found.past_key_values is None and found.sequences.shape == (1, 40 + NEW)


def test_a_request_that_fails_leaves_the_next_one_whole(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 40)
    expected = generated(own, ids)

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("stop")

    with offload(own, path=tmp_path, exact=True) as done:
        with pytest.raises(KeyError, match="stop"):
            generated(own, ids, stopping_criteria=[fail])
        assert torch.equal(generated(own, ids), expected)
    assert done.requests == 1
    with offload(own, memory=10, path=tmp_path), pytest.raises(BudgetError):
        generated(own, ids)
    with pytest.raises(KeyError), offload(own, path=tmp_path):
        raise KeyError


def test_what_cannot_be_is_refused_before_anything_is_replaced() -> None:
    own = model()
    for wrong in ({"cache": "disc-swap"}, {"cache": DynamicCache}, {"cache": 3}, {"num_selekted": 4}):
        with pytest.raises(ConfigError), offload(own, **wrong):
            pass
    with pytest.raises(TypeError, match="PreTrainedModel"), offload(torch.nn.Linear(2, 2)):
        pass


def test_one_in_another_and_ends_in_any_order(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 40)
    outer, inner = offload(own, path=tmp_path), offload(own, ClusterCache, path=tmp_path)
    of_outer, of_inner = outer.__enter__(), inner.__enter__()
    generated(own, ids)
    assert (of_outer.requests, of_inner.requests) == (0, 1) and of_inner.report.cache == "ClusterCache"
    outer.__exit__(None, None, None)
    generated(own, ids)
    assert (of_outer.requests, of_inner.requests) == (0, 2)
    inner.__exit__(None, None, None)
    generated(own, ids)
    assert (of_outer.requests, of_inner.requests) == (0, 2)
    vars(own).pop("generate", None)


def test_a_users_own_method_is_called_and_stays(tmp_path: Path) -> None:
    own, calls = model(), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["past_key_values"])
        return type(own).generate(own, *args, **kwargs)

    own.generate = counting
    try:
        with offload(own, path=tmp_path):
            generated(own, prompt(own, 1, 40))
        assert own.generate is counting and isinstance(calls[0], DiskSwapCache)
    finally:
        del own.generate


def test_copies_and_pickles_are_plain(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 40)
    expected = generated(own, ids)
    with offload(own, path=tmp_path) as done:
        for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            assert torch.equal(generated(twin, ids), expected)
    assert done.requests == 0


def test_threads_do_not_share_a_cache(tmp_path: Path) -> None:
    own = model()
    prompts = [prompt(own, 1, length) for length in (40, 60, 80)]
    expected = [generated(own, ids) for ids in prompts]
    found: list[Any] = [None] * 3

    def ask(place: int) -> None:
        found[place] = own.generate(prompts[place], max_new_tokens=NEW, do_sample=False)

    with offload(own, path=tmp_path, exact=True) as done:
        threads = [threading.Thread(target=ask, args=(place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert done.requests == 3 and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_adapters(tmp_path: Path) -> None:
    own, ids = copy.deepcopy(model()), prompt(model(), 1, 40)
    adapted = peft.get_peft_model(own, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval()
    expected = adapted.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
    with offload(adapted, path=tmp_path, exact=True) as done:
        assert torch.equal(adapted.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False), expected)
    assert done.requests == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pipeline_that_gets_a_list(batch: int, tmp_path: Path) -> None:
    """One cache a call, of as many rows as the batch."""
    own, texts = model(), [" ".join(f"w{5 + (3 * word * size) % 90}" for word in range(size)) for size in (30, 50, 41)]
    say = pipeline("text-generation", model=own, tokenizer=words(), device="cpu")
    options = {"max_new_tokens": NEW, "do_sample": False, "batch_size": batch}
    expected = say(texts, **options)
    with offload(own, path=tmp_path, exact=True) as done:
        assert say(texts, **options) == expected
    assert done.requests == (3 if batch == 1 else 2)


# --- every model of a process --------------------------------------------------------------------------------------


def test_every_model_is_offloaded_and_none_afterwards(tmp_path: Path) -> None:
    own, other, ids = model(), long_model(), prompt(model(), 1, 40)
    expected = [generated(one, ids) for one in (own, other)]
    plain = GenerationMixin.generate
    with offload_all(path=tmp_path, exact=True) as done:
        assert torch.equal(generated(own, ids), expected[0]) and torch.equal(generated(other, ids), expected[1])
        theirs = DynamicCache(config=own.config)
        generated(own, ids, past_key_values=theirs)
    assert done.requests == 2 and GenerationMixin.generate is plain
    generated(own, ids)
    assert done.requests == 2
    outer, inner = offload_all(path=tmp_path), offload_all(path=tmp_path)
    of_outer, of_inner = outer.__enter__(), inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    try:
        generated(own, ids)
        assert (of_outer.requests, of_inner.requests) == (0, 0)
    finally:
        GenerationMixin.generate = plain


@pytest.mark.parametrize("whose", ["the model's", "both", "all"])
def test_an_assistant_keeps_its_own_cache(whose: str, tmp_path: Path) -> None:
    """Its calls are no requests, and go on with what the one before held."""
    own, ids, seen = fresh("llama"), prompt(model(), 1, 40), []
    assistant = assistant_of("llama")
    expected = generated(own, ids)

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("past_key_values"))
        return type(assistant).generate(assistant, *args, **kwargs)

    assistant.generate = watched
    try:
        with contextlib.ExitStack() as stack:
            fields: dict[str, Any] = {"path": tmp_path, "exact": True}
            of_assistant = stack.enter_context(offload(assistant, **fields)) if whose == "both" else None
            done = stack.enter_context(offload_all(**fields) if whose == "all" else offload(own, **fields))
            assert torch.equal(generated(own, ids, assistant_model=assistant), expected)
        assert done.requests == 1 and (of_assistant is None or of_assistant.requests == 0)
        assert len(seen) > 1 and [type(cache) for cache in seen] == [type(None), *[DynamicCache] * (len(seen) - 1)]
    finally:
        del assistant.generate


@pytest.mark.parametrize("whose", ["the model's", "all"])
@pytest.mark.parametrize("options", [{"assistant_early_exit": 1}, {"assistant_model": None}], ids=["early", "itself"])
def test_a_model_that_is_its_own_assistant(whose: str, options: dict[str, Any], tmp_path: Path) -> None:
    own, ids = fresh("llama"), prompt(model(), 1, 40)
    options = {name: own if value is None else value for name, value in options.items()}
    expected = generated(own, ids, **options)
    with offload_all(path=tmp_path, exact=True) if whose == "all" else offload(own, path=tmp_path, exact=True) as done:
        assert torch.equal(generated(own, ids, **options), expected)
    assert done.requests == 1 and done.report is not None and done.report.tokens >= 40 + NEW - 1


def test_a_model_that_has_no_place_for_it_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
    own = T5ForConditionalGeneration(T5Config(vocab_size=199, decoder_start_token_id=0, **sizes)).eval()
    ids = torch.arange(5, 15)[None]
    expected = generated(own, ids)
    with offload_all(path=tmp_path) as done, pytest.warns(UserWarning, match="T5.* keeps its own"):
        assert torch.equal(generated(own, ids), expected)
    assert done.requests == 0
