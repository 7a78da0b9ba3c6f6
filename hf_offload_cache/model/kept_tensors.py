"""What layers of transformers' own hold in memory, whatever their class."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch


def kept_tensors(layer: Any, names: Collection[str] | None = None) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Every tensor in the attributes of `layer` (those in `names`; None: all), with the mapping or sequence that has it
    and its key or index there."""
    places: list[Any] = [vars(layer)]
    while places:
        place = places.pop()
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if place is vars(layer) and names is not None and key not in names:
                continue
            if isinstance(value, torch.Tensor):
                yield place, key, value
            elif isinstance(value, dict | list | tuple):
                places.append(value)


def kept_nbytes(layer: Any, names: Collection[str] | None = None) -> int:
    """Bytes of what `layer` holds, single numbers aside; what two of its attributes name counts once."""
    parts = (part for _, _, part in kept_tensors(layer, names) if part.ndim)
    return sum({(part.data_ptr(), part.shape): part.nbytes for part in parts}.values())
