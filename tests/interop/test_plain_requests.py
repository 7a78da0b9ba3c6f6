"""`offload` sees each generation: what a checkpoint's own settings would keep from it, and what makes its own cache."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, fresh, prompt, since, tiny
from nothing_left import no_threads_and_descriptors
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_offload_cache import ContextLibrary, DiskSwapCache, offload, offload_all
from hf_offload_cache.errors import CacheUnusedError, UnsupportedModelError
from hf_offload_cache.interop.pages import _NAMES

FIELDS: dict[str, Any] = {"exact": True, "engine": "memory"}
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
PAGES = since("5.23", "its paged cache has other names")
CELL = '</th><td style="text-align: left">'
"""Between a row's name and its value, in HTML."""


def both(model: Any, **options: Any) -> list[contextlib.AbstractContextManager[Any]]:
    return [offload(model, **FIELDS, **options), offload_all(**FIELDS, **options)]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # continuous batching shows its progress: no thread stays
    before = Cache.__init__, GenerationMixin.generate, "init_continuous_batching" in vars(GenerationMixin)
    with no_threads_and_descriptors():
        yield
    assert (Cache.__init__, GenerationMixin.generate, "init_continuous_batching" in vars(GenerationMixin)) == before


# ---------------------------------------------------------------------------------------------- a checkpoint's settings


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_cache", False), *(("cache_implementation", one) for one in ("static", "quantized", "hybrid"))],
)
def test_a_checkpoints_own_default_is_offloaded(name: str, value: Any) -> None:
    """As arguments leave it, in a copy of it (which pipelines pass), and beside other settings of a caller."""
    model = fresh("llama")
    ids = prompt(model, 1, 40)
    expected = model.generate(ids, **GREEDY)
    setattr(model.generation_config, name, value)
    copied = copy.deepcopy(model.generation_config)
    settings = ({}, {"generation_config": copied}, {"use_cache": True}, {"past_key_values": None})
    for context in both(model):
        with context as done:
            for given in settings:
                assert torch.equal(model.generate(ids, **GREEDY, **given), expected)
        assert (done.requests, done.requests_left_plain) == (4, 0)
        assert done.report is not None and done.report.tokens == 43


def test_a_config_without_cache_is_offloaded() -> None:
    """MPT's checkpoints say so; `generate` takes it over from there."""
    model = LlamaForCausalLM(LlamaConfig(**COMMON, use_cache=False)).eval()
    assert model.generation_config.use_cache is False
    with offload(model, **FIELDS) as done:
        model.generate(prompt(model, 1, 20), **GREEDY)
    assert done.requests == 1


def test_what_the_caller_names_wins_and_is_not_counted() -> None:
    model, ids = tiny("llama"), prompt(tiny("llama"), 1, 40)
    for context in both(model, strict=True):
        with context as done:
            model.generate(ids, cache_implementation="static", **GREEDY)
            model.generate(ids, use_cache=False, **GREEDY)
            model.generate(ids, generation_config=GenerationConfig(cache_implementation="dynamic", **GREEDY))
            model.generate(ids, past_key_values=DynamicCache(config=model.config), **GREEDY)
        assert (done.requests, done.requests_left_plain) == (0, 0)


# ---------------------------------------------------------------------------------------------- caches of their own


class OwnLoop(LlamaForCausalLM):
    """Generates in its own way, with a cache that it makes, or that its forward makes."""

    makes = True

    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        cache: Any = DynamicCache(config=self.config) if self.makes else None
        new = ids
        for _ in range(3):
            output = self(new, past_key_values=cache, use_cache=True)
            cache, new = output.past_key_values, output.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], 1)
        return ids


def _batched(model: Any, ids: torch.Tensor) -> Any:
    settings = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1)
    pages = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)
    return model.generate_batch([ids[0].tolist()], generation_config=settings, continuous_batching_config=pages)


def _ignoring(model: Any, ids: torch.Tensor) -> Any:
    return model.generate(ids, custom_generate=lambda model, input_ids, **_: input_ids, **GREEDY)


PLAIN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "continuous batching": _batched,
    "a manager": lambda model, ids: model.init_continuous_batching(),
    "a forward": lambda model, ids: model(ids, use_cache=True),
    "its forward": lambda model, ids: model.forward(ids, use_cache=True),
    "another loop": _ignoring,
}


