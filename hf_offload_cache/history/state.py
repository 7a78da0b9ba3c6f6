"""The arrays of a captured state: each is declared once, with its shape, types and range, and checked by that."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import not_whole, shown

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that keys and values may have."""
LARGEST = 3e38
"""What lies beyond is no number, or is none in some of these types."""


def is_tensor(
    value: Any, shape: tuple[int | None, ...], *dtypes: torch.dtype, low: float | None = None, high: float | None = None
) -> bool:
    """Whether a captured object is a tensor of this shape (None: any size in that dimension) and one of these types,
    with all values from `low` to `high`, so without NaN."""
    if not isinstance(value, torch.Tensor) or value.ndim != len(shape) or value.dtype not in dtypes:
        return False
    if any(wanted not in (None, size) for wanted, size in zip(shape, value.shape, strict=True)):
        return False
    above = low is None or bool((value >= low).all())
    return above and (high is None or bool((value <= high).all()))


class Array:
    """One array of a state. `shape` names its sizes, such as "rows tokens"; without `dtypes` its type is the keys'.
    Values are at least `low`, and below the size that `below` names."""

    def __init__(self, shape: str, *dtypes: torch.dtype, low: float | None = None, below: str | None = None) -> None:
        self.sizes, self.dtypes, self.low, self.below = shape.split(), dtypes, low, below


class State:
    """The arrays of a captured part, by name. `part` is what errors call it, such as "clusters"."""

    def __init__(self, part: str, **arrays: Array) -> None:
        self.part, self.arrays = part, arrays

    def check(self, tree: Any, name: str, dtype: torch.dtype | None = None, **sizes: int) -> dict[str, int]:
        """Raise `ContextError` unless `tree` has exactly these arrays, each as declared.

        Returns all sizes: those given, and of the others what the first array with that size has. `name`: the layer's.
        `dtype`: the keys'.
        """
        if not isinstance(tree, dict) or tree.keys() != self.arrays.keys():
            entries = sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
            raise not_whole(name, f"entries of its {self.part} are {shown(entries)}, expected {sorted(self.arrays)}")
        for entry, array in self.arrays.items():
            found, dtypes = tree[entry], array.dtypes or (dtype,)
            high = None if array.below is None else sizes[array.below] - 1
            if not is_tensor(found, tuple(map(sizes.get, array.sizes)), *dtypes, low=array.low, high=high):
                wanted = ", ".join(f"{size}={sizes[size]}" if size in sizes else size for size in array.sizes)
                limits = "" if array.low is None else f" from {array.low}" + ("" if high is None else f" to {high}")
                what = f"{shown(found)}, expected ({wanted}) {' or '.join(map(str, dtypes))}{limits}"
                raise not_whole(name, f"{entry} of its {self.part} is {what}")
            sizes.update(zip(array.sizes, found.shape, strict=True))
        return sizes
