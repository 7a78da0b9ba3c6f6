"""Models loaded, wrapped, copied and used in unusual ways: right tokens, or a named error that says what is wrong."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
import transformers
from background import in_threads
from batch_driver import Driver
from harness import (
    CASES,
    SMALL,
    Decoded,
    assert_exact,
    fresh,
    generate,
    prompt,
    tiny,
    tokenizer,
    unchanged,
)
from long_models import long_fresh
from packaging.version import Version
from pairwise import combinations
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from vision_models import gemma3_vl, qwen2_5_vl

from hf_offload_cache import DiskSwapCache, detach
from hf_offload_cache.errors import CacheClosedError, PromptError, SeamLostError, UnsupportedModelError

EXACT: dict[str, Any] = {"exact": True, **SMALL}
MODES: dict[str, dict[str, Any]] = {
    "streamed": EXACT,
    "bitwise": {"exact": "bitwise", **SMALL},
    "sparse": {**SMALL, "num_selected": 512, "reuse_capacity": 64},
}
"""Three ways to be exact: the last is a sparse cache that selects everything."""


def ours(model: Any, **fields: Any) -> DiskSwapCache:
    """An exact cache with small groups and blocks."""
    return DiskSwapCache(model, **{**EXACT, **fields})


def dynamic(model: Any) -> DynamicCache:
    """The cache to compare with."""
    return DynamicCache(config=model.config)


def check(model: Any, cases: tuple[str, ...] = ("greedy", "beams", "left_padding"), expect: str = "tagged") -> None:
    """Every case is exact with our cache, in the state expected, and the model is as before afterwards."""
    expected = {case: CASES[case](model, dynamic(model)) for case in cases}
    with unchanged(model):
        for case in cases:
            with ours(model) as cache:
                assert_exact(expected[case], CASES[case](model, cache))
                assert cache.report().layers[expect] > 0
                assert cache.report().layers["full"] == 0


class Boom(Exception):
    """Raised by tests inside a forward or inside generate."""


# ---------------------------------------------------------------------------------------------- loaded unusually


@pytest.mark.parametrize("through", ["wrapper", "base"])
def test_peft_adapter(through: str) -> None:
    """LoRA with weights that matter; the cache is built with the PeftModel or with the model under it."""
    peft = pytest.importorskip("peft")
    base = fresh("llama")
    without = CASES["greedy"](base, dynamic(base))
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    expected = CASES["left_padding"](model, dynamic(base))
    assert not harness.compare(without, CASES["greedy"](model, dynamic(base))).exact
    with unchanged(model), ours(model if through == "wrapper" else model.get_base_model()) as cache:
        assert_exact(expected, CASES["left_padding"](model, cache))
        assert cache.report().layers["tagged"] == 3


def test_bitsandbytes_nf4(tmp_path: Path) -> None:
    """4-bit weights on the CPU."""
    pytest.importorskip("bitsandbytes")
    fresh("llama").save_pretrained(tmp_path)
    quantisation = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantisation, dtype=torch.float32, device_map="cpu"
    )
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # that kernel rounds activations to bfloat16
    model.generation_config.eos_token_id = None
    check(model)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_accelerate_offload(place: str, tmp_path: Path) -> None:
    """Weights that lie on the meta device between the steps."""
    accelerate = pytest.importorskip("accelerate")
    model = fresh("llama")
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    check(model)


@pytest.mark.parametrize("build", [qwen2_5_vl, gemma3_vl])
def test_vision_language_model_with_text(build: Callable[[], Any]) -> None:
    """Text input to a vision-language model: the text layers are found and tagged."""
    check(build())


def test_encoder_decoder_is_refused() -> None:
    """A named error, and nothing put on the model."""
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    with unchanged(model), pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        DiskSwapCache(model)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_of_another_kind_is_refused(device: str) -> None:
    """One line that names the device, and nothing put on the model; if one layer is on it, too."""
    model = fresh("llama")
    model.model.layers[1].self_attn._hf_hook = SimpleNamespace(execution_device=torch.device(device))
    line = f"LlamaForCausalLM is on {device}, and this cache runs on a CPU or a CUDA device: move the model to one"
    for make in (DiskSwapCache, lambda one: DiskSwapCache.for_budget(one, "1/2", max_context=4096)):
        with unchanged(model), pytest.raises(UnsupportedModelError, match=line) as told:
            make(model)
        assert "\n" not in str(told.value)


def test_something_that_is_no_model_is_refused() -> None:
    """A `TypeError` that says what was given."""
    with pytest.raises(TypeError, match="Linear"):
        DiskSwapCache(torch.nn.Linear(2, 2))


def test_only_sliding_layers() -> None:
    """Nothing to offload: a warning, and the right tokens from transformers' own layers."""
    model = tiny("mistral_sliding")
    expected = CASES["left_padding"](model, dynamic(model))
    with unchanged(model):
        with pytest.warns(UserWarning, match="nothing to offload"):
            cache = ours(model)
        with cache:
            assert_exact(expected, CASES["left_padding"](model, cache), bitwise=True)
            assert cache.report().layers == {"unknown": 0, "tagged": 0, "full": 0, "kept": 3}


