"""Hooks, attention tables and methods on a model, attached with its first cache and removed with its last.

The hooks of its blocks are on only while some cache needs block events. This room knows a cache only by the methods of
`Attachable`. Everything on a model is inert for every other cache.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import CacheUnusedError, ConfigError
from .attention_call import TAG, Place, all_led, put_tables, ready, replaceable, take_tables, untraced
from .conversation import Conversation, ModelState
from .look_ahead import reason_against_pieces
from .method_on_model import MethodOnModel
from .own_generate import GivenCache
from .place import (
    feeds_pieces_anew,
    generating_parts,
    has_own_generate,
    inner_model,
    is_model,
    warn_if_untested,
    with_indexers,
)
from .seam import (
    Attachable,
    Hooks,
    Seam,
    cache_among,
    hook_blocks,
    hook_indexers,
    hook_model,
    named,
    put_last,
    strip_hooks,
    unhook,
    unwrapped,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Configs with a model's attention implementation

def configs_of(model: PreTrainedModel) -> list[Any]:
    """Every distinct config object that a module of `model` may read its attention implementation from."""
    configs: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in configs or not hasattr(config, "_attn_implementation_internal"):
            return
        configs[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            visit(getattr(config, name, None))

    visit(model.config)
    for submodel in _submodels(model):
        visit(submodel.config)
    return list(configs.values())


def _submodels(model: PreTrainedModel) -> list[PreTrainedModel]:
    return [module for module in model.modules() if is_model(module)]


# Methods around a forward of `generate`: they make its positions, the pieces of a prompt, and the inputs, at which

class PreparePositions(MethodOnModel):
    """Replaces the method that makes a generation's positions from the state that the model stored in the cache's
    earlier turns."""

    name = "_prepare_position_ids_for_generation"

    def __call__(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        cache = cache_among((), model_kwargs)
        if cache is None:
            self.turn_to_others()
            return self.method()(inputs_tensor, model_kwargs)
        with cache.conversing(begins=True):
            positions = self.method()(inputs_tensor, model_kwargs)
        if cache.media is not None:  # positions are those of all media, and only the new ones are encoded
            cache.media.keep_behind(cache.held(), model_kwargs)
            cache.media = None
        return positions


class Prefill(MethodOnModel):
    """Replaces the method that runs a prompt, in pieces if the generation has a `prefill_chunk_size`."""

    name = "_prefill"

    def __call__(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache, chunk = cache_among((), model_kwargs), getattr(generation_config, "prefill_chunk_size", None)
        if cache is not None and chunk is not None:
            held, positions = cache.held(), model_kwargs.get("position_ids")
            first, total = held + chunk, input_ids.shape[1]
            if isinstance(positions, torch.Tensor):
                first, total = int(positions[..., :first].max()) + 1, int(positions.max()) + 1
            if (reason := reason_against_pieces(self.model, first, total)) is not None:
                raise ConfigError(
                    f"prefill_chunk_size={chunk:,} is not possible with {type(self.model).__name__}: {reason}; leave "
                    "it out of generate and the generation_config, and the prompt goes through the model in one forward"
                )
        mask = model_kwargs.get("attention_mask")  # of the stored tokens too, unlike ids that are only the new ones
        tokens = mask.shape[-1] if isinstance(mask, torch.Tensor) else getattr(generation_config, "_mask_length", -1)
        with nullcontext() if cache is None else cache.reading(max(tokens, input_ids.shape[1])):
            held = 0 if cache is None or chunk is None else cache.held()
            if chunk is not None and held and feeds_pieces_anew() and _is_complete(input_ids, model_kwargs):
                return self._continued(held, chunk, input_ids, generation_config, model_kwargs, *args, **kwargs)
            return self.method()(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _continued(
        self, held: int, chunk: int, input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any],
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run what follows the `held` tokens in pieces of `chunk`, each as a prompt that the cache continues; the
        output of the last. `input_ids` (B, P) and the mask are the complete conversation's."""
        config, total, output = copy.copy(config), input_ids.shape[1], None
        config.prefill_chunk_size = None
        for end in [*range(held + chunk, total, chunk), total]:
            cut = {
                name: value[..., :end] if name in _BY_TOKEN and isinstance(value, torch.Tensor) else value
                for name, value in model_kwargs.items()
            }
            output = self.method()(input_ids[:, :end], config, cut, *args, **kwargs)
        return output


