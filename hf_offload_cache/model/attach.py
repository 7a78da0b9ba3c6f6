"""The seams in a transformers model: hooks, an attention function and a mask function; put on and taken off as one.

Nothing here knows a cache beyond the verbs that its hooks call. What is on a model is inert for every other cache.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..report.timeline import NO_TIMELINE, Timeline
from .attention_call import own_attention
from .tag import tag_of

PREFIX = "hf_offload_cache_"
"""Before the name of the implementation that a config had: the name tells what to delegate to. Never holds "flash"."""
_ALWAYS = ("sdpa", "eager")
_OWN_KERNELS = ("flash", "flex", "paged")
"""Parts of names whose masks are of another kind, or whose names transformers treats in a way of its own."""
_LOCKS: dict[int, threading.RLock] = {}


def _lock() -> threading.RLock:
    """Over what is attached in this process: a forked child does not wait for a thread that only its parent has."""
    return _LOCKS.setdefault(os.getpid(), threading.RLock())


class AttentionName(str):
    """Our name for an implementation; equal to the implementation's own as well, since some models compare.

    Its hash is that of our name: look-ups in transformers' tables find ours, and never the other.
    """

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or self.removeprefix(PREFIX) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Attachable:
    """What the seams call on the cache that a forward was given, all on the thread that runs the model."""

    timeline: Timeline = NO_TIMELINE
    """Told by the seams what the model is doing."""

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Before the whole model's forward."""

    def end_step(self, output: Any = None) -> Any:
        """After the whole model's forward; not after one that raised."""

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        """Before a decoder block, with the residual stream (B, q, hidden)."""

    def enter_attention(self, layer_idx: int, module: torch.nn.Module, hidden: torch.Tensor, rotary: Any) -> None:
        """Before its attention, with the normed stream (B, q, hidden) and the rotary cosines and sines, if given."""

    def leave_attention(self, layer_idx: int, output: torch.Tensor) -> None:
        """After its attention, with what it adds to the stream (B, q, hidden)."""

    def check_prompt(self, input_ids: torch.Tensor) -> None:
        """`generate` is about to drop the first of ids (B, P), which the cache should hold."""

    def close(self) -> None:
        """The cache is not to be used any more."""


@dataclass
class _Attachment:
    caches: dict[int, weakref.ref] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    renamed: list[tuple[Any, str]] = field(default_factory=list)
    seams: list[Any] = field(default_factory=list)


# Which models carry seams now. Not state of a step: the count that says when the last cache has gone.
_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()


def inner_model(model: Any) -> PreTrainedModel:
    """The PreTrainedModel under torch.compile's and PEFT's wrappers. Raises `TypeError`."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return inner


def attach(model: PreTrainedModel, cache: Attachable) -> int:
    """Put the seams on `model` (once, however many caches) and count `cache`; returns the token for `release`."""
    with _lock():
        token = id(cache)
        attachment = _ATTACHED.get(model)
        if attachment is not None:
            attachment.caches[token] = weakref.ref(cache)
        if attachment is None or _ATTACHED.get(model) is not attachment:  # a collection may just have closed the last
            attachment = _Attachment({token: weakref.ref(cache)})
            try:
                _put_on(model, attachment)
            except BaseException:
                _take_off(model, attachment)
                raise
            _ATTACHED[model] = attachment
        return token


def release(model: PreTrainedModel | None, token: int) -> None:
    """Count a cache out; with the last one, `model` is as it was before the first. Idempotent."""
    with _lock():
        attachment = None if model is None else _ATTACHED.get(model)
        if attachment is None or model is None or attachment.caches.pop(token, None) is None or attachment.caches:
            return
        del _ATTACHED[model]
        _take_off(model, attachment)


def replaced(model: PreTrainedModel) -> bool:
    """Whether the model's attention goes through ours while the seams are on."""
    attachment = _ATTACHED.get(model)
    return attachment is not None and bool(attachment.renamed)


def intact(model: torch.nn.Module) -> bool:
    """Whether every config that carried our attention when the seams went on still does."""
    attachment = _ATTACHED.get(model) if isinstance(model, PreTrainedModel) else None
    names = [] if attachment is None else [config._attn_implementation_internal for config, _ in attachment.renamed]
    return all((name or "").startswith(PREFIX) for name in names)


def detach(model: Any) -> None:
    """Close every cache on `model` and restore it. Does nothing on a model without caches."""
    inner = inner_model(model)
    with _lock():
        attachment = _ATTACHED.get(inner)
        caches = [] if attachment is None else [ref() for ref in attachment.caches.values()]
    for cache in caches:
        if cache is not None:
            cache.close()


# --- putting on and taking off -----------------------------------------------------------------------------------


def _put_on(model: PreTrainedModel, attachment: _Attachment) -> None:
    _strip_copied(model)
    submodels = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if all(submodel._can_set_attn_implementation() for submodel in submodels):
        for config in _configs(model, submodels):
            name = config._attn_implementation_internal
            base = (name or "eager").removeprefix(PREFIX)
            known = base in _ALWAYS or (base in ALL_ATTENTION_FUNCTIONS and base in ALL_MASK_ATTENTION_FUNCTIONS)
            if known and not any(part in base for part in _OWN_KERNELS):
                register(base)
                shared = [kept for kept in _live_configs() if kept[0] is config]  # a config of two models
                attachment.renamed.append(shared[0] if shared else (config, name))
                config._attn_implementation_internal = AttentionName(PREFIX + base)

    def put(verb: str, register_hook: Callable[..., Any], layer_idx: int = -1) -> None:
        seam = _Seam(verb, layer_idx)
        attachment.handles.append(register_hook(seam, with_kwargs=True))
        attachment.seams.append(seam)

    put("begin_step", model.register_forward_pre_hook)
    put("end_step", model.register_forward_hook)
    for layer_idx, block, attention in _blocks(model):
        put("enter_block", block.register_forward_pre_hook, layer_idx)
        put("enter_attention", attention.register_forward_pre_hook, layer_idx)
        put("leave_attention", attention.register_forward_hook, layer_idx)
    model.__dict__["prepare_inputs_for_generation"] = _PrepareInputs(model)


