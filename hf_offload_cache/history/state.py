"""The arrays of a stateful part, declared once: capture, check, restore, growth and row selection follow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ..errors import not_whole, shown
from ..memory.account import lasting_empty

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that keys and values may have."""
LARGEST = 3e38
"""Largest magnitude that is a finite number in all of these types, except float16."""
_AT_ONCE = 256 << 10
"""Bytes of an array whose rows are changed in place at a time."""


def is_tensor(
    value: Any, shape: tuple[int | None, ...], *dtypes: torch.dtype, low: float | None = None, high: float | None = None
) -> bool:
    """Whether a captured object is a tensor of this shape (None: any size in that dimension) and one of these types,
    with all values from `low` to `high`, which excludes NaN."""
    if not isinstance(value, torch.Tensor) or value.ndim != len(shape) or value.dtype not in dtypes:
        return False
    if any(wanted not in (None, size) for wanted, size in zip(shape, value.shape, strict=True)):
        return False
    above = low is None or bool((value >= low).all())
    return above and (high is None or bool((value <= high).all()))


class Array:
    """A tensor of a state. `shape` names its sizes, such as "rows tokens width"; a last "*each" stands for several.

    Args:
        dtypes: allowed types; none given: the keys' type.
        at: the holder's attribute; None: the array's name. "tail.entries" belongs to another object, which moves it.
        low, high: limits of its values, NaN excluded; `below`: name of a size that its values are below.
        optional: it may be None.
        booked: number of arrays of its size that the account counts for it.
    """

    def __init__(
        self, shape: str, *dtypes: torch.dtype, at: str | None = None, low: float | None = None,
        high: float | None = None, below: str | None = None, optional: bool = False, booked: int = 1,
    ) -> None:  # fmt: skip
        self.sizes, self.dtypes, self.at, self.booked = tuple(shape.split()), dtypes, at, booked
        self.low, self.high, self.below, self.optional = low, high, below, optional

    def check(self, value: Any, dtype: torch.dtype | None, sizes: dict[str, Any]) -> str | None:
        """A description of what is expected if `value` is not that; else None, after adding its sizes to `sizes`."""
        shape: list[int | None] = []
        for size in self.sizes:
            shape += sizes[size[1:]] if size[0] == "*" else [sizes.get(size)]
        high, dtypes = self.high if self.below is None else sizes[self.below] - 1, self.dtypes or (dtype,)
        if is_tensor(value, tuple(shape), *dtypes, low=self.low, high=high):
            sizes.update((size, count) for size, count in zip(self.sizes, value.shape, strict=False) if size[0] != "*")
            return None
        wanted = ", ".join(f"{size}={sizes[size]}" if size in sizes else size for size in self.sizes)
        limits = "" if self.low is None else f" from {self.low}" + ("" if high is None else f" to {high}")
        return f"({wanted}) {' or '.join(map(str, dtypes))}{limits}"


class Table(Array):
    """A numpy array in host memory: its bytes count in the holder's `tables_nbytes` and are not booked."""


class Number:
    """An integer from 0, below `below`."""

    sizes: tuple[str, ...] = ()
    optional = False

    def __init__(self, below: int = 1 << 62, at: str | None = None) -> None:
        self.below, self.at = below, at

    def check(self, value: Any, dtype: torch.dtype | None, sizes: dict[str, Any]) -> str | None:
        """As `Array.check`."""
        return None if type(value) is int and 0 <= value < self.below else f"a whole number below {self.below}"


