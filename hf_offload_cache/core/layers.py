"""Construction of a cache's layers for a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..config import OffloadConfig
from ..contexts.open import capture_kept, restore_kept
from ..memory.account import without_views
from ..memory.plan import LayerPlan
from ..model.geometry import indexer_topk
from ..model.place import has_indexer
from ..stores.base import FreezableStore
from .indexed_layer import IndexedLayer
from .layer import OffloadLayer
from .plan import LayerKind
from .shared import Shared
from .step import MOST_CANDIDATES

# The memory of layers that are not offloaded: sliding windows, linear states, indexers' keys

_LINEAR = ("conv_states", "recurrent_states")


def kept_state(layer: Any) -> dict[str, Any]:
    """The state that `layer` keeps in memory besides offloaded entries: its own attributes, not copies."""
    return capture_kept(layer, _LINEAR if isinstance(layer, OffloadLayer) else None)


def settle(layer: Any, most_cropped: int | None = None) -> None:
    """Copy the state of `layer` to its own memory, so that it does not keep the tensors alive that it was sliced from.
    State with at most one extra token is not copied: that is what a token added to a full window leaves.

    While the layer records its past, which a `crop` may partly remove, it keeps everything that it recorded. If the
    crop removes at most `most_cropped` tokens, it keeps that many beyond its needs. Candidates stay as they are,
    because copying a window at each verification would free only memory that the plan already counts.
    """
    recording = getattr(layer, "record_past", False)
    if recording and most_cropped is not None:
        _forget_past(layer, most_cropped)
    state = kept_state(layer)
    for name, value in without_views(state, MOST_CANDIDATES if recording else 1).items():
        if value is not state[name]:
            setattr(layer, name, value)


def _forget_past(layer: Any, most_cropped: int) -> None:
    """Drop what neither the window nor a crop needs; in an `OffloadLayer`, which has no window, only from states."""
    if (window := getattr(layer, "sliding_window", None)) and layer.is_initialized:
        most = window - 1 + most_cropped
        layer.keys, layer.values = layer.keys[:, :, -most:], layer.values[:, :, -most:]
    for place, states in getattr(layer, "conv_states", {}).items():
        if states is not None and (size := layer.conv_kernel_size[place]):
            layer.conv_states[place] = states[..., -(size + most_cropped) :]


def check_recorded(layer: Any, count: int) -> None:
    """Raise `RuntimeError` if a window cannot be cropped by `count` tokens because it no longer has the tokens before
    them: with the remaining ones it would attend to fewer tokens than the model does."""
    window = getattr(layer, "sliding_window", None)
    if not (window and count and getattr(layer, "record_past", False) and layer.is_initialized):
        return
    held, length = layer.keys.shape[-2], layer.get_seq_length()
    if held < min(length, window - 1 + count):
        raise RuntimeError(
            f"the cache cannot be cropped by {count} tokens: its layers with a sliding window of {window} have enough "
            f"for {max(0, held - window + 1)}: call crop once after each forward, or reset() the cache"
        )


# Layers of hybrid models: linear-attention state, kept as transformers keeps it, next to an offloaded history

class _HybridMethods:
    """Adds transformers' own linear-attention state to an `OffloadLayer` (see `hybrid`)."""

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
    """The class of layers with linear-attention states and the offloaded history of `layer_class`; one for each."""
    bases = (_HybridMethods, layer_class, LinearAttentionAndFullAttentionLayer)
    names = {"__module__": layer_class.__module__, "__doc__": f"A `{layer_class.__name__}` with a linear state."}
    return type(f"Hybrid{layer_class.__name__}", bases, names)


def planner(layer_class: type[OffloadLayer]) -> Callable[[LayerKind, OffloadConfig, int], LayerPlan]:
    """As `OffloadLayer.plan`, of the layer that a cache with this `layer_class` has for a kind."""
    return lambda kind, *others: (IndexedLayer if kind.most_chosen else layer_class).plan(kind, *others)


def make_layers(model: PreTrainedModel, layer_class: type[OffloadLayer], shared: Shared) -> list[Any]:
    """transformers' own layers for this model, with every full-attention layer replaced by a `layer_class`, and every
    one with an indexer by an `IndexedLayer`."""
    layers: list[Any] = list(DynamicCache(config=model.config).layers)
    place, topk = 0, indexer_topk(model.config.get_text_config())
    for layer_idx, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[layer_idx] = layer_class(shared, layer_idx, place)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            states = {name: getattr(layer, name) for name in ("number_of_states",) if hasattr(layer, name)}
            layers[layer_idx] = hybrid(layer_class)(shared, layer_idx, place, **states)
        elif has_indexer(layer):
            layers[layer_idx] = IndexedLayer(shared, layer_idx, place, topk)
        else:
            continue
        place += 1
    return layers


def has_linear_state(layer: Any) -> bool:
    """Whether a layer has a state of linear attention, which every token changes."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)
