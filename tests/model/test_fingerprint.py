"""What makes stored keys valid for a model: equal for the same model however it is held, named where it differs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, SMALL, build, config_of, fresh, prompt, tiny, unchanged
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizer,
    PreTrainedTokenizerFast,
)

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import ContextMismatchError
from hf_offload_cache.model import SAMPLE, check_fingerprint, full_fingerprint
from hf_offload_cache.model.weights import weights

LLAMA = "llama"


def differing(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """The names of the fields that are not the same on both sides."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def refused(stored: dict[str, str], model: Any, tokenizer: Any = None) -> str:
    """The message of the refusal, without what every one says."""
    with pytest.raises(ContextMismatchError) as caught:
        check_fingerprint(stored, model, tokenizer)
    return str(caught.value).partition(": ")[2].partition("; ")[0]


def of_config(name: str, **changed: Any) -> Any:
    """A tiny model with the matrix' weights (as far as shapes stay) and changed fields."""
    config = config_of(name)
    for field, value in changed.items():
        assert hasattr(config, field), field
        setattr(config, field, value)
    return build(type(tiny(name)), config)


# ---------------------------------------------------------------------------------------------- the same model


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "opt", "deepseek_v2"])
def test_a_reload_is_the_same_model(name: str, tmp_path: Path) -> None:
    model = fresh(name)
    stored = json.loads(json.dumps(full_fingerprint(model, every_byte=True)))
    assert all(type(value) is str for value in stored.values())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert full_fingerprint(again, every_byte=True) == stored
    check_fingerprint(stored, again)


def test_the_order_is_the_order_of_comparison() -> None:
    """The kind of model first, the weights last."""
    names = list(full_fingerprint(tiny(LLAMA), tokenizer(), every_byte=True))
    assert names[0] == "config.model_type"
    assert names[-3:] == ["tokenizer", "weights", "weights (full)"]
    groups = [name.partition(".")[0] for name in names[:-3]]
    first = dict.fromkeys(groups)
    assert list(first) == ["config", "attention", "rope", "dtype", "quantisation", "adapters"]
    assert groups == sorted(groups, key=list(first).index)


