"""The seams of a model, put on with its first cache and taken off with its last: hooks, names, `prepare_inputs`.

Nothing in this room knows a cache beyond the verbs of `Attachable`. What is on a model is inert for every other cache.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import config_names, prepare_inputs
from .attachable import Attachable
from .config_names import Renamed
from .inner_model import inner_model, is_model
from .seam import Seam, put_hooks, strip_hooks
from .tested_version import warn_if_untested
from .untraced import ready

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class _Attachment:
    """What is on one model. Holds nothing of the model but its configs, which do not hold it."""

    caches: dict[int, weakref.ref] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    renamed: Renamed = field(default_factory=list)
    seams: list[Seam] = field(default_factory=list)


# State of the process, not of a step, and it cannot lie on the model: it would be copied and saved with it. It says
# which models carry seams, how many caches count on them, and so when the last one has gone.
_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()
_LOCKS: dict[int, threading.RLock] = {}


def _lock() -> threading.RLock:
    """Over what is attached in this process: a forked child does not wait for a thread that only its parent has."""
    return _LOCKS.setdefault(os.getpid(), threading.RLock())


def attach(model: PreTrainedModel, cache: Attachable) -> int:
    """Put the seams on `model` (once, however many caches) and count `cache`; returns the token for `release`."""
    warn_if_untested()
    ready()
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
    attachment = _ATTACHED.get(model) if is_model(model) else None
    return attachment is None or all(config_names.carries_ours(config) for config, _ in attachment.renamed)


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
    config_names.rename(model, attachment.renamed, _renamed_now())
    put_hooks(model, attachment.seams, attachment.handles)
    prepare_inputs.put_on(model)


def _take_off(model: PreTrainedModel, attachment: _Attachment) -> None:
    for handle in attachment.handles:
        handle.remove()
    config_names.restore(attachment.renamed, _renamed_now())
    prepare_inputs.take_off(model)


def _strip_copied(model: PreTrainedModel) -> None:
    """Take off what a copy or a pickle of an attached model brought along: nobody counts it."""
    strip_hooks(model, {id(seam) for attachment in _ATTACHED.values() for seam in attachment.seams})
    config_names.strip(model, _renamed_now())
    prepare_inputs.take_off(model)


def _renamed_now() -> Renamed:
    """The configs that carry our name for a live attachment, with the names they had."""
    return [renamed for attachment in _ATTACHED.values() for renamed in attachment.renamed]
