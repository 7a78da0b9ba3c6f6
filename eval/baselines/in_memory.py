"""Caches that hold all that they attend to in memory: transformers' quantized one, and a window of latest tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedCache

from hf_offload_cache.config import parse_memory
from hf_offload_cache.errors import BudgetError

SINKS = 4
"""First tokens that a window keeps (StreamingLLM, Xiao et al. 2024, section 3.2)."""


class WindowLayer(DynamicLayer):
    """The first `SINKS` and the latest of `kept` tokens, at their own positions. A call attends to these and to all of
    its own tokens."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept, self.seen = kept, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if keys.shape[-2] > self.kept:
            self.keys, self.values = (
                torch.cat([part[:, :, :SINKS], part[:, :, SINKS - self.kept :]], -2) for part in (keys, values)
            )
        return keys, values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.keys.shape[-2] if self.is_initialized else 0
        return held + query_length, self.seen - held


def window_tokens(memory: Any, max_context: int) -> int:
    """Tokens that `memory`, a share, keeps of `max_context`. Raises `BudgetError` if that is hardly more than sinks."""
    kept = parse_memory(memory, max_context)
    if kept < 2 * SINKS:
        raise BudgetError(f"memory must keep at least {2 * SINKS} tokens, got {memory}, {kept} of {max_context:,}")
    return kept


def window_cache(model: PreTrainedModel, memory: Any, max_context: int) -> Cache:
    """As many tokens as the share `memory` of `max_context` are, in layers with full attention; windows of the model's
    own stay as they are."""
    kept = window_tokens(memory, max_context)
    layers = DynamicCache(config=model.config).layers
    return Cache(layers=[WindowLayer(kept) if type(layer) is DynamicLayer else layer for layer in layers])


_GROUP, _RESIDUAL = 64, 128
"""Elements that have a scale and a shift of 16 bits in common, and tokens that are not quantized yet: the defaults."""


def quantized_cache(model: PreTrainedModel, bits: int) -> Cache:
    """transformers' own, by optimum-quanto (KIVI's idea; per channel of a flattened group, as transformers has it)."""
    return QuantizedCache(
        backend="quanto", config=model.config, nbits=bits, q_group_size=_GROUP, residual_length=_RESIDUAL
    )


def quantized_share(model: PreTrainedModel, bits: int, tokens: int) -> float:
    """Share of the full KV that `quantized_cache` holds between steps, with a full residual. A step also unpacks a
    layer."""
    element = 8 * model.dtype.itemsize
    packed = (bits + 2 * 16 / _GROUP) / element
    late = min(1.0, _RESIDUAL / tokens)
    return packed * (1 - late) + late


IN_MEMORY: dict[str, Callable[[PreTrainedModel, Any, int], Cache]] = {
    "window": window_cache,
    "4-bit": lambda model, memory, max_context: quantized_cache(model, 4),
    "2-bit": lambda model, memory, max_context: quantized_cache(model, 2),
}
"""Name -> how it is made for a share of memory and so many tokens."""