def put(part: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(part, name, value)


SAME: dict[str, Callable[[Any], Any]] = {
    "name": lambda model: put(model.config, _name_or_path="elsewhere/model", architectures=["Other"]),
    "attention implementation": lambda model: model.set_attn_implementation("eager"),
    "outputs": lambda model: (
        model.set_attn_implementation("eager"),
        put(model.config, output_attentions=True, output_hidden_states=True, use_cache=False),
    ),
    "attention implementation of a part": lambda model: put(
        model.config, attn_config={"attn_implementation": "eager", "attn_pdrop": 0.1}
    ),
    "generation config": lambda model: put(model.generation_config, temperature=0.3, max_new_tokens=5),
    "special tokens": lambda model: put(model.config, pad_token_id=7, eos_token_id=[2, 3]),
    "labels": lambda model: put(model.config, num_labels=5, problem_type="regression"),
    "dropout": lambda model: put(model.config, attention_dropout=0.1),
    "training mode": lambda model: model.train(),
    "no gradients": lambda model: model.requires_grad_(False),
    "moved to the cpu": lambda model: model.to("cpu"),
    "compiled in place": lambda model: model.compile(backend="eager"),
    "a deep copy": copy.deepcopy,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled within": lambda model: setattr(model, "model", torch.compile(model.model, backend="eager")),
    "not contiguous": lambda model: turn(model.model.layers[0].mlp.up_proj.weight),
}


def turn(parameter: torch.nn.Parameter) -> None:
    """The same numbers, column by column in memory."""
    parameter.data = parameter.data.t().contiguous().t()
    assert not parameter.is_contiguous()


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_key_changes_nothing(change: str) -> None:
    model = fresh(LLAMA)
    stored = full_fingerprint(model, every_byte=True)
    changed = SAME[change](model)
    model = changed if isinstance(changed, torch.nn.Module) else model
    assert full_fingerprint(model, every_byte=True) == stored
    check_fingerprint(stored, model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_attached_or_not_and_after_generate(name: str) -> None:
    """The seams are nothing of the model's, and asking changes nothing."""
    model = fresh(name)
    stored = full_fingerprint(model, every_byte=True)
    with DiskSwapCache(model, **SMALL) as cache:
        assert full_fingerprint(model, every_byte=True) == stored
        model.generate(prompt(model), past_key_values=cache, max_new_tokens=2)
        with unchanged(model):
            assert full_fingerprint(model, every_byte=True) == stored
    assert full_fingerprint(model, every_byte=True) == stored


def test_frequencies_that_grow_with_the_length() -> None:
    """A forward over more tokens than trained on recomputes them: that is no other model."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = of_config(LLAMA, rope_parameters=rope, max_position_embeddings=16)
    stored = full_fingerprint(model)
    before = model.model.rotary_emb.inv_freq.clone()
    model(prompt(model))
    assert not torch.equal(before, model.model.rotary_emb.inv_freq)
    assert full_fingerprint(model) == stored


def test_no_model() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        full_fingerprint(torch.nn.Linear(2, 2))


# ---------------------------------------------------------------------------------------------- another configuration

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
SLIDING = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
OTHER_CONFIG: dict[str, tuple[str, dict[str, Any], str]] = {
    "rope theta": (
        LLAMA,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "config.rope_parameters.rope_theta was 10000, here it is 500000",
    ),
    "rope scaling": (LLAMA, {"rope_parameters": LINEAR}, "config.rope_parameters.factor was absent, here it is 4"),
    "rope of one kind of layer": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10001.0},
            }
        },
        "config.rope_parameters.full_attention.rope_theta was 1000000, here it is 10001",
    ),
    "head dim": (LLAMA, {"head_dim": 32}, "config.head_dim was 16, here it is 32"),
    "key heads": (LLAMA, {"num_key_value_heads": 4}, "config.num_key_value_heads was 2, here it is 4"),
    "layers": (LLAMA, {"num_hidden_layers": 2}, "config.num_hidden_layers was 3, here it is 2"),
    "norm": (LLAMA, {"rms_norm_eps": 1e-5}, "config.rms_norm_eps was 1e-06, here it is 1e-05"),
    "sliding window": ("mistral_sliding", {"sliding_window": 8}, "config.sliding_window was 16, here it is 8"),
    "no sliding window": (
        "mistral_sliding",
        {"sliding_window": None},
        "config.sliding_window was 16, here it is absent",
    ),
    "attention scaling": (
        "gemma3",
        {"query_pre_attn_scalar": 32},
        "config.query_pre_attn_scalar was 16, here it is 32",
    ),
    "layer types": (
        "gemma3",
        {"layer_types": SLIDING},
        'config.layer_types was ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], '
        'here it is ["full_attention", "full_attention", "sliding_attention", "full_attention"]',
    ),
    "soft capping": (
        "gemma3",
        {"attn_logit_softcapping": 30.0},
        "config.attn_logit_softcapping was absent, here it is 30",
    ),
}


@pytest.mark.parametrize("case", OTHER_CONFIG)
def test_another_configuration_is_named(case: str) -> None:
    name, changed, message = OTHER_CONFIG[case]
    assert refused(full_fingerprint(tiny(name)), of_config(name, **changed)) == message


def test_another_kind_of_model_is_named_before_its_fields() -> None:
    assert refused(full_fingerprint(tiny(LLAMA)), tiny("qwen2")) == "config.model_type was llama, here it is qwen2"


def test_what_a_module_was_changed_to_after_it_was_built() -> None:
    """The configuration does not tell."""
    model = fresh("gemma3")
    stored = full_fingerprint(model)
    model.model.layers[1].self_attn.scaling *= 2
    assert refused(stored, model) == "attention.scaling was 0.25, here it is [0.25, 0.5, 0.25, 0.25]"


def test_the_type_of_the_weights() -> None:
    model = fresh(LLAMA)
    stored = full_fingerprint(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert refused(stored, model) == "dtype was float32, here it is bfloat16"
    with pytest.raises(ContextMismatchError, match=r"load it in float32 \(`--dtype`\), or prefill again"):
        check_fingerprint(stored, model)
    check_fingerprint(full_fingerprint(model), model)


def test_a_cast_model_has_other_angles_than_one_loaded_so(tmp_path: Path) -> None:
    """Casting rounds the rotary frequencies too; loading in a type keeps them."""
    cast = fresh(LLAMA)
    cast.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast.bfloat16()
    assert differing(full_fingerprint(loaded), full_fingerprint(cast)) == {"rope.inv_freq"}
    assert refused(full_fingerprint(loaded), cast) == "rope.inv_freq was float32, here it is bfloat16"


def test_the_part_around_a_text_model_counts() -> None:
    """Pictures become keys by the encoder's configuration."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    def composite(patch: int) -> Any:
        text = {**COMMON, "head_dim": 16, "sliding_window": 16, "num_hidden_layers": 2}
        vision = {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 8 * patch,
            "patch_size": patch,
        }
        torch.manual_seed(0)
        return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))

    model = composite(2)
    stored = full_fingerprint(model)
    assert stored["config.head_dim"] == "16"
    assert not [name for name in stored if "text_config" in name]
    assert refused(stored, composite(4)).startswith("outer config.vision_config.image_size was 16, here it is 32")
    with torch.no_grad():
        next(model.model.vision_tower.parameters()).view(-1)[0] += 1
    assert differing(stored, full_fingerprint(model)) == {"weights"}


