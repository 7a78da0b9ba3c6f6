"""Tiny models whose ids are no (B, T): several codes stand for one token. No tests in here."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    MusicgenMelodyDecoderConfig,
    MusicgenMelodyForCausalLM,
)

CODEBOOKS = 4


class Coded(NamedTuple):
    model: Any
    options: dict[str, Any]
    """Of its `generate`."""
    rows: int
    """Rows of ids for one sequence."""

    def prompt(self, sequences: int, length: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 50, (sequences * self.rows, length), generator=generator)

    def generate(self, ids: torch.Tensor, cache: Any = None, new: int = 6, **more: Any) -> torch.Tensor:
        with_cache = {} if cache is None else {"past_key_values": cache}
        with torch.no_grad():
            return self.model.generate(  # type: ignore[no-any-return]
                ids, max_new_tokens=new, do_sample=False, **{**self.options, **with_cache, **more}
            )


def _larger(model: Any) -> Any:
    """Weights whose tokens tell of what a cache loses."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    return model.eval()


def _music(model_class: Any, config_class: Any) -> Coded:
    config = config_class(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        num_codebooks=CODEBOOKS, pad_token_id=99, bos_token_id=99,
    )  # fmt: skip
    model = _larger(model_class(config))
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        setattr(model.generation_config, name, 99)
    return Coded(model, {"num_return_sequences": 1, "guidance_scale": 1.0}, CODEBOOKS)


def _speech() -> Coded:
    depth = dict(
        num_codebooks=CODEBOOKS, backbone_hidden_size=64, vocab_size=51, hidden_size=32, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    config = CsmConfig(
        num_codebooks=CODEBOOKS, vocab_size=51, text_vocab_size=99, hidden_size=64, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, depth_decoder_config=depth,
    )  # fmt: skip
    model = _larger(CsmForConditionalGeneration(config))
    model.generation_config.eos_token_id = None
    return Coded(model, {}, 1)


@functools.cache
def coded(name: str) -> Coded:
    """The model of that name, shared by all tests: whoever attaches to it has to close."""
    torch.manual_seed(0)
    if name == "csm":
        return _speech()
    if name == "musicgen":
        return _music(MusicgenForCausalLM, MusicgenDecoderConfig)
    return _music(MusicgenMelodyForCausalLM, MusicgenMelodyDecoderConfig)


NAMES = ("musicgen", "musicgen_melody", "csm")
