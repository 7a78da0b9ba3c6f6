"""`offload` with models that are made, loaded or spread in other ways: with pictures, quantised, on several devices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from harness import DEVICE, SMALL, Decoded, assert_exact, compare, prompt, unchanged
from long_llama import long_model
from transformers import DynamicCache
from vision_models import PICTURE, WITH_A_PICTURE, Inputs, git, ids, pixels

from hf_offload_cache import DiskSwapCache, offload, offload_all
from hf_offload_cache.model import quantized_bytes

NEW = 8
WIDE: dict[str, Any] = {**SMALL, "block_tokens": 128}
"""A history of several blocks, and not of so many that merging them takes all the time."""
SELECTING: dict[str, Any] = {
    "group_size": 4, "num_recent": 8, "block_tokens": 64, "num_selected": 40, "reuse_capacity": 60,
}  # fmt: skip
"""A sixteenth of a prompt with a picture."""


def answer(model: Any, inputs: Inputs, **options: Any) -> Decoded:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    with torch.no_grad():
        found = model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)
    return Decoded(found.sequences, torch.stack([step.float() for step in found.logits]))


# ---------------------------------------------------------------------------------------------- pictures


@functools.cache
def pictured(name: str) -> tuple[Any, Inputs, Decoded]:
    """The model, what it is given, and what it answers, which depends on the picture."""
    build, given = WITH_A_PICTURE[name]
    model, inputs = build(), {key: value.to(DEVICE) for key, value in given().items()}
    expected = answer(model, inputs)
    other = answer(model, {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)})
    assert not compare(expected, other).exact
    return model, inputs, expected


@pytest.mark.parametrize("name", list(WITH_A_PICTURE))
def test_a_picture(name: str, tmp_path: Path) -> None:
    """By one model in a budget, and by all: what `DynamicCache` gives, through layers that are all offloaded."""
    model, inputs, expected = pictured(name)
    ways = functools.partial(offload, model, memory="2MiB"), functools.partial(offload_all, **WIDE)
    for make in ways:
        with unchanged(model), make(path=tmp_path, exact=True) as done:
            assert_exact(expected, answer(model, inputs))
        assert done.requests == 1 and done.report is not None
        assert done.report.tokens == inputs["input_ids"].shape[1] + NEW - 1
        assert done.report.layers["tagged"] > 0 and done.report.layers["full"] == 0
        assert done.report.decode_steps == NEW - 1


@pytest.mark.parametrize("name", list(WITH_A_PICTURE))
def test_a_picture_with_a_cache_that_selects(name: str, tmp_path: Path) -> None:
    model, inputs, expected = pictured(name)
    with unchanged(model), offload(model, path=tmp_path, **SELECTING) as done:
        found = answer(model, inputs)
    assert found.tokens.shape == expected.tokens.shape and done.report is not None
    assert torch.equal(found.logits[0], expected.logits[0])  # of the prompt, which is not selected from
    assert done.report.decode_steps == NEW - 1 and 0.05 < (done.report.selected_fraction or 1) < 0.2


def turns(model: Any, inputs: Inputs, cache: Any) -> list[Decoded]:
    """A picture and a question; another question; where the model takes it, another picture and a third."""
    answers = [answer(model, inputs, past_key_values=cache)]
    for patches in (0, int((inputs["input_ids"] == PICTURE).sum())):
        more = torch.tensor([[40, 41, 42, *[PICTURE] * patches, 50, 51]], device=DEVICE)
        ids = torch.cat([answers[-1].tokens, more], 1)
        given = {name: value for name, value in inputs.items() if name == "image_grid_thw"}
        if patches and given:
            break  # it says of all pictures where they are, and is taken for what is new
        given |= {"pixel_values": -inputs["pixel_values"]} if patches else {}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                given[name] = (ids == PICTURE).to(inputs[name].dtype)
        answers.append(answer(model, {"input_ids": ids, **given}, past_key_values=cache))
    return answers


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava"])
def test_a_conversation_about_pictures(name: str, tmp_path: Path) -> None:
    model, inputs, _ = pictured(name)
    expected = turns(model, inputs, DynamicCache(config=model.config))
    assert len(expected) == (2 if "image_grid_thw" in inputs else 3)
    with unchanged(model), DiskSwapCache(model, path=tmp_path, exact=True, **WIDE) as cache:
        for one, other in zip(expected, turns(model, inputs, cache), strict=True):
            assert_exact(one, other)
        assert cache.report().layers["full"] == 0


@pytest.mark.parametrize("name", ["kosmos2", "blip2"])
def test_a_model_whose_generate_is_a_parts_selects_with_a_cache_that_is_named(name: str, tmp_path: Path) -> None:
    """It may be the model's own where the model takes one, and else is the part's."""
    model, inputs, expected = pictured(name)
    with unchanged(model):
        own = model if name == "kosmos2" else model.language_model
        with DiskSwapCache(own, path=tmp_path, **SELECTING) as cache:
            found = answer(model, inputs, past_key_values=cache)
            report = cache.report()
    assert torch.equal(found.logits[0], expected.logits[0]) and report.tokens == expected.tokens.shape[1] - 1
    assert report.decode_steps == NEW - 1 and 0.05 < (report.selected_fraction or 1) < 0.2


def test_a_step_of_a_model_is_one_step_where_a_part_has_seams_too(tmp_path: Path) -> None:
    """Kosmos-2's forward, which its `generate` does not call."""
    model, inputs, expected = pictured("kosmos2")
    with unchanged(model), torch.no_grad(), DiskSwapCache(model, path=tmp_path, **SELECTING) as cache:
        model(**inputs, past_key_values=cache)
        picture = {"image_embeds": torch.zeros(1, 4, 64, device=DEVICE)}
        for token in expected.tokens[:, -NEW:-1].split(1, 1):
            model(input_ids=token, past_key_values=cache, **picture)
        report = cache.report()
        assert report.decode_steps == NEW - 1 and 0.05 < (report.selected_fraction or 1) < 0.2
        given = expected.tokens[:, :-1].cpu()
        assert report.tokens == given.shape[1] and torch.equal(cache.input_ids, given)


