"""Every causal language model that transformers ships, tiny: is a cache of ours exact with it?

`walk_one(config_class)` looks at one architecture; `PYTHONPATH=. python tests/walk.py [--all-cases] [NAME ...]` walks.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
import pytest
import transformers
from packaging.version import Version
from transformers import DynamicCache, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_offload_cache import DiskSwapCache

NEW = 8
"""Tokens to generate: two groups are sealed meanwhile, one of them a block's last; beams cross, windows slide."""

BESIDE = 4
"""Of these, tokens that `DynamicCache` generates on the attached model."""

SHORT_CASES = ("greedy", "padded_beams")
FURTHER_CASES = (
    "beams", "left_padding", "sample", "batch", "chunked_prefill", "padded_chunked_prefill", "prompt_lookup",
    "second_turn",
)  # fmt: skip
REPRESENTATIVES = (
    "bloom",
    "cohere2",
    "cpmant",
    "deepseek_v3",
    "doge",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "ministral",
    "minimax_m3_vl_text",
    "qwen3_next",
    "zamba2",
)
"""Architectures unlike each other, which the default run takes. `make test-all` takes all of them."""
WITH_EVERY_CACHE = (
    "bloom", "cpmant", "deepseek_v3", "falcon_h1", "gemma3n_text", "gpt_oss", "minimax_m3_vl_text", "qwen3_next",
)  # fmt: skip
"""Of these, the ones that the default run takes through steps of another cache, too, and not of `DiskSwapCache` alone;
the slow tests of every one."""

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, POSITIONS, WINDOW = 4, 64, 4, 2, 16, 96, 160, 512, 16


# ---------------------------------------------------------------------------------------------- tiny configs


_SIZED: tuple[tuple[int, str], ...] = (
    (
        VOCAB,
        "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size "
        "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base",
    ),
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim embedding_size lru_width "
        "hidden_size_global input_embedding_size output_embedding_size mamba_d_ssm qk_dim ple_embed_dim "
        "out_hidden_size projector_input_dim projector_output_dim vision_output_dim pronunciation_embed_dim "
        "shape_embed_dim backbone_hidden_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth num_blocks "
        "num_decoder_layers num_encoder_layers",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads swa_num_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "linear_num_heads linear_num_key_heads linear_num_value_heads index_n_heads",
    ),
    (KV_HEADS, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups"),
    (
        HEAD_DIM,
        "head_dim kv_channels attention_head_dim swa_head_dim global_head_dim linear_head_dim d_head "
        "linear_key_head_dim linear_value_head_dim index_head_dim qk_nope_head_dim v_head_dim dim_head d_kv "
        "mamba_d_state state_size ssm_state_size attention_head_size rotary_dim query_pre_attn_scalar",
    ),
    (
        FFN,
        "intermediate_size ffn_dim n_inner d_ff dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim mlp_dim "
        "dense_intermediate_size intermediate_size_mlp ffn_hidden_size block_ffn_dim shared_intermediate_size",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size feed_forward_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size router_hidden_size",
    ),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
        "model_max_length original_max_position_embeddings position_bias_max_distance",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size window_size attention_window_size local_attention "
        "attention_chunk_size local_attention_window_len index_topk mamba_chunk_size "
        "chunk_size",
    ),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_groups o_groups "
        "num_kv_shared_layers num_layers_per_stack H_cycles L_cycles altup_num_inputs",
    ),
    (
        1,
        "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group "
        "first_k_dense_replace num_dense_layers moe_layer_start_index zero_expert_num mamba_n_groups "
        "mamba_ngroups",
    ),
    (
        8,
        "qk_rope_head_dim o_lora_rank hidden_size_per_layer_input laurel_rank gated_norm_rank hc_lowrank "
        "d_rel mamba_n_heads mamba_num_heads n_mamba_heads",
    ),
    (16, "kv_lora_rank adapter_rank time_step_rank mamba_dt_rank mamba_d_head mamba_head_dim mamba_headdim"),
    (24, "q_lora_rank qk_head_dim"),
)
SIZES: dict[str, int] = {name: size for size, names in _SIZED for name in names.split()}
"""Field of a config -> its size in a tiny model, whatever the architecture."""

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_audio_encoder": {"adapter_out_dim": HIDDEN, "adapter_input_size": HIDDEN},
    "dots3_note_text": {
        "per_layer_config": {
            layer: {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "qk_nope_head_dim": 16}
            | {"qk_rope_head_dim": 16, "head_dim": 32, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24}
            for layer in ("1", "3")
        },
    },
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}}},
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}}},
    "gemma3n_text": {"intermediate_size": [FFN] * LAYERS},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> fields that the rules get wrong."""

NEVER_NONE = ("head_dim", "num_key_value_heads")
"""Fields whose default may be None, and which some models need."""


def pick_layers(kinds: Iterable[Any], layers: int = LAYERS) -> list[Any]:
    """`layers` entries of a per-layer list in which every kind comes up, in the order of first appearance."""
    distinct: list[Any] = []
    for kind in kinds:
        if kind not in distinct:
            distinct.append(kind)
    return [distinct[i % len(distinct)] for i in range(layers)]


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a tiny config, from the rules and the defaults of `config`."""
    fields: dict[str, Any] = {}
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = _fields(value)
        elif name in SIZES and not isinstance(value, (list, tuple)) and (value is not None or name in NEVER_NONE):
            fields[name] = SIZES[name]
        elif isinstance(value, (list, tuple)) and len(value) == layers and layers > 1:
            fields[name] = pick_layers(value)
        elif name.endswith("token_id"):
            fields[name] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": harness.PAD}.get(name, 3)
        elif isinstance(value, float) and ("dropout" in name or "drop" in name):
            fields[name] = 0.0
    if getattr(config, "qk_rope_head_dim", None):  # latent attention: as many key heads as heads
        fields["num_key_value_heads"] = HEADS
        if "head_dim" in fields:
            fields["head_dim"] = SIZES["qk_rope_head_dim"]
    if hasattr(config, "is_decoder"):
        fields["is_decoder"] = True
    return fields | SPECIAL.get(config.model_type, {})


