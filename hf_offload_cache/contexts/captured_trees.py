"""Whether the trees of a context are what was captured of a cache: their kinds and the manifest's numbers.

Nothing has been made of a tree yet when it is checked here. Whether its values make sense is checked by whoever
restores them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from ..errors import not_whole, shown
from ..history.captured_history import DTYPES, check_form
from ..history.record_format import RecordFormat
from ..model.geometry import LayerShape, seen_layers, stated_shape
from .manifest import LayerEntry


def token_ids(tree: Any, batch: int, tokens: int) -> torch.Tensor:
    """The token ids (batch, tokens), int64, in the state of a cache as a whole. Raises `ContextError`."""
    ids = tree.get("ids") if isinstance(tree, dict) else None
    shape = (batch, tokens)
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.shape != shape or not tokens:
        found = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise not_whole("cache", f"its token ids are {found}, the manifest says {shape} torch.int64")
    return ids


class LayersOf:
    """The contents of a model's layers: keys and values as its configuration says, and otherwise the state that one
    token leaves in a twin without data."""

    def __init__(self, model: Any) -> None:
        self._model, stated = model, stated_shape(model.config.get_text_config(decoder=True))
        self._stated = None if stated is None else _sizes_of(stated)

    @functools.cached_property
    def _seen(self) -> list[Any] | None:
        return seen_layers(self._model)

    def have_sizes(self, sizes: tuple[int, int, int, int]) -> bool:
        """Whether some layer has keys and values of (Hk, Dk, Hv, Dv); also true if that is unknown."""
        if sizes == self._stated or self._seen is None:
            return True
        both = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in self._seen]
        return sizes in [
            (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
            for keys, values in both
            if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == values.ndim == 4
        ]

    def check_kept(self, tree: Any, layer_idx: int, rows: int, name: str) -> None:
        """Raise `ContextError` unless a transformers layer's keys, values and linear states are as the model makes them
        for `rows` sequences."""
        keys, values = tree.get("keys"), tree.get("values")
        if isinstance(keys, torch.Tensor) or isinstance(values, torch.Tensor):
            fit = isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
            fit = fit and keys.ndim == values.ndim == 4 and keys.dtype == values.dtype in DTYPES
            if not fit or not len(keys) == len(values) == rows or keys.shape[2] != values.shape[2]:
                raise not_whole(name, f"its keys and values are {shortened(keys)} and {shortened(values)}")
            if not self.have_sizes((keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])):
                raise not_whole(name, f"its keys and values are {shortened(keys)}, and the model's have other sizes")
        states = {part: held for part, held in tree.items() if isinstance(held, dict) and held}
        if not any(isinstance(one, torch.Tensor) for held in states.values() for one in held.values()):
            return
        twin = None if self._seen is None or layer_idx >= len(self._seen) else self._seen[layer_idx]
        growing = not type(twin).__module__.startswith("transformers.cache_utils")  # a model's own: entries a token
        for part, held in states.items():
            usual: Any = getattr(twin, part, None)
            for place, one in held.items() if isinstance(usual, dict) else ():
                other = usual.get(place)
                if part == "conv_kernel_size":  # that of one token may be shorter
                    width = states.get("conv_states", {}).get(place)
                    fits = isinstance(width, torch.Tensor) and width.ndim > 1 and one == width.shape[-1]
                    fits = fits or (width is None and one == other)
                elif growing:
                    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
                    fits = not isinstance(one, torch.Tensor) or (one.ndim > 1 and len(one) == rows)
                    fits = fits and (not both or (one.ndim == other.ndim and one.shape[2:] == other.shape[2:]))
                elif isinstance(other, torch.Tensor) or isinstance(one, torch.Tensor):
                    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
                    last = -1 if part == "conv_states" else None
                    fits = both and one.ndim == other.ndim > 1 and one.dtype in DTYPES and len(one) == rows
                    fits = fits and one.shape[1:last] == other.shape[1:last]
                else:
                    fits = type(one) is type(other) and (isinstance(one, bool) or one == other)
                if not fits:
                    what = f"{part} {shown(place)} is {shortened(one)}, and the model's {shortened(other)}"
                    raise not_whole(name, what)


def _sizes_of(shape: LayerShape) -> tuple[int, int, int, int]:
    return shape.num_key_heads, shape.key_dim, shape.num_value_heads, shape.value_dim


def check_history(tree: Any, entry: LayerEntry, batch: int, tokens: int, layers: LayersOf, name: str) -> None:
    """Raise `ContextError` unless a captured layer holds keys and values as the model makes them, in the number and
    record size that the manifest states. The check comes before any of them is opened and before memory is allocated.

    A layer that holds nothing, or that captures something else as "history", is left to the code that restores it.
    """
    history = tree.get("history")
    if not isinstance(history, dict) or not isinstance(history.get("form"), dict):
        return
    form, tail, heads = RecordFormat(**history["form"]), history.get("tail"), tree.get("heads", 1)
    check_form(form, name)
    if type(heads) is not int or not 1 <= heads < 2**20:
        raise not_whole(name, f"each sequence has {shown(heads)} rows")
    own = (heads * form.num_key_heads, form.key_dim, heads * form.num_value_heads, form.value_dim)
    if not layers.have_sizes(own):
        raise not_whole(name, f"its keys and values have (heads, width, heads, width) {own}, and the model's have not")
    if any(entry.size_of(part) > form.record_bytes for part in entry.parts) or (
        entry.parts and entry.record_bytes != form.record_bytes
    ):
        raise not_whole(name, f"a record of its form has {form.record_bytes:,} bytes, {entry.record_bytes:,} are named")
    if not isinstance(tail, torch.Tensor) or tail.ndim != 3 or len(tail) != batch * heads:
        found = shortened(tail)
        raise not_whole(name, f"its latest tokens are {found}, of {batch} sequences of {heads} rows each")
    if history.get("length") != tokens or isinstance(history["length"], bool):
        raise not_whole(name, f"it holds {shown(history.get('length'))} tokens, the manifest says {tokens}")


def check_layer(tree: Any, entry: LayerEntry, name: str) -> None:
    """Raises `ContextError` unless `tree` is the state of a layer, with the tags of the records that it has."""
    if not isinstance(tree, dict) or not isinstance(tree.get("tags"), list) or not isinstance(tree.get("layer"), dict):
        raise not_whole(name, "its state is none of a layer")
    tags = tree["tags"]
    if len(tags) != len(entry.parts):
        raise not_whole(name, f"there are tags of {len(tags)} files of records, the manifest names {len(entry.parts)}")
    for tag, part in zip(tags, entry.parts, strict=True):
        if not isinstance(tag, torch.Tensor) or tag.ndim != 2 or len(tag) != part.records:
            found = tuple(tag.shape) if isinstance(tag, torch.Tensor) else type(tag).__name__
            raise not_whole(name, f"the tags of {part.file} are {found}, and it has {part.records} records")


def check_kinds(tree: Any, like: dict[str, Any], name: str) -> None:
    """Raises `ContextError` unless `tree` has the entries of `like`, what a new layer captures, each of its kind.

    What is in a dictionary is left to whoever restores that part.
    """
    if not isinstance(tree, dict) or like.keys() != tree.keys():
        differ = sorted(map(str, like.keys() ^ tree.keys())) if isinstance(tree, dict) else "all"
        raise not_whole(name, f"entries are missing, or are none of such a layer: {differ}")
    for field, value in tree.items():
        expected = like[field]
        if not (isinstance(expected, dict) and isinstance(value, dict)) and not is_of_kind(value, expected, (dict,)):
            raise not_whole(name, f"{field} is {shortened(value)}, and a new layer has {shortened(expected)}")


def is_of_kind(value: Any, expected: Any, late: tuple[type, ...]) -> bool:
    """Whether `value` may stand where a new layer has `expected`; for None also a tensor, or something of `late`."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(expected, torch.Tensor):
        return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (expected.shape, expected.dtype)
    if isinstance(value, torch.Tensor):
        return expected is None and value.ndim > 0
    if expected is None:
        return value is None or isinstance(value, late)
    if type(expected) is int:
        return type(value) is int and 0 <= value < np.iinfo(np.int64).max
    return type(value) is type(expected) or (isinstance(expected, float) and type(value) is int)


def shortened(value: Any) -> str:
    """What an error shows of a value."""
    return shown(repr(value) if isinstance(value, str) else value)