# ---------------------------------------------------------------------------------------------- other weights


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_element_changes_the_full_digest(data: st.DataObject) -> None:
    model = tiny(LLAMA)
    stored = full_fingerprint(model, every_byte=True)
    parameters = list(model.parameters())
    parameter = parameters[data.draw(st.integers(0, len(parameters) - 1))]
    number = min(SAMPLE, parameter.numel())
    sampled = [place * (parameter.numel() - 1) // (number - 1) for place in range(number)]
    element = data.draw(st.sampled_from(sampled) | st.integers(0, parameter.numel() - 1))
    bits = parameter.data.view(-1).view(torch.int32)
    try:
        bits[element] ^= 1
        changed = full_fingerprint(model, every_byte=True)
        assert differing(stored, changed) == {"weights (full)"} | ({"weights"} if element in sampled else set())
        first = "weights" if element in sampled else "weights (full)"
        assert refused(stored, model).startswith(f"{first} was {stored[first]}, here it is {changed[first]}")
    finally:
        bits[element] ^= 1
    check_fingerprint(stored, model)


def test_first_and_last_element_of_every_parameter_are_sampled() -> None:
    model = fresh(LLAMA)
    stored = full_fingerprint(model)
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        for element in (0, -1):
            kept = flat[element].item()
            flat[element] = kept + 1
            assert differing(stored, full_fingerprint(model)) == {"weights"}, (name, element)
            flat[element] = kept
    assert full_fingerprint(model) == stored


def test_what_a_digest_sees() -> None:
    """Names and shapes beside the bytes; the sign of zero; buffers that are saved, and no others."""
    model = fresh(LLAMA)
    stored = full_fingerprint(model)["weights"]
    norm = model.model.norm
    norm.weight.data = norm.weight.data.view(8, 8)
    assert full_fingerprint(model)["weights"] != stored
    norm.weight.data = norm.weight.data.view(64)
    assert full_fingerprint(model)["weights"] == stored

    layers = model.model.layers
    first, second = layers[0].mlp, layers[1].mlp
    layers[0].mlp, layers[1].mlp = second, first
    assert full_fingerprint(model)["weights"] != stored
    layers[0].mlp, layers[1].mlp = first, second
    assert full_fingerprint(model)["weights"] == stored

    norm.weight.data[0] = 0.0
    zero = full_fingerprint(model)["weights"]
    norm.weight.data[0] = -0.0
    assert full_fingerprint(model)["weights"] != zero

    norm.weight.data[0] = 1.0
    norm.register_buffer("scratch", torch.zeros(3), persistent=False)
    assert full_fingerprint(model)["weights"] == stored
    norm.register_buffer("offset", torch.zeros(3))
    with_buffer = full_fingerprint(model)["weights"]
    assert with_buffer != stored
    norm.offset[1] = 1
    changed = full_fingerprint(model)["weights"]
    assert changed not in (stored, with_buffer)
    norm.register_buffer("renamed", norm.offset)
    del norm.offset
    assert full_fingerprint(model)["weights"] not in (stored, with_buffer, changed)


def test_tensors_that_consist_of_others() -> None:
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    model = fresh(LLAMA)
    numbers = model.model.norm.weight.data

    def of_two(other: torch.Tensor) -> str:
        model.model.norm.weight = torch.nn.Parameter(two_tensor.TwoTensor(numbers, other), requires_grad=False)
        return full_fingerprint(model)["weights"]

    same, changed = numbers.clone(), numbers.clone()
    changed[3] += 1
    assert of_two(same) == of_two(same.clone())
    assert of_two(same) != of_two(changed)


# ---------------------------------------------------------------------------------------------- offloaded weights


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_offloaded_weights_are_seen(where: str, tmp_path: Path) -> None:
    import accelerate

    model = fresh(LLAMA)
    stored = full_fingerprint(model, every_byte=True)
    if where == "memory":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert full_fingerprint(model, every_byte=True) == stored


def test_weights_that_nobody_holds_are_never_taken_for_seen_ones() -> None:
    model = fresh(LLAMA)
    stored = full_fingerprint(model, every_byte=True)
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.to("meta"))
    unseen = full_fingerprint(model, every_byte=True)
    assert differing(stored, unseen) == {"weights", "weights (full)"}
    count = len(list(weights(model)))
    assert unseen["weights"].startswith(f"unseen: 1 of {count} weights; ")
    assert refused(stored, model).startswith(f"weights was {stored['weights']}, here it is unseen: 1 of")