_BY_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Inputs of a model whose last dimension is the conversation's tokens."""


def _is_complete(input_ids: torch.Tensor, given: dict[str, Any]) -> bool:
    """Whether ids (B, P), and no embeddings, are the complete conversation, not only what is new: as many as the mask
    has."""
    mask = given.get("attention_mask")
    return isinstance(mask, torch.Tensor) and mask.shape[-1] == input_ids.shape[1] and "inputs_embeds" not in given


class PrepareInputs(MethodOnModel):
    """Replaces a model's `prepare_inputs_for_generation`: checks the prompt before `generate` drops the part that the
    cache should already hold."""

    name = "prepare_inputs_for_generation"

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        cache = cache_among((), kwargs)
        if cache is None:
            self.turn_to_others()
        else:
            first, some = bool(kwargs.get("is_first_iteration")), kwargs.get("next_sequence_length") is not None
            repeats = first and not some and not cache.is_reading and kwargs.get("inputs_embeds") is None
            if repeats and (held := cache.held()):
                # with candidates transformers would compute the stored tokens again, and append them
                kwargs["next_sequence_length"], some = input_ids.shape[1] - held, True
            if first and some:
                cache.check_prompt(input_ids, kwargs.get("inputs_embeds"))
            cache.prepare_step(first=first or not some)  # transformers 5.17 calls no piece of a prompt first
        with nullcontext() if cache is None else cache.conversing():
            prepared: dict[str, Any] = self.method()(input_ids, **kwargs)
        if cache is not None:
            name = next(name for name, value in kwargs.items() if unwrapped(value) is cache)
            theirs = prepared.get(name)
            if theirs is None:  # Phi-3 recomputes all keys beyond its short factors' positions
                cache.start_over(prepared.get("input_ids"), prepared.get("inputs_embeds"))
                prepared[name] = kwargs[name]
            elif unwrapped(theirs) is not cache:
                raise CacheUnusedError(
                    f"{type(self.model).__name__} prepares its inputs with another cache, {type(theirs).__name__}, "
                    "instead of the one that it was given: run this model without this cache"
                )
        return prepared


