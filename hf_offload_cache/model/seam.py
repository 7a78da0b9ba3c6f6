"""The hooks on a model: each finds the cache in the call's arguments and calls one method on it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeGuard

import torch
from torch.utils.hooks import RemovableHandle

from ..report.trace import NO_TIMELINE, Timeline
from .attention_call import untraced
from .media import Media
from .place import decoder_blocks, leading_blocks

# The methods that hooks call on a forward's cache

class Attachable(Protocol):
    """The methods that hooks call on a cache; all on the thread that runs the model. An object with these methods is a
    cache of ours (see `is_attachable`); the defaults do nothing.

    Hooks run outside of what `torch.compile` traces.
    """

    timeline: Timeline = NO_TIMELINE
    """Records the model's phases."""

    watches_blocks: bool = True
    """Whether events of blocks and their attention are wanted. An attached cache calls `attach.watch_blocks` after a
    change."""

    media: Media | None = None
    """The pictures and sounds of the coming prompt, of which the cache has stored the first ones; None: it stored
    none."""

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Before the complete model's forward, with all its arguments by name.

        Returns new arguments for the call, or None to leave it unchanged. Must not change `kwargs`.
        """
        return None

    def end_step(self, output: Any) -> Any | None:
        """After the complete model's forward, unless it raised. Returns another output, or None for this one."""
        return None

    def fail_step(self) -> None:
        """After a forward of the complete model that raised an `Exception`, which is passed on."""

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        """Before a decoder block, with the residual stream (B, q, hidden). With `layer_idx` -1: before one with another
        stream, or one without attention that is the first of its list."""

    def enter_attention(self, layer_idx: int, module: torch.nn.Module, hidden: torch.Tensor, rotary: Any) -> None:
        """Before its attention, with the normed stream (B, q, hidden) and the rotary cosines and sines, if given."""

    def leave_attention(self, layer_idx: int, output: torch.Tensor) -> None:
        """After its attention, with its addition to the stream (B, q, hidden)."""

    def run_indexer(
        self, layer_idx: int, forward: Callable[..., torch.Tensor], given: dict[str, Any]
    ) -> torch.Tensor:
        """Instead of a layer's indexer: the tokens that it chose, as of `leave_indexer`. `forward`: its forward, for
        which arguments are `given`."""
        return forward(**given)

    def leave_indexer(self, layer_idx: int, chosen: torch.Tensor) -> torch.Tensor | None:
        """After a layer's indexer, with the tokens that it chose: indices (B, q, K), or a mask (B, 1, q, T). Returns
        what the model goes on with instead; None: with these."""
        return None

    def check_prompt(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> None:
        """`generate` is about to drop the first of ids (B, P), or of embeddings (B, P, hidden), which the cache should
        hold."""

    def prepare_step(self, *, first: bool) -> None:
        """`generate` is about to call the model; `first`: with a prompt, or a piece of one."""

    def start_over(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
        """Handle a model that recomputes the keys of all tokens: the step with ids (B, t), or embeddings (B, t,
        hidden), becomes the first one of the stored text."""

    def conversing(self, *, begins: bool = False) -> AbstractContextManager[None]:
        """Context while `generate` prepares a forward with this cache: state that the model's code stores on the model
        belongs to the cache then. `begins`: the positions of a generation are made."""
        return nullcontext()

    @property
    def is_reading(self) -> bool:
        """Whether it is within `reading`."""
        return False

    def reading(self, tokens: int) -> AbstractContextManager[None]:
        """Context around the forwards of a prompt that `generate` passes in one piece or several, each without the
        stored tokens. With these, the prompt has `tokens` tokens a sequence."""
        return nullcontext()

    def held(self) -> int:
        """Stored tokens per sequence."""
        return 0

    def close(self) -> None:
        """End the cache's use."""


def is_attachable(cache: Any) -> TypeGuard[Attachable]:
    """Whether `cache` has the hooks' methods: no cache of transformers has."""
    return hasattr(type(cache), "prepare_step")


def cache_among(args: tuple, kwargs: dict[str, Any]) -> Attachable | None:
    """Our cache in the arguments of a forward."""
    cache = unwrapped(kwargs.get("past_key_values"))
    if is_attachable(cache):
        return cache
    return next((value for value in (*args, *kwargs.values()) if is_attachable(value)), None)


def unwrapped(cache: Any) -> Any:
    """`cache`, or its part for self-attention: a decoder with cross-attention (GPT-2's) wraps the given cache in an
    `EncoderDecoderCache`, and returns that."""
    return getattr(cache, "self_attention_cache", cache)


class Seam:
    """A hook for one method of `Attachable`. Holds no module: a copy of a model has its own hooks. Inert if the
    arguments hold no cache of ours."""

    def __init__(self, verb: str, layer_idx: int = -1, turn_to_others: Callable[[], None] | None = None) -> None:
        self.verb = verb
        self.layer_idx = layer_idx
        self.turn_to_others = turn_to_others
        """Called if the arguments hold no cache of ours; a copy has none."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "turn_to_others": None}

    @untraced
    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: Any = None, output: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return Seam.__call__.outside(self, module, args, kwargs, output)
        if type(kwargs) is not dict:  # another thread is attaching or removing it: no cache there waits for it
            return None
        cache: Any = kwargs.get("past_key_values")
        if not hasattr(type(cache), "prepare_step"):  # `is_attachable`, without a call
            cache = cache_among(args, kwargs)
            if cache is None:
                if self.turn_to_others is not None:
                    self.turn_to_others()
                return None
        if self.verb == "begin_step":
            if cache.timeline.on:
                cache.timeline.begin_step()
            changed = cache.begin_step(module, {**named(module, args), **kwargs} if args else kwargs)
            return None if changed is None else ((), changed)
        if self.verb == "end_step" and output is None:
            return cache.fail_step()
        if self.verb == "end_step":
            changed = cache.end_step(output)
            if cache.timeline.on:
                cache.timeline.end_step()
            return changed
        if self.verb == "leave_indexer":
            if len(module._forward_hooks) > 1:
                output = each_once(output)  # other code's hooks may have changed it
            return cache.leave_indexer(self.layer_idx, output)
        if not cache.watches_blocks:
            return None
        timeline, layer_idx = cache.timeline, self.layer_idx
        if self.verb == "leave_attention":
            if timeline.on:
                timeline.leave_attention(layer_idx)
            cache.leave_attention(layer_idx, output[0] if isinstance(output, tuple) else output)
            if timeline.on:
                timeline.enter_rest(layer_idx)
            return None
        hidden = args[0] if args else kwargs.get("hidden_states")
        if layer_idx < 0 or not (isinstance(hidden, torch.Tensor) and hidden.ndim == 3):
            if self.verb == "enter_block":
                cache.enter_block(-1, module, hidden)
        elif self.verb == "enter_block":
            if timeline.on:
                timeline.enter_block(layer_idx)
            cache.enter_block(layer_idx, module, hidden)
        else:
            if timeline.on:
                timeline.enter_attention(layer_idx)
            cache.enter_attention(layer_idx, module, hidden, kwargs.get("position_embeddings"))
        return None


Hooks = list[tuple[Seam, RemovableHandle]]
"""Attached hooks with their handles."""


def named(module: torch.nn.Module, args: tuple) -> dict[str, Any]:
    """Positional arguments of the forward of `module`, by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False))