# ---------------------------------------------------------------------------------------------- adapters


def adapted(*names: str, **fields: Any) -> Any:
    """A tiny Llama with LoRA adapters of those names (random, not zero); the first is active."""
    peft = pytest.importorskip("peft")
    wrapped = None
    for seed, name in enumerate(names):
        lora = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "k_proj"], "init_lora_weights": False, **fields})
        torch.manual_seed(seed)
        if wrapped is None:
            wrapped = peft.get_peft_model(fresh(LLAMA), lora, adapter_name=name)
        else:
            wrapped.add_adapter(name, lora)
    return wrapped


def test_an_adapter_is_named() -> None:
    model = adapted("one")
    stored = full_fingerprint(tiny(LLAMA))
    assert stored["adapters"] == "none"
    assert refused(stored, model) == 'adapters was none, here it is ["one"]'
    assert full_fingerprint(model)["adapters.one.scaling"] == "2"


def test_an_adapter_is_the_same_through_either_handle(tmp_path: Path) -> None:
    """PEFT's wrapper, the model within, a compiled wrapper; and loaded again."""
    peft = pytest.importorskip("peft")
    model = adapted("one")
    stored = full_fingerprint(model)
    check_fingerprint(stored, model.get_base_model())
    check_fingerprint(stored, torch.compile(model, backend="eager"))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh(LLAMA), str(tmp_path / "one"), adapter_name="one")
    assert differing(stored, full_fingerprint(again)) == set()
    inner = model.get_base_model()
    inner.model = torch.compile(inner.model, backend="eager")
    check_fingerprint(stored, model)


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        (("one", "two"), lambda model: model.set_adapter("two"), 'adapters was ["one"], here it is ["two"]'),
        (("one",), lambda model: model.merge_adapter(), 'adapters.merged was [], here it is ["one"]'),
    ],
    ids=["another active one", "merged"],
)
def test_a_changed_adapter(names: tuple[str, ...], change: Callable[[Any], Any], message: str) -> None:
    model = adapted(*names)
    stored = full_fingerprint(model)
    change(model)
    assert refused(stored, model) == message


def test_a_disabled_adapter() -> None:
    model = adapted("one")
    stored = full_fingerprint(model)
    with model.disable_adapter():
        disabled = full_fingerprint(model)
        assert refused(stored, model) == "adapters.disabled was false, here it is true"
    check_fingerprint(stored, model)
    assert refused(disabled, model) == "adapters.disabled was true, here it is false"


def test_another_scaling_in_one_layer() -> None:
    model = adapted("one")
    stored = full_fingerprint(model)
    layer = model.get_base_model().model.layers[1].self_attn.k_proj
    layer.scale_layer(1.5)
    assert refused(stored, model) == "adapters.one.scaling was 2, here it is 2, 3"
    model.get_base_model().model.layers[0].self_attn.k_proj.scale_layer(1.5)
    both = full_fingerprint(model)
    layer.unscale_layer()
    assert differing(both, full_fingerprint(model)) == {"adapters.layers"}


def test_another_adapter_configuration() -> None:
    """The same weights, read another way."""
    stored = full_fingerprint(adapted("one", lora_alpha=8))
    model = adapted("one", lora_alpha=16)
    assert refused(stored, model) == "adapters.one.lora_alpha was 8, here it is 16"
    assert "weights" not in differing(stored, full_fingerprint(model))
    elsewhere = adapted("one", lora_alpha=8, target_modules=["v_proj", "q_proj"])
    names = 'was ["k_proj", "q_proj"], here it is ["q_proj", "v_proj"]'
    assert refused(stored, elsewhere) == f"adapters.one.target_modules {names}"


