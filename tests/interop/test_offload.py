"""`offload`: plain calls of `generate`, and what calls it, use a cache of their own, and leave nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from harness import COMMON, assistant_of, build, fresh, prompt, tiny
from long_llama import long_model
from pairwise import combinations
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
from hf_offload_cache.errors import BudgetError, ConfigError, ContextMismatchError, UnsupportedModelError
from hf_offload_cache.interop import request_cache
from hf_offload_cache.registry import CACHES, cache_class

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


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3}, "samples": {"do_sample": True, "num_return_sequences": 2},
    "candidates": {"prompt_lookup_num_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize(("name", "options"), combinations(list(CACHES), OPTIONS))
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


def test_a_request_with_candidates_has_memory_for_them(tmp_path: Path) -> None:
    """Without them, such a budget has none, and a cache for it takes none."""
    own, ids, memory = long_model(), prompt(long_model(), 1, 1500), 480_000
    with DiskSwapCache.for_budget(own, memory, 1500 + NEW + 1, path=tmp_path) as cache:
        assert not cache.config.candidates
    with offload(own, memory=memory, path=tmp_path) as done:
        assert generated(own, ids, prompt_lookup_num_tokens=3).shape[1] == 1500 + NEW
        assert done.report is not None and done.report.peak_memory_bytes <= memory
    none = offload(own, memory=memory, candidates=False, path=tmp_path)
    with none, pytest.raises(BudgetError, match="candidates is False"):
        generated(own, ids, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize(
    ("options", "some"),
    [
        ({}, False),
        ({"use_mtp": True}, True),
        ({"assistant_early_exit": 1}, True),
        ({"prompt_lookup_num_tokens": 3}, True),
    ],
)
def test_what_makes_candidates_gets_memory_for_them(options: dict[str, Any], some: bool, tmp_path: Path) -> None:
    def generate(ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> bool:
        return bool(past_key_values.config.candidates)

    own = copy.deepcopy(long_model())
    own.generate = generate
    with offload(own, memory=480_000, path=tmp_path):
        assert own.generate(prompt(own, 1, 1500), max_new_tokens=NEW, **options) is some


def test_a_request_that_fails_leaves_the_next_one_whole(tmp_path: Path) -> None:
    own, ids = model(), prompt(model(), 1, 40)
    expected = generated(own, ids)

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("stop")

    with offload(own, path=tmp_path, exact=True) as done:
        with pytest.raises(KeyError, match="stop"):
            generated(own, ids, stopping_criteria=[fail])
        assert torch.equal(generated(own, ids), expected)
        found = generated(own, ids, return_dict_in_generate=True)
        assert found.past_key_values is None and torch.equal(found.sequences, expected)  # no closed cache
    assert done.requests == 2
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


def test_adapters_that_are_switched_between_requests(tmp_path: Path) -> None:
    """And off, and merged."""
    ids = prompt(model(), 1, 40)
    adapted = peft.get_peft_model(fresh("llama"), lora(0), adapter_name="first")
    torch.manual_seed(1)
    adapted.add_adapter("second", lora(1))
    adapted.eval()

    def answers() -> list[list[int]]:
        found = []
        for name in ("first", "second", "first"):
            adapted.set_adapter(name)
            found.append(adapted.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0].tolist())
        with adapted.disable_adapter():
            found.append(adapted.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0].tolist())
        return found

    expected = answers()
    assert expected[0] == expected[2] and len({tuple(one) for one in expected}) == 3
    for handed in (adapted, adapted.get_base_model()):
        with offload(handed, path=tmp_path, exact=True) as done:
            assert answers() == expected
        assert done.requests == 4
    begun = {}
    for name in ("first", "second"):
        adapted.set_adapter(name)
        with DiskSwapCache(adapted, path=tmp_path, exact=True) as cache:
            adapted.generate(input_ids=ids, max_new_tokens=2, past_key_values=cache)
            begun[name] = cache.adapters
            cache.save(tmp_path / name)
            if name == "first":
                adapted.set_adapter("second")
                with cache.fork() as twin, pytest.raises(ContextMismatchError, match="when the cache was filled"):
                    twin.save(tmp_path / "fork")
    assert (begun["first"]["adapters"], begun["second"]["adapters"]) == ('["first"]', '["second"]')
    with pytest.raises(ContextMismatchError, match=r"adapters was .*first.*, here it is .*second"):
        DiskSwapCache.open(tmp_path / "first", adapted)


def lora(seed: int) -> peft.LoraConfig:
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


PROMPTS: dict[str, peft.PeftConfig] = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7),
    "encoder": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=7, encoder_hidden_size=16),
}


def prompted(config: peft.PeftConfig) -> Any:
    """With virtual tokens that matter."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(fresh("llama"), copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in adapted.prompt_encoder.parameters():
            parameter.normal_()
    return adapted