@pytest.mark.parametrize("how", list(PLAIN))
def test_a_generation_without_us_is_told_counted_and_refused_by_strict(how: str) -> None:
    model, ids = fresh("llama"), prompt(tiny("llama"), 1, 20)  # old transformers: batching leaves its attention set
    for context in both(model):
        with context as done, pytest.warns(UserWarning, match="LlamaForCausalLM keeps its own cache: ") as caught:
            PLAIN[how](model, ids)
            PLAIN[how](model, ids)
        assert (done.requests, done.requests_left_plain) == (0, 2)
        assert len([one for one in caught if "keeps its own cache" in str(one.message)]) == 1
    for context in both(model, strict=True):
        with context as done, pytest.raises((UnsupportedModelError, CacheUnusedError), match="leave strict out"):
            PLAIN[how](model, ids)
        assert done.requests == 0


# ---------------------------------------------------------------------------------------------- pages and a library

PAGE = 16


def _in_pages(model: Any, rows: list[torch.Tensor], **options: Any) -> tuple[list[list[int]], int]:
    """The answers of continuous batching in a new manager, and the number of tokens that the model computed."""
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    pages = ContinuousBatchingConfig(**{"page_size": PAGE, "num_blocks": 40, "max_batch_tokens": 64, **options})
    computed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, given, __: computed.append(given[0].numel()))
    ids = [row.flatten().tolist() for row in rows]
    found = model.generate_batch(ids, generation_config=settings, continuous_batching_config=pages)
    hook.remove()
    return [one.generated_tokens for one in found.values()], sum(computed)


def _manager(model: Any, num_blocks: int) -> Any:
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    pages = ContinuousBatchingConfig(page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=64)
    return model.init_continuous_batching(settings, pages)