def test_a_sparse_cache_says_where_it_cannot_be_sparse() -> None:
    """Latent attention: exact by the whole history, with a warning that names the layers."""
    model = tiny("deepseek_v2")
    with DiskSwapCache(model, num_selected=8, **SMALL) as cache, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoded = CASES["left_padding"](model, cache)
        said = [str(warning.message) for warning in caught] + list(cache.report().warnings)
    assert_exact(harness.reference("deepseek_v2", "left_padding"), decoded)
    assert any("sparse" in text for text in said), said


# ---------------------------------------------------------------------------------------------- used unusually


def test_two_threads_and_a_third_without() -> None:
    """Two caches of ours and a `DynamicCache` on one model, at once, three rounds each."""
    model = tiny("llama")
    names = ("greedy", "left_padding", "sample")
    expected = {name: CASES[name](model, dynamic(model)) for name in names[:2]}
    plain = CASES["batch"](model, dynamic(model))

    def with_ours(name: str) -> None:
        for _ in range(3):
            with ours(model) as cache:
                assert_exact(expected[name], CASES[name](model, cache))

    def without() -> None:
        for _ in range(6):
            assert_exact(plain, CASES["batch"](model, dynamic(model)), bitwise=True)

    with unchanged(model):
        in_threads(lambda: with_ours("greedy"), lambda: with_ours("left_padding"), without)


def test_threads_that_construct_and_close() -> None:
    """The count of caches on the model survives four threads."""
    model = tiny("llama")

    def construct_and_close() -> None:
        for _ in range(40):
            DiskSwapCache(model, exact=True, engine="memory").close()

    with unchanged(model):
        in_threads(*[construct_and_close] * 4)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_enabled(mode: str) -> None:
    """The forward is right; a backward pass gives the right gradient or none at all."""
    model = fresh("llama")
    ids = prompt(model, 2, 40)

    def forwards(cache: Any) -> list[torch.Tensor]:
        return [
            model(ids[:, :30], past_key_values=cache).logits,
            model(ids[:, 30:36], past_key_values=cache).logits,
            model(ids[:, 36:37], past_key_values=cache).logits,
        ]

    def gradient(logits: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        logits.pow(2).mean().backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    expected = forwards(dynamic(model))
    wanted = gradient(expected[0])
    with DiskSwapCache(model, **MODES[mode]) as cache:
        got = forwards(cache)
        for reference, logits in zip(expected, got, strict=True):
            assert logits.requires_grad
            assert_exact(*(Decoded(ids, part.detach()) for part in (reference, logits)))
        torch.testing.assert_close(gradient(got[0]), wanted)
        for logits in got[1:]:
            with pytest.raises(RuntimeError, match="gradient"):
                gradient(logits)


def test_pipeline_given_a_list() -> None:
    model = fresh("llama")
    words = tokenizer(harness.vocabulary(model))
    words.padding_side = "left"
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=words)
    texts = [
        " ".join(f"w{i}" for i in prompt(model, 1, length, seed)[0].tolist()) for length, seed in ((40, 1), (33, 2))
    ]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    alone = [pipe(text, past_key_values=dynamic(model), **options) for text in texts]
    together = pipe(texts, batch_size=2, past_key_values=dynamic(model), **options)
    with unchanged(model):
        with ours(model) as cache:
            assert pipe(texts[0], past_key_values=cache, **options) == alone[0]
        with ours(model) as cache, pytest.raises(PromptError):
            pipe(texts, past_key_values=cache, **options)
        with ours(model) as cache:
            assert pipe(texts, batch_size=2, past_key_values=cache, **options) == together


