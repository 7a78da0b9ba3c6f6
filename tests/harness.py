"""Tiny models, decoding cases and the comparison that every exactness test shares. No tests in here.

Logits are compared, not tokens alone, and the weights are larger than an initialisation gives: the tokens of a
default-initialised tiny model stay the same even when a cache loses its history or ignores the padding.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hf_offload_cache.testing.model_walk import SMALL, TOLERANCE, Comparison, Decoded, compare

__all__ = ["SMALL", "TOLERANCE", "Comparison", "Decoded", "compare"]  # tests find here what they share

PROMPT, NEW = 67, 8
"""Tokens of a prompt and tokens to generate: with `SMALL`, 14 groups, and two more that are sealed meanwhile, of which
the second is a fourth block's last."""

PAD = 0
"""Padding token; prompts do not contain it."""

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
"""Where models and prompts are: "cuda" runs on a GPU what runs on a CPU, too (`make test-gpu`)."""


def since(version: str, why: str) -> pytest.MarkDecorator:
    """Skips under an older transformers, for a fault of its own."""
    older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(older, reason=f"transformers before {version}: {why}")


RECORDED_WINDOWS = since("5.23", "with `DynamicCache` too, a step after `activate_past_recording` fails beside windows")

# ---------------------------------------------------------------------------------------------- models


def build(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0, scale: float = 5.0) -> Any:
    """A random model in float32, in eval mode, that never stops early; matrices times `scale`."""
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(scale)
    generation = model.generation_config
    generation.use_cache = True  # mpt's default is False: generate would feed the whole prompt again at each step
    generation.eos_token_id, generation.bos_token_id, generation.pad_token_id = None, 1, PAD
    generation.forced_eos_token_id = generation.forced_bos_token_id = generation.begin_suppress_tokens = None
    return model.to(DEVICE)


COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "layer_types": _SLIDING_AND_FULL,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": _SLIDING_AND_FULL,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    # not in the exactness matrix, used by the seams' tests
    "mistral_sliding": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {}),
}
"""Name -> (prefix of the config and model classes, fields that differ from the common ones)."""

_CLASS_OF_CONFIG = {"Gemma3": "Gemma3TextConfig"}


def config_of(name: str) -> PreTrainedConfig:
    """A fresh tiny config of the matrix."""
    prefix, fields = TINY[name]
    config_class = getattr(transformers, _CLASS_OF_CONFIG.get(prefix, f"{prefix}Config"))
    return config_class(**copy.deepcopy({**COMMON, **fields}))


def fresh(name: str, seed: int = 0) -> Any:
    """A new tiny model of the matrix, for tests that change it."""
    return build(getattr(transformers, f"{TINY[name][0]}ForCausalLM"), config_of(name), seed)


@functools.cache
def tiny(name: str) -> Any:
    """The tiny model of that name, shared by all tests: whoever attaches to it has to close."""
    model = fresh(name)
    model.tiny_name = name
    return model