@pytest.mark.parametrize("name", list(PROMPTS))
def test_adapters_that_are_prompts(name: str, tmp_path: Path) -> None:
    """Their tokens are of the request, and of its budget."""
    adapted, ids = prompted(PROMPTS[name]), prompt(model(), 2, 40)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    expected = adapted.generate(**options)
    assert not torch.equal(expected, generated(fresh("llama"), ids))
    base = adapted.get_base_model()
    for make in (functools.partial(offload, adapted), functools.partial(offload, base), offload_all):
        with make(memory="1MiB", path=tmp_path, exact=True) as done:
            assert torch.equal(adapted.generate(**options), expected)
        assert done.requests == 1 and done.report is not None and done.report.tokens == 40 + 7 + NEW - 1


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_a_prefix_is_refused_before_anything_runs(memory: str | None, tmp_path: Path) -> None:
    """PEFT puts it into a cache of its own."""
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7)
    adapted, ids = prompted(prefix), prompt(model(), 1, 40)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    expected, calls = adapted.generate(**options), []
    hook = adapted.get_base_model().model.register_forward_hook(lambda *_: calls.append(1))
    for made in (lambda: offload(adapted, path=tmp_path, memory=memory), lambda: DiskSwapCache(adapted)):
        with pytest.raises(UnsupportedModelError, match="adapter of PREFIX_TUNING"), made():
            pass
    with offload(adapted.get_base_model(), path=tmp_path, memory=memory) as done:
        with pytest.raises(UnsupportedModelError, match="adapter of PREFIX_TUNING"):
            adapted.generate(**options)
        assert not calls
        with adapted.disable_adapter():
            adapted.generate(**options)
        assert done.requests == 1
    hook.remove()
    with adapted.disable_adapter(), DiskSwapCache(adapted) as cache:
        adapted.generate(**options, past_key_values=cache)
        assert cache.tokens == 40 + NEW - 1
    with offload_all(path=tmp_path, memory=memory) as done, pytest.warns(UserWarning, match="PREFIX_TUNING"):
        assert torch.equal(adapted.generate(**options), expected)
    assert (done.requests, done.requests_left_plain) == (0, 1)


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


@pytest.mark.parametrize(
    ("whose", "options"), [("the model's", {"assistant_early_exit": 1}), ("all", {"assistant_model": None})]
)
def test_a_model_that_is_its_own_assistant(whose: str, options: dict[str, Any], tmp_path: Path) -> None:
    own, ids = fresh("llama"), prompt(model(), 1, 40)
    options = {name: own if value is None else value for name, value in options.items()}
    expected = generated(own, ids, **options)
    with offload_all(path=tmp_path, exact=True) if whose == "all" else offload(own, path=tmp_path, exact=True) as done:
        assert torch.equal(generated(own, ids, **options), expected)
    assert done.requests == 1 and done.report is not None and done.report.tokens >= 40 + NEW - 1


# --- models without a place ----------------------------------------------------------------------------------------

SIZES = {"vocab_size": 199, "hidden_size": 32, "num_hidden_layers": 2}


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
    return T5ForConditionalGeneration(T5Config(vocab_size=199, decoder_start_token_id=0, **sizes))


def mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, state_size=8))


def rwkv() -> Any:
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**SIZES, attention_hidden_size=32))


def gpt() -> Any:
    config = transformers.OpenAIGPTConfig(vocab_size=199, n_embd=32, n_layer=2, n_head=2)
    return transformers.OpenAIGPTLMHeadModel(config)


