"""What a model's own code keeps on it between steps is each cache's own: M-RoPE's offsets above all."""

from __future__ import annotations

import copy
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, SMALL, build, unchanged
from mrope_models import MODELS, together, with_a_picture
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache
from hf_offload_cache.errors import PromptError, UnsupportedModelError

FIELDS: dict[str, Any] = {**SMALL, "exact": True, "engine": "memory"}
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
FEW = ("qwen2_vl", "glm4v", "qwen3_omni", "qwen3_5")
NAMES = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in MODELS]
CACHES = (DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache)


@functools.cache
def model_of(name: str) -> Any:
    return MODELS[name]()


def fresh(name: str) -> Any:
    """Of the same weights, as it is before any conversation."""
    return copy.deepcopy(model_of(name))


def first(model: Any, cache: Any, given: Any) -> torch.Tensor:
    ids: torch.Tensor = model.generate(**given, past_key_values=cache, **OPTIONS)
    return ids


def goes_on(ids: torch.Tensor, seed: int = 9) -> torch.Tensor:
    more = torch.randint(5, 180, (len(ids), 7), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, more], 1)


def then(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[list[int]]:
    """The next turn, behind ids (B, T), of which the first have `mask`."""
    ids, given = goes_on(ids), {}
    if mask is not None:
        more = torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=mask.dtype)
        given["attention_mask"] = torch.cat([mask, more], 1)
    found: list[list[int]] = model.generate(ids, past_key_values=cache, **given, **OPTIONS).tolist()
    return found


def uninterrupted(name: str, given: Any) -> list[list[int]]:
    model = fresh(name)
    cache = DynamicCache(config=model.config)
    return then(model, cache, first(model, cache, given), given.get("attention_mask"))


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_where_it_was_in_a_saved_context(name: str, tmp_path: Path) -> None:
    given = with_a_picture(name)
    expected, model = uninterrupted(name, given), fresh(name)
    with DiskSwapCache(model, **FIELDS) as cache:
        ids = first(model, cache, given)
        cache.save(tmp_path / "context")
        with cache.fork() as twin:
            assert then(model, twin, ids) == expected
        assert then(model, cache, ids) == expected
    other = fresh(name)
    with unchanged(other), DiskSwapCache.open(tmp_path / "context", other) as cache:
        assert then(other, cache, ids) == expected


