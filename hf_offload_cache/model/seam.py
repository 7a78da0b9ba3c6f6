"""The hooks on a model: each finds the cache in the call's arguments and calls one verb on it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .attachable import Attachable, cache_among
from .decoder_blocks import decoder_blocks
from .registered_attention import ALWAYS, register
from .untraced import untraced


class Seam:
    """A hook for one verb of `Attachable`. Holds no module: a copy of a model has seams of its own with its copy.

    Inert where the arguments hold no cache of ours.
    """

    def __init__(self, verb: str, layer_idx: int = -1, turn_to_others: Callable[[], None] | None = None) -> None:
        self.verb = verb
        self.layer_idx = layer_idx
        self.turn_to_others = turn_to_others
        """Called where the arguments hold no cache of ours; a copy has none."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "turn_to_others": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in ALWAYS:  # a model pickled while attached carries our names into a new process
            register(name)

    @untraced
    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: Any = None, output: Any = None) -> Any:
        if type(kwargs) is not dict:  # another thread puts it on or takes it off now: no cache there waits for it
            return None
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, Attachable):
            cache = cache_among(args, kwargs)
            if cache is None:
                if self.turn_to_others is not None:
                    self.turn_to_others()
                return None
        if self.verb == "begin_step":
            return self._begin_step(cache, module, args, kwargs)
        if self.verb == "end_step" and output is None:
            return cache.fail_step()
        if self.verb == "end_step":
            changed = cache.end_step(output)
            cache.timeline.end_step()
            return changed
        if cache.watches_blocks:
            self._in_block(cache, module, args, kwargs, output)
        return None

    def _in_block(
        self, cache: Attachable, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> None:
        timeline, layer_idx = cache.timeline, self.layer_idx
        if self.verb == "leave_attention":
            if timeline.on:
                timeline.leave_attention(layer_idx)
            cache.leave_attention(layer_idx, output[0] if isinstance(output, tuple) else output)
            if timeline.on:
                timeline.enter_rest(layer_idx)
            return
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.ndim == 3:
            if self.verb == "enter_block":
                if timeline.on:
                    timeline.enter_block(layer_idx)
                cache.enter_block(layer_idx, module, hidden)
            else:
                if timeline.on:
                    timeline.enter_attention(layer_idx)
                cache.enter_attention(layer_idx, module, hidden, kwargs.get("position_embeddings"))

    def _begin_step(
        self, cache: Attachable, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        cache.timeline.begin_step()
        changed = cache.begin_step(module, {**_named(module, args), **kwargs} if args else kwargs)
        return None if changed is None else ((), changed)


Hooks = list[tuple[Seam, RemovableHandle]]
"""Seams that are on, each with what takes it off."""


def _named(module: torch.nn.Module, args: tuple) -> dict[str, Any]:
    """What was given to the forward of `module` by position, by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False))


def hook_model(model: torch.nn.Module, hooks: Hooks, turn_to_others: Callable[[], None]) -> None:
    """Hook `model` for the methods of steps; each hook is added to `hooks` once it is on. `turn_to_others` is called
    before a forward without a cache of this library."""
    _hook("begin_step", -1, model.register_forward_pre_hook, hooks, turn_to_others)
    # others see what the caller will; it is told of a forward that raised, too
    first = functools.partial(model.register_forward_hook, prepend=True, always_call=True)
    _hook("end_step", -1, first, hooks)


def hook_blocks(model: torch.nn.Module, hooks: Hooks) -> None:
    """Hook the decoder blocks of `model` for the verbs of blocks and their attention; else as `hook_model`."""
    for layer_idx, block, attention in decoder_blocks(model):
        _hook("enter_block", layer_idx, block.register_forward_pre_hook, hooks)
        _hook("enter_attention", layer_idx, attention.register_forward_pre_hook, hooks)
        _hook("leave_attention", layer_idx, attention.register_forward_hook, hooks)


def _hook(
    verb: str, layer_idx: int, register_hook: Callable[..., RemovableHandle], hooks: Hooks,
    turn_to_others: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    seam = Seam(verb, layer_idx, turn_to_others)
    hooks.append((seam, register_hook(seam, with_kwargs=True)))


def unhook(hooks: Hooks) -> None:
    """Take off what is in `hooks`, which is empty then."""
    while hooks:
        hooks[-1][1].remove()
        hooks.pop()


def strip_hooks(model: torch.nn.Module, counted: set[int]) -> None:
    """Take off the seams, by `id` not in `counted`, that a copy or a pickle of an attached model brought along."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Seam) and id(hook) not in counted]:
                del hooks[key]
                for flags in (
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    flags.pop(key, None)