NO_PLACE: dict[str, tuple[Any, str]] = {
    "encoder-decoder": (t5, "T5.* is an encoder-decoder"),
    "a state alone": (mamba, "Mamba.* takes no past_key_values"),
    "a state of its own": (rwkv, "Rwkv.* takes no past_key_values"),
    "no cache": (gpt, "OpenAIGPT.* takes no past_key_values"),
}


def without_an_end(build: Any) -> Any:
    torch.manual_seed(0)
    own = build().eval()
    own.generation_config.eos_token_id, own.generation_config.pad_token_id = None, 0
    return own


@pytest.mark.parametrize(("name", "memory"), combinations(list(NO_PLACE), [None, "1/13"]))
def test_a_model_that_has_no_place_for_it_is_left_alone(name: str, memory: str | None, tmp_path: Path) -> None:
    """By `offload_all`, and refused by who names it; no attribute is left."""
    build, said = NO_PLACE[name]
    own, ids = without_an_end(build), torch.arange(5, 25)[None]
    expected, before = generated(own, ids), dict(vars(own))
    with offload_all(path=tmp_path, memory=memory) as done, pytest.warns(UserWarning, match="keeps its own") as caught:
        assert torch.equal(generated(own, ids), expected) and torch.equal(generated(own, ids), expected)
    assert (done.requests, done.requests_left_plain) == (0, 2)
    assert len(caught) == 1 and re.search(said, str(caught[0].message))
    with pytest.raises(UnsupportedModelError, match=said), offload(own, path=tmp_path, memory=memory):
        pass
    with pytest.raises(UnsupportedModelError, match=said):
        DiskSwapCache(own) if memory is None else DiskSwapCache.for_budget(own, memory, 100)
    assert vars(own) == before


def test_windows_alone_are_left_alone(tmp_path: Path) -> None:
    own, ids = tiny("mistral_sliding"), prompt(model(), 1, 40)
    expected = generated(own, ids)
    with offload_all(path=tmp_path) as done, pytest.warns(UserWarning, match="no full-attention layer") as caught:
        assert torch.equal(generated(own, ids), expected)
    assert (done.requests, done.requests_left_plain, len(caught)) == (0, 1, 1)


# --- short requests ------------------------------------------------------------------------------------------------

ENTRY = 2 * COMMON["num_hidden_layers"] * 2 * 16 * 4
"""Bytes of the tiny model's keys and values of a token."""


