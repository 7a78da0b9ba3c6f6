"""Whether the trees of a context are what was captured of a cache: their kinds and the manifest's numbers.

Nothing has been made of a tree yet when it is checked here. Whether its values make sense is checked by whoever
restores them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..errors import not_whole
from .manifest import LayerEntry


def token_ids(tree: Any, batch: int, tokens: int) -> torch.Tensor:
    """The token ids (batch, tokens), int64, in the state of a cache as a whole. Raises `ContextError`."""
    ids = tree.get("ids") if isinstance(tree, dict) else None
    shape = (batch, tokens)
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.shape != shape or not tokens:
        found = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise not_whole("cache", f"its token ids are {found}, the manifest says {shape} torch.int64")
    return ids


def check_layer(tree: Any, entry: LayerEntry, name: str) -> None:
    """Raises `ContextError` unless `tree` is the state of a layer, with the tags of the records that it has."""
    if not isinstance(tree, dict) or not isinstance(tree.get("tags"), list) or "layer" not in tree:
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
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)[:80]
