"""Whether a cache of this library has a place in a model."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from .inner_model import inner_model, is_model
from .peft_adapters import is_prefix, prompt_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def no_place(model: Any) -> str | None:
    """Why `model` (or a wrapper of one), as it is now, takes no cache of ours, and what to do; None: it takes one."""
    inner = inner_model(model)
    name = f"model {type(inner).__name__}"
    if inner.config.is_encoder_decoder:
        return (
            f"{name} is an encoder-decoder: this cache serves decoder-only models; "
            "use transformers' EncoderDecoderCache"
        )
    adapter = prompt_adapter(model, inner)
    if adapter is not None and is_prefix(adapter):
        return (
            f"{name} has an adapter of {adapter.peft_type.value}, which PEFT puts into a cache of its own: "
            "use transformers' own cache, or another kind of adapter"
        )
    if generates_by_parts(inner):
        parts = ", ".join(generating_parts(inner))
        return f"{name} generates by models within it: make the cache with one of these ({parts})"
    if not _takes_a_cache(inner):
        return f"{name} takes no past_key_values: it keeps its state in its own way, so run it without this cache"
    if not any(hasattr(layer, "keys") for layer in _layers(inner)):
        return f"{name} has no attention whose keys and values are kept: there is nothing to offload"
    return None


def nothing_to_offload(model: Any) -> str | None:
    """Why a cache of ours would offload nothing of `model`, which may have a place for it; None: there is something."""
    why = no_place(model)
    if why is not None:
        return why
    layers = _layers(inner_model(model))
    return None if any(is_offloaded(layer) for layer in layers) else unoffloaded(model)


def unoffloaded(model: Any) -> str | None:
    """Text about the layers that grow with the context but stay in memory, or that no layer grows; None: each growing
    layer is offloaded."""
    from transformers.cache_utils import CacheLayerMixin

    inner = inner_model(model)
    layers, name = _layers(inner), f"model {type(inner).__name__}"
    growing = [
        one
        for one in layers
        if isinstance(one, CacheLayerMixin)  # and no window alone, whose size is bounded
        and not (getattr(one, "is_sliding", False) and type(one).__module__ == "transformers.cache_utils")
    ]
    kept = [one for one in growing if not is_offloaded(one)]
    if kept:
        kinds = ", ".join(sorted({type(one).__name__ for one in kept}))
        return (
            f"{name} has {len(kept)} of {len(layers)} layers that keep more than keys and values ({kinds}): they are "
            "not offloaded yet, and stay in memory as with DynamicCache"
        )
    return None if growing else f"{name} has no full-attention layer: there is nothing to offload"


def offloaded_layers(model: Any) -> int:
    """Number of a model's layers that a cache of this library offloads."""
    return sum(is_offloaded(layer) for layer in _layers(inner_model(model)))


def is_offloaded(layer: Any) -> bool:
    """Whether a cache of this library offloads the keys and values of such a transformers layer."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

    return type(layer) in (DynamicLayer, LinearAttentionAndFullAttentionLayer)


def has_own_generate(model: PreTrainedModel) -> bool:
    """Whether the class of `model` has a `generate` of its own, which may call that of a model within it."""
    from transformers import GenerationMixin

    return getattr(type(model), "generate", None) is not GenerationMixin.generate


def has_own_loop(model: PreTrainedModel) -> bool:
    """Whether the class's own `generate` calls no other `generate`, but steps through the model by transformers' own
    sampling, as MusicGen's does. Such a loop uses the cache that it is given."""
    if not has_own_generate(model):
        return False
    called = inspect.unwrap(type(model).generate).__code__.co_names
    return _takes_a_cache(model) and "_sample" in called and "generate" not in called


def generates_by_parts(model: PreTrainedModel) -> bool:
    """Whether `model` generates, and never runs itself then: its own `generate` calls a part's, as BLIP-2's does."""
    takes = "past_key_values" in _parameters(model, "forward")
    return has_own_generate(model) and not takes and bool(generating_parts(model))


def generating_parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """By name, the models directly within `model` that generate, and have a place for a cache."""
    parts = {name: part for name, part in model.named_children() if is_model(part)}
    return {name: part for name, part in parts.items() if part.can_generate() and no_place(part) is None}


def _takes_a_cache(model: PreTrainedModel) -> bool:
    """As `generate` finds it: by name of what is called, and by its own list of models that only seem to."""
    listed = getattr(type(model), "_supports_default_dynamic_cache", None)
    if listed is not None and not listed():
        return False
    return "past_key_values" in {
        *_parameters(model, "forward"), *_parameters(model, "prepare_inputs_for_generation")
    }  # fmt: skip


def _parameters(model: PreTrainedModel, method: str) -> set[str]:
    """Of the class's method: what lies on a model of ours or accelerate's takes anything."""
    found = getattr(type(model), method, None)
    return set() if found is None else set(inspect.signature(found).parameters)


def _layers(model: PreTrainedModel) -> list[Any]:
    from transformers.cache_utils import DynamicCache

    return list(DynamicCache(config=model.config).layers)
