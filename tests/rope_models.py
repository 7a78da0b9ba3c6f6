"""Tiny Llamas whose keys depend on the length of the forward that makes them. No tests in here."""

from __future__ import annotations

from typing import Any

from harness import COMMON, build
from transformers import LlamaConfig, LlamaForCausalLM

POSITIONS = 4096


def long_rope(original: int) -> Any:
    """Beyond `original` positions all keys of a forward are rotated by other frequencies."""
    own = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "factor": 4.0}
    own |= {"long_factor": [4.0] * 8, "original_max_position_embeddings": original}
    sizes = {**COMMON, "max_position_embeddings": POSITIONS, "rope_parameters": own}
    return build(LlamaForCausalLM, LlamaConfig(**sizes))


def dynamic_rope(original: int) -> Any:
    """Beyond `original` positions the frequencies depend on the longest text so far."""
    own = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    sizes = {**COMMON, "max_position_embeddings": original, "rope_parameters": own}
    return build(LlamaForCausalLM, LlamaConfig(**sizes))


KINDS = {"longrope": long_rope, "dynamic": dynamic_rope}