class ExpandLatents(MethodOnModel):
    """Replaces the method by which attention with an indexer makes keys and values of stored latents: hands the tag of
    the latents on to them. Keys and values of a tag that stands for stored ones are undefined: nobody reads them."""

    name = "expand_kv"
    expanded: tuple[torch.Tensor, ...] = ()
    """Keys and values without data, with the heads, widths and types of the latest ones; empty before the first."""

    @untraced
    def __call__(self, *latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_dynamo_compiling():
            return cast(tuple[torch.Tensor, torch.Tensor], ExpandLatents.__call__.outside(self, *latents))
        method, tag = self.method(), getattr(latents[0], TAG, None)
        if tag is None or tag.whole or not self.expanded:
            keys, values = method(*latents)
            self.expanded = tuple(one[:1, :, :1].detach().to("meta") for one in (keys, values))
        else:
            shape = len(latents[0]), -1, latents[0].shape[2], -1
            keys, values = (torch.empty_like(one.expand(shape), device=latents[0].device) for one in self.expanded)
        expanded: tuple[torch.Tensor, torch.Tensor] = keys, values
        if tag is not None:
            for one in expanded:
                one.__dict__[TAG] = tag
            tag.expand = method
        return expanded


class RunIndexer(MethodOnModel):
    """Replaces the forward of an indexer, which the cache may run several times."""

    name = "forward"

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return cast(torch.Tensor, RunIndexer.__call__.outside(self, *args, **kwargs))
        cache, method, layer_idx = cache_among(args, kwargs), self.method(), getattr(self.model, "layer_idx", None)
        if cache is None or layer_idx is None:
            return cast(torch.Tensor, method(*args, **kwargs))
        if not isinstance(next(reversed(self.model._forward_hooks.values()), None), Seam):
            put_last(self.model)
        return cache.run_indexer(layer_idx, method, {**named(self.model, args), **kwargs})


_METHODS: tuple[type[MethodOnModel], ...] = (PreparePositions, PrepareInputs, Prefill, GivenCache)


def _indexer_methods(model: PreTrainedModel) -> Iterator[tuple[type[MethodOnModel], Any]]:
    """Methods of a model's attention with indexers that are replaced, each with its module."""
    for attention in with_indexers(model):
        yield ExpandLatents, attention
        if isinstance(indexer := getattr(attention, "indexer", None), torch.nn.Module):
            yield RunIndexer, indexer


@dataclass
class _Attachment:
    """Attachments on one model. Holds only the model's configs, which do not hold the model."""

    caches: dict[int, weakref.ref] = field(default_factory=dict)
    tables: list[Place] = field(default_factory=list)
    """Places in the model's files that have our attention table."""
    at_death: weakref.finalize | None = None
    """Removes our tables if the model dies before its caches, whose `release` finds no model then."""
    configs: list[Any] = field(default_factory=list)
    """Configs whose attention could go through ours when the hooks were attached."""
    hooks: Hooks = field(default_factory=list)
    watching: set[int] = field(default_factory=set)
    """Caches that want block events: while there is one, the hooks of blocks are on."""
    block_hooks: Hooks = field(default_factory=list)
    state: ModelState | None = None
    """State that the model's code keeps on it for each conversation."""


# State of the process, not of a step. On the model it would be copied and saved with it. It tells which models have
# hooks, and which caches need them.
_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()
_LOCKS: dict[int, threading.RLock] = {}


def _lock() -> threading.RLock:
    """Lock for this process's attachments: a forked child does not wait for a thread of its parent."""
    return _LOCKS.setdefault(os.getpid(), threading.RLock())


def attach(model: PreTrainedModel, cache: Attachable) -> int:
    """Attach to `model` (once, however many caches) and count `cache`; returns the token for `release`.

    Hooks of blocks are attached if the cache `watches_blocks`; `watch_blocks` tells about a change.
    """
    warn_if_untested()
    ready()
    with _lock():
        token = id(cache)
        attachment = _ATTACHED.get(model)
        if attachment is not None:
            attachment.caches[token] = weakref.ref(cache)
        if attachment is None or _ATTACHED.get(model) is not attachment:  # a collection may have closed the last
            attachment = _Attachment({token: weakref.ref(cache)}, state=ModelState(model))
            _ATTACHED[model] = attachment  # first, so that a collection's removal leaves what this one needs
            try:
                _put_on(model, attachment)
            except BaseException:
                _ATTACHED.pop(model, None)
                _take_off(model, attachment)
                raise
        if cache.watches_blocks:
            try:
                watch_blocks(model, cache)
            except BaseException:
                release(model, token)
                raise
        return token


def watch_blocks(model: PreTrainedModel, cache: Attachable) -> None:
    """Apply a change of the `watches_blocks` of `cache`, which is on `model`. The hooks of blocks are on while some
    cache wants them, because each costs every block's call, inert or not.

    A block compiled by `torch.compile` keeps the hooks that it had then: hooks that are off by now find nobody who
    watches, and later ones are not called.
    """
    with _lock():
        attachment = _ATTACHED.get(model)
        if attachment is not None and id(cache) in attachment.caches:
            if cache.watches_blocks:
                attachment.watching.add(id(cache))
            else:
                attachment.watching.discard(id(cache))
            _hook_blocks(model, attachment)


def release(model: PreTrainedModel | None, token: int) -> None:
    """Count a cache out; with the last one, `model` is as it was before the first. Idempotent."""
    with _lock():
        attachment = None if model is None else _ATTACHED.get(model)
        if attachment is None or model is None or attachment.caches.pop(token, None) is None:
            return
        attachment.watching.discard(token)
        if attachment.caches:
            _hook_blocks(model, attachment)
            return
        del _ATTACHED[model]
        _take_off(model, attachment)
    if attachment.state is not None:
        attachment.state.turn_to_others()


def conversation(model: PreTrainedModel) -> Conversation:
    """A new conversation on `model`, which a cache is on."""
    state = _ATTACHED[model].state
    assert state is not None
    return Conversation(state)


def replaced(model: PreTrainedModel) -> bool:
    """Whether the model's attention goes through ours now."""
    attachment = _ATTACHED.get(model)
    return attachment is not None and bool(attachment.tables and attachment.configs)


def intact(model: torch.nn.Module) -> bool:
    """Whether every config whose attention went through ours at attachment still names such an implementation."""
    attachment = _ATTACHED.get(model)  # type: ignore[call-overload]  # a module within the model may run alone
    return attachment is None or all_led(attachment.tables, attachment.configs)


def detach(model: Any) -> None:
    """Close every cache on `model` and restore it. Does nothing on a model without caches."""
    inner = inner_model(model)
    with _lock():
        attachment = _ATTACHED.get(inner)
        caches = [] if attachment is None else [ref() for ref in attachment.caches.values()]
    for cache in caches:
        if cache is not None:
            cache.close()


def _put_on(model: PreTrainedModel, attachment: _Attachment) -> None:
    _strip_copied(model)
    if all(submodel._can_set_attn_implementation() for submodel in _submodels(model)):
        configs = configs_of(model)
        attachment.configs = [one for one in configs if replaceable(one._attn_implementation_internal)]
        put_tables(model, attachment.tables)
        attachment.at_death = weakref.finalize(model, _take_tables, attachment)
        attachment.at_death.atexit = False
    assert attachment.state is not None
    hook_indexers(model, attachment.hooks)
    for method_class, module in _indexer_methods(model):
        method_class.put_on(module)
    for one in _running(model):
        hook_model(one, attachment.hooks, attachment.state.turn_to_others)
        for method in _METHODS:
            method.put_on(one, attachment.state.turn_to_others)


def _take_off(model: PreTrainedModel, attachment: _Attachment) -> None:
    unhook(attachment.block_hooks)
    unhook(attachment.hooks)
    if attachment.at_death is not None:
        attachment.at_death.detach()
    _take_tables(attachment)
    for method_class, module in _indexer_methods(model):
        method_class.take_off(module)
    for one in _running(model):
        for method in _METHODS:
            method.take_off(one)


def _take_tables(attachment: _Attachment) -> None:
    """Return attention tables to files of models, unless another model with caches needs ours there."""
    with _lock():
        tables, attachment.tables = attachment.tables, []
        take_tables(tables, [place for one in _ATTACHED.values() for place in one.tables])


def _running(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models whose forward is a step: `model`, and those within it that its own `generate` may call instead
    (Kosmos-2's). If one runs within the other, the inner one's step replaces the outer one's."""
    return [model, *generating_parts(model).values()] if has_own_generate(model) else [model]


def _hook_blocks(model: PreTrainedModel, attachment: _Attachment) -> None:
    """Attach or remove the hooks of blocks, as the caches want them now."""
    if not attachment.watching:
        unhook(attachment.block_hooks)
    elif not attachment.block_hooks:
        try:
            hook_blocks(model, attachment.block_hooks)
        except BaseException:
            unhook(attachment.block_hooks)
            raise


def _strip_copied(model: PreTrainedModel) -> None:
    """Remove hooks and methods that came with a copy or a pickle of an attached model: nobody counts them."""
    counted = {id(seam) for one in _ATTACHED.values() for seam, _ in (*one.hooks, *one.block_hooks)}
    strip_hooks(model, counted)
    for method_class, module in _indexer_methods(model):
        method_class.take_off(module)
    for one in _running(model):
        for method in _METHODS:
            method.take_off(one)
