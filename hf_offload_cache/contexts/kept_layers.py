"""Capture, check, restore and row selection for the state of transformers' own cache layers: sliding windows, linear
states, an indexer's keys, and whatever a model's own layers add."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from ..errors import UnsupportedModelError
from ..errors import not_whole
from .captured_trees import is_of_kind, shortened

_LATE = (torch.dtype, torch.device)
"""Kinds of what a new layer has not yet and one that holds something has; beside tensors."""


def capture_kept(layer: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attributes of `layer` (those in `names`; None: all) as a tree: no copies, not to be changed."""
    return {name: getattr(layer, name) for name in (vars(layer) if names is None else names)}


def select_kept_rows(layer: Any, rows: torch.Tensor, batch: int, change: str, argument: Any) -> dict[str, Any]:
    """Attributes of `layer`, which holds `batch` sequences, after sequence i becomes the current sequence `rows[i]`;
    `layer` itself is unchanged.

    Calls its own method `change` with `argument`, if it has one. Attributes that the method leaves unchanged are
    selected here, because some layers' methods skip state other than keys and values. Raises `UnsupportedModelError`
    for a tensor whose sequence dimension is unknown.
    """
    twin = copy.copy(layer)
    vars(twin).update((name, _containers(value)) for name, value in vars(layer).items())
    before = {(id(place), key): id(tensor) for place, key, tensor in _tensors(twin)}
    if (own := getattr(twin, change, None)) is not None:
        own(argument)
    for place, key, tensor in _tensors(twin):
        if before.get((id(place), key)) != id(tensor) or not tensor.ndim or not tensor.numel():
            continue
        if tensor.shape[0] != batch or isinstance(place, tuple):
            raise UnsupportedModelError(
                f"a {type(layer).__name__} keeps {key!r} of shape {tuple(tensor.shape)} for {batch} sequences, and it "
                "is not known which part is whose: leave the sequences as they are, or use transformers' DynamicCache"
            )
        place[key] = tensor.index_select(0, rows.to(tensor.device))
    return vars(twin)


def _containers(value: Any) -> Any:
    """A copy of dictionaries and lists, at all depths, with what they have in them."""
    if isinstance(value, dict | list):
        value = copy.copy(value)
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = _containers(item)
    return value


def _tensors(layer: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Every tensor in the attributes of `layer`, with the mapping or sequence that has it,
    and its key or index there."""
    places: list[Any] = [vars(layer)]
    while places:
        place = places.pop()
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if isinstance(value, torch.Tensor):
                yield place, key, value
            elif isinstance(value, dict | list | tuple):
                places.append(value)


def crops_all(layer: Any) -> bool:
    """Whether a layer's `crop` takes back all of its state: the class that last defined the state has its own
    `crop`."""
    classes = type(layer).__mro__
    made, cropped = (
        next((place for place, one in enumerate(classes) if name in vars(one)), len(classes))
        for name in ("__init__", "crop")
    )
    return cropped <= made


def restore_kept(
    layer: Any,
    tree: Any,
    place: str,
    names: Iterable[str] | None = None,
    rows: int | None = None,
    *,
    known: bool = False,
) -> None:
    """Make `layer`, a new layer of the same kind, hold the state captured in `tree`. Tensors are copied.

    Args:
        place: name for errors.
        names: as for `capture_kept`.
        rows: number of sequences that every tensor has; None: unknown.
        known: `tree` was captured in this process, and is not checked.

    Raises `ContextError` with nothing changed unless `tree` has the entries of a new layer, each of its kind. Further
    entries are allowed, such as tensors and types that are added with the first token. Their names must not be names of
    the layer's class, so a context cannot replace a method.
    """
    if not known:
        like = capture_kept(layer, names)
        # a layer of a model's own may count what it holds, and have nothing in a part of it
        foreign = not type(layer).__module__.startswith(("transformers.cache_utils", __package__.split(".")[0]))
        _check(tree, like, place, dir(type(layer)), rows, foreign=foreign)
        if tree.get("is_initialized") and not like.get("is_initialized"):
            for part in ("keys", "values"):
                held = tree.get(part, torch.empty(0, dtype=torch.float32, device="cpu"))
                if not isinstance(held, torch.Tensor) or not held.is_floating_point():
                    raise not_whole(place, f"its {part} are {shortened(held)}")
    for name, value in tree.items():
        setattr(layer, name, _own(value))


def _check(
    tree: Any, like: dict[Any, Any], place: str, taken: Collection[str], rows: int | None, *, foreign: bool
) -> None:
    """`taken`: names that an entry may have only where a new layer has it. `foreign`: numbers and empty tensors may be
    where a new layer has None."""
    if not isinstance(tree, dict) or like.keys() - tree.keys():
        missing = sorted(map(str, like.keys() - tree.keys())) if isinstance(tree, dict) else "all"
        raise not_whole(place, f"entries are missing: {missing}")
    for field, value in tree.items():
        if field not in like and (not isinstance(field, str) or field in taken):
            raise not_whole(place, f"it has the entry {field!r}, which a layer has not")
        expected = like.get(field)
        if isinstance(expected, dict) and expected and isinstance(value, dict):
            _check(value, expected, f"{place}, {field}", (), rows, foreign=foreign)
            continue
        # an int is one of several of its kind, such as sizes of states
        late = (*_LATE, int) if isinstance(field, int) or foreign else _LATE
        of_kind = is_of_kind(value, expected, late)
        if foreign and isinstance(value, int) and expected is None:
            of_kind = of_kind and is_of_kind(value, 0, ())
        if isinstance(expected, bool | int | str) and expected:  # such as the size of a window
            of_kind = of_kind and value == expected
        if isinstance(value, torch.Tensor) and rows is not None and expected is None:
            of_kind = of_kind and (rows in value.shape or (foreign and not value.numel()))
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
