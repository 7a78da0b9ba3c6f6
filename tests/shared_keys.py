"""A tiny model some of whose layers attend to the keys of others."""

from __future__ import annotations

from typing import Any

from harness import build
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig


def gemma3n() -> Any:
    config = Gemma3nTextConfig(
        vocab_size=199, vocab_size_per_layer_input=199, hidden_size=64, hidden_size_per_layer_input=16,
        intermediate_size=[64] * 6, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 6, laurel_rank=8, max_position_embeddings=512, altup_num_inputs=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return build(Gemma3nForCausalLM, config, scale=2.0)