@pytest.mark.skipif(transformers.__version__.startswith("5.17."), reason="GIT itself fails there: index out of range")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_picture_that_no_ids_stand_for_is_of_the_request(rows: int, tmp_path: Path) -> None:
    """GIT puts five tokens before the prompt."""
    model, words, picture = git(), ids(0).expand(rows, -1).to(DEVICE), pixels(rows, 3, 28, 28).to(DEVICE)
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": picture}
    expected, entry = answer(model, inputs), 2 * 2 * 64 * 4
    assert not compare(expected, answer(model, {**inputs, "pixel_values": -picture})).exact
    for make in (functools.partial(offload, model), offload_all):
        with unchanged(model), make(memory="99/100", path=tmp_path, exact=True, strict=True) as done:
            assert_exact(expected, answer(model, inputs))
        assert done.requests == 1 and done.report is not None
        assert done.report.tokens == 5 + words.shape[1] + NEW - 1
        assert done.report.memory_budget == rows * (5 + words.shape[1] + NEW + 1) * entry * 99 // 100


def test_a_picture_alone_is_a_request_of_as_many_rows(tmp_path: Path) -> None:
    """GIT begins each picture's text with a token of its own."""
    model, inputs = git(), {"pixel_values": pixels(3, 3, 28, 28).to(DEVICE)}
    expected = answer(model, inputs)
    assert expected.tokens.shape == (3, 1 + NEW)
    with unchanged(model), offload(model, memory="2MiB", path=tmp_path, exact=True) as done:
        assert_exact(expected, answer(model, inputs))
    assert done.requests == 1 and done.report is not None and done.report.tokens == 5 + NEW


# ---------------------------------------------------------------------------------------------- quantised, spread