def _take_off(model: PreTrainedModel, attachment: _Attachment) -> None:
    for handle in attachment.handles:
        handle.remove()
    owned = {id(config) for config, _ in _live_configs()}
    for config, name in attachment.renamed:
        if id(config) not in owned and (config._attn_implementation_internal or "").startswith(PREFIX):
            config._attn_implementation_internal = name
    _strip_prepare(model)


def _strip_copied(model: PreTrainedModel) -> None:
    """Take off what a copy or a pickle of an attached model brought along: nobody counts it."""
    seams = {id(seam) for attachment in _ATTACHED.values() for seam in attachment.seams}
    owned = {id(config) for config, _ in _live_configs()}
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Seam) and id(hook) not in seams]:
                del hooks[key]
                for flags in (
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    flags.pop(key, None)
    submodels = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in _configs(model, submodels):
        name = config._attn_implementation_internal or ""
        if name.startswith(PREFIX) and id(config) not in owned:
            config._attn_implementation_internal = name.removeprefix(PREFIX)
    _strip_prepare(model)


def _live_configs() -> list[tuple[Any, str]]:
    """The configs that carry our name for a live attachment, with the names they had."""
    return [renamed for attachment in _ATTACHED.values() for renamed in attachment.renamed]


def _strip_prepare(model: PreTrainedModel) -> None:
    if isinstance(model.__dict__.get("prepare_inputs_for_generation"), _PrepareInputs):
        del model.__dict__["prepare_inputs_for_generation"]


def _configs(model: PreTrainedModel, submodels: list[PreTrainedModel]) -> list[Any]:
    """Every distinct config object that a module of `model` may read its implementation from."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            visit(getattr(config, name, None))

    visit(model.config)
    for submodel in submodels:
        visit(submodel.config)
    return list(found.values())


def _blocks(model: PreTrainedModel) -> Iterator[tuple[int, torch.nn.Module, torch.nn.Module]]:
    """Decoder blocks with their self-attention: modules with a `layer_idx`, named for attention, within a block."""
    for name, attention in model.named_modules():
        layer_idx = getattr(attention, "layer_idx", None)
        path, _, leaf = name.rpartition(".")
        if isinstance(layer_idx, int) and path and "attention" in type(attention).__name__.lower():
            block = model.get_submodule(path)
            if "attention" not in type(block).__name__.lower() and "cross" not in leaf:
                yield layer_idx, block, attention


def attention_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """By layer index, where the attention of each decoder block makes its keys."""
    found: dict[int, torch.device] = {}
    for layer_idx, _, attention in _blocks(model):
        moved = getattr(getattr(attention, "_hf_hook", None), "execution_device", None)  # accelerate's
        held = next((p.device for p in attention.parameters() if p.device.type != "meta"), None)
        found[layer_idx] = torch.device(moved) if moved is not None else held or model.device
    return found


# --- what the model calls ----------------------------------------------------------------------------------------


class _Seam:
    """A hook that finds the cache in the call's arguments and calls one verb on it. Holds no module: safe to copy."""

    def __init__(self, verb: str, layer_idx: int = -1) -> None:
        self.verb = verb
        self.layer_idx = layer_idx

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in _ALWAYS:  # a model pickled while attached carries our names into a new process
            register(name)

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        cache = _cache_among(args, kwargs)
        if cache is None:
            return
        timeline = cache.timeline
        if self.verb == "begin_step":
            timeline.begin_step()
            cache.begin_step(module, {"input_ids": args[0], **kwargs} if args else kwargs)
        elif self.verb == "end_step":
            cache.end_step()
            timeline.end_step()
        elif self.verb == "leave_attention":
            timeline.leave_attention(self.layer_idx)
            cache.leave_attention(self.layer_idx, output[0] if isinstance(output, tuple) else output)
            timeline.enter_rest(self.layer_idx)
        else:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and hidden.ndim == 3:
                if self.verb == "enter_block":
                    timeline.enter_block(self.layer_idx)
                    cache.enter_block(self.layer_idx, module, hidden)
                else:
                    timeline.enter_attention(self.layer_idx)
                    cache.enter_attention(self.layer_idx, module, hidden, kwargs.get("position_embeddings"))


def _cache_among(args: tuple, kwargs: dict[str, Any]) -> Attachable | None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Attachable):
        return cache
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Attachable)), None)


class _PrepareInputs:
    """`generate`'s own method, with one look at the ids before it drops those that the cache should hold already."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's own: `generate` looks there for what the model takes."""
        return inspect.signature(functools.partial(type(self.model).prepare_inputs_for_generation, self.model))

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        cache = _cache_among((), kwargs)
        if cache is not None and kwargs.get("is_first_iteration") and kwargs.get("next_sequence_length") is not None:
            cache.check_prompt(input_ids)
        return type(self.model).prepare_inputs_for_generation(self.model, input_ids, **kwargs)


def register(implementation: str) -> None:
    """Make our name for `implementation` known to transformers: the attention function and the mask function."""
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + implementation, functools.partial(_attention, implementation))
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + implementation, ALL_MASK_ATTENTION_FUNCTIONS[implementation])


def _attention(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    own = own_attention(module, implementation)
    tag = tag_of(key)
    if tag is None:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    return tag.layer.attend(tag, own, module, query, key, value, attention_mask, *args, **kwargs)