@pytest.mark.parametrize("name", NAMES)
def test_conversations_on_one_model_do_not_mix(name: str) -> None:
    """Two of ours, transformers' own, and one of text alone that is given by hand: each as if it was alone."""
    model, plain = fresh(name), fresh(name)
    prompts = [with_a_picture(name), with_a_picture(name, 50, 30, 4, 11), with_a_picture(name, 40, 30, 12, 13)]
    words = prompts[0]["input_ids"][:, :50]
    alone = DynamicCache(config=plain.config)
    plain(words, past_key_values=alone)
    expected = plain(words[:, :3], past_key_values=alone).logits
    theirs = DynamicCache(config=model.config)
    one, two, three = (DiskSwapCache(model, **FIELDS) for _ in range(3))
    with one, two, three:
        ids = [first(model, cache, each) for cache, each in zip((one, two, theirs), prompts, strict=True)]
        model(words, past_key_values=three)
        for cache, each, own in zip((one, two, theirs), prompts, ids, strict=True):
            assert then(model, cache, own) == uninterrupted(name, each)
        torch.testing.assert_close(model(words[:, :3], past_key_values=three).logits, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_rows_keep_their_offsets(name: str, tmp_path: Path) -> None:
    given = together(with_a_picture(name, 70, 20), with_a_picture(name, 90, 8, 4, 5))
    expected, model, mask = uninterrupted(name, given), fresh(name), given["attention_mask"]

    def changed(change: Any) -> tuple[Any, torch.Tensor]:
        cache = DiskSwapCache(model, **FIELDS)
        ids = first(model, cache, given)
        change(cache)
        return cache, goes_on(ids)

    def asked(cache: Any, ids: torch.Tensor, rows: list[int]) -> list[list[int]]:
        whole = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        with cache:
            found = model.generate(ids[rows], attention_mask=whole[rows], past_key_values=cache, **OPTIONS)
        answers: list[list[int]] = found.tolist()
        return answers

    cache, ids = changed(lambda cache: cache.save(tmp_path / "context"))
    assert asked(cache, ids, [0, 1]) == expected
    model = fresh(name)
    assert asked(DiskSwapCache.open(tmp_path / "context", model), ids, [0, 1]) == expected
    assert asked(*changed(lambda cache: cache.reorder_cache(torch.tensor([1, 0]))), [1, 0]) == expected[::-1]
    if name != "qwen3_5":  # transformers' linear layers have neither
        twice = asked(*changed(lambda cache: cache.batch_repeat_interleave(2)), [0, 0, 1, 1])
        assert twice == [expected[row] for row in (0, 0, 1, 1)]
        assert asked(*changed(lambda cache: cache.batch_select_indices(torch.tensor([1]))), [1]) == expected[1:]


@pytest.mark.parametrize("cls", CACHES)
def test_every_cache_opens_a_picture(cls: Any, tmp_path: Path) -> None:
    given, model = with_a_picture("qwen2_5_vl"), fresh("qwen2_5_vl")
    expected = uninterrupted("qwen2_5_vl", given)
    with cls(model, exact=True, engine="memory") as cache:
        ids = first(model, cache, given)
        cache.save(tmp_path / "context")
    other = fresh("qwen2_5_vl")
    with cls.open(tmp_path / "context", other) as cache:
        assert then(other, cache, ids) == expected


def test_beams_and_a_step_that_fails() -> None:
    given, model = with_a_picture("qwen2_vl"), fresh("qwen2_vl")
    options = {**OPTIONS, "num_beams": 3}
    expected = fresh("qwen2_vl").generate(**given, **options).tolist()
    with DiskSwapCache(model, **FIELDS) as cache:
        assert model.generate(**given, past_key_values=cache, **options).tolist() == expected
    with DiskSwapCache(model, **FIELDS) as cache:
        ids = first(model, cache, given)
        hook = model.model.language_model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            then(model, cache, ids)
        hook.remove()
        with pytest.raises(RuntimeError, match="an earlier forward was interrupted"):
            then(model, cache, ids)
        assert then(model, cache, ids) == uninterrupted("qwen2_vl", given)


# ---------------------------------------------------------------------------------------------- any model's code


class Counting(LlamaForCausalLM):
    """Its positions begin where an attribute of its own says, which each prompt decides anew."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.offset = None

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        held = past_key_values.get_seq_length()
        if not held:
            self.offset = int(input_ids.sum()) % 50
        places = torch.arange(held, held + input_ids.shape[1])[None] + self.offset
        kwargs["position_ids"] = places * 2
        return super().forward(input_ids, past_key_values=past_key_values, **kwargs)


class Remembering(LlamaForCausalLM):
    """It keeps in a dictionary what it was told."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.told: dict[str, Any] = {}

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        self.told["ids"] = input_ids
        return super().forward(input_ids, **kwargs)


def llama(cls: type[LlamaForCausalLM]) -> Any:
    return build(cls, LlamaConfig(**COMMON))


def test_a_number_on_a_model_is_followed(tmp_path: Path) -> None:
    model, other = llama(Counting), llama(Counting)
    ids = torch.arange(5, 60)[None]
    alone = DynamicCache(config=other.config)
    other(ids, past_key_values=alone)
    expected = other(ids[:, :1], past_key_values=alone).logits
    with DiskSwapCache(model, **FIELDS) as one, DiskSwapCache(model, **FIELDS) as two, torch.no_grad():
        model(ids, past_key_values=one)
        one.save(tmp_path / "context")
        model(ids[:, 5:], past_key_values=two)
        torch.testing.assert_close(model(ids[:, :1], past_key_values=one).logits, expected, rtol=0, atol=1e-4)
    other.offset = None
    with DiskSwapCache.open(tmp_path / "context", other) as cache, torch.no_grad():
        torch.testing.assert_close(other(ids[:, :1], past_key_values=cache).logits, expected, rtol=0, atol=1e-4)
    assert model.offset is None


def test_a_hook_that_keeps_what_it_sees_is_no_state() -> None:
    """Users' hooks may leave tensors on modules, and read them afterwards."""
    model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
    ids = torch.arange(5, 60)[None]

    def keeps(module: Any, args: Any, output: Any) -> None:
        module.seen = {"output": output}

    hook = model.model.layers[0].mlp.register_forward_hook(keeps)
    with DiskSwapCache(model, **FIELDS) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        with cache.fork() as twin:
            model(ids[:, :1], past_key_values=twin)
    hook.remove()
    assert model.model.layers[0].mlp.seen["output"].shape == (1, 1, 64)


class Notes:
    """What a model keeps in an object of its own."""

    def __init__(self) -> None:
        self.deep: dict[str, dict[str, Any]] = {"a": {}}


class TakingNotes(LlamaForCausalLM):
    """It changes an object, levels down."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.notes = Notes()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        self.notes.deep["a"]["ids"] = input_ids
        return super().forward(input_ids, **kwargs)


class Default(Counting):
    """Its attribute has a default in the class."""

    offset = None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        del self.offset


def test_an_attribute_with_a_default_in_the_class_is_followed() -> None:
    model, ids = llama(Default), torch.arange(5, 60)[None]
    with DiskSwapCache(model, **FIELDS) as one, DiskSwapCache(model, **FIELDS) as two, torch.no_grad():
        model(ids, past_key_values=one)
        offset = model.offset
        model(ids[:, 3:], past_key_values=two)
        assert model.offset != offset
        model(ids[:, :1], past_key_values=one)
        assert model.offset == offset
    assert "offset" not in vars(model)


def test_a_number_that_others_left_on_the_model_is_saved(tmp_path: Path) -> None:
    """The same one: their conversation begins with the same prompt."""
    model, ids = llama(Counting), torch.arange(5, 60)[None]
    with torch.no_grad():
        model(ids, past_key_values=DynamicCache(config=model.config))
        with DiskSwapCache(model, **FIELDS) as cache:
            model(ids, past_key_values=cache)
            cache.save(tmp_path / "context")
            expected = model(ids[:, :1], past_key_values=cache).logits
        other = llama(Counting)
        with DiskSwapCache.open(tmp_path / "context", other) as cache:
            found = other(ids[:, :1], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_prompt_that_is_refused_changes_no_positions() -> None:
    """Its positions were made before it was compared with what is held."""
    given, model, plain = with_a_picture("qwen2_vl"), fresh("qwen2_vl"), fresh("qwen2_vl")
    theirs = DynamicCache(config=plain.config)
    ids = first(plain, theirs, given)
    with DiskSwapCache(model, **FIELDS) as cache, torch.no_grad():
        first(model, cache, given)
        with pytest.raises(PromptError, match="differs from the stored tokens"):
            first(model, cache, with_a_picture("qwen2_vl", 120, 60, 16, 11))
        expected = plain(ids[:, -1:], past_key_values=theirs).logits
        found = model(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("ours", [True, False], ids=["two of ours", "one of transformers' own"])
def test_threads_do_not_take_each_others_positions(ours: bool) -> None:
    """Another conversation runs while a prompt is under way."""
    model = fresh("qwen2_vl")
    prompts = [with_a_picture("qwen2_vl"), with_a_picture("qwen2_vl", 50, 30, 16, 11)]
    began, goes_on = threading.Event(), threading.Event()
    other = DiskSwapCache(model, **FIELDS) if ours else DynamicCache(config=model.config)
    answers: list[torch.Tensor] = []
    with DiskSwapCache(model, **FIELDS) as cache:
        thread = threading.Thread(target=lambda: answers.append(first(model, cache, prompts[0])))

        def wait(*_: Any) -> None:
            if threading.current_thread() is thread:
                began.set()
                assert goes_on.wait(60)

        hook = model.model.language_model.layers[1].register_forward_pre_hook(wait)
        thread.start()
        assert began.wait(60)
        theirs = first(model, other, prompts[1])
        goes_on.set()
        thread.join()
        hook.remove()
        assert then(model, cache, answers[0]) == uninterrupted("qwen2_vl", prompts[0])
        assert then(model, other, theirs) == uninterrupted("qwen2_vl", prompts[1])
    getattr(other, "close", lambda: None)()


class Buffered(LlamaForCausalLM):
    """Its positions begin where a buffer says."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("offset", None, persistent=False)

    def note(self, offset: torch.Tensor) -> None:
        self.offset = offset

    def at(self) -> Any:
        return self.offset

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        held = past_key_values.get_seq_length()
        if not held:
            self.note(input_ids.sum(1, keepdim=True) % 50)
        places = torch.arange(held, held + input_ids.shape[1])[None] + self.at()
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=places * 2, **kwargs)