def test_a_short_request_does_not_fail_for_its_share(tmp_path: Path) -> None:
    """It has transformers' own cache, whose `past_key_values` its caller gets; and no more than the floor."""
    own, ids = model(), prompt(model(), 2, 40)
    expected = generated(own, ids)
    full = 2 * (40 + NEW + 1) * ENTRY
    with offload(own, memory="1/13", path=tmp_path) as done:
        found = generated(own, ids, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected) and type(found.past_key_values) is DynamicCache
    assert (done.requests, done.requests_left_plain, done.report) == (0, 1, None)
    with offload(own, memory="1/13", floor=full // 2, path=tmp_path) as done:
        generated(own, ids)
    assert (done.requests, done.requests_left_plain) == (0, 1)
    for refused in ({"floor": full // 2 - 1}, {"strict": True}):
        said = pytest.raises(BudgetError, match=rf"memory is {full // 13:,} bytes.*2 x {40 + NEW + 1} tokens need")
        with offload(own, memory="1/13", path=tmp_path, **refused) as done, said:
            generated(own, ids)
        assert (done.requests, done.requests_left_plain) == (0, 0)


def test_a_share_that_does_not_do_becomes_the_floor(tmp_path: Path) -> None:
    """Where the full KV does not fit in that; one that does is kept."""
    own, ids = long_model(), prompt(long_model(), 1, 1500)
    full = (1500 + NEW + 1) * ENTRY
    said = pytest.warns(UserWarning, match="memory='1/13' of this request .* 400KiB per sequence")
    with offload(own, memory="1/13", floor="400KiB", path=tmp_path) as done, said:
        generated(own, ids)
    assert (done.requests, done.requests_left_plain, done.requests_at_floor) == (1, 0, 1) and done.report is not None
    assert done.report.memory_budget == 400 * 2**10 > full // 13
    assert done.report.peak_memory_bytes <= done.report.memory_budget
    with offload(own, memory="1/2", floor="1GiB", path=tmp_path) as done:
        generated(own, ids)
    assert (done.requests, done.requests_at_floor) == (1, 0) and done.report is not None
    assert done.report.memory_budget == full // 2


def test_a_memory_in_bytes_is_never_exceeded(tmp_path: Path) -> None:
    """A request whose full KV fits in it needs no cache of ours; another is an error, whatever the floor."""
    own, ids = model(), prompt(model(), 1, 40)
    full = (40 + NEW + 1) * ENTRY
    with offload(own, memory=full, path=tmp_path) as done:
        generated(own, ids)
    assert (done.requests, done.requests_left_plain) == (0, 1)
    with offload(own, memory=full - 1, path=tmp_path), pytest.raises(BudgetError):
        generated(own, ids)
    with offload(own, memory=full, strict=True, path=tmp_path), pytest.raises(BudgetError):
        generated(own, ids)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory": "half"}, "memory must be bytes"), ({"memory": "0.5"}, "a share is written '1/13'"),
        ({"memory": "1/13", "floor": "1/2"}, "floor must be"), ({"goal": "speed"}, "give memory too"),
        ({"memory": "1/13", "goal": "fast"}, "one of fidelity, speed"),
        ({"memory": "1/13", "goal": "fidelity", "cache": "spec"}, "SpecCache has no fields"),
        ({"library_memory": "1GiB"}, "give library too"),
        ({"library": "nowhere/at/all", "encryption_key": "a file"}, "encryption_key is that of the library"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_before_a_request(given: dict[str, Any], said: str) -> None:
    own = model()
    with pytest.raises(ConfigError, match=said), offload(own, **given):
        pass
    assert "generate" not in vars(own)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "spec" else []) for name in sorted(CACHES)]
)
def test_windows_alone_are_within_a_budget_or_too_much_for_it(name: str, tmp_path: Path) -> None:
    own, ids = tiny("mistral_sliding"), prompt(model(), 1, 40)
    expected = generated(own, ids)
    with offload(own, name, memory="1/13", path=tmp_path) as done:  # short: its own cache is within the floor
        assert torch.equal(generated(own, ids), expected)
    assert (done.requests, done.requests_left_plain) == (0, 1)
    refused = pytest.raises(BudgetError, match="need at least")
    with offload(own, name, memory="1/13", strict=True, path=tmp_path), refused:
        generated(own, ids)
    with pytest.warns(UserWarning, match="nothing to offload"):
        cache = cache_class(name).for_budget(own, "8MiB", 60, path=tmp_path)
    with cache:
        assert torch.equal(generated(own, ids, past_key_values=cache), expected)
        assert cache.report().peak_memory_bytes <= 8 * 2**20


def test_a_cache_for_a_request() -> None:
    """What `offload` gives a request, for who runs the model himself."""
    own = model()
    assert request_cache(DiskSwapCache, own, 60, memory="1/13") is None
    with request_cache(DiskSwapCache, own, 60, 2, memory="1MiB") as cache:
        assert isinstance(cache, DiskSwapCache)
        assert (cache.config.memory, cache.config.max_context, cache.config.max_batch) == (2**20, 60, 2)
    with request_cache(ClusterCache, own, 60, num_selected=80) as cache:
        assert type(cache) is ClusterCache and cache.config.num_selected == 80 and cache.config.memory is None
    with pytest.raises(BudgetError):
        request_cache(DiskSwapCache, own, 60, memory="1/13", strict=True)
    with pytest.raises(ConfigError, match="give memory too"):
        request_cache(DiskSwapCache, own, 60, goal="speed")


def test_a_goal_chooses_each_requests_fields(tmp_path: Path) -> None:
    own, estimated = long_model(), []

    class Noted(DiskSwapCache):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            estimated.append(self.config.remainder)

    for goal in ({}, {"goal": "fidelity"}, {"goal": "speed"}):
        with offload(own, Noted, memory="2MiB", path=tmp_path, **goal):
            generated(own, prompt(own, 1, 1500))
    assert estimated == [True, True, False]