@functools.cache
def assistant_of(name: str) -> Any:
    """A model that agrees with `tiny(name)` often but not always."""
    model = fresh(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            parameter.add_(0.02 * float(parameter.std(correction=0)) * noise)
    return model


# ---------------------------------------------------------------------------------------------- cases


Case = Callable[..., Decoded]
"""(model, cache, tokens to generate = NEW) -> what came of it."""


def vocabulary(model: Any) -> int:
    """Size of the vocabulary of the text model."""
    return model.config.get_text_config(decoder=True).vocab_size


def prompt(model: Any, rows: int = 1, length: int = PROMPT, seed: int = 7) -> torch.Tensor:
    """Random token ids (rows, length) without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocabulary(model), (rows, length), generator=generator).to(DEVICE)


def repetitive_prompt(model: Any, length: int = PROMPT) -> torch.Tensor:
    """One row in which n-grams come back, so that prompt lookup finds candidates."""
    return prompt(model, 1, 11).repeat(1, length // 11 + 1)[:, :length]


def padding(rows: int, length: int = PROMPT, step: int = 11) -> torch.Tensor:
    """A left-padding mask (rows, length); row i has i * step padded positions, more than a block of `SMALL` in the
    third row."""
    mask = torch.ones(rows, length, dtype=torch.long, device=DEVICE)
    for row in range(rows):
        mask[row, : row * step] = 0
    return mask


def generate(model: Any, cache: Cache | None, input_ids: torch.Tensor, **options: Any) -> Decoded:
    """`model.generate` with the logits of every step; greedy unless told otherwise."""
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, **options}
    if cache is not None:
        options["past_key_values"] = cache
    with torch.no_grad():
        out = model.generate(input_ids, return_dict_in_generate=True, output_logits=True, **options)
    return Decoded(out.sequences, torch.stack([step.float() for step in out.logits]))


def greedy(model: Any, cache: Cache | None, new: int = NEW) -> Decoded:
    """One row, no padding."""
    return generate(model, cache, prompt(model), max_new_tokens=new)


def sample(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Sampling with a seed."""
    torch.manual_seed(3)
    return generate(model, cache, prompt(model), do_sample=True, top_k=0, temperature=1.2, max_new_tokens=new)


def beams(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Two rows, three beams each: the cache is reordered at every step."""
    return generate(model, cache, prompt(model, 2), num_beams=3, max_new_tokens=new)


def batch(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Three rows of one length."""
    return generate(model, cache, prompt(model, 3), max_new_tokens=new)


def left_padding(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Three rows with 0, 11 and 22 padded positions."""
    mask = padding(3)
    return generate(model, cache, prompt(model, 3).masked_fill(mask == 0, PAD), attention_mask=mask, max_new_tokens=new)


def padded_beams(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Two rows, the second padded, three beams each."""
    mask = padding(2, step=19)
    ids = prompt(model, 2).masked_fill(mask == 0, PAD)
    return generate(model, cache, ids, attention_mask=mask, num_beams=3, max_new_tokens=new)


def chunked_prefill(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """The prompt in pieces of 16."""
    return generate(model, cache, prompt(model), prefill_chunk_size=16, max_new_tokens=new)


def padded_chunked_prefill(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Three rows, the prompt in pieces of 16, a whole piece of the third row padded."""
    mask = padding(3)
    ids = prompt(model, 3).masked_fill(mask == 0, PAD)
    return generate(model, cache, ids, attention_mask=mask, prefill_chunk_size=16, max_new_tokens=new)


def prompt_lookup(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Candidates from the prompt: several queries over a history, rejected ones are cropped."""
    return generate(model, cache, repetitive_prompt(model), prompt_lookup_num_tokens=4, max_new_tokens=new)


def assistant(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Candidates from a second model."""
    return generate(model, cache, prompt(model), assistant_model=assistant_of(model.tiny_name), max_new_tokens=new)


def second_turn(model: Any, cache: Cache, new: int = NEW) -> Decoded:
    """Two rows; generate, append nine tokens, generate again on the same cache."""
    first = generate(model, cache, prompt(model, 2), max_new_tokens=new // 2)
    ids = torch.cat([first.tokens, prompt(model, 2, 9, seed=8)], dim=1)
    second = generate(model, cache, ids, max_new_tokens=new // 2)
    return Decoded(second.tokens, torch.cat([first.logits, second.logits]))


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        greedy,
        sample,
        beams,
        batch,
        left_padding,
        padded_beams,
        chunked_prefill,
        padded_chunked_prefill,
        prompt_lookup,
        assistant,
        second_turn,
    )
}


# ---------------------------------------------------------------------------------------------- comparison


def assert_exact(reference: Decoded, result: Decoded, bitwise: bool = False) -> None:
    """Raises AssertionError, with the numbers, unless the result is exact (or bitwise equal)."""
    found = compare(reference, result)
    assert found.bitwise if bitwise else found.exact, found


_references: dict[tuple[str, str], Decoded] = {}


def reference(name: str, case: str) -> Decoded:
    """What `DynamicCache` gives for that tiny model and case, computed once."""
    if (name, case) not in _references:
        model = tiny(name)
        _references[name, case] = CASES[case](model, DynamicCache(config=model.config))
    return _references[name, case]


# ---------------------------------------------------------------------------------------------- state of a model


def fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that attaching changes: hooks of all modules, the attention implementation of all configs, and the
    attention tables of the files that define the modules."""
    state: dict[str, Any] = {"attributes": sorted(vars(model))}
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        table = getattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS", None)
        state[f"{kind.__module__}.table"] = id(table)
    for name, module in model.named_modules():
        for field in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs"):
            state[f"{name}.{field}"] = dict(getattr(module, field))
        state[f"{name}._forward_pre_hooks_with_kwargs"] = dict(module._forward_pre_hooks_with_kwargs)
        state[f"{name}.forward"] = module.__dict__.get("forward")
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            for key in ("", *getattr(config, "sub_configs", {})):
                part = getattr(config, key) if key else config
                state[f"{name}.config.{key}"] = getattr(part, "_attn_implementation", None)
    return state


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Asserts that the model is, after the block, exactly as before."""
    before = fingerprint(model)
    yield
    after = fingerprint(model)
    assert after.keys() == before.keys()
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}


# ---------------------------------------------------------------------------------------------- broken on purpose


class OnlyNewTokens(DynamicLayer):
    """Loses the history."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        super().update(key_states, value_states, *args, **kwargs)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.get_seq_length()


class StaleGroup(DynamicLayer):
    """Hands out four tokens of the history as zeros, once it is long."""

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]  # 5.17's own keeps the batch size

    def update(self, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(*args, **kwargs)
        if keys.shape[-2] < 48:
            return keys, values
        keys, values = keys.clone(), values.clone()
        keys[:, :, 32:36] = 0
        values[:, :, 32:36] = 0
        return keys, values


class NoReorder(DynamicLayer):
    """Leaves the beams where they are."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        pass


class CropsTooMuch(DynamicLayer):
    """Takes the oldest instead of the newest tokens away."""

    def crop(self, max_length: int) -> None:
        if max_length and self.is_initialized:
            self.keys, self.values = self.keys[..., -max_length:, :], self.values[..., -max_length:, :]


def broken(model: Any, layer_class: type[DynamicLayer]) -> DynamicCache:
    """A `DynamicCache` whose full-attention layers are of the class."""
    cache = DynamicCache(config=model.config)
    cache.layers = [layer_class() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def tokenizer(size: int) -> Any:
    """A tokenizer whose words are w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w3")
