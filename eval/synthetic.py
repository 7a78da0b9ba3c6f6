"""Models of SmolLM2-135M's shape with random weights, and long contexts put into a cache without a prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import Cache

from hf_offload_cache.core import OffloadLayer
from hf_offload_cache.model import AttentionCall

NOISE = 1.25
"""Root mean square of the part of a key that is its own. It keeps the best groups from lying side by side more than a
real model's do on text, where 1.6 adjacent ones are read together without reuse, and 1.2 with it."""

SHIFT = 509
"""Tokens by which rows of a batch differ: no multiple of a group."""


@dataclass(frozen=True)
class Shape:
    """Sizes that decide a step's time and memory; SmolLM2-135M's by default."""

    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 576
    intermediate: int = 1536
    vocabulary: int = 49152

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in 16 bits, all layers."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def light(self, layers: int | None = None) -> Shape:
        """The same cache (of `layers` layers) with a model that is next to nothing: to measure the cache alone."""
        return Shape(layers or self.layers, self.heads, self.kv_heads, self.head_dim, 8 * self.heads, 64, 256)


SMOLLM2 = Shape()
LLAMA_1B = Shape(layers=16, heads=32, kv_heads=8, head_dim=64, hidden=2048, intermediate=8192, vocabulary=128256)
LLAMA_8B = Shape(layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336, vocabulary=128256)


def build_model(
    shape: Shape, positions: int = 262144, seed: int = 0, device: torch.device | str = "cpu", window: int = 0
) -> Any:  # fmt: skip
    """A Llama with random weights in bfloat16, in evaluation mode. With `window`, a Qwen2 whose layers see so many
    tokens, but for each fourth, which sees all."""
    torch.manual_seed(seed)
    kinds = ["sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(shape.layers)]
    others = {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds} if window else {}
    config = (Qwen2Config if window else LlamaConfig)(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=positions, tie_word_embeddings=True, eos_token_id=None,
        **others,
    )  # fmt: skip
    made = (Qwen2ForCausalLM if window else LlamaForCausalLM)._from_config(config, dtype=torch.bfloat16)
    return made.to(device).eval()


def context(
    shape: Shape, tokens: int, layer_idx: int, batch: int = 1, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (B, Hkv, T, D) of `batch` sequences, bfloat16, made on `device`, the same for the same arguments;
    never zeros.

    Keys are a mean, a part of low rank that drifts slowly from token to token, and noise: most of their energy fits a
    compact copy. Most lies where the rotary embedding turns slowly, as a trained model's does. Values are noise. Row i
    is the first row, `i * SHIFT` tokens further on: views of one tensor, so that many rows take little more memory.
    """
    made: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(1000 + layer_idx), "device": device}
    width, rank, span, longest = shape.kv_heads * shape.head_dim, 24, 64, tokens + (batch - 1) * SHIFT
    corners = torch.randn(longest // span + 2, rank, **made)
    drift = torch.nn.functional.interpolate(corners.T[None], size=longest, mode="linear", align_corners=True)[0].T
    basis = torch.randn(rank, width, **made) / rank**0.5
    keys = drift @ basis + torch.randn(width, **made)
    keys += NOISE * torch.randn(longest, width, **made)
    half = torch.arange(shape.head_dim // 2, device=device)
    keys *= torch.where(half < shape.head_dim // 4, 0.2, 1.0).repeat(2 * shape.kv_heads)
    rows, size = [], (batch, shape.kv_heads, tokens, shape.head_dim)
    for part in (keys, torch.randn(longest, width, **made)):
        flat = part.view(longest, shape.kv_heads, shape.head_dim).transpose(0, 1).to(torch.bfloat16).contiguous()
        rows.append(flat.as_strided(size, (SHIFT * flat.stride(1), *flat.stride())))
    return rows[0], rows[1]


def fill(
    cache: Cache, model: LlamaForCausalLM, shape: Shape, tokens: int, batch: int = 1, piece: int | None = None
) -> None:
    """Put a context of random keys and values into an empty cache, ours or transformers', layer by layer: `update`,
    then `attend` with an attention function that computes nothing, so that groups are sealed and written, and summaries
    are made. Every row has records of its own; their content is `context`'s. `piece`: an offloaded layer gets so many
    tokens in this way, and then as many at a time without queries, which takes less memory; None: all at once."""
    with torch.no_grad():
        for layer_idx in range(shape.layers):
            keys, values = context(shape, tokens, layer_idx, batch, model.device)
            layer = cache.layers[layer_idx]
            size = piece if piece is not None and isinstance(layer, OffloadLayer) else tokens
            returned, other = cache.update(keys[:, :, :size], values[:, :, :size], layer_idx)
            queries = returned.new_zeros(batch, shape.heads, 1, shape.head_dim)
            attend_to_nothing(cache, model, layer_idx, queries, returned, other)
            del returned, other
            for first in range(size, tokens, size):
                layer.take(keys[:, :, first : first + size], values[:, :, first : first + size])
            del keys, values


def attend_to_nothing(cache: Cache, model: Any, layer_idx: int, *call: torch.Tensor) -> None:
    """The end of an offloaded layer's prefill: `attend` with queries, keys and values that nothing is computed of."""
    layer = cache.layers[layer_idx]
    if isinstance(layer, OffloadLayer) and layer.state != "full":
        module = model.model.layers[layer_idx].self_attn
        layer.attend(AttentionCall(_no_attention, module, *call, None, kwargs={"scaling": module.scaling}))


def _no_attention(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2), None


class Inputs:
    """Input embeddings (B, 1, hidden) of successive steps, the same for the same arguments. `likeness` is the
    correlation of one step's with the next's, and so sets the hit rate: tokens drawn at random (0) select anew in every
    step, a random model's own greedy tokens repeat themselves (1), and text is between."""

    def __init__(self, shape: Shape, likeness: float, seed: int = 1, batch: int = 1) -> None:
        self.shape, self.likeness, self.batch = shape, likeness, batch
        self._generator = torch.Generator().manual_seed(seed)
        self._latest = self._noise()

    def _noise(self) -> torch.Tensor:
        return torch.randn(self.batch, 1, self.shape.hidden, generator=self._generator)

    def next(self) -> torch.Tensor:
        """The embedding of the next step, bfloat16."""
        self._latest = self.likeness * self._latest + (1 - self.likeness**2) ** 0.5 * self._noise()
        return self._latest.to(torch.bfloat16)


def decode_step(model: LlamaForCausalLM, cache: Cache, embedding: torch.Tensor) -> torch.Tensor:
    """One decoding step; the logits (B, 1, vocabulary)."""
    with torch.no_grad():
        given = embedding.to(model.device)
        return model(inputs_embeds=given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