def hook_model(model: torch.nn.Module, hooks: Hooks, turn_to_others: Callable[[], None]) -> None:
    """Hook `model` for the methods of steps; each hook is added to `hooks` once it is on. `turn_to_others` is called
    before a forward without a cache of this library."""
    _hook("begin_step", -1, model.register_forward_pre_hook, hooks, turn_to_others)
    # other hooks see the caller's output; called for a forward that raised, too
    first = functools.partial(model.register_forward_hook, prepend=True, always_call=True)
    _hook("end_step", -1, first, hooks)


def hook_indexers(model: torch.nn.Module, hooks: Hooks) -> None:
    """Hook the indexers of `model`, by which layers choose what they attend to; otherwise like `hook_model`."""
    for layer_idx, _, attention in decoder_blocks(model):
        indexer = getattr(attention, "indexer", None)
        if isinstance(indexer, torch.nn.Module):
            _hook("leave_indexer", layer_idx, indexer.register_forward_hook, hooks)


def each_once(chosen: torch.Tensor) -> torch.Tensor:
    """As `chosen`, the indices (B, q, K) of tokens, with -1 for repeated ones: a mask counts such a token once. A mask
    stays as it is."""
    if chosen.dtype == torch.bool:
        return chosen
    chosen = chosen.sort(2).values
    return chosen.masked_fill(torch.nn.functional.pad(chosen[..., 1:] == chosen[..., :-1], (1, 0)), -1)


def put_last(indexer: torch.nn.Module) -> None:
    """Let our hook of an `indexer` run behind those of other code, which see and may change what the indexer chose."""
    hooks = indexer._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, Seam)]:
        hooks[key] = hooks.pop(key)


def hook_blocks(model: torch.nn.Module, hooks: Hooks) -> None:
    """Hook the decoder blocks of `model` for events of blocks and their attention; otherwise like `hook_model`."""
    for block in leading_blocks(model):
        _hook("enter_block", -1, block.register_forward_pre_hook, hooks)
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
    """Remove all `hooks`, and empty the list."""
    while hooks:
        hooks[-1][1].remove()
        hooks.pop()


def strip_hooks(model: torch.nn.Module, counted: set[int]) -> None:
    """Remove hooks that came with a copy or a pickle of an attached model: those whose `id` is not in `counted`."""
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