@pytest.mark.parametrize("other", ["eager", "sdpa"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_set_attn_implementation_after_attaching(other: str, used: bool) -> None:
    """Right tokens, or `SeamLostError` in that forward; closing leaves the user's choice alone."""
    model = fresh("llama")
    ids = prompt(model, 2)
    turn = torch.cat([ids, prompt(model, 2, 5, seed=9)], 1)
    expected = generate(model, dynamic(model), turn)
    with ours(model) as cache:
        if used:
            with torch.no_grad():
                model(ids[:, :-2], past_key_values=cache)
                model(ids[:, -2:], past_key_values=cache)
        model.set_attn_implementation(other)
        try:
            decoded = generate(model, cache, turn)
        except SeamLostError:
            assert used
            with pytest.raises((SeamLostError, RuntimeError)):
                model(turn[:, -1:], past_key_values=cache)
        else:
            assert_exact(expected, decoded)
    assert model.config._attn_implementation == other
    assert_exact(expected, generate(model, dynamic(model), turn))


@pytest.fixture
def dynamo() -> Iterator[dict[str, Any]]:
    """torch.compile's counters, from a clean start."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("wrapper", "streamed"), ("compiled forward", "sparse"),
        pytest.param("wrapper", "sparse", marks=pytest.mark.slow),
        pytest.param("compiled forward", "streamed", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_torch_compile(how: str, mode: str, dynamo: dict[str, Any]) -> None:
    """The same tokens; the tracer breaks at `update`, attention and the seams, and never looks into them."""
    model = fresh("llama")
    expected = CASES["left_padding"](model, dynamic(model))
    wrapped = torch.compile(model, backend="eager") if how == "wrapper" else model
    if how == "compiled forward":
        model.forward = torch.compile(model.forward, backend="eager")
    with unchanged(model), DiskSwapCache(wrapped, **MODES[mode]) as cache, ours(model):
        assert_exact(expected, CASES["left_padding"](wrapped, cache))
        assert cache.report().layers["tagged"] == 3
        if mode == "sparse":
            assert {index for index, sight in cache.look_ahead.sights.items() if sight.recipe} == {0, 1, 2}
    known = ["Seam.__call__", "Cache.update", "_attend"]
    older = Version(torch.__version__) < Version("2.13")
    for reason in dynamo["graph_break"]:
        assert any(name in reason for name in known), reason
    if how == "compiled forward":  # `generate` calls the model under the wrapper, which nobody compiled
        assert 0 < dynamo["frames"]["ok"] <= (80 if older else 60)


@pytest.mark.slow
def test_torch_compile_settles(dynamo: dict[str, Any]) -> None:
    model = fresh("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    with DiskSwapCache(model, **MODES["sparse"]) as cache, torch.no_grad():
        model(prompt(model), past_key_values=cache)
        for seed in range(4):
            model(prompt(model, 1, 1, seed), past_key_values=cache)
        settled = dict(dynamo["frames"])
        for seed in range(12):
            model(prompt(model, 1, 1, seed), past_key_values=cache)
        assert settled["ok"] > 0
        assert dict(dynamo["frames"]) == settled


# ---------------------------------------------------------------------------------------------- prompts and batches


def test_an_unrelated_prompt_is_refused() -> None:
    """`generate` with a longer prompt that does not continue what the cache holds; the cache still serves its own."""
    model = tiny("llama")
    ids = prompt(model)
    with ours(model) as cache:
        first = generate(model, cache, ids, max_new_tokens=8)
        with pytest.raises(PromptError, match="token 0 of"):
            generate(model, cache, prompt(model, 1, 90, seed=11))
        almost = torch.cat([first.tokens, prompt(model, 1, 5, seed=9)], 1)
        almost[0, 33] = almost[0, 33] % 190 + 6
        with pytest.raises(PromptError, match="token 33 of"):
            generate(model, cache, almost)
        turn = torch.cat([first.tokens, prompt(model, 1, 5, seed=9)], 1)
        second = generate(model, cache, turn, max_new_tokens=8)
    reference = dynamic(model)
    generate(model, reference, ids, max_new_tokens=8)
    assert_exact(generate(model, reference, turn, max_new_tokens=8), second)


def test_a_prompt_fed_again_is_refused() -> None:
    """The same prompt on a used cache, through generate and as a forward at position 0; nothing is appended."""
    model = tiny("llama")
    ids = prompt(model)
    with ours(model) as cache:
        generate(model, cache, ids, max_new_tokens=8)
        held = cache.get_seq_length()
        with pytest.raises(PromptError):
            generate(model, cache, ids, max_new_tokens=8)
        with pytest.raises(PromptError), torch.no_grad():
            model(ids, past_key_values=cache, position_ids=torch.arange(ids.shape[1])[None])
        assert cache.get_seq_length() == held


def test_another_batch_size_is_refused() -> None:
    """Two rows on a cache that holds one."""
    model = tiny("llama")
    with ours(model) as cache, torch.no_grad():
        model(prompt(model), past_key_values=cache)
        with pytest.raises(PromptError, match=r"\b1\b.*\b2\b"):
            model(prompt(model, 2, 1), past_key_values=cache)
        assert cache.get_seq_length() == harness.PROMPT


def test_a_closed_cache_says_so() -> None:
    """`close` twice, then use: a named error."""
    model = tiny("llama")
    cache = ours(model)
    CASES["greedy"](model, cache)
    cache.close()
    cache.close()
    with pytest.raises(CacheClosedError):
        CASES["greedy"](model, cache)
    with pytest.raises((TypeError, CacheClosedError)):
        pickle.dumps(cache)


# ---------------------------------------------------------------------------------------------- put on and taken off


def test_close_restores_the_model_after_an_exception() -> None:
    """An exception in generate, or within a layer, goes through; hooks, names and threads are as before."""
    model = tiny("llama")
    threads = threading.active_count()

    def explode(*arguments: Any) -> Any:
        raise Boom

    with unchanged(model):
        with pytest.raises(Boom), ours(model) as cache:
            generate(model, cache, prompt(model), logits_processor=[explode])
        handle = model.model.layers[1].mlp.register_forward_pre_hook(explode)
        try:
            with pytest.raises(Boom), ours(model) as cache:
                CASES["greedy"](model, cache)
        finally:
            handle.remove()
    assert threading.active_count() == threads


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupted_forward_is_taken_back(at: int) -> None:
    """Some layers hold more than others."""
    model = tiny("llama")

    def explode(*arguments: Any) -> None:
        raise Boom

    with ours(model) as cache, torch.no_grad():
        given = prompt(model, 1, 40, seed=3), prompt(model)[:, :-1], prompt(model, 1, 1, seed=5), prompt(model, 1, 9)
        for ids in given:
            handle = model.model.layers[at].self_attn.register_forward_pre_hook(explode)
            with pytest.raises(Boom):
                model(ids, past_key_values=cache)
            handle.remove()
            if at:
                with pytest.raises(RuntimeError, match=rf"interrupted.*holds (0|{harness.PROMPT - 1}) tokens"):
                    CASES["greedy"](model, cache)
            if ids.shape[1] == harness.PROMPT - 1:
                model(ids, past_key_values=cache)
        assert_exact(harness.reference("llama", "greedy"), CASES["greedy"](model, cache))


def test_nested_caches_are_counted() -> None:
    """Closing one leaves the other at work; the last one restores the model."""
    model = tiny("gemma3")
    expected = harness.reference("gemma3", "left_padding")
    with unchanged(model):
        first, second = ours(model), ours(model)
        third = ours(model, exact="bitwise")
        first.close()
        assert_exact(expected, CASES["left_padding"](model, second))
        second.close()
        assert_exact(expected, CASES["left_padding"](model, third), bitwise=True)
        third.close()


def test_detach_closes_every_cache() -> None:
    """`detach` restores the model whatever is still on it, and does nothing on a model without caches."""
    model = tiny("llama")
    with unchanged(model):
        caches = [ours(model), ours(model)]
        detach(model)
        for cache in caches:
            with pytest.raises(CacheClosedError):
                CASES["greedy"](model, cache)
    detach(model)


def test_a_forgotten_cache_restores_the_model() -> None:
    """Garbage collection of an unclosed cache takes the seams off."""
    model = fresh("llama")
    with unchanged(model):
        cache = ours(model)
        CASES["greedy"](model, cache)
        del cache
        gc.collect()


def test_report_counts() -> None:
    """Layers by state, tokens, bytes of the full cache, steps; all as `DynamicCache` would hold them."""
    model = tiny("gemma3")
    with ours(model) as cache:
        assert cache.report().layers == {"unknown": 2, "tagged": 0, "full": 0, "kept": 2}
        CASES["left_padding"](model, cache, new=32)
        report = cache.report()
        assert report.layers == {"unknown": 0, "tagged": 2, "full": 0, "kept": 2}
        assert report.tokens == harness.PROMPT + 31
        assert report.decode_steps == 31
        full_layers = 2 * 3 * report.tokens * 2 * 16 * 2 * 4
        assert full_layers < report.full_kv_bytes <= 2 * full_layers
        whatever_is_held = report.memory_by_owner["tables"] + report.memory_by_owner.get("io ring", 0)
        assert report.memory_bytes - whatever_is_held < report.full_kv_bytes
        assert report.bytes_written >= full_layers // 2
        assert json.loads(json.dumps(report.to_dict()))["tokens"] == report.tokens
        cache.reset()
        assert (cache.report().tokens, cache.report().decode_steps, cache.report().bytes_read) == (0, 0, 0)
    with ours(model, exact="bitwise") as cache:
        CASES["greedy"](model, cache)
        assert cache.report().layers == {"unknown": 0, "tagged": 0, "full": 2, "kept": 2}


# ---------------------------------------------------------------------------------------------- copied and saved


def test_deepcopy_of_an_attached_model() -> None:
    """The copy runs with `DynamicCache` and with a cache of its own, also when the original is closed."""
    model = fresh("gemma3")
    expected = CASES["left_padding"](model, dynamic(model))
    with unchanged(model):
        with ours(model) as cache:
            CASES["greedy"](model, cache)
            twin = copy.deepcopy(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)  # whatever in the copy still points to the original goes wrong now
            assert_exact(expected, CASES["left_padding"](twin, dynamic(twin)), bitwise=True)
            with ours(twin) as own:
                assert_exact(expected, CASES["left_padding"](twin, own))
                assert own.report().layers["tagged"] == 2
        assert twin.config._attn_implementation == model.config._attn_implementation == "sdpa"
        assert_exact(expected, CASES["left_padding"](twin, dynamic(twin)), bitwise=True)


_LOAD = """
import pickle, sys, torch
from transformers import DynamicCache
folder = sys.argv[1]
ids = torch.load(f"{folder}/ids")
with open(f"{folder}/pickle", "rb") as file:
    models = {"pickle": pickle.load(file), "torch": torch.load(f"{folder}/torch", weights_only=False)}
for how, model in models.items():
    with torch.no_grad():
        out = model.generate(ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=8,
                             do_sample=False, return_dict_in_generate=True, output_logits=True)
    torch.save((out.sequences, torch.stack(out.logits)), f"{folder}/{how}.out")
"""


def test_a_model_pickled_while_attached(tmp_path: Path) -> None:
    model = fresh("llama")
    ids = prompt(model, 2)
    expected = generate(model, dynamic(model), ids, max_new_tokens=8)
    with ours(model) as cache:
        CASES["greedy"](model, cache)
        (tmp_path / "pickle").write_bytes(pickle.dumps(model))
        torch.save(model, tmp_path / "torch")
    torch.save(ids, tmp_path / "ids")
    twins = pickle.loads((tmp_path / "pickle").read_bytes()), torch.load(tmp_path / "torch", weights_only=False)
    for twin in twins:
        assert_exact(expected, generate(twin, dynamic(twin), ids, max_new_tokens=8))
    root = str(Path(harness.__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{_LOAD}", str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    for how in ("pickle", "torch"):
        assert_exact(expected, Decoded(*torch.load(tmp_path / f"{how}.out")))


def test_save_pretrained_while_attached(tmp_path: Path) -> None:
    """The files are those of the model without us, byte for byte; the reloaded model is stock."""
    model = fresh("gemma3")
    model.save_pretrained(tmp_path / "before")
    with ours(model) as cache:
        CASES["greedy"](model, cache)
        model.save_pretrained(tmp_path / "attached")
        assert "offload" not in json.dumps(model.config.to_dict())
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "attached").iterdir())
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "attached" / name).read_bytes(), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "attached", dtype=torch.float32).eval()
    assert again.config._attn_implementation == "sdpa"
    again.generation_config.eos_token_id = None
    expected = CASES["greedy"](model, dynamic(model))
    assert_exact(expected, CASES["greedy"](again, dynamic(again)))


# ---------------------------------------------------------------------------------------------- batch operations


class Pair(Driver):
    """A `DynamicCache` and a cache of ours, whose logits are compared in every step."""

    def __init__(self, model: Any, cache: Cache, rows: int = 3, length: int = 40, seed: int = 0) -> None:
        super().__init__(model, dynamic(model), cache, rows=rows, length=length, step=7, seed=1000 * seed)

    def feed(self, tokens: int = 1, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
        logits = super().feed(tokens, mask)
        assert_exact(*(Decoded(self.mask, each) for each in logits))
        return logits

    def reset(self) -> None:
        """Empty both, start anew with another batch."""
        self.caches[1].reset()
        self.caches = (dynamic(self.model), self.caches[1])  # 5.17's own `reset` keeps the batch size
        self.start(2, 23, 9)


OPERATIONS: dict[str, Callable[[Pair], None]] = {
    "crop 0": lambda pair: pair.crop(0),
    "crop 1": lambda pair: pair.crop(1),
    "crop the tail": lambda pair: pair.crop(8),
    "crop into groups": lambda pair: pair.crop(13),
    "crop to a group's edge": lambda pair: pair.crop(20),
    "crop nearly all": lambda pair: pair.crop(39),
    "reorder": lambda pair: pair.reorder([2, 0, 1]),
    "reorder with copies": lambda pair: pair.reorder([1, 1, 0]),
    "repeat": lambda pair: pair.repeat(2),
    "select": lambda pair: pair.select([2, 0]),
    "select one": lambda pair: pair.select([1]),
    "reset": lambda pair: pair.reset(),
}
"""Name -> the operation on a pair of caches that hold 40 tokens of three rows."""


MOVED = ("reorder", "reorder with copies", "repeat", "select", "reset")
"""Operations that the sliding layers follow too, which transformers keeps."""


@pytest.mark.parametrize(
    ("name", "mode", "operation"),
    [
        *combinations(("llama",), MODES.keys(), OPERATIONS.keys()),
        *(("gemma3", "streamed", operation) for operation in MOVED),
    ],
)
def test_batch_operations(name: str, mode: str, operation: str) -> None:
    with DiskSwapCache(tiny(name), **MODES[mode]) as cache:
        pair = Pair(tiny(name), cache)
        OPERATIONS[operation](pair)
        for tokens in (1, 1, 6, 1, 17, 1):
            pair.feed(tokens)


@pytest.mark.parametrize(
    ("layer_class", "operation"),
    [
        (harness.StaleGroup, "reset"),
        (harness.NoReorder, "reorder"),
        (harness.NoReorder, "reorder with copies"),
        (harness.CropsTooMuch, "crop into groups"),
    ],
)
def test_a_pair_notices_a_broken_cache(layer_class: type[DynamicLayer], operation: str) -> None:
    """The comparison itself: what is wrong with the cache comes out."""
    model = tiny("llama")
    pair = Pair(model, harness.broken(model, layer_class))
    OPERATIONS[operation](pair)
    with pytest.raises(AssertionError, match="deviation"):
        for tokens in (1, 32):
            pair.feed(tokens)


@harness.RECORDED_WINDOWS
def test_crop_beside_sliding_layers() -> None:
    """A window that slid can be cropped after `activate_past_recording`, as with transformers' own cache."""
    model = tiny("gemma3")
    with ours(model) as cache:
        plain = dynamic(model)
        for held in (plain, cache):
            held.activate_past_recording()
        ids = prompt(model, 2, 60)
        with torch.no_grad():
            for held in (plain, cache):
                model(ids[:, :40], past_key_values=held)
                model(ids[:, 40:48], past_key_values=held)
                held.crop(-6)
            logits = [model(ids[:, 48:], past_key_values=held).logits for held in (plain, cache)]
        assert_exact(*(Decoded(ids, part) for part in logits))


@pytest.mark.parametrize(("mode", "seed"), combinations(MODES.keys(), range(6)))
def test_operations_in_any_order(mode: str, seed: int) -> None:
    """A seeded walk over steps and operations; the logits agree after every one."""
    model = tiny("qwen3")
    chosen = random.Random(seed)
    with DiskSwapCache(model, **MODES[mode]) as cache:
        pair = Pair(model, cache, rows=2, length=chosen.randint(1, 50), seed=seed)
        for _ in range(14):
            rows, held = pair.mask.shape
            kind = chosen.choice(["step", "step", "crop", "reorder", "repeat", "select"])
            if kind == "crop":
                pair.crop(chosen.randint(0, min(held - 15, 25)) if held > 15 else 0)
            elif kind == "reorder":
                pair.reorder([chosen.randrange(rows) for _ in range(rows)])
            elif kind == "repeat" and rows <= 3:
                pair.repeat(2)
            elif kind == "select":
                pair.select(sorted(chosen.sample(range(rows), chosen.randint(1, rows))))
            pair.feed(chosen.choice([1, 1, 1, 2, 5, 19]))


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_torch_compile_of_one_layer_serves_all(exact: bool, dynamo: dict[str, Any]) -> None:
    fields = {"exact": True} if exact else {"group_size": 4, "num_selected": 40, "rank": 8, "look_ahead": False}
    compiled = {}
    for layers in (3, 9):
        model = long_fresh("llama", num_hidden_layers=layers)
        ids, answers = prompt(model, 1, 600), []
        for call in (model.forward, torch.compile(model.forward, backend="eager")):
            torch._dynamo.reset()
            dynamo.clear()
            model.forward = call
            with (
                torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True),
                DiskSwapCache(model, engine="memory", **fields) as cache,
                torch.no_grad(),
            ):
                model(ids, past_key_values=cache)
                answers.append([model(prompt(model, 1, 1, n), past_key_values=cache).logits for n in range(3)])
                assert exact or cache.report().selected_fraction < 0.5, "ranked and selected"
        assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))
        compiled[layers] = (dynamo["frames"]["ok"], dynamo["stats"]["unique_graphs"])
    assert compiled[3] == compiled[9] and compiled[3][1] > 0