def test_a_buffer_of_numbers_is_followed(tmp_path: Path) -> None:
    model, other, ids = llama(Buffered), llama(Buffered), torch.arange(5, 60)[None]
    with DiskSwapCache(model, **FIELDS) as one, DiskSwapCache(model, **FIELDS) as two, torch.no_grad():
        model(ids, past_key_values=one)
        one.save(tmp_path / "context")
        model(ids[:, 5:], past_key_values=two)
        expected = model(ids[:, :1], past_key_values=one).logits
        with DiskSwapCache.open(tmp_path / "context", other) as cache:
            found = other(ids[:, :1], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert model.offset is None and "offset" in model._buffers


class Overwritten(Buffered):
    """It writes to a buffer in place."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("start", torch.zeros(1, 1, dtype=torch.long), persistent=False)

    def note(self, offset: torch.Tensor) -> None:
        self.start.copy_(offset)

    def at(self) -> Any:
        return self.start


class Numbered(Buffered):
    """It keeps a number in a dictionary."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.start: dict[str, int] = {}

    def note(self, offset: torch.Tensor) -> None:
        self.start["offset"] = int(offset)

    def at(self) -> Any:
        return self.start["offset"]


class Configured(Numbered):
    """It keeps a number in its configuration."""

    def note(self, offset: torch.Tensor) -> None:
        self.config.start = int(offset)

    def at(self) -> Any:
        return self.config.start


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Remembering, "'told' .a dict. on itself"), (TakingNotes, "'notes' .a Notes. on itself"),
        (Overwritten, "'(model.)?start'"), (Numbered, "'(model.)?start'"), (Configured, "'(model.)?config'"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(cls: Any, name: str, tmp_path: Path) -> None:
    model, ids, wanted = llama(cls), torch.arange(5, 60)[None], f"{cls.__name__} keeps {name}"
    with DiskSwapCache(model, **FIELDS) as one, DiskSwapCache(model, **FIELDS) as two, torch.no_grad():
        model(ids, past_key_values=one)
        model(ids[:, :1], past_key_values=one)  # one conversation goes on
        with pytest.raises(UnsupportedModelError, match=wanted):
            one.save(tmp_path / "context")
        with pytest.raises(UnsupportedModelError, match=wanted):
            one.fork()
        model(ids[:, 5:], past_key_values=two)
        with pytest.raises(UnsupportedModelError, match=wanted):
            model(ids[:, :1], past_key_values=one)
        model(ids[:, :1], past_key_values=two)
    assert not (tmp_path / "context").exists()
