"""The account of a cache's memory: each owner of an allocation books it here."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from ..errors import BudgetError
from ..report.report import size_text

# The memory behind tensors: a view keeps its complete storage alive

def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of dictionaries, lists and tuples. Skips constants, tensors without dimensions."""
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
    """Bytes of memory that the tensors of `tree` keep alive: each storage counts once, at its full size."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(tree)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def without_views(tree: Any, spare: int) -> Any:
    """`tree` with copies of the tensors whose storage is larger than they and `spare` more entries need; the same
    object if nothing was copied.

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
            items = {name: replaced(child) for name, child in part.items()}
            return items if any(items[name] is not child for name, child in part.items()) else part
        if isinstance(part, list | tuple):
            parts = [replaced(child) for child in part]
            return type(part)(parts) if any(new is not old for new, old in zip(parts, part, strict=True)) else part
        return part

    return replaced(tree)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same part of the same storage."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


RECORDS = "records in memory"
"""Owner of the records that stores keep in host memory."""
SLOTS = "reuse slots"
"""Owner of the entries that stay resident after they were read."""


def host_side(device_type: str, records_apart: bool) -> frozenset[str]:
    """Owners that are not within the limit `memory`: records, if attention runs on a CUDA device, which has memory of
    its own, or if a configuration has `records_apart`."""
    return frozenset([RECORDS] if device_type == "cuda" or records_apart else [])


class Spare(Protocol):
    """An owner of memory that it can read again: copies of stored data."""

    def free_memory(self) -> None:
        """Release the memory that is not in use now, if any. On the thread that runs the model; does not block."""


class MemoryAccount:
    """Bytes in use by owner, and their peak. Any thread may call it. If others `spare` memory, only the thread that
    runs the model may book more.

    Each owner of an allocation calls `hold` *before* it allocates and `release` after it freed.

    Args:
        limit: maximum bytes in use; None: no limit.
        apart: owners whose bytes the limit does not count.

    Attributes:
        sparing: spare memory is freed before a booking fails: see `not_sparing`.
        pressed: how often an owner freed spare memory so that a booking succeeded.
    """

    def __init__(self, limit: int | None = None, apart: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self.limit, self._apart = limit, frozenset(apart)
        self.by_owner: Counter[str] = Counter()
        self.current = 0
        self.peak = 0
        self.pressed = 0
        self._spare: list[weakref.ref[Spare]] = []
        self.sparing = True

    def spare(self, one: Spare) -> None:
        """Ask `one` to free memory before a booking fails; the last added is asked first. Keeps a weak reference."""
        self._spare = [reference for reference in self._spare if reference() is not None]
        self._spare.append(weakref.ref(one))

    @contextlib.contextmanager
    def not_sparing(self) -> Iterator[None]:
        """Inside, bookings free no spare memory: for memory that is not needed."""
        before, self.sparing = self.sparing, False
        try:
            yield
        finally:
            self.sparing = before

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more are within the limit, with nothing freed."""
        return self.limit is None or self.current - self.apart + nbytes <= self.limit

    @property
    def apart(self) -> int:
        """Bytes of `current` that the limit does not count."""
        return sum(self.by_owner[owner] for owner in self._apart)

    def hold(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` more (or less, if negative). Above the limit, owners that `spare` memory free it first, one
        after the other until there is room. Raises `BudgetError`, with nothing booked, if there is none."""
        limited = nbytes > 0 and self.limit is not None
        if limited and not self.has_room(nbytes) and self.sparing:
            self._press(nbytes)
        with self._lock:
            if limited and not self.has_room(nbytes):
                held = ", ".join(f"{name} {size_text(part)}" for name, part in self.by_owner.most_common(3) if part)
                raise BudgetError(
                    f"memory: {owner} needs {nbytes:,} bytes in addition to the {self.current:,} in use ({held}), "
                    f"above the limit of {self.limit:,}: raise memory, or let `for_budget` choose the fields"
                )
            self.by_owner[owner] += nbytes
            self.current += nbytes
            if self.current > self.peak:
                self.peak = self.current

    def _press(self, nbytes: int) -> None:
        """Ask for spare memory until there is room for `nbytes`; not if they exceed the limit by themselves."""
        if self.limit is None or nbytes > self.limit:
            return
        for reference in reversed(self._spare):
            spare, held = reference(), self.current
            if spare is not None:
                spare.free_memory()
            self.pressed += self.current < held
            if self.has_room(nbytes):
                return

    def release(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` less."""
        with self._lock:
            self.by_owner[owner] -= nbytes
            self.current -= nbytes

    def empty(
        self, owner: str, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """An uninitialised tensor that can be written to in any mode, booked under `owner` until `free`.

        Raises `BudgetError`, or the device's error, with nothing booked.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        self.hold(owner, nbytes)
        try:
            return lasting_empty(*shape, dtype=dtype, device=device)
        except BaseException:  # a device may have less memory than a budget allows
            self.release(owner, nbytes)
            raise

    def free(self, owner: str, tensor: torch.Tensor) -> None:
        """Book the memory behind `tensor` as freed; the caller drops it."""
        self.hold(owner, -tensor.untyped_storage().nbytes())

    @contextlib.contextmanager
    def holding(self, owner: str, nbytes: int) -> Iterator[None]:
        """Book `nbytes` while the block runs. Raises `BudgetError` as `hold` does, before the block runs."""
        self.hold(owner, nbytes)
        try:
            yield
        finally:
            self.release(owner, nbytes)

    def observe(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` as all that `owner` has in use. Others allocated it, so it cannot raise."""
        with self._lock:
            self.current += nbytes - self.by_owner[owner]
            self.by_owner[owner] = nbytes
            self.peak = max(self.peak, self.current)


# Allocation of memory that outlives a step

def lasting_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised tensor that can be written to in any mode.

    A tensor made under `torch.inference_mode` cannot be written to outside it.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


class Workspace:
    """Scratch memory that a call's results may use and the next call overwrites, so that a step allocates nothing.

    For one thread. Its bytes are booked in `account` under `owner` until `release`. It grows to the largest request.
    """

    def __init__(self, account: MemoryAccount, owner: str) -> None:
        self._account = account
        self._owner = owner
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._asked: object = None
        self._taken = self._bytes

    def take(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor, valid until the next `take`."""
        asked = shape, dtype, device
        if asked == self._asked:  # all layers ask for the same
            return self._taken
        needed = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < needed or self._bytes.device != device:
            self.release()  # the old memory is freed before the new one is allocated
            self._bytes = self._account.empty(self._owner, needed, dtype=torch.uint8, device=device)
        self._taken = self._bytes[:needed].view(dtype).view(shape)
        self._asked = asked
        return self._taken

    def release(self) -> None:
        """Free the memory; `take` may follow."""
        self._account.release(self._owner, self._bytes.numel())
        self._bytes = self._taken = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._asked = None