def test_an_adapter_that_transformers_put_in() -> None:
    peft = pytest.importorskip("peft")
    model = fresh(LLAMA)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), "one")
    stored = full_fingerprint(model)
    assert (stored["adapters"], stored["adapters.disabled"], stored["adapters.one.r"]) == ('["one"]', "false", "4")
    model.disable_adapters()
    assert refused(stored, model) == "adapters.disabled was false, here it is true"
    model.enable_adapters()
    check_fingerprint(stored, model)


def test_a_soft_prompt() -> None:
    """It is in front of the ids, and not among the model's weights."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(fresh(LLAMA), config)
    stored = full_fingerprint(model)
    assert refused(full_fingerprint(tiny(LLAMA)), model).startswith("adapters was none")
    check_fingerprint(stored, torch.compile(model, backend="eager"))
    with model.disable_adapter():
        assert refused(stored, model) == "adapters.disabled was false, here it is true"
    with torch.no_grad():
        next(model.prompt_encoder.parameters()).view(-1)[0] += 1
    assert differing(stored, full_fingerprint(model)) == {"adapters.prompt"}


# ---------------------------------------------------------------------------------------------- quantisation


def quantised(folder: Path, **fields: Any) -> Any:
    """The tiny Llama, quantised on the CPU as it is loaded."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    if not (folder / "config.json").exists():
        fresh(LLAMA).save_pretrained(folder)
    config = BitsAndBytesConfig(**fields)
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


def test_quantisation_is_named(tmp_path: Path) -> None:
    nf4 = full_fingerprint(quantised(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    fp4 = quantised(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="fp4")
    none = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert refused(nf4, fp4) == "quantisation.bnb_4bit_quant_type was nf4, here it is fp4"
    assert refused(nf4, none) == "quantisation was bitsandbytes, here it is none"
    assert refused(full_fingerprint(none), fp4) == "quantisation was none, here it is bitsandbytes"
    assert "weights" in differing(nf4, full_fingerprint(fp4))


SCHEMES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "other storage": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.float32},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model_stays_itself(scheme: str, tmp_path: Path) -> None:
    model = quantised(tmp_path, **SCHEMES[scheme])
    stored = full_fingerprint(model, every_byte=True)
    assert stored["dtype"] == "bfloat16"
    model.save_pretrained(tmp_path / "quantised")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "quantised")
    assert differing(stored, full_fingerprint(again, every_byte=True)) == set()
    model(prompt(model))
    assert differing(stored, full_fingerprint(model, every_byte=True)) == set()


