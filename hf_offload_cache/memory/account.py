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


HOST_SLOTS = "host slots"
"""Owner of entries in host memory besides the device's slots."""


GRAPHS = "graphs"
"""Owner of what a CUDA graph of a step keeps: its inputs, its results, and what a layer of it computes with."""
LATENTS = "chosen latents"
"""Owner of the memory with which many queries attend to stored latents. It is used only if there is room: otherwise
keys and values are made of the latents."""
ADAPTERS = "adapters"
"""Owner of what is fitted to keys; on CUDA of the part on the device."""


def beside(owner: str) -> str:
    """The second name of an owner that has memory on a CUDA device and in host memory: of the latter."""
    return f"{owner}, host"


def staged(owner: str, device_type: str) -> tuple[str, ...]:
    """Owners of memory that reads fill: on CUDA as many bytes lie on the device, as `owner`, and in host memory."""
    return (owner, beside(owner)) if device_type == "cuda" else (owner,)


_ON_THE_HOST = frozenset(
    {RECORDS, HOST_SLOTS, "tables", "token ids", "write queue", "stalled reads", "io ring", "timeline", "saving"}
    | {beside(owner) for owner in ("staging", "stream buffers", ADAPTERS)}
)


def host_side(device_type: str, records_apart: bool) -> frozenset[str]:
    """Owners that `host_memory` limits, and not `memory`.

    If attention runs on a CUDA device: those of host memory. Of owners with memory on both sides, "tables" counts as
    the host's, and others as the device's. Otherwise none, or records, if a configuration has `records_apart`."""
    return _ON_THE_HOST if device_type == "cuda" else frozenset([RECORDS] if records_apart else [])


class Spare(Protocol):
    """An owner of memory that can be done without: copies of stored data, and records that wait to be written."""

    def free_memory(self) -> None:
        """Release the memory that is not in use now, if any. On the thread that runs the model. Does not block, except
        for the queue of writes."""


class MemoryAccount:
    """Bytes in use by owner, and their peak. Any thread may call it. If others `spare` memory, only the thread that
    runs the model may book more.

    Each owner of an allocation calls `hold` *before* it allocates and `release` after it freed.

    Args:
        limit: maximum bytes in use, without those of the host side; None: no limit.
        host_limit: maximum bytes of the host side; None: no limit.
        host: owners on the host side: see `host_side`.

    Attributes:
        current, host_bytes: bytes in use, and those of the host side among them.
        peak, host_peak: the most bytes in use at a time, without the host side's, and of the host side.
        sparing: spare memory is freed before a booking fails: see `not_sparing`.
        pressed: how often an owner freed spare memory so that a booking succeeded.
    """

    def __init__(
        self, limit: int | None = None, host_limit: int | None = None, host: frozenset[str] = frozenset()
    ) -> None:
        self._lock = threading.Lock()
        self.limit, self.host_limit, self.host = limit, host_limit, host
        self.by_owner: Counter[str] = Counter()
        self.current = self.host_bytes = 0
        self.peak = self.host_peak = 0
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

    def has_room(self, nbytes: int, owner: str | None = None) -> bool:
        """Whether `nbytes` more of `owner` (None: not of the host side) are within the limit, with nothing freed."""
        if owner in self.host:
            return self.host_limit is None or self.host_bytes + nbytes <= self.host_limit
        return self.limit is None or self.current - self.host_bytes + nbytes <= self.limit

    def of_host(self, owner: str) -> str:
        """The name under which `owner` books memory of the host."""
        return beside(owner) if beside(owner) in self.host else owner

    def reset_peaks(self) -> None:
        """Begin the peaks anew."""
        self.peak, self.host_peak = self.current - self.host_bytes, self.host_bytes

    def hold(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` more (or less, if negative). Above the limit, owners that `spare` memory free it first, one
        after the other until there is room. Raises `BudgetError`, with nothing booked, if there is none."""
        on_host = owner in self.host
        limited = nbytes > 0 and (self.host_limit if on_host else self.limit) is not None
        if limited and not self.has_room(nbytes, owner) and self.sparing:
            self._press(nbytes, owner)
        with self._lock:
            if limited and not self.has_room(nbytes, owner):
                raise self._refusal(owner, nbytes)
            self.by_owner[owner] += nbytes
            self.current += nbytes
            if on_host:
                self.host_bytes += nbytes
                self.host_peak = max(self.host_peak, self.host_bytes)
            elif self.current - self.host_bytes > self.peak:
                self.peak = self.current - self.host_bytes

    def _refusal(self, owner: str, nbytes: int) -> BudgetError:
        on_host = owner in self.host
        name, limit = ("host_memory", self.host_limit) if on_host else ("memory", self.limit)
        kind = "" if HOST_SLOTS not in self.host else " of host memory" if on_host else " of device memory"
        used = self.host_bytes if on_host else self.current - self.host_bytes
        largest = [(one, part) for one, part in self.by_owner.most_common() if part and (one in self.host) == on_host]
        held = ", ".join(f"{one} {size_text(part)}" for one, part in largest[:3])
        advice = "lower max_context or max_batch" if on_host else "let `for_budget` choose the fields"
        return BudgetError(
            f"{name}: {owner} needs {nbytes:,} bytes{kind} in addition to the {used:,} in use ({held}), "
            f"above the limit of {limit:,}: raise {name}, or {advice}"
        )

    def _press(self, nbytes: int, owner: str) -> None:
        """Ask for spare memory until there is room for `nbytes`; not if they exceed the limit by themselves."""
        limit = self.host_limit if owner in self.host else self.limit
        if limit is None or nbytes > limit:
            return
        for reference in reversed(self._spare):
            spare, held = reference(), self.current
            if spare is not None:
                spare.free_memory()
            self.pressed += self.current < held
            if self.has_room(nbytes, owner):
                return

    def release(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` less."""
        with self._lock:
            self.by_owner[owner] -= nbytes
            self.current -= nbytes
            if owner in self.host:
                self.host_bytes -= nbytes

    def hold_all(self, owners: Iterable[str], nbytes: int) -> None:
        """Book `nbytes` more for each of the `owners`, or nothing, as `hold` does."""
        held = list[str]()
        try:
            for owner in owners:
                self.hold(owner, nbytes)
                held.append(owner)
        except BaseException:
            for owner in held:
                self.release(owner, nbytes)
            raise

    def empty(
        self, owner: str, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", pinned: bool = False
    ) -> torch.Tensor:
        """As `lasting_empty`, booked under `owner` until `free`.

        Raises `BudgetError`, or the device's error, with nothing booked.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        self.hold(owner, nbytes)
        try:
            return lasting_empty(*shape, dtype=dtype, device=device, pinned=pinned)
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
            more = nbytes - self.by_owner[owner]
            self.current += more
            self.by_owner[owner] = nbytes
            if owner in self.host:
                self.host_bytes += more
                self.host_peak = max(self.host_peak, self.host_bytes)
            else:
                self.peak = max(self.peak, self.current - self.host_bytes)


# Allocation of memory that outlives a step

def lasting_empty(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", pinned: bool = False
) -> torch.Tensor:
    """Uninitialised tensor that can be written to in any mode; `pinned`, in page-locked host memory, or in plain memory
    if no more can be pinned.

    A tensor made under `torch.inference_mode` cannot be written to outside it.
    """
    with torch.inference_mode(False):
        if pinned:
            with contextlib.suppress(RuntimeError):
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
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
