"""Whether what a context says was captured can be restored: kinds and sizes, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DummyLayer

from ..core.kept_layers import capture_kept
from ..core.offload_cache import OffloadCache
from ..core.offload_layer import OffloadLayer
from ..errors import ContextError
from .manifest import LayerEntry, Manifest

_STATES = ("unknown", "tagged", "full")


def check_cache(tree: Any, manifest: Manifest) -> None:
    """Raises `ContextError` unless the state of the cache as a whole has the manifest's token ids."""
    ids = tree.get("ids") if isinstance(tree, dict) else None
    shape = (manifest.batch, manifest.tokens)
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.shape != shape or not manifest.tokens:
        found = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise _wrong("cache", f"its token ids are {found}, the manifest says {shape} torch.int64")


def check_layer(tree: Any, layer: Any, entry: LayerEntry, manifest: Manifest, name: str) -> None:
    """Raises `ContextError` unless the state of a layer goes with the new `layer`, its records and the manifest."""
    if not isinstance(tree, dict) or not isinstance(tree.get("tags"), list) or "layer" not in tree:
        raise _wrong(name, "its state is none of a layer")
    _check_tags(tree["tags"], entry, name)
    captured = tree["layer"]
    if not isinstance(layer, OffloadLayer):
        _check_alike(captured, capture_kept(layer), name, known=dir(type(layer)), rows=manifest.batch)
        holds = captured.get("is_initialized") and not isinstance(layer, DummyLayer)
        for part in ("keys", "values") if holds else ():
            held = captured.get(part, torch.empty(0))
            if not isinstance(held, torch.Tensor) or not held.is_floating_point():
                raise _wrong(name, f"its {part} are {_short(held)}")
        return
    like = layer.capture()
    linear = like.pop("linear", None)
    if linear is not None:
        states = captured.get("linear") if isinstance(captured, dict) else None
        _check_alike(states, linear, name, known=dir(type(layer)), rows=manifest.batch)
        captured = {field: value for field, value in captured.items() if field != "linear"}
    _check_alike(captured, like, name)
    if captured["state"] not in _STATES:
        raise _wrong(name, f"its state is {captured['state']!r}, none of {_STATES}")
    _check_history(captured["history"], layer, entry, manifest, name)


def check_whole(cache: OffloadCache, manifest: Manifest) -> None:
    """Raises `ContextError` unless all layers that were restored hold as many tokens."""
    for layer_idx, layer in enumerate(cache.layers):
        if isinstance(layer, OffloadLayer) and not layer.is_initialized:
            continue
        length = getattr(layer, "get_seq_length", lambda: manifest.tokens)()
        if length != manifest.tokens or isinstance(length, bool):
            raise _wrong(f"layer {layer_idx}", f"it holds {length!r} tokens, the manifest says {manifest.tokens}")


def _check_tags(tags: Sequence[Any], entry: LayerEntry, name: str) -> None:
    if len(tags) != len(entry.parts):
        raise _wrong(name, f"there are tags of {len(tags)} files of records, the manifest names {len(entry.parts)}")
    for tag, part in zip(tags, entry.parts, strict=True):
        if not isinstance(tag, torch.Tensor) or tag.ndim != 2 or len(tag) != part.records:
            found = tuple(tag.shape) if isinstance(tag, torch.Tensor) else type(tag).__name__
            raise _wrong(name, f"the tags of {part.file} are {found}, and it has {part.records} records")


def _check_history(tree: Any, layer: OffloadLayer, entry: LayerEntry, manifest: Manifest, name: str) -> None:
    if tree is None:
        if entry.parts:
            raise _wrong(name, "it holds no history, and has records")
        return
    size, tail, length = layer.shared.config.group_size, tree["tail"], tree["length"]
    if type(length) is not int or length != manifest.tokens:
        raise _wrong(name, f"its length is {length!r}, the manifest says {manifest.tokens}")
    if not isinstance(tail, torch.Tensor) or not isinstance(tree["table"], torch.Tensor) or not tail.ndim:
        raise _wrong(name, "its table and its tail are no tensors")
    if tail.shape[0] != manifest.batch:
        raise _wrong(name, f"it holds {tail.shape[0]} sequences, the manifest says {manifest.batch}")
    form = tree["form"]
    if any(type(number) is not int for field, number in form.items() if field != "dtype"):
        raise _wrong(name, f"its entries have the form {form}")
    if size is not None and form["group_size"] != size:
        raise _wrong(name, f"a record holds {form['group_size']} tokens, group_size is {size}")


def _check_alike(
    tree: Any, like: dict[Any, Any], name: str, *, known: Sequence[str] | None = None, rows: int | None = None
) -> None:
    """Raises `ContextError` unless `tree` has the entries of `like`, what a new layer captures, each of its kind.

    `known`: names that the layer's class uses, so that no other entry may have one; None: there may be no other.
    `rows`: sequences that every tensor has.
    """
    if not isinstance(tree, dict) or like.keys() - tree.keys():
        missing = sorted(map(str, like.keys() - tree.keys())) if isinstance(tree, dict) else "all"
        raise _wrong(name, f"entries are missing: {missing}")
    for field, value in tree.items():
        if field not in like and (known is None or not isinstance(field, str) or field in known):
            raise _wrong(name, f"it has the entry {field!r}, which a layer has not")
        expected = like.get(field)
        if isinstance(expected, dict) and expected and isinstance(value, dict):
            _check_alike(value, expected, f"{name}, {field}", known=(), rows=rows)
        elif not _fits(value, expected, rows, isinstance(field, int)):
            raise _wrong(name, f"{field} is {_short(value)}, and a new layer has {_short(expected)}")


def _fits(value: Any, expected: Any, rows: int | None, numbered: bool) -> bool:
    """`numbered`: the value is one of several of its kind, such as sizes of states."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(expected, torch.Tensor):
        return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (expected.shape, expected.dtype)
    if isinstance(value, torch.Tensor):
        return expected is None and value.ndim > 0 and (rows is None or rows in value.shape)
    if expected is None:
        late = (dict,) if rows is None else (torch.dtype, torch.device, *([int] if numbered else []))
        return value is None or isinstance(value, late)
    if type(expected) is int:
        return type(value) is int and 0 <= value < np.iinfo(np.int64).max
    return type(value) is type(expected) or (isinstance(expected, float) and type(value) is int)


def _short(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def _wrong(name: str, what: str) -> ContextError:
    return ContextError(f"{name} of the context does not hold together: {what}; save the context anew")