class State:
    """The arrays and numbers of a class, by name. All methods get the holder, an object of that class.

    Args:
        part: the name in errors, such as "clusters".
        owner: the tensors' owner in the holder's `_account`, unless the holder names another as `_owner`.
        used: sizes that are only partly in use, each with the holder's attribute that counts the elements in use.
    """

    def __init__(
        self, part: str, owner: str = "", used: dict[str, str] | None = None, /, **entries: Array | Number
    ) -> None:
        self.part, self.owner, self.used, self.entries = part, owner, used or {}, entries
        self._at = {name: entry.at or name for name, entry in entries.items()}

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self, holder: Any) -> dict[str, Any]:
        """The arrays' part in use: views, valid until the next change; tables as tensors."""
        values = ((name, entry, attrgetter(self._at[name])(holder)) for name, entry in self.entries.items())
        return {name: self._in_use(holder, entry, value) for name, entry, value in values}

    def own(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The entries of this state in a tree that also has others."""
        return {name: tree[name] for name in self.entries if name in tree}

    def check(self, tree: Any, name: str, dtype: torch.dtype | None = None, /, **sizes: Any) -> dict[str, Any]:
        """Raise `ContextError` unless `tree` has exactly these entries, each as declared.

        Returns all sizes: the given ones, and for each other size that of the first array that has it. `name`: the
        layer's. `dtype`: the keys'.
        """
        if not isinstance(tree, dict) or tree.keys() != self.entries.keys():
            entries = sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
            raise not_whole(name, f"entries of its {self.part} are {shown(entries)}, expected {sorted(self.entries)}")
        for entry, declared in self.entries.items():
            absent = tree[entry] is None and declared.optional
            if not absent and (wanted := declared.check(tree[entry], dtype, sizes)) is not None:
                raise not_whole(name, f"{entry} of its {self.part} is {shown(tree[entry])}, expected {wanted}")
        return sizes

    def restore(self, holder: Any, tree: dict[str, Any]) -> None:
        """Take over a checked tree. It is copied into the holder's tensors, which need room for it and that many
        elements in use; a None attribute gets the tree's own value. Other objects restore their own arrays."""
        for name, entry in self.entries.items():
            value, at = tree[name], self._at[name]
            if "." in at:
                continue
            if isinstance(entry, Table):
                value = None if value is None else value.numpy(force=True).copy()
            elif isinstance(value, torch.Tensor) and (held := getattr(holder, at)) is not None:
                self._in_use(holder, entry, held).copy_(value)
                continue
            setattr(holder, at, value)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, holder: Any, **sizes: int) -> None:
        """Keep the first elements along these sizes, of the part in use and of tables."""
        for size in sizes.keys() & self.used.keys():
            setattr(holder, self.used[size], min(sizes[size], getattr(holder, self.used[size])))
        for at, array, table in self._held(holder, tables=True):
            setattr(holder, at, table[tuple(slice(sizes.get(size)) for size in array.sizes)].copy())

    def select_rows(self, holder: Any, rows: torch.Tensor, *, in_place: bool = True) -> None:
        """Replace row i by the present row `rows[i]`. Tensors change in place if the number of rows stays the same and
        `in_place` is set. Raises `BudgetError` with nothing changed."""
        held = list(self._held(holder))
        if not in_place or any(len(tensor) != len(rows) for _, _, tensor in held):
            self.remake(holder, rows)
            held = []
        for _, array, tensor in held:
            view, chosen = self._in_use(holder, array, tensor), rows.to(tensor.device)
            axis = next((axis for axis, size in enumerate(array.sizes) if size in self.used), 1)
            for part in view.split(max(1, _AT_ONCE * view.shape[axis] // max(1, view.nbytes)), axis):
                part.copy_(part.index_select(0, chosen))
        for at, _, table in self._held(holder, tables=True):
            setattr(holder, at, table[rows.numpy(force=True)])

    def remake(self, holder: Any, rows: torch.Tensor | None = None, /, **sizes: int) -> None:
        """Replace the tensors by new ones with this much room along `sizes`, the old contents, and these `rows` (None:
        all). The account counts both meanwhile. Raises `BudgetError`, or the device's error, with nothing changed."""
        held, before, wanted, nbytes = list(self._held(holder)), self.nbytes(holder), [], 0
        for _, array, old in held:
            room = [sizes.get(size, count) for size, count in zip(array.sizes, old.shape, strict=False)]
            shape = (room[0] if rows is None else len(rows), *room[1:], *old.shape[len(room) :])
            wanted.append((shape, old.dtype, old.device))
            nbytes += math.prod(shape) * old.itemsize * array.booked
        holder._account.hold(self._owner(holder), nbytes)
        try:
            made = [lasting_empty(*shape, dtype=dtype, device=device) for shape, dtype, device in wanted]
        except BaseException:  # a device may have less memory than a budget allows
            holder._account.release(self._owner(holder), nbytes)
            raise
        for (at, array, old), new in zip(held, made, strict=True):
            part = self._in_use(holder, array, old)
            into = new[tuple(map(slice, (len(part if rows is None else rows), *part.shape[1:])))]
            if rows is None:
                into.copy_(part)
            else:
                torch.index_select(part, 0, rows.to(part.device), out=into)
            setattr(holder, at, new)
        holder._account.release(self._owner(holder), before)

    def nbytes(self, holder: Any) -> int:
        """Bytes of the tensors as booked: a view counts with all of the memory behind it."""
        return sum(array.booked * tensor.untyped_storage().nbytes() for _, array, tensor in self._held(holder))

    def close(self, holder: Any) -> None:
        """Free the tensors: the holder keeps tensors without rows."""
        holder._account.release(self._owner(holder), self.nbytes(holder))
        for at, _, old in self._held(holder):
            setattr(holder, at, old.new_empty(0, *old.shape[1:]))

    def _owner(self, holder: Any) -> str:
        owner: str = getattr(holder, "_owner", self.owner)
        return owner

    def _held(self, holder: Any, *, tables: bool = False) -> Iterator[tuple[str, Array, Any]]:
        """The holder's own tensors, or its tables, each with its attribute; without those that are None."""
        for name, entry in self.entries.items():
            at = self._at[name]
            if not isinstance(entry, Array) or isinstance(entry, Table) != tables or "." in at:
                continue
            if (value := getattr(holder, at)) is not None:
                yield at, entry, value

    def _in_use(self, holder: Any, entry: Array | Number, value: Any) -> Any:
        """A view of the part of an array that is in use; a number unchanged."""
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        for axis, size in enumerate(entry.sizes if value is not None else ()):
            if size in self.used:
                value = value.narrow(axis, 0, getattr(holder, self.used[size]))
        return value
