"""A tiny Llama with a word-level tokenizer that has no chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(96)]
POSITIONS = 512
NEW = 6


def save_word_model(folder: Path, splitter: Any, *more: str) -> Path:
    """`folder`, where it lies then; `more` words."""
    specials = ["<unk>", "<eos>", "Question", "Answer", ":", *more]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(specials + WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = splitter
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(specials) + len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS,
        bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answered(folder: Path, ids: torch.Tensor) -> str:
    """The answer by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1}
    return str(tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :], skip_special_tokens=True)).strip()
