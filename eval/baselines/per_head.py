"""Heads with records of their own: one record is one token of one key head."""

from __future__ import annotations

from typing import Any

import torch

from hf_offload_cache.model.attention_call import AttentionFunction
from hf_offload_cache.model.tag import TAG, Tag

from .selective import SelectiveCache, SelectiveLayer


def fold_heads(tensor: torch.Tensor) -> torch.Tensor:
    """(B, Hk, t, D) as (B Hk, 1, t, D): rows of one sequence lie together, head after head."""
    return tensor.reshape(-1, 1, *tensor.shape[2:])


def unfold_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The reverse of `fold_heads`."""
    return tensor.reshape(-1, heads, *tensor.shape[2:])


class PerHeadLayer(SelectiveLayer):
    """A layer that keeps key heads as rows of a batch, so that each has a history, records and a choice of its own.

    On disk a record is rounded up to the device's block: 512 bytes of a head of 128 in 16 bits take 4 KiB.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `OffloadLayer.update`, with the shapes that the model gave."""
        self.fold = key_states.shape[1]
        folded = super().update(fold_heads(key_states), fold_heads(value_states), *args, **kwargs)
        tag = getattr(folded[0], TAG, None)
        keys, values = (unfold_heads(tensor, self.fold) for tensor in folded)
        if tag is not None:
            setattr(keys, TAG, tag)
            setattr(values, TAG, tag)
        return keys, values

    def _attend(
        self,
        tag: Tag,
        attention: AttentionFunction,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, heads, length, dim = query.shape
        folded_query = query.reshape(batch * self.fold, heads // self.fold, length, dim)
        folded = [fold_heads(tensor) for tensor in (key, value)]
        if getattr(value, TAG, None) is tag:
            for tensor in folded:
                setattr(tensor, TAG, tag)
        if mask is not None and mask.shape[0] > 1:
            mask = mask.repeat_interleave(self.fold, 0)
        output, _ = super()._attend(tag, attention, module, folded_query, *folded, mask, *args, **kwargs)
        return output.unflatten(0, (batch, self.fold)).transpose(1, 2).flatten(2, 3), None

    def importance(self, weights: torch.Tensor) -> torch.Tensor:
        """One row a key head: the sum over its query heads."""
        return weights.unflatten(0, (self.fold, -1)).sum(1)


class PerHeadCache(SelectiveCache):
    """A cache of `PerHeadLayer`s; refuses groups of several tokens."""

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        if config is None:
            fields = {"group_size": 1, "reuse_capacity": 0, **fields}
        super().__init__(model, path, config, **fields)

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        fold = max((layer.fold for layer in self.offloaded if isinstance(layer, PerHeadLayer)), default=1)
        if given is not None and fold > 1:  # the layers hold a row for each head
            rows = given.new_empty(given.shape[0] * fold, given.shape[1], 0)
            kwargs = {**kwargs, "input_ids": None, "inputs_embeds": rows}
        super().begin_step(model, kwargs)
