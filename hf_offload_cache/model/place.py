"""Whether a model has a place for a cache of this library, and where its parts are."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import transformers
from packaging.version import Version

from .peft_adapters import is_prefix, prompt_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Decoder blocks of any architecture

def decoder_blocks(model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module, torch.nn.Module]]:
    """Layer index, block and its self-attention: a module with a `layer_idx`, named for attention, within the block."""
    for name, attention in model.named_modules():
        layer_idx = getattr(attention, "layer_idx", None)
        path, _, leaf = name.rpartition(".")
        if isinstance(layer_idx, int) and path and "attention" in type(attention).__name__.lower():
            block = model.get_submodule(path)
            if "attention" not in type(block).__name__.lower() and "cross" not in leaf:
                yield layer_idx, block, attention


def leading_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The first block of each list with decoder blocks, if it is none of these: it has a linear state alone."""
    blocks = {block for _, block, _ in decoder_blocks(model)}
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one)]
    return [one[0] for one in lists if one[0] not in blocks and any(part in blocks for part in one.modules())]


def with_indexers(model: PreTrainedModel) -> list[Any]:
    """The attention modules of a model some of whose layers choose by an indexer what they attend to; empty for other
    models, and for one that keeps the indexers' keys elsewhere than in its cache."""
    modules = [attention for _, _, attention in decoder_blocks(model)]
    if not any(isinstance(getattr(module, "indexer", None), torch.nn.Module) for module in modules):
        return []
    return modules if any(map(has_indexer, _layers(model))) else []


def attention_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """By layer index, the device on which each decoder block's attention makes its keys."""
    devices: dict[int, torch.device] = {}
    for layer_idx, _, attention in decoder_blocks(model):
        moved = getattr(getattr(attention, "_hf_hook", None), "execution_device", None)  # accelerate's
        held = next((p.device for p in attention.parameters() if p.device.type != "meta"), None)
        devices[layer_idx] = torch.device(moved) if moved is not None else held or model.device
    return devices


def device_type(model: PreTrainedModel) -> str:
    """Type of the device that attention runs on: "cuda" if any block's does, else "cpu"."""
    if model.device.type == "cuda":
        return "cuda"
    return "cuda" if any(device.type == "cuda" for device in attention_devices(model).values()) else "cpu"


DEVICES = ("cpu", "cuda", "meta")
"""Types of devices that a model may be on; on the last one it has no data, and is only planned for."""


# Conflicts between training and a cache

class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "no gradient flows through a history that hf_offload_cache read from its store: "
            "run the forward under torch.no_grad(), or train with DynamicCache"
        )


def no_backward(tensor: torch.Tensor, in_graph: torch.Tensor) -> torch.Tensor:
    """`tensor` (a leaf), whose values joined a graph that contains `in_graph`: a backward pass through it raises
    instead of being silently wrong."""
    if not (torch.is_grad_enabled() and in_graph.requires_grad):
        return tensor
    return _NoBackward.apply(tensor.requires_grad_())


def checkpointing_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that keep a cache from a decoder block while they train with `gradient_checkpointing` on: the blocks
    themselves, and the modules around them."""
    blocks = {block for _, block, _ in decoder_blocks(model)}
    return [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing")
        and not getattr(module, "_can_checkpoint_with_cache", False)
        and any(part in blocks for part in module.modules())
    ]


# Models under a user's wrappers

def is_model(module: Any) -> TypeGuard[PreTrainedModel]:
    """Whether `module` is a PreTrainedModel. Planning does not import this, because it takes seconds."""
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def inner_model(model: Any) -> PreTrainedModel:
    """The PreTrainedModel under torch.compile's and PEFT's wrappers. Raises `TypeError`."""
    inner = getattr(model, "_orig_mod", model)
    if not is_model(inner) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not is_model(inner):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return inner


# The model of a cache

class OwnModel:
    """The model of a cache, held weakly, with the models that are parts of it (a text model in a larger one).

    Attributes:
        ref: gives the model, while it lives.
        parts: the model and those within it, held weakly.
        checkpointing: the modules in it that may checkpoint gradients, held weakly.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.ref = weakref.ref(model)
        self.parts = weakref.WeakSet(module for module in model.modules() if is_model(module))
        self.checkpointing = [weakref.ref(module) for module in checkpointing_modules(model)]

    def __call__(self) -> PreTrainedModel | None:
        """The model, while it lives."""
        return self.ref()

    def includes(self, model: torch.nn.Module) -> bool:
        """Whether `model` is the cache's own, a part of it, or contains it: a step of one runs the other."""
        ours = self.ref()
        return model in self.parts or (ours is not None and any(module is ours for module in model.modules()))

    def checkpoints_gradients(self) -> bool:
        """Whether some decoder block would get no cache now, because it trains and checkpoints gradients."""
        for ref in self.checkpointing:
            module = ref()
            if module is not None and module.training and module.gradient_checkpointing:
                return True
        return False

    def stranger(self) -> PreTrainedModel | None:
        """The model whose forward the caller runs in, if none around it is the cache's own.

        Looks through the callers' frames, because an `update` does not know its caller. None if no model is among them
        (a cache driven by hand), or if that is unknown.
        """
        nearest: PreTrainedModel | None = None
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(caller, torch.nn.Module) and is_model(caller):
                if caller in self.parts:
                    return None
                nearest = caller if nearest is None else nearest
            frame = frame.f_back  # type: ignore[assignment]
        return nearest


