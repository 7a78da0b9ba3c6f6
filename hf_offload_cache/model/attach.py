"""Seams of a model, attached with its first cache and removed with its last: hooks, names, and two methods.

The hooks of its blocks are on only while some cache needs block events.

This package knows a cache only by the methods of `Attachable`. Everything put on a model is inert for every other
cache.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .attachable import Attachable
from .config_names import Renamed, carries_ours, rename_attention, restore_attention, strip_attention
from .conversation import Conversation, ModelState
from .inner_model import inner_model, is_model
from .method_on_model import MethodOnModel
from .own_generate import GivenCache
from .place import generating_parts, has_own_generate
from .prepare_inputs import Prefill, PrepareInputs, PreparePositions
from .seam import Hooks, hook_blocks, hook_model, strip_hooks, unhook
from .tested_version import warn_if_untested
from .untraced import ready

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_METHODS: tuple[type[MethodOnModel], ...] = (PreparePositions, PrepareInputs, Prefill, GivenCache)


@dataclass
class _Attachment:
    """What is on one model. Holds nothing of the model but its configs, which do not hold it."""

    caches: dict[int, weakref.ref] = field(default_factory=dict)
    renamed: Renamed = field(default_factory=list)
    hooks: Hooks = field(default_factory=list)
    watching: set[int] = field(default_factory=set)
    """The caches that want the verbs of blocks: as long as there is one, the hooks of blocks are on."""
    block_hooks: Hooks = field(default_factory=list)
    state: ModelState | None = None
    """What the model's code keeps on it for each conversation."""


# State of the process, not of a step, and it cannot lie on the model: it would be copied and saved with it. It says
# which models carry seams, how many caches count on them, and so when the last one has gone.
_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()
_LOCKS: dict[int, threading.RLock] = {}


def _lock() -> threading.RLock:
    """Over what is attached in this process: a forked child does not wait for a thread that only its parent has."""
    return _LOCKS.setdefault(os.getpid(), threading.RLock())


def attach(model: PreTrainedModel, cache: Attachable) -> int:
    """Put the seams on `model` (once, however many caches) and count `cache`; returns the token for `release`.

    Those of blocks are put on where the cache `watches_blocks`; see `watch_blocks` for one that changes that.
    """
    warn_if_untested()
    ready()
    with _lock():
        token = id(cache)
        attachment = _ATTACHED.get(model)
        if attachment is not None:
            attachment.caches[token] = weakref.ref(cache)
        if attachment is None or _ATTACHED.get(model) is not attachment:  # a collection may just have closed the last
            attachment = _Attachment({token: weakref.ref(cache)}, state=ModelState(model))
            try:
                _put_on(model, attachment)
            except BaseException:
                _take_off(model, attachment)
                raise
            _ATTACHED[model] = attachment
        if cache.watches_blocks:
            try:
                watch_blocks(model, cache)
            except BaseException:
                release(model, token)
                raise
        return token


def watch_blocks(model: PreTrainedModel, cache: Attachable) -> None:
    """What `cache`, which is on `model`, says by `watches_blocks` has changed: the hooks of blocks are on as long as
    some cache wants them, for every one costs each block's call, inert or not.

    What `torch.compile` has made of a block keeps the hooks that the block had then: those that are off by now find
    nobody who watches, and those that came later are not called.
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
    """Whether the model's attention goes through ours while the seams are on."""
    attachment = _ATTACHED.get(model)
    return attachment is not None and bool(attachment.renamed)


def intact(model: torch.nn.Module) -> bool:
    """Whether every config that carried our attention when the seams went on still does."""
    attachment = _ATTACHED.get(model) if is_model(model) else None
    return attachment is None or all(carries_ours(config) for config, _ in attachment.renamed)


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
    rename_attention(model, attachment.renamed, _renamed_now())
    assert attachment.state is not None
    for one in _running(model):
        hook_model(one, attachment.hooks, attachment.state.turn_to_others)
        for method in _METHODS:
            method.put_on(one, attachment.state.turn_to_others)


def _take_off(model: PreTrainedModel, attachment: _Attachment) -> None:
    unhook(attachment.block_hooks)
    unhook(attachment.hooks)
    restore_attention(attachment.renamed, _renamed_now())
    for one in _running(model):
        for method in _METHODS:
            method.take_off(one)


def _running(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models whose forward is a step: `model`, and those within it that its own `generate` may call in its place
    (Kosmos-2's). Where one runs within the other, the inner one's begins in the place of the outer one's."""
    return [model, *generating_parts(model).values()] if has_own_generate(model) else [model]


def _hook_blocks(model: PreTrainedModel, attachment: _Attachment) -> None:
    """Put the hooks of blocks on or take them off, as the caches want them now."""
    if not attachment.watching:
        unhook(attachment.block_hooks)
    elif not attachment.block_hooks:
        try:
            hook_blocks(model, attachment.block_hooks)
        except BaseException:
            unhook(attachment.block_hooks)
            raise


def _strip_copied(model: PreTrainedModel) -> None:
    """Take off what a copy or a pickle of an attached model brought along: nobody counts it."""
    counted = {id(seam) for one in _ATTACHED.values() for seam, _ in (*one.hooks, *one.block_hooks)}
    strip_hooks(model, counted)
    strip_attention(model, _renamed_now())
    for one in _running(model):
        for method in _METHODS:
            method.take_off(one)


def _renamed_now() -> Renamed:
    """The configs that carry our name for a live attachment, with the names they had."""
    return [renamed for attachment in _ATTACHED.values() for renamed in attachment.renamed]
