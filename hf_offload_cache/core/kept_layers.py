"""What transformers' own cache layers hold (sliding windows, linear states), taken out and put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def capture_kept(layer: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attributes of `layer` (those in `names`; None: all) as a tree: no copies, not to be changed."""
    return {name: getattr(layer, name) for name in (vars(layer) if names is None else names)}


def restore_kept(layer: Any, tree: dict[str, Any]) -> None:
    """Make `layer`, a new one of the same kind, hold what `tree` was captured of. Tensors are copied."""
    for name, value in tree.items():
        setattr(layer, name, _own(value))


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own(item) for item in value)
    return value