def model_text(model: Any) -> str:
    """A model in the words of a message: its class and, if it has one, the name that it was loaded by."""
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{type(model).__name__} {path!r}" if path else f"{type(model).__name__} (at {id(model):#x})"


# The tested version of transformers, and a warning about newer ones

TESTED = "5.23"
"""The newest version that the tests ran with; setup.cfg has it next to the range that installs."""


def warn_if_untested() -> None:
    """Warn, once per process, if transformers is a newer minor version than was tested."""
    _warn(transformers.__version__)


def untested() -> str | None:
    """Text for a newer minor version of transformers than was tested, or for torch on ROCm; None: neither."""
    return _message(transformers.__version__)


@functools.cache  # once per process, however many caches a user has
def _warn(version: str) -> None:
    if (message := _message(version)) is not None:
        warnings.warn(message, UserWarning, stacklevel=5)


def _message(version: str) -> str | None:
    check = "check your model once with `python -m hf_offload_cache.testing MODEL` (a folder or a name)"
    if _minor(version) > _minor(TESTED):
        return f"transformers {version} is newer than {TESTED}, which hf_offload_cache was tested with: {check}"
    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip}, which hf_offload_cache was not tested with: {check}"
    return None


def feeds_pieces_anew() -> bool:
    """Whether `generate` with a `prefill_chunk_size` feeds a filled cache the complete conversation, from its first
    token on, as transformers 5.17 does and 5.23 does not."""
    return _minor(transformers.__version__) < (5, 23)


def _minor(version: str) -> tuple[int, int]:
    parsed = Version(version)  # also "6.0rc1", or "5.24.dev0" of a checkout
    return parsed.major, parsed.minor


def no_place(model: Any) -> str | None:
    """Why `model` (or a wrapper), in its current state, takes no cache of ours, and what to do; None: it takes one."""
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
    if "cache" in _parameters(inner, "forward") and not _takes_a_cache(inner):
        return (
            f"{name} takes its cache under another name in transformers {transformers.__version__}, which this version "
            f"of hf_offload_cache does not support: install transformers {TESTED}"
        )
    if not _takes_a_cache(inner):
        return f"{name} takes no past_key_values: it keeps its state in its own way, so run it without this cache"
    if not any(hasattr(layer, "keys") for layer in _layers(inner)):
        return f"{name} has no attention whose keys and values are kept: there is nothing to offload"
    if foreign := sorted({device.type for device in attention_devices(inner).values()} - set(DEVICES)):
        return (
            f"{name} is on {', '.join(foreign)}, and this cache runs on a CPU or a CUDA device: move the model to one, "
            "or use DynamicCache"
        )
    return None


def nothing_to_offload(model: Any) -> str | None:
    """Why a cache of ours would offload nothing of `model`, even if it has a place for it; None: it would offload
    something."""
    why = no_place(model)
    if why is not None:
        return why
    layers = _layers(inner_model(model))
    return None if any(is_offloaded(layer) for layer in layers) else unoffloaded(model)


def unoffloaded(model: Any) -> str | None:
    """Text about layers that grow with the context but stay in memory, or about a model without growing layers; None:
    each growing layer is offloaded."""
    from transformers.cache_utils import CacheLayerMixin

    inner = inner_model(model)
    layers, name = _layers(inner), f"model {type(inner).__name__}"
    growing = [
        one
        for one in layers
        if isinstance(one, CacheLayerMixin)  # a window's size is bounded
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

    return type(layer) in (DynamicLayer, LinearAttentionAndFullAttentionLayer) or has_indexer(layer)


def has_indexer(layer: Any) -> bool:
    """Whether the model of such a transformers layer chooses by an indexer what its attention sees."""
    return type(layer).__name__ == "DynamicIndexedLayer"  # older versions of transformers have none


def has_own_generate(model: PreTrainedModel) -> bool:
    """Whether the class of `model` has its own `generate`, which may call that of a model within it."""
    from transformers import GenerationMixin

    return getattr(type(model), "generate", None) is not GenerationMixin.generate


def has_own_loop(model: PreTrainedModel) -> bool:
    """Whether the class's own `generate` calls no other `generate`, but steps through the model by transformers' own
    sampling, like MusicGen's. Such a loop uses the cache that it is given."""
    if not has_own_generate(model):
        return False
    called = inspect.unwrap(type(model).generate).__code__.co_names
    return _takes_a_cache(model) and "_sample" in called and "generate" not in called


def generates_by_parts(model: PreTrainedModel) -> bool:
    """Whether `model` generates without running itself: its own `generate` calls a part's, like BLIP-2's."""
    takes = "past_key_values" in _parameters(model, "forward")
    return has_own_generate(model) and not takes and bool(generating_parts(model))


def generating_parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """By name, the models directly within `model` that generate, and have a place for a cache."""
    parts = {name: part for name, part in model.named_children() if is_model(part)}
    return {name: part for name, part in parts.items() if part.can_generate() and no_place(part) is None}


def _takes_a_cache(model: PreTrainedModel) -> bool:
    """Whether `generate` would pass a cache: by the parameters of its methods, and transformers' list of models that
    only seem to take one."""
    listed = getattr(type(model), "_supports_default_dynamic_cache", None)
    if listed is not None and not listed():
        return False
    return "past_key_values" in {
        *_parameters(model, "forward"), *_parameters(model, "prepare_inputs_for_generation")
    }  # fmt: skip


def _parameters(model: PreTrainedModel, method: str) -> set[str]:
    """Parameters of the class's method: methods on the model itself, ours or accelerate's, take anything."""
    function = getattr(type(model), method, None)
    return set() if function is None else set(inspect.signature(function).parameters)


def _layers(model: PreTrainedModel) -> list[Any]:
    from transformers.cache_utils import DynamicCache

    return list(DynamicCache(config=model.config).layers)