@pytest.mark.parametrize("scheme", ["nf4", "nested", "other storage"])
def test_codes_packed_for_the_cpu_are_the_codes(scheme: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    model = quantised(tmp_path, **SCHEMES[scheme])
    stored = full_fingerprint(model, every_byte=True)
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    assert weight.quant_state.packing_format_for_cpu
    assert differing(stored, full_fingerprint(model, every_byte=True)) == set()
    weight.data[17, 5] ^= 16
    assert "weights (full)" in differing(stored, full_fingerprint(model, every_byte=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_are_weights(scheme: str, tmp_path: Path) -> None:
    model = quantised(tmp_path, **SCHEMES[scheme])
    stored = full_fingerprint(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    if scheme == "int8":
        weight.SCB.view(-1)[0] *= 2
    elif scheme == "nested":
        weight.quant_state.offset *= 2
    else:
        weight.quant_state.absmax.view(-1)[0] *= 2
    assert differing(stored, full_fingerprint(model)) == {"weights"}


# ---------------------------------------------------------------------------------------------- tokenizers

WORDS = ["[UNK]", "[PAD]", *(f"word{number}" for number in range(20))]


def tokenizer(words: list[str] = WORDS, normalizer: Any = None) -> PreTrainedTokenizerFast:
    """Of whole words."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def with_added_token() -> PreTrainedTokenizerFast:
    changed = tokenizer()
    changed.add_tokens(["new"])
    return changed


OTHER_TOKENIZER: dict[str, Callable[[], Any]] = {
    "one more word": lambda: tokenizer([*WORDS, "more"]),
    "two words swapped": lambda: tokenizer([*WORDS[:-2], WORDS[-1], WORDS[-2]]),
    "added token": with_added_token,
    "normalizer": lambda: tokenizer(normalizer=normalizers.Lowercase()),
}


@pytest.mark.parametrize("case", OTHER_TOKENIZER)
def test_another_tokenizer_is_named(case: str) -> None:
    model = tiny(LLAMA)
    stored = full_fingerprint(model, tokenizer())
    message = refused(stored, model, OTHER_TOKENIZER[case]())
    assert message.startswith(f"tokenizer was {stored['tokenizer']}, here it is ")


def test_the_same_tokenizer(tmp_path: Path) -> None:
    model, used = tiny(LLAMA), tokenizer()
    stored = full_fingerprint(model, used)
    used(["word1", "word2 word3 word4"], padding=True, truncation=True, max_length=2)
    used.backend_tokenizer.enable_truncation(5)
    used.backend_tokenizer.enable_padding(pad_token='",\\"added_tokens":')
    used.chat_template = "{{ messages }}"
    assert full_fingerprint(model, used) == stored
    tokenizer().save_pretrained(tmp_path)
    check_fingerprint(stored, model, PreTrainedTokenizerFast.from_pretrained(tmp_path))


def test_a_tokenizer_on_one_side_alone_is_not_compared() -> None:
    model = tiny(LLAMA)
    check_fingerprint(full_fingerprint(model), model, tokenizer())
    check_fingerprint(full_fingerprint(model, tokenizer()), model)


class Slow(PreTrainedTokenizer):
    """One without a backend, of whole words."""

    def __init__(self, words: list[str], **options: Any) -> None:
        self.words = {word: number for number, word in enumerate(words)}
        super().__init__(unk_token="[UNK]", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {**self.words, **self.added_tokens_encoder}

    def _convert_token_to_id(self, token: str) -> int:
        return self.words.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.words)[index]


def test_a_tokenizer_without_a_backend() -> None:
    model = tiny(LLAMA)
    stored = full_fingerprint(model, Slow(WORDS))
    check_fingerprint(stored, model, Slow(WORDS))
    more = Slow(WORDS)
    more.add_tokens(["new"])
    for other in (Slow([*WORDS, "more"]), more, Slow(WORDS, do_lower_case=True), tokenizer()):
        assert refused(stored, model, other).startswith("tokenizer was")


# ---------------------------------------------------------------------------------------------- the comparison


def test_fields_that_only_one_side_has() -> None:
    model = tiny(LLAMA)
    stored = full_fingerprint(model)
    without = {name: value for name, value in stored.items() if name != "config.head_dim"}
    assert refused(without, model) == "config.head_dim was absent, here it is 16"
    assert refused({**stored, "later": "x"}, model) == "later was x, here it is absent"
    assert refused({}, model) == "config.model_type was absent, here it is llama"


def test_the_order_does_not_depend_on_the_stored_one() -> None:
    model = tiny(LLAMA)
    stored = {**full_fingerprint(model), "weights": "x", "config.head_dim": "8", "dtype": "float16", "later": "x"}
    for ordered in (stored, dict(reversed(stored.items())), dict(sorted(stored.items()))):
        assert refused(ordered, model) == "config.head_dim was 8, here it is 16"
    assert refused({**full_fingerprint(model), "weights": "x", "z": "x"}, model) == "z was x, here it is absent"


def test_the_full_digest_comes_after_all_else_and_only_where_it_is_stored() -> None:
    model = fresh(LLAMA)
    sampled, full = full_fingerprint(model), full_fingerprint(model, every_byte=True)
    model.model.layers[0].mlp.up_proj.weight.data.view(-1)[1] += 1
    check_fingerprint(sampled, model)
    assert refused(full, model).startswith("weights (full) was ")
    assert refused({**full, "dtype": "x"}, model) == "dtype was x, here it is float32"


def test_long_values_are_shown_where_they_differ() -> None:
    layers = ["full_attention"] * 60
    model = build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "num_hidden_layers": 1}))
    model.config.some_list = layers
    stored = full_fingerprint(model)
    model.config.some_list = [*layers[:40], "sliding_attention", *layers[41:]]
    message = refused(stored, model)
    assert message.startswith("config.some_list was ...")
    assert '"full_attention", "sliding_attention"' in message
    assert len(message) < 300
