"""Trees of values and tensors as bytes: safetensors, with the tree itself as JSON beside the tensors. No pickle.

A tree is made of dictionaries (string or whole-number keys), lists, tuples, None, booleans, numbers, strings, dtypes,
devices and tensors: what a layer's `capture` returns.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..config import MOST_JSON_BYTES, parse_json
from ..errors import ContextError, shown

_TREE = "tree"
_PLAIN = (type(None), bool, int, float, str)


def pack(tree: Any) -> bytes:
    """The bytes of `tree`, whose tensors may be on any device: that is forgotten. `TypeError` for other leaves."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_without_tensors(tree, tensors)).encode()
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    for name, tensor in tensors.items():  # safetensors refuses those that lie in one memory
        if memory.count(tensor.untyped_storage().data_ptr()) > 1:
            tensors[name] = tensor.clone()
    tensors[_TREE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return save(tensors)


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors of `tree`."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return sum(tensor_bytes(part) for part in parts)


def unpack(data: bytes, device: torch.device, place: str) -> Any:
    """The tree that was given to `pack`, with its tensors on `device`, owned by the caller. Raises `ContextError` that
    names `place`.

    Takes twice the bytes of `data` and a few MiB, whatever the content, because each tensor is in the tree once.
    """
    try:
        header = int.from_bytes(data[:8], "little")
        if header > MOST_JSON_BYTES:  # some hundred thousand tensors without elements, of a kilobyte each
            raise ValueError(f"a header of {header:,} bytes, above {MOST_JSON_BYTES:,}")
        tensors = load(data)
        tree = parse_json(tensors.pop(_TREE).numpy().tobytes())
        found = _with_tensors(tree, tensors, device)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {shown(str(error), 200)}"
        raise ContextError(f"{place}: the state cannot be read ({what})") from error
    if tensors:
        raise ContextError(f"{place}: the state cannot be read: {len(tensors)} of its tensors are not in its tree")
    return found


def _without_tensors(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        if not all(type(key) in (str, int) for key in tree):
            raise TypeError(f"a context cannot hold a dictionary with keys {list(tree)!r}")
        return {"dict": [[key, _without_tensors(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_without_tensors(value, tensors) for value in tree]}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.device):
        return {"device": tree.type}
    if isinstance(tree, _PLAIN):
        return tree
    raise TypeError(f"a context cannot hold a {type(tree).__name__}: {tree!r}")


def _with_tensors(tree: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    if not isinstance(tree, dict):
        if not isinstance(tree, _PLAIN):
            raise ValueError(f"unexpected {type(tree).__name__}")
        return tree
    if len(tree) != 1:
        raise ValueError(f"unexpected entry with {sorted(tree)}")
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors.pop(value).to(device)  # once: of a name that is in many places each would take memory
    if kind == "dict":
        return {key: _with_tensors(item, tensors, device) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_with_tensors(item, tensors, device) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "dtype":
        found = getattr(torch, value, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"unknown dtype {value!r}")
        return found
    if kind == "device":
        return device
    raise ValueError(f"unknown kind {kind!r}")
