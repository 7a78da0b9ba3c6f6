"""What transformers' own cache layers hold (sliding windows, linear states): taken out, checked and put back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from .captured_trees import is_of_kind, not_whole, shortened

_LATE = (torch.dtype, torch.device)
"""Kinds of what a new layer has not yet and one that holds something has; beside tensors."""


def capture_kept(layer: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attributes of `layer` (those in `names`; None: all) as a tree: no copies, not to be changed."""
    return {name: getattr(layer, name) for name in (vars(layer) if names is None else names)}


def restore_kept(
    layer: Any, tree: Any, place: str, names: Iterable[str] | None = None, rows: int | None = None
) -> None:
    """Make `layer`, a new one of the same kind, hold what `tree` was captured of. Tensors are copied.

    Args:
        place: what errors call it.
        names: as for `capture_kept`.
        rows: sequences that every tensor has; None: that is not known.

    Raises `ContextError` with nothing changed unless `tree` has the entries of a new layer, each of its kind. Others
    may be there, tensors and types that come with the first token, but none with a name that the layer's class has:
    a context replaces no method.
    """
    like = capture_kept(layer, names)
    _check(tree, like, place, dir(type(layer)), rows)
    if tree.get("is_initialized") and not like.get("is_initialized"):
        for part in ("keys", "values"):
            held = tree.get(part, torch.empty(0, dtype=torch.float32, device="cpu"))
            if not isinstance(held, torch.Tensor) or not held.is_floating_point():
                raise not_whole(place, f"its {part} are {shortened(held)}")
    for name, value in tree.items():
        setattr(layer, name, _own(value))


def _check(tree: Any, like: dict[Any, Any], place: str, taken: Collection[str], rows: int | None) -> None:
    """`taken`: names that an entry may have only where a new layer has it."""
    if not isinstance(tree, dict) or like.keys() - tree.keys():
        missing = sorted(map(str, like.keys() - tree.keys())) if isinstance(tree, dict) else "all"
        raise not_whole(place, f"entries are missing: {missing}")
    for field, value in tree.items():
        if field not in like and (not isinstance(field, str) or field in taken):
            raise not_whole(place, f"it has the entry {field!r}, which a layer has not")
        expected = like.get(field)
        if isinstance(expected, dict) and expected and isinstance(value, dict):
            _check(value, expected, f"{place}, {field}", (), rows)
            continue
        late = (*_LATE, int) if isinstance(field, int) else _LATE  # one of several of its kind, such as sizes of states
        of_kind = is_of_kind(value, expected, late)
        if isinstance(expected, bool | int | str) and expected:  # such as the size of a window
            of_kind = of_kind and value == expected
        if isinstance(value, torch.Tensor) and rows is not None and expected is None:
            of_kind = of_kind and rows in value.shape
        if not of_kind:
            raise not_whole(place, f"{field} is {shortened(value)}, and a new layer has {shortened(expected)}")


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own(item) for item in value)
    return value
