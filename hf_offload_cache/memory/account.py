"""The account of what a cache holds: each owner of an allocation books it here."""

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


RECORDS = "records in memory"
"""The owner of what stores keep in host memory."""
SLOTS = "reuse slots"
"""The owner of the entries that stay after they were read."""


class Spare(Protocol):
    """Holds what can be had again: copies of what is stored."""

    def free_memory(self) -> None:
        """Release what is not at work just now, if anything. On the thread that runs the model; does not block."""


class MemoryAccount:
    """Bytes that a cache holds, by owner, and the most it ever held at once; any thread may call, but for `hold` of
    more, where there is something to `spare`: that is for the thread that runs the model.

    Each owner of an allocation calls `hold` *before* it allocates and `release` after it freed.

    Args:
        limit: the most that may be held, in bytes; None: no limit.
        apart: owners whose bytes the limit does not count.

    Attributes:
        sparing: others are asked to give back before something is refused: see `not_sparing`.
        pressed: how often something was given back so that something else could be held.
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
        """`one` is asked to give back before something is refused, those that came last first. Not kept alive."""
        self._spare = [each for each in self._spare if each() is not None]
        self._spare.append(weakref.ref(one))

    @contextlib.contextmanager
    def not_sparing(self) -> Iterator[None]:
        """Nothing is given back inside, for what is not needed."""
        before, self.sparing = self.sparing, False
        try:
            yield
        finally:
            self.sparing = before

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more are within the limit as it is."""
        return self.limit is None or self.current - self.apart + nbytes <= self.limit

    @property
    def apart(self) -> int:
        """Bytes of `current` that the limit does not count."""
        return sum(self.by_owner[owner] for owner in self._apart)

    def hold(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` more (or, negative, less). Above the limit what others `spare` is given back first, one after
        the other until there is room. Raises `BudgetError`, with nothing booked, where there is none."""
        limited = nbytes > 0 and self.limit is not None
        if limited and not self.has_room(nbytes) and self.sparing:
            self._press(nbytes)
        with self._lock:
            if limited and not self.has_room(nbytes):
                held = ", ".join(f"{name} {size_text(part)}" for name, part in self.by_owner.most_common(3) if part)
                raise BudgetError(
                    f"memory: {owner} would take {nbytes:,} bytes beside the {self.current:,} held ({held}), above the "
                    f"{self.limit:,} allowed: give more memory, or let `for_budget` choose the fields"
                )
            self.by_owner[owner] += nbytes
            self.current += nbytes
            if self.current > self.peak:
                self.peak = self.current

    def _press(self, nbytes: int) -> None:
        """Let others give back until there is room for `nbytes`, unless there can be none."""
        if self.limit is None or nbytes > self.limit:
            return
        for one in reversed(self._spare):
            spare, held = one(), self.current
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
        """An uninitialised tensor that may be written to in any mode, booked under `owner` until `free`.

        Raises `BudgetError`, or what the device raises, with nothing booked.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        self.hold(owner, nbytes)
        try:
            return lasting_empty(*shape, dtype=dtype, device=device)
        except BaseException:  # a device may have less than a budget allows
            self.release(owner, nbytes)
            raise

    def free(self, owner: str, tensor: torch.Tensor) -> None:
        """Book the memory behind `tensor` as given back; the caller drops it."""
        self.hold(owner, -tensor.untyped_storage().nbytes())

    @contextlib.contextmanager
    def holding(self, owner: str, nbytes: int) -> Iterator[None]:
        """`nbytes` are held inside. Raises `BudgetError` as `hold` does, before anything runs."""
        self.hold(owner, nbytes)
        try:
            yield
        finally:
            self.release(owner, nbytes)

    def observe(self, owner: str, nbytes: int) -> None:
        """`owner` was seen to hold `nbytes` in all: what others allocate is booked as it is, and cannot be refused."""
        with self._lock:
            self.current += nbytes - self.by_owner[owner]
            self.by_owner[owner] = nbytes
            self.peak = max(self.peak, self.current)


# Allocation of what outlives a step

def lasting_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised tensor that may be written to in any mode.

    One made under `torch.inference_mode` may not be written to after it.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


class Workspace:
    """Memory for what one call computes and the next may overwrite, so that a step allocates nothing. One thread's.

    Its bytes are held in `account` under `owner` until `release`. It grows to the largest thing asked for.
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
        if asked == self._asked:  # layer after layer takes the same
            return self._taken
        needed = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < needed or self._bytes.device != device:
            self.release()  # the old memory goes before the new one comes
            self._bytes = self._account.empty(self._owner, needed, dtype=torch.uint8, device=device)
        self._taken = self._bytes[:needed].view(dtype).view(shape)
        self._asked = asked
        return self._taken

    def release(self) -> None:
        """Give the memory back; `take` may follow."""
        self._account.release(self._owner, self._bytes.numel())
        self._bytes = self._taken = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._asked = None
