"""Puts known or random keys and values into a cache, without a prefill."""

from __future__ import annotations

from typing import Any

import torch

from ..core.cache import OffloadCache
from ..core.layer import OffloadLayer
from ..model.attention_call import AttentionCall
from ..model.config_values import config_value
from ..model.place import decoder_blocks, inner_model


def attention_modules(model: Any) -> dict[int, torch.nn.Module]:
    """The self-attention of each decoder block, by layer index."""
    return {layer_idx: attention for layer_idx, _, attention in decoder_blocks(inner_model(model))}


def fill(
    layer: OffloadLayer,
    module: torch.nn.Module,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor | None = None,
) -> None:
    """Put keys (B, Hk, T, Dk) and values (B, Hv, T, Dv) into an empty layer; `module` is its attention, `queries` (B,
    H, n, Dk) are the latest queries of these tokens, None: unknown.

    Works like a prefill in one piece, with an attention function that computes nothing: the layer is then "tagged", its
    groups are sealed and written, and its summary exists. Both tensors are copied. The look-ahead sees nothing.
    """
    config = getattr(module, "config", None)
    heads = config_value(config, "num_attention_heads") if config is not None else None
    with torch.no_grad():
        returned, other = layer.update(keys, values)
        query = keys.new_zeros(keys.shape[0], heads or keys.shape[1], 1, keys.shape[3]) if queries is None else queries
        layer.attend(AttentionCall(_no_attention, module, query, returned, other, None))


def _no_attention(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2), None


_LATEST = 512
"""Queries that a layer remembers: as many as coded keys are fitted to."""


class _ObservedLayer(OffloadLayer):
    """Remembers the latest queries of the last call with several."""

    seen: torch.Tensor | None = None
    scaling = 1.0

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.scaling = call.scaling
        if call.num_queries > 1:
            self.seen = call.query[:, :, -_LATEST:].detach().clone()
        return super().attend(call)


class ObservedCache(OffloadCache):
    """An exact cache whose layers remember the latest queries: see `observed`."""

    layer_class = _ObservedLayer


def observed(layer: OffloadLayer) -> torch.Tensor | None:
    """The latest queries (B, H, n, D) of a layer of an `ObservedCache`; None: its attention is not ours."""
    return layer.seen if isinstance(layer, _ObservedLayer) else None


def scaling_of(layer: OffloadLayer) -> float:
    """The scaling of scores that a layer of an `ObservedCache` saw."""
    return layer.scaling if isinstance(layer, _ObservedLayer) else 1.0
