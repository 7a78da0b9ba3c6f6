"""The memory behind tensors: a view keeps its complete storage alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of dictionaries, lists and tuples, without those of no dimension, which are constants."""
    left = [tree]
    while left:
        part = left.pop()
        if isinstance(part, torch.Tensor):
            if part.ndim:
                yield part
        elif isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list | tuple):
            left.extend(part)


def storage_bytes(tree: Any) -> int:
    """Bytes that the tensors of `tree` keep in memory: each storage counts in full, and once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(tree)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def without_views(tree: Any, spare: int) -> Any:
    """`tree` with copies of the tensors whose storage holds more than they and `spare` entries; the same object if
    nothing had to be copied.

    An entry is one index along the second-last dimension, the token dimension of keys and values (B, H, T, D). Tensors
    that are the same view of a storage are the same tensor in the result.
    """
    used: dict[int, dict[tuple[Any, ...], int]] = {}
    for tensor in tensors_in(tree):
        entry = tensor.nbytes // max(1, tensor.shape[-2]) if tensor.ndim > 1 else 0
        used.setdefault(tensor.untyped_storage().data_ptr(), {})[_view(tensor)] = tensor.nbytes + spare * entry
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def replaced(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            if not part.ndim or storage.nbytes() <= sum(used[storage.data_ptr()].values()):
                return part
            if (view := _view(part)) not in copies:
                copies[view] = part.clone(memory_format=torch.contiguous_format)
            return copies[view]
        if isinstance(part, dict):
            items = {name: replaced(one) for name, one in part.items()}
            return items if any(items[name] is not one for name, one in part.items()) else part
        if isinstance(part, list | tuple):
            parts = [replaced(one) for one in part]
            return type(part)(parts) if any(new is not one for new, one in zip(parts, part, strict=True)) else part
        return part

    return replaced(tree)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same part of the same storage."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
