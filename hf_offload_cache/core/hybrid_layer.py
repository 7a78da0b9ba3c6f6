"""Layers of hybrid models: linear-attention state, kept as transformers keeps it, beside an offloaded history."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..contexts.kept_layers import capture_kept, restore_kept
from ..stores.freezable import FreezableStore
from .offload_layer import OffloadLayer


class _HybridMethods:
    """Puts transformers' own linear-attention state beside what an `OffloadLayer` offloads (see `hybrid`)."""

    is_croppable = LinearAttentionLayer.is_croppable

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # type: ignore[arg-type]
        else:
            super().lazy_initialization(*args)  # type: ignore[misc]

    def reset(self) -> None:
        states = self._states()
        recording = getattr(self, "record_past", False)
        LinearAttentionLayer.__init__(self, **states)  # type: ignore[arg-type]  # `reset` would keep the batch size
        self.record_past = recording
        super().reset()  # type: ignore[misc]

    def select_rows(self, rows: torch.Tensor) -> None:
        states = (self.conv_states, self.recurrent_states)  # type: ignore[attr-defined]
        for place, key, state in [(held, key, state) for held in states for key, state in held.items()]:
            if state is not None:
                place[key] = state.index_select(0, rows.to(state.device))
        super().select_rows(rows)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)  # type: ignore[arg-type]
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "linear": capture_kept(self, self._linear_names())}  # type: ignore[misc]

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        super().restore(tree, parts, device)  # type: ignore[misc]
        place = f"layer {self.layer_idx}"  # type: ignore[attr-defined]
        rows = self.batch or None  # type: ignore[attr-defined]
        restore_kept(self, tree["linear"], place, self._linear_names(), rows)

    def _linear_names(self) -> list[str]:
        return list(vars(LinearAttentionLayer(**self._states())))

    def _states(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("number_of_states",) if hasattr(self, name)}


@functools.cache
def hybrid(layer_class: type[OffloadLayer]) -> type[OffloadLayer]:
    """The class of layers that hold linear-attention states beside what `layer_class` offloads: one for each."""
    bases = (_HybridMethods, layer_class, LinearAttentionAndFullAttentionLayer)
    names = {"__module__": layer_class.__module__, "__doc__": f"A `{layer_class.__name__}` beside a linear state."}
    return type(f"Hybrid{layer_class.__name__}", bases, names)
