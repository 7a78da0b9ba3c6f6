"""The model of the pages' blocks: a tiny one, with a tokenizer that has a token for each byte, and a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from site_pages import ROOT
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = (ROOT / "examples" / "document.txt").read_text()[:4500]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: 1 + at for at, letter in enumerate(letters)}}
    own = Tokenizer(BPE(vocabulary, []))
    own.pre_tokenizer, own.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<eos>", pad_token="<eos>")


def save_tiny(folder: Path) -> Path:
    """The model with its tokenizer in `folder`, as a hub gives it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=40000, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def session_of(folder: Path) -> dict[str, Any]:
    """What the quickstart's first block leaves, with the model in `folder`."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    return {"model": model, "tokenizer": tokenizer, "inputs": tokenizer(TEXT, return_tensors="pt")}