def _with_library(model: Any, rows: list[torch.Tensor], folder: Path, cls: str = "disk-swap", **options: Any) -> Any:
    """As `_in_pages`, with a library's record, as after a restart. `options`: of `offload_all`, and of the pages."""
    pages = {name: options.pop(name) for name in ("num_blocks", "allow_block_sharing") if name in options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with offload_all(cls, library=options.pop("library", folder), **options) as done:
            return *_in_pages(model, rows, **pages), done


@PAGES
@pytest.mark.parametrize(("cls", "dtype"), [("disk-swap", torch.float32), ("cluster", torch.bfloat16)])
def test_pages_begin_with_contexts_of_the_library(cls: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """After a restart, with a key, in a text that goes on, in one that parts from it, and in `generate`."""
    model = fresh("llama").to(dtype)
    first, key = prompt(model, 1, 100), os.urandom(32)
    (answer,), alone = _in_pages(model, [first])
    longer = torch.cat([first, torch.tensor([answer]), prompt(model, 1, 40, seed=2)], 1)
    parted = torch.cat([first[:, :70], prompt(model, 1, 30, seed=3)], 1)
    texts = [longer, parted]
    expected, _ = _in_pages(model, texts)
    library, decoded = ContextLibrary(tmp_path / "library", key=lambda: key), 5 * len(texts)
    given = {"memory": "1/2", "library": library, "num_blocks": 24}
    found, computed, done = _with_library(model, [first], tmp_path, cls, **given)
    assert (found, computed, done.tokens_reused) == ([answer], alone, 0)
    found, computed, done = _with_library(model, texts, tmp_path, cls, **given)
    assert found == expected and done.reuse.trouble == []
    kept, shared = 96, 64  # complete pages of the first text, and of what the other one has in common with it
    assert computed == decoded + (146 - kept) + (100 - shared) and done.tokens_reused == kept
    found, computed, done = _with_library(model, texts, tmp_path, cls, **given)
    assert found == expected and computed == decoded + (146 - 144) + (100 - 96)
    (entry, other) = library.entries()
    assert sorted([entry.manifest.tokens, other.manifest.tokens]) == [96, 144] and done.reuse.without_pages == 0
    with offload(model, cls, exact=True, library=library) as done:
        assert model.generate(longer, max_new_tokens=6, do_sample=False)[0, 146:].tolist() == expected[0]
    assert done.tokens_reused == 144
    without_key = ContextLibrary(tmp_path / "library")
    assert _with_library(model, [longer], tmp_path, cls, library=without_key)[2].tokens_reused == 0


@PAGES
def test_what_pages_may_not_take_from_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private requests, windows, sharing that is off, changed weights, a damaged context, and too few pages."""
    model, sliding = fresh("llama"), fresh("mistral_sliding")
    ids = prompt(model, 1, 100)
    expected, plain = _in_pages(model, [ids])
    with offload_all(library=tmp_path) as done, pytest.warns(UserWarning, match="library if their pages allow"):
        with done.private():
            assert _in_pages(model, [ids]) == (expected, plain)
        with pytest.warns(UserWarning, match="leaves none: its model has layers with sliding windows"):
            _in_pages(sliding, [ids])
        with pytest.warns(UserWarning, match="leaves none: allow_block_sharing is off"):
            assert _in_pages(model, [ids], allow_block_sharing=False) == (expected, plain)
        with monkeypatch.context() as changed, pytest.warns(UserWarning, match="this version of transformers .* has"):
            changed.setitem(_NAMES, "scheduler", ("finish",))
            assert _in_pages(model, [ids]) == (expected, plain)
        assert done.reuse.library.entries() == []
        manager = _manager(model, num_blocks=40)
        manager.start()
        manager.add_request(ids[0].tolist(), request_id="first")
        assert manager.get_result(timeout=60).generated_tokens == expected[0]
        done.reuse.settle()
        with torch.no_grad():
            model.lm_head.weight.neg_()
        with pytest.warns(UserWarning, match="weights changed after its manager"):
            manager.add_request(prompt(model, 1, 80, seed=5)[0].tolist(), request_id="second")
            assert manager.get_result(timeout=60).is_finished()
            manager.stop()
            manager.destroy()
        with torch.no_grad():
            model.lm_head.weight.neg_()
        (entry,) = done.reuse.library.entries()
        assert entry.manifest.tokens == 96
    with offload_all(library=tmp_path) as done, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = _manager(model, num_blocks=9)
        manager.add_request(prompt(model, 1, 64, seed=6)[0].tolist(), request_id="first", max_new_tokens=2)
        manager.add_request(ids[0].tolist(), request_id="second")  # needs six pages for a prefix, and four are free
        manager.start()
        found = [manager.get_result(timeout=60) for _ in range(2)]
        manager.stop()
        manager.destroy()
    assert [one.request_id for one in found] == ["first", "second"] and found[1].generated_tokens == expected[0]
    assert (done.tokens_reused, done.reuse.without_pages, done.reuse.trouble) == (0, 1, [])
    assert "1 computed a stored beginning, because too few pages were free" in str(done)
    with open(max((tmp_path / entry.name).glob("*.records")), "r+b") as file:  # of one layer
        file.write(bytes(100))
    found, computed, done = _with_library(model, [ids], tmp_path)
    assert (found, computed, done.tokens_reused) == (expected, plain, 0)
    assert "the library could not be read" in done.reuse.trouble[0]


@pytest.mark.parametrize("makes", [True, False], ids=["made by the loop", "made by its forward"])
def test_a_models_own_loop_is_told_and_counted(makes: bool) -> None:
    model = build(OwnLoop, LlamaConfig(**COMMON))
    model.makes, ids = makes, prompt(tiny("llama"), 1, 20)
    expected = model.generate(ids)
    for context in both(model):
        with context as done, pytest.warns(UserWarning, match="OwnLoop keeps its own cache: its generate runs a loop"):
            assert torch.equal(model.generate(ids), expected)
        assert (done.requests, done.requests_left_plain) == (0, 1)
    for context in both(model, strict=True):
        with context as done, pytest.raises(UnsupportedModelError, match="loop of its own"):
            model.generate(ids)
        assert (done.requests, done.requests_left_plain) == (0, 0)


def test_forwards_that_generate_nothing_are_not_counted() -> None:
    """Scoring and training leave `use_cache` out; another model is not this one; a model without a place raises not."""
    model, other = tiny("llama"), fresh("llama")
    ids = prompt(model, 1, 20)
    encoder = T5ForConditionalGeneration(
        T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offload(model, strict=True, **FIELDS) as done, torch.no_grad():
            model(ids)
            model.model(ids)
            model(ids, labels=ids, use_cache=False)
            model(ids, past_key_values=DynamicCache(config=model.config), use_cache=True)
            other(ids, use_cache=True)
            with DiskSwapCache(model, **FIELDS) as cache:
                model(ids, past_key_values=cache, use_cache=True)
    assert (done.requests, done.requests_left_plain) == (0, 0)
    with offload_all(strict=True, **FIELDS) as done, pytest.warns(UserWarning, match="T5For.* is an encoder-decoder"):
        encoder.eval().generate(torch.full((1, 5), 7), max_new_tokens=3)
    assert (done.requests, done.requests_left_plain) == (0, 1)


def test_threads_are_seen_and_requests_of_others_are_not() -> None:
    """A forward in one thread is counted while another is within a request."""
    model, ids = tiny("llama"), prompt(tiny("llama"), 1, 20)
    began, goes_on = threading.Event(), threading.Event()

    def wait(input_ids: torch.Tensor, scores: Any) -> Any:
        began.set()
        assert goes_on.wait(60)
        return scores

    with offload(model, **FIELDS) as done, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread = threading.Thread(target=lambda: model.generate(ids, logits_processor=[wait], **GREEDY))
        thread.start()
        assert began.wait(60)
        model(ids, use_cache=True)
        goes_on.set()
        thread.join()
    assert (done.requests, done.requests_left_plain) == (1, 1)


def test_contexts_and_caches_that_do_not_end_in_turn_leave_nothing() -> None:
    model, ids = fresh("llama"), prompt(tiny("llama"), 1, 20)
    first, second = offload(model, **FIELDS), offload_all(**FIELDS)
    first.__enter__()
    cache = DiskSwapCache(model, **FIELDS)
    done = second.__enter__()
    first.__exit__(None, None, None)
    model.generate(ids, **GREEDY)
    assert done.requests == 1
    assert model.generate(ids, past_key_values=cache, **GREEDY).shape == (1, 24) and cache.held() == 23
    second.__exit__(None, None, None)
    cache.close()
    assert "generate" not in vars(model)
    cache = DiskSwapCache(model, **FIELDS)
    with offload(model, **FIELDS) as done:
        cache.close()
        model.generate(ids, **GREEDY)
    assert done.requests == 1 and "generate" not in vars(model)


def test_a_decoder_with_cross_attention_is_one_request() -> None:
    """Its forward makes two caches. Several forwards are several requests, also where their caches stay."""
    config = GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, add_cross_attention=True)
    model, ids = build(GPT2LMHeadModel, config), prompt(tiny("llama"), 1, 20)
    for one in (model, tiny("llama")):
        with offload(one, **FIELDS) as done, pytest.warns(UserWarning, match="keeps its own cache"):
            outputs = [one(ids, use_cache=True) for _ in range(3)]
        assert (done.requests_left_plain, len(outputs)) == (3, 3)


# ---------------------------------------------------------------------------------------------- what is said of them


def test_what_happened_is_said() -> None:
    """In a terminal and in a notebook: nothing, a short request, one that is offloaded, and one with its own loop."""
    model = fresh("llama")
    ids = prompt(model, 1, 40)
    with offload(model, memory="1/13") as done:
        nothing = "0 requests were offloaded\nno call of generate has ended yet; calls that pass past_key_values, "
        assert str(done).startswith(nothing) and "no call of generate has ended yet" in done._repr_html_()
        model.generate(ids, **GREEDY)
        model.generate(ids, **GREEDY)
        why = "all keys and values of such a request fit `floor`, 64MiB a sequence"
        assert str(done) == f"0 requests were offloaded, 2 were left plain\nleft plain: 2, {why}"
        assert done.plain_reasons == {why: 2} and f"2 of them{CELL}{why}</td>" in done._repr_html_()
        with pytest.warns(UserWarning, match="keeps its own cache"):
            model(ids, use_cache=True)
        assert list(done.plain_reasons.values()) == [2, 1] and "left plain: 1, LlamaForCausalLM: " in str(done)
    with offload(model, memory="40KiB") as done:
        model.generate(ids, **GREEDY)
    assert list(done.plain_reasons) == ["all keys and values of such a request fit `memory`, 40KiB"]
    with offload(model, **FIELDS) as done:
        model.generate(ids, **GREEDY)
    assert str(done) == f"1 requests were offloaded\nthe latest one:\n{done.report}"
    assert done.report is not None and done._repr_html_().endswith(done.report._repr_html_())
    assert f"offloaded{CELL}1</td>" in done._repr_html_()
