"""A random model that the tests of tuning share. No tests in here."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 3


@functools.cache
def tiny_llama(seed: int = 0, **changed: Any) -> Any:
    """In float32, in eval mode; matrices are large enough for attention to choose. Shared: change nothing of it."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": 199, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 8192, "bos_token_id": 1,
        "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changed})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5.0)
    return model


def tokenizer(text: str, verbose: bool) -> dict[str, Any]:
    """Token ids by the length of each word."""
    return {"input_ids": [3 + len(word) for word in text.split()]}


WORDS = " ".join("abcdefg"[: 1 + n * n % 7] for n in range(900))
"""A text of as many tokens."""


def token_ids(count: int, seed: int = 0) -> torch.Tensor:
    """(count,), int64."""
    return torch.randint(3, 199, (count,), generator=torch.Generator().manual_seed(seed))
