"""Tiny models whose layers keep more than keys and values, or windows and states. No tests in here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformers
from harness import COMMON, build, tiny

_EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
_INDEXER = {"index_topk": 24, "index_n_heads": 2, "index_head_dim": 16}


def _made(prefix: str, config: str = "Config", model: str = "ForCausalLM", **fields: Any) -> Any:
    found = getattr(transformers, f"{prefix}{config}")(**{**COMMON, **fields})
    return build(getattr(transformers, f"{prefix}{model}"), found)


def _minimax_m3() -> Any:
    return _made(
        "MiniMaxM3VL", "TextConfig", head_dim=16, rotary_dim=8, dense_intermediate_size=64, shared_intermediate_size=32,
        num_experts_per_tok=2, num_local_experts=4, index_n_heads=2, index_head_dim=16, index_block_size=8,
        index_topk_blocks=4, layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    )  # fmt: skip


def _deepseek_v4() -> Any:
    kinds = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
    return _made(
        "DeepseekV4", num_key_value_heads=1, head_dim=32, q_lora_rank=24, qk_rope_head_dim=8, sliding_window=16,
        moe_intermediate_size=32, num_experts_per_tok=2, n_routed_experts=4, layer_types=kinds, o_groups=2,
        o_lora_rank=16, index_n_heads=2, index_head_dim=16, index_topk=8, hc_mult=2, mlp_layer_types=["moe"] * 3,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    )  # fmt: skip


LAYERED: dict[str, Callable[[], Any]] = {
    "indexer": lambda: _made("DeepseekV32", **_LATENT, **_EXPERTS, **_INDEXER),
    "indexer of glm": lambda: _made("GlmMoeDsa", **_LATENT, **_EXPERTS, **_INDEXER),
    "blocks of keys": _minimax_m3,
    "compressed": _deepseek_v4,
    "window": lambda: tiny("gemma3"),
    "hybrid": lambda: _made(
        "FalconH1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1,
        mamba_chunk_size=16,
    ),
    "convolution": lambda: _made("Lfm2", layer_types=["conv", "full_attention", "conv"], conv_L_cache=3),
    "linear": lambda: _made(
        "Qwen3Next", head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
}  # fmt: skip
"""Name -> a model. Those of windows and states have full-attention layers, too."""


def dense_with_indexers() -> Any:
    """Indexers without experts, which the counting device does not run."""
    return _made("DeepseekV32", **_LATENT, **_INDEXER, **{**_EXPERTS, "first_k_dense_replace": 3})


def mistral_large4() -> Any:
    """With keys that layers share, indexers that layers share, and layers without positions. Its first three layers own
    an indexer."""
    text = {
        **COMMON, **_EXPERTS, **_LATENT, **_INDEXER, "num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 0],
        "kv_source_layers": [0, 1, 0, 0, 1], "indexer_types": ["full", "full", "full", "shared", "full"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "head_dim": 16,
    }  # fmt: skip
    found = transformers.MistralLarge4Config(text_config=text, vision_config=vision)
    return build(transformers.MistralLarge4ForConditionalGeneration, found)


def glm5_next() -> Any:
    """With an indexer of blocks that a second layer shares, between linear layers."""
    text = {
        **COMMON, **_EXPERTS, **_LATENT, **_INDEXER, "qk_rope_head_dim": 0, "num_hidden_layers": 4, "index_kpool": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "linear_head_dim": 16, "linear_num_heads": 4, "hc_mult": 2,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 4,
        "image_size": 16, "projection_intermediate_size": 32,
    }  # fmt: skip
    found = transformers.Glm5NextConfig(text_config=text, vision_config=vision)
    return build(transformers.Glm5NextForConditionalGeneration, found)


@functools.cache
def layered(name: str) -> Any:
    """The model of that name, shared by all tests: whoever attaches to it has to close."""
    return LAYERED[name]()