def shrink(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A tiny config of that class."""
    return config_class(**copy.deepcopy(_fields(config_class())))


def tiny_model(config_class: type[PreTrainedConfig], **options: Any) -> Any:
    """The tiny model that `AutoModelForCausalLM` would build from that config class."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    config = shrink(config_class)
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    return harness.build(model_class, config, **options)


# ---------------------------------------------------------------------------------------------- one architecture


@dataclass
class Result:
    """What one architecture did.

    `status`: "exact", "wrong" (other logits than `DynamicCache`, or an error of ours), "not generating"
    (`DynamicCache` itself fails, or is not used by the model) or "not buildable" (no tiny model).
    """

    architecture: str
    model: str = ""
    status: str = "exact"
    reason: str = ""
    deviations: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    bitwise: bool | None = None
    """None: nothing was decoded for it."""
    layers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def generates(self) -> bool:
        """A tiny model of it generates with `DynamicCache`."""
        return self.status in ("exact", "wrong")

    @property
    def tagged_throughout(self) -> bool:
        """Exact, and no layer of the cache had to hand out its whole history."""
        return self.status == "exact" and not self.layers.get("full") and not self.layers.get("unknown")


PINNED = Version(
    next(
        line.removeprefix("transformers==")
        for line in (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
        if line.startswith("transformers==")
    )
)
"""The version of transformers that constraints.txt names."""


def beams_are_wrong(name: str) -> bool:
    """Older versions of transformers leave the state of DeepSeek V4's compressors as it is when beams change rows. Ours
    follow the rows, so there is nothing right to compare with."""
    if name != "deepseek_v4":
        return False
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    return "reorder_cache" not in vars(modeling.DeepseekV4HCACache)


def architectures_by_default() -> list[Any]:
    """Parameters for every architecture. The representatives are in the default run. So are all others under another
    version of transformers than the pinned one: a change of versions is what the walk is for."""
    changed = Version(transformers.__version__) != PINNED
    return usually(architectures() if changed else REPRESENTATIVES, architectures())


def usually(some: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Parameters for each of the names, slow but for `some`."""
    some = set(some)
    return [pytest.param(name, marks=[] if name in some else pytest.mark.slow) for name in names]


MakeCache = Callable[..., Any]
"""(model, exact=True or "bitwise") -> a cache, to be closed if it has `close`."""


def disk_swap(model: Any, exact: bool | str) -> Any:
    """The cache under test, without a disk: the store has tests of its own.

    Blocks so small that histories are merged of several; but not for a model that picks blocks of keys by rank, where
    the last bit of a merged output decides between two that tie, on one processor and not on another.
    """
    picks = any(name.startswith("index_topk") for name in vars(model.config))
    fields = {**harness.SMALL, "block_tokens": 1024} if picks else harness.SMALL
    return DiskSwapCache(model, exact=exact, engine="memory", **fields)


def architectures() -> dict[str, type[PreTrainedConfig]]:
    """Model type -> config class, of every causal language model of this transformers."""
    return {config_class.model_type: config_class for config_class in MODEL_FOR_CAUSAL_LM_MAPPING}


def walk_one(
    config_class: type[PreTrainedConfig], cases: Iterable[str] = SHORT_CASES, make: MakeCache = disk_swap,
    bitwise: bool = True, **options: Any,
) -> Result:  # fmt: skip
    """Compares a cache with `DynamicCache` on a tiny model of that architecture, made with `options`; `bitwise`: and
    greedy to the last bit, too. Never raises for the model's sake."""
    result = Result(config_class.model_type)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(config_class, **options)
        except Exception as error:
            result.status, result.reason = "not buildable", _one_line(error)
        else:
            result.model = type(model).__name__
            _compare_all(model, tuple(cases), make, bitwise, result)
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def _compare_all(model: Any, cases: tuple[str, ...], make: MakeCache, bitwise: bool, result: Result) -> None:
    references: dict[str, harness.Decoded] = {}
    for case in dict.fromkeys(("greedy", *cases) if bitwise else cases):  # the bitwise part is greedy
        try:
            cache = DynamicCache(config=model.config)
            references[case] = harness.CASES[case](model, cache, NEW)
            if not any(getattr(layer, "is_initialized", False) for layer in cache.layers):
                raise ValueError("the model does not use the cache")
            if not references[case].logits.isfinite().any():
                raise ValueError("the logits are not finite")
            if case == "second_turn" and cache.get_seq_length() != references[case].tokens.shape[1] - 1:
                raise ValueError("the cache holds other tokens than were fed: generate cannot tell what is new")
        except Exception as error:
            references.pop(case, None)
            result.refused[case] = _one_line(error)
    if not references or "greedy" in result.refused:
        result.status, result.reason = "not generating", next(iter(result.refused.values()))
        return
    before = harness.fingerprint(model)
    try:
        for case in filter(references.__contains__, cases):
            found, layers, _ = _run(model, case, references[case], make, True)
            result.deviations[case] = found.deviation
            result.layers = {key: max(count, result.layers.get(key, 0)) for key, count in layers.items()}
            if not found.exact:
                result.status, result.reason = "wrong", f"{case}: {found}"
        inert = True
        if bitwise:
            found, _, inert = _run(model, "greedy", references["greedy"], make, "bitwise", plain=True)
            result.bitwise = found.bitwise
        restored = harness.fingerprint(model) == before
        for good, reason in (
            (inert, "DynamicCache on the attached model is not as before"),
            (result.bitwise is not False, "greedy is not bitwise equal"),
            (restored, "closing did not restore the model"),
        ):
            if not good:
                result.status, result.reason = "wrong", "; ".join(filter(None, (result.reason, reason)))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        result.status, result.reason = "wrong", f"{_one_line(error)} ({Path(place.filename).name}:{place.lineno})"


def _run(
    model: Any, case: str, reference: harness.Decoded, make: MakeCache, exact: bool | str, plain: bool = False
) -> tuple[harness.Comparison, dict[str, int], bool]:
    """How a cache of ours compares, its layers' states, and (`plain`) whether `DynamicCache` is bitwise as before."""
    cache = make(model, exact=exact)
    try:
        decoded = harness.CASES[case](model, cache, NEW)
        report = cache.report() if hasattr(cache, "report") else None
        layers = {} if report is None else {**report.layers, "chosen by the model": report.chosen_by_model}
        inert = not plain or _is_as_before(model, case, reference)
    finally:
        getattr(cache, "close", lambda: None)()
    return harness.compare(reference, decoded), layers, inert


def _is_as_before(model: Any, case: str, reference: harness.Decoded) -> bool:
    """Whether `DynamicCache` gives the first tokens and logits of `reference`, to the last bit: the prompt and a few
    steps, since what is attached is attached to all of them."""
    plain = harness.CASES[case](model, DynamicCache(config=model.config), BESIDE)
    tokens = reference.tokens[:, : reference.tokens.shape[1] - NEW + BESIDE]
    return harness.compare(harness.Decoded(tokens, reference.logits[:BESIDE]), plain).bitwise


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# ---------------------------------------------------------------------------------------------- the whole walk


def summarise(results: Iterable[Result]) -> dict[str, Any]:
    """Counts and lists, ready for JSON."""
    results = list(results)
    count = Counter(result.status for result in results)
    exact = [result for result in results if result.status == "exact"]
    return {
        "transformers": transformers.__version__,
        "architectures": len(results),
        "generating": sum(result.generates for result in results),
        "exact": count["exact"],
        "wrong": count["wrong"],
        "tagged_throughout": sum(result.tagged_throughout for result in results),
        "fallback": sorted(result.architecture for result in exact if not result.tagged_throughout),
        "slowest_seconds": max((result.seconds for result in results), default=0.0),
        "max_deviation": max((max(result.deviations.values()) for result in exact), default=0.0),
        "not_generating": {r.architecture: r.reason for r in results if r.status == "not generating"},
        "not_buildable": {r.architecture: r.reason for r in results if r.status == "not buildable"},
        "results": [asdict(result) for result in results],
    }


def write_summary(results: Iterable[Result], path: str | None = None) -> dict[str, Any]:
    """The summary; also written as JSON to `path`, or to the path in the environment variable WALK_JSON."""
    summary = summarise(results)
    target = path or os.environ.get("WALK_JSON")
    if target:
        Path(target).write_text(json.dumps(summary, indent=1))
    return summary


def as_text(summary: dict[str, Any]) -> str:
    """The counts, and why the others could not be compared."""
    lines = [f"{key}: {value}" for key, value in summary.items() if isinstance(value, int | float | str)]
    lines.append(f"exact by the fallback: {', '.join(summary['fallback'])}")
    for key in ("not_generating", "not_buildable"):
        lines += [f"{key} {name}: {reason[:100]}" for name, reason in summary[key].items()]
    return "\n".join(lines)


def main() -> int:
    """Walks over the architectures named, or all; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="model types; all if none")
    parser.add_argument("--all-cases", action="store_true", help=f"also {', '.join(FURTHER_CASES)}")
    parser.add_argument("--json", help="where to write the summary")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known = architectures()
    cases = (*SHORT_CASES, *FURTHER_CASES) if arguments.all_cases else SHORT_CASES
    results = []
    for name in arguments.names or known:
        results.append(walk_one(known[name], cases))
        last = results[-1]
        print(f"{last.seconds:6.1f} s  {name:28} {last.status:15} {last.layers or ''} {last.reason}", flush=True)
    summary = write_summary(results, arguments.json)
    print(as_text(summary))
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