LONG = 900
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that takes long prompts."""
    place = tmp_path_factory.mktemp("model")
    long_model().save_pretrained(place)
    return place


def loaded(folder: Path, **options: Any) -> Any:
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    own.generation_config.eos_token_id = None
    return own


def check(own: Any, path: Path, device: torch.device = CPU, exact: bool | str = True) -> None:
    """Exact by one model and by all, as far as `exact` says; and in a budget, selecting, to the end."""
    ids = prompt(long_model(), 1, LONG).to(device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = answer(own, inputs)
    for make in (functools.partial(offload, own), offload_all):
        with unchanged(own), make(path=path, exact=exact) as done:
            assert_exact(expected, answer(own, inputs), bitwise=exact == "bitwise")
        assert done.requests == 1 and done.report is not None and done.report.tokens == LONG + NEW - 1
        assert done.report.layers["full" if exact == "bitwise" else "tagged"] == 3
    with unchanged(own), offload(own, path=path, memory="260KiB") as done:
        assert answer(own, inputs).tokens.shape == (1, LONG + NEW)
    assert done.report is not None and done.report.memory_budget == 260 * 2**10 >= done.report.peak_memory_bytes
    assert done.report.decode_steps == NEW - 1 and (done.report.selected_fraction or 1) < 0.9


def _stored_bytes(model: Any) -> int:
    """Bytes of a model's tensors, with those that bitsandbytes keeps beside a weight."""
    found = [*model.parameters(), *model.buffers()]
    for weight in model.parameters():
        states = [getattr(weight, "quant_state", None)]
        states += [getattr(states[0], "state2", None)]
        found += [getattr(state, name, None) for state in states for name in ("absmax", "code", "offset")]
        found += [getattr(weight, "SCB", None)]
    return sum(tensor.nbytes for tensor in {id(one): one for one in found if isinstance(one, torch.Tensor)}.values())


QUANTISED: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "nf4": ("Linear4bit", torch.float32, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp4, scales too": ("Linear4bit", torch.bfloat16, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
    "int8": ("Linear8bitLt", torch.bfloat16, {"load_in_8bit": True}),
}


@pytest.mark.parametrize("name", list(QUANTISED))
def test_quantised_weights(name: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    kind, dtype, options = QUANTISED[name]
    own = loaded(folder, quantization_config=transformers.BitsAndBytesConfig(**options), dtype=dtype, device_map=DEVICE)
    assert type(own.model.layers[0].mlp.up_proj).__name__ == kind
    with torch.device("meta"):
        planned = transformers.AutoModelForCausalLM.from_config(own.config).to(dtype)
    counted = quantized_bytes(planned, own.config.quantization_config.to_dict(), "cpu")
    assert 0 <= _stored_bytes(own) - counted < 1024, "what `plan` counts, but for the rotary frequencies"
    for module in own.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # that kernel rounds activations to bfloat16
    rounds = kind == "Linear8bitLt" or dtype == torch.bfloat16  # what differs by a last bit, by much more afterwards
    check(own, tmp_path, DEVICE, exact="bitwise" if rounds else True)


PARTS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head"]


def on_places(*places: Any) -> dict[str, Any]:
    return {"model.rotary_emb": places[0], **dict(zip(PARTS, places, strict=True))}


@pytest.mark.parametrize("how", ["loaded", "dispatched"])
def test_weights_on_the_disk(how: str, folder: Path, tmp_path: Path) -> None:
    """Two of three layers, which accelerate brings for each forward; the others in memory."""
    places = on_places("cpu", "cpu", "disk", "disk", "disk", "cpu")
    if how == "loaded":
        own = loaded(folder, device_map=places, offload_folder=tmp_path / "weights")
    else:
        own = accelerate.dispatch_model(loaded(folder), places, "cpu", offload_dir=tmp_path / "weights")
    assert [layer.mlp.up_proj.weight.device.type for layer in own.model.layers] == ["cpu", "meta", "meta"]
    check(own, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("places", [(0, 0, 1, 1, 1, 0), (0, 0, 0, "cpu", 0, 0)], ids=["two devices", "and the CPU"])
def test_several_devices(places: tuple[Any, ...], folder: Path, tmp_path: Path) -> None:
    """Each layer's keys and values are where it is."""
    if torch.cuda.device_count() <= max(place for place in places if place != "cpu"):
        pytest.skip("needs as many CUDA devices as are named")
    own = loaded(folder, device_map=on_places(*places))
    check(own, tmp_path, torch.device("cuda", 0))


def test_a_quantised_model_with_an_adapter(folder: Path, tmp_path: Path) -> None:
    """QLoRA: low rank beside 4 bits."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    own = loaded(folder, quantization_config=four, dtype=torch.float32, device_map=DEVICE)
    given = {"input_ids": prompt(long_model(), 1, 60)}
    plain = answer(own, given)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(own, lora).eval()
    expected = answer(adapted, given)
    assert not compare(expected, plain).exact
    for handed in (adapted, own):
        with offload(handed, path=tmp_path, exact="bitwise") as done:
            assert_exact(expected, answer(adapted, given), bitwise=True)
        assert done.requests == 1
