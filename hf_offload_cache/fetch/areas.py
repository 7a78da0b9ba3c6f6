"""Memory that a cache's layers share while they select: staging areas to read into, and one view for attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kernels import slots
from ..kernels.on_a_device import to_device
from ..memory.account import MemoryAccount, staged
from ..memory.dry_run import DryRun
from ..stores.base import DEVICE_BLOCK, aligned_empty, pinned_empty
from .choice import Extents

# Row copies by index

class ByteRows:
    """The rows of a tensor (n, width), contiguous in the last dimension, in the tensor's memory.

    On a CPU numpy copies them: torch's threads would wake up too slowly for copies this small.
    """

    __slots__ = ("_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._bytes = tensor.view(torch.uint8).numpy() if tensor.device.type == "cpu" else None

    def put(self, target: np.ndarray, source: ByteRows, rows: np.ndarray | slice) -> None:
        """self[target] = source[rows], for the same type and width."""
        if self._bytes is not None and source._bytes is not None:
            self._bytes[target] = source._bytes[rows]
            return
        into, taken = self.tensor, source.tensor
        if source._bytes is not None:  # through pinned memory, so that nothing waits
            gathered = pinned_empty(len(target), source._bytes.shape[1])
            np.take(source._bytes, np.arange(len(taken))[rows], 0, gathered.numpy())
            there = gathered.view(taken.dtype).to(into.device, non_blocking=True)
            into.index_copy_(0, _index(target, into.device), there)
            return
        taken = taken[rows] if isinstance(rows, slice) else taken.index_select(0, _index(rows, taken.device))
        into.index_copy_(0, _index(target, into.device), taken.to(into.device))


def _index(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(np.ascontiguousarray(rows, dtype=np.int64), device)


# Records that a device fills

class Outgoing:
    """Copies records out of a device, on a stream of its own. For the thread that runs the model."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copied(
        self, records: torch.Tensor, aligned: bool, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        """`records` (n, record_bytes) of the device in host memory: `into`, or new memory, which the caller owns. And a
        callable that blocks until they are there, in any thread. Does not block, unless no more memory can be pinned.
        `aligned`: to `DEVICE_BLOCK`."""
        host = pinned_empty(*records.shape) if into is None else into
        if aligned and host.data_ptr() % DEVICE_BLOCK:  # CUDA pins whole pages
            host = aligned_empty(*records.shape, pinned=host.is_pinned())
        self._stream.wait_stream(torch.cuda.current_stream(records.device))
        with torch.cuda.stream(self._stream):
            host.copy_(records, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        records.record_stream(self._stream)
        return host, copied.synchronize

    def join(self, stream: torch.cuda.Stream) -> None:
        """Let work that a stream of the device gets from now on see what was copied. Does not block."""
        stream.wait_stream(self._stream)


# Memory that reads fill, and its copy to the device

PLACE_BYTES = 8 + 4
"""Bytes of device memory for a record that a kernel reads: its address and its index."""


class Staging:
    """Bytes of host memory to read into, and on CUDA as many bytes of device memory; seen as rows of any size.

    The bytes are booked in `account` under `owner` until `release`, and on CUDA those in host memory under its second
    name: see `staged`. `from_host`: the latter exist from the beginning; else from the first `host_rows` on. For the
    thread that runs the model. Raises `BudgetError`, with nothing booked.
    """

    def __init__(
        self, nbytes: int, device: torch.device, account: MemoryAccount, owner: str, *, from_host: bool = True
    ) -> None:
        self.nbytes = nbytes
        self._cuda = device.type == "cuda"
        self.device = device
        self._account = account
        names = staged(owner, device.type)
        self._owners, self._later = (names, ()) if from_host or not self._cuda else (names[:1], names[1:])
        account.hold_all(self._owners, nbytes)
        self._held_bytes = nbytes
        self._host = aligned_empty(1, 0 if self._later else nbytes, pinned=self._cuda)[0]
        self._device = self._host
        self._payloads: dict[tuple[int, int, torch.dtype], ByteRows] = {}
        if self._cuda:
            with torch.inference_mode(False):
                self._device = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.stream = torch.cuda.Stream(device)  # of its copies
            self._copied, self._freed = torch.cuda.Event(), torch.cuda.Event()
            self._pending = False  # a copy reads host memory, as far as is known
            self.free()  # the memory may have been another tensor's, which earlier work reads

    def fits(self, nbytes: int, device: torch.device) -> bool:
        """Whether there is room for `nbytes` on their way to `device`."""
        return self.nbytes >= nbytes and self.device == device

    def host_rows(self, count: int, record_bytes: int, first_byte: int = 0) -> torch.Tensor:
        """`count` records from `first_byte` on, uint8 (count, record_bytes), to read into: always the same memory.

        Blocks until every earlier `upload` has read it.
        """
        if self._cuda:
            self.wait_uploaded()
            if self._later:
                self._account.hold_all(self._later, self.nbytes)
                self._owners, self._later = (*self._owners, *self._later), ()
                self._host = aligned_empty(1, self.nbytes, pinned=True)[0]
        return self._host[first_byte : first_byte + count * record_bytes].view(count, record_bytes)

    def free(self) -> None:
        """Note that only work which the current stream was given so far reads the device memory."""
        if self._cuda:
            self._freed.record(torch.cuda.current_stream(self.device))

    def upload(self, count: int, record_bytes: int, first_byte: int = 0, *, freed: bool = False) -> torch.Tensor:
        """Copy `count` records to the device: uint8 (count, record_bytes) there, on a CPU the same memory.

        Does not block. Work given to the current stream from now on sees the records. The copy waits for the stream's
        earlier work, which may still read the old ones: for all of it, or, with `freed`, for that before `free`.
        """
        part = slice(first_byte, first_byte + count * record_bytes)
        if self._cuda and count:
            if not freed:
                self.free()
            self._copy([self._host[part]], first_byte)
            self._pending = True
        return self._device[part].view(count, record_bytes)

    def gather(self, runs: list[torch.Tensor]) -> torch.Tensor:
        """As `upload` of records behind each other, with `freed`, from their own pinned memory (n, record_bytes)
        each."""
        self._copy(runs, 0)
        return self._device[: sum(run.numel() for run in runs)].view(-1, runs[0].shape[1])

    def bring(self, addresses: np.ndarray, record_bytes: int) -> torch.Tensor:
        """As `gather` of records at `addresses` (n,) int64 in pinned memory, multiples of 16, which a kernel reads by
        itself. It is given `PLACE_BYTES` a record."""
        count = len(addresses)
        part = self._device[: count * record_bytes].view(count, record_bytes)
        every = np.arange(count, dtype=np.int32)[None]
        with self._account.holding(self._owners[0], PLACE_BYTES * count), self._copying():
            at, places = to_device(addresses[None], self.device), to_device(every, self.device)
            slots.bring(at, places, places, part[None])
        return part

    def _copy(self, sources: list[torch.Tensor], first_byte: int) -> None:
        with self._copying():
            for source in sources:
                stop = first_byte + source.numel()
                self._device[first_byte:stop].copy_(source.view(-1), non_blocking=True)
                first_byte = stop

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Inside, the stream of copies is the current one. It begins when the device memory is free, and work that the
        stream outside is given from then on sees what it copied."""
        self.stream.wait_event(self._freed)
        with torch.cuda.stream(self.stream):
            yield
            self._copied.record(self.stream)
        torch.cuda.current_stream(self.device).wait_event(self._copied)

    def payloads(self, count: int, form: Any) -> ByteRows:
        """As `upload`, seen as payloads: row i is the payload of record i, for i below `count`."""
        if self._cuda:
            self.upload(count, form.record_bytes)
        shape = form.record_bytes, form.payload_width, form.payload_dtype
        if shape not in self._payloads:
            size = self.nbytes // form.record_bytes
            with torch.inference_mode(False):
                records = self._device[: size * form.record_bytes].view(size, form.record_bytes)
                self._payloads[shape] = ByteRows(form.payload(records))
        return self._payloads[shape]

    def host_payloads(self, count: int, form: Any) -> ByteRows:
        """The payloads of the first `count` records in host memory, valid until the next `host_rows`."""
        records = self._host[: count * form.record_bytes].view(count, form.record_bytes)
        return ByteRows(form.payload(records))

    def wait_uploaded(self) -> None:
        """Block until every `upload` has read its host rows."""
        if self._cuda and self._pending:
            self._copied.synchronize()
            self._pending = False

    def release(self) -> None:
        """Free both buffers after the running copies. Idempotent; afterwards only `release` may be called."""
        self.wait_uploaded()
        self._payloads = {}
        self._host = self._device = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.nbytes = 0
        for owner in self._owners:
            self._account.release(owner, self._held_bytes)
        self._held_bytes = 0


# The result of a gather

class View:
    """Memory in which each of `rows` rows has room for `width` payloads and `behind` more after them.

    Attributes:
        payloads: all payloads, (n, payload width). Packed ones are void after `unpack`.
        entries: the entries, row by row: (rows, N, entry width). They are in the same memory as the payloads. Packed
            payloads lie in its last part: `unpack` fills the entries from the first on, as many at a time as do not
            reach the payloads that are left.
        target: (rows * width) int64, the indices in `payloads` of each row's first `width`.
    """

    def __init__(self, memory: torch.Tensor, rows: int, width: int, behind: int, form: Any) -> None:
        stride = width + behind
        size, self._form, self._packed = rows * stride * form.record_width, form, []
        with torch.inference_mode(False):  # written to in any mode
            self.entries = memory[:size].view(rows, stride * form.group_size, form.entry_width)
            if form.bits is None:
                payloads = self.entries.view(rows * stride, form.payload_width)
            else:
                each, count, first = form.payload_bytes // form.dtype.itemsize, rows * width, 0
                start = size - count * each
                payloads = memory[start:size].view(form.payload_dtype).view(count, form.payload_width)
                whole = self.entries[:, : width * form.group_size].unflatten(1, (width, form.group_size))
                while first < count:
                    row, column = divmod(first, width)
                    last = min(width, (start + first * each) // form.record_width - row * stride)
                    assert last > column, "behind the payloads there is no room for a record"
                    part = payloads[first : first + last - column]
                    self._packed += form.unpacking(part, whole[row, column:last])
                    first += last - column
                stride = width
            self.payloads = ByteRows(payloads)
        self.entry_rows: ByteRows | None = None
        """`entries` as rows of one entry each, made when first needed."""
        self.target = (np.arange(rows)[:, None] * stride + np.arange(width)).reshape(-1)

    def unpack(self) -> None:
        """Fill the entries from packed payloads."""
        self._form.unpack(self._packed)


@dataclass(frozen=True)
class Filled:
    """A view filled with the records of units that a predictor looked at; void after the next call of `view`."""

    by: object
    units: np.ndarray
    extents: Extents
    """Extents of these units, valid while nothing changes."""
    view: View
    resident: int
    """Number of units that were in a tier before; `ready`: number of those prefetched."""
    ready: int


def records_soon(records: int) -> int:
    """Number of records a row that a history of `records` may soon have: the limit for areas."""
    return records * 9 // 8 + 8


class Areas:
    """Staging areas that fetchers borrow, and the view for gathered entries. For the thread that runs the model.

    Booked in the account as "staging", "selection" and, for kept entries, "kept". An area belongs to its borrower until
    it is given back, possibly after the step. An area that a stalled read may still write to is not given back: `reset`
    takes it when the read has ended; until then the stuck operation keeps its memory. The view is valid until the next
    call of `view`.

    Args:
        ahead: maximum number of areas borrowed for prefetches at a time.
    """

    def __init__(self, account: MemoryAccount, ahead: int = 1) -> None:
        self._account = account
        self._most_ahead = ahead
        self._lent = 0
        self._free: list[Staging] = []
        self._borrowed: list[Staging] = []
        self._view: torch.Tensor | None = None
        self._widened = False
        account.spare(self)
        self._parted: tuple[tuple[Any, ...], View] | None = None  # the latest view, and its arguments
        self._kept: torch.Tensor | None = None
        self.filled: Filled | None = None
        """The view's contents, if their fetcher may use them again; None after the next `view`."""

    def rehearse(
        self, run: DryRun, area: int, view_bytes: tuple[int, int], kept_bytes: tuple[int, int]
    ) -> None:
        """Declare areas of `area` bytes (one for missing records and those for prefetches), the view, and the kept
        entries. Counts a usual step or a wider one, which prefetches nothing, whichever is larger."""
        usual = {"staging": (1 + self._most_ahead) * area, "selection": view_bytes[0], "kept": kept_bytes[0]}
        wider = {"staging": area, "selection": view_bytes[1], "kept": kept_bytes[1]}
        for owner, nbytes in max(usual, wider, key=lambda held: sum(held.values())).items():
            (run.stages if owner == "staging" else run.passes)(owner, decode=nbytes, together=True)

    def borrow(self, nbytes: int, device: torch.device) -> Staging:
        """An area of at least `nbytes` for `device`. Raises `BudgetError`."""
        for index, area in enumerate(self._free):
            if area.nbytes >= nbytes and area.device == device:
                del self._free[index]
                break
        else:
            if self._free:  # the old memory is freed before the new one is allocated
                self._free.pop().release()
            area = Staging(nbytes, device, self._account, "staging")
        self._borrowed.append(area)
        return area

    def borrow_ahead(self, nbytes: int, device: torch.device) -> Staging | None:
        """As `borrow`; None if all areas for prefetches are borrowed or there is no memory: a prefetch is optional."""
        if self._lent >= self._most_ahead:
            return None
        for area in self._free:
            if area.nbytes >= nbytes and area.device == device:
                break
        else:
            if not all(self._account.has_room(nbytes, owner) for owner in staged("staging", device.type)):
                return None
        area = self.borrow(nbytes, device)
        self._lent += 1
        return area

    def give_back(self, area: Staging, *, ahead: bool = False) -> None:
        """Give an area back: no read uses it, and copies from it are done or in the stream's order."""
        self._lent -= ahead
        self._borrowed.remove(area)
        self._free.append(area)

    def view(self, rows: int, width: int, behind: int, form: Any, device: torch.device, room: int) -> View:
        """An uninitialised `View`, valid until the next one, in memory for `room` payloads that is allocated once.

        A view that needs more, for a verification of candidates, takes the memory of free areas, until `narrow`. Raises
        `BudgetError`."""
        self.filled = None
        if form.bits is not None:
            behind = max(1, behind)  # see `View`
        parts = rows, width, behind, form, device
        if self._parted is not None and self._parted[0] == parts:
            return self._parted[1]
        size, memory = rows * (width + behind) * form.record_width, self._view
        room *= form.record_width
        if memory is None or memory.dtype != form.dtype or memory.device != device or memory.numel() < size:
            memory = None  # the old memory is freed before the new one is allocated
            self._drop_view()
            if size > room:
                self._release_free()
                self._drop_kept()
                self._widened, room = True, size
            memory = self._view = self._account.empty("selection", room, dtype=form.dtype, device=device)
        view = View(memory, rows, width, behind, form)
        self._parted = parts, view
        return view

    def kept(self, rows: int, chosen: int, latest: int, form: Any, device: torch.device) -> torch.Tensor:
        """Uninitialised entries (rows, chosen + latest, entry width), valid until the next call. The memory has room
        for `latest` to grow to complete units. Raises `BudgetError`."""
        entries = chosen + latest
        size, memory = rows * entries * form.entry_width, self._kept
        if memory is None or memory.dtype != form.dtype or memory.device != device or memory.numel() < size:
            self._drop_kept()
            room = rows * (chosen * form.entry_width + -(-latest // form.group_size) * form.record_width)
            memory = self._kept = self._account.empty("kept", room, dtype=form.dtype, device=device)
        return memory[:size].view(rows, entries, form.entry_width)

    def narrow(self) -> None:
        """Free the view's extra memory, before a step of the usual size."""
        if self._widened:
            self._drop_view()

    def _drop_view(self) -> None:
        self._parted, self._widened, self.filled = None, False, None
        if self._view is not None:
            self._account.free("selection", self._view)
            self._view = None

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._account.free("kept", self._kept)
            self._kept = None

    def reset(self) -> None:
        """Free all areas, including those that an interrupted fetcher still had, and the view."""
        self._lent = 0
        self._free += self._borrowed
        self._borrowed = []
        self.release()

    def release(self) -> None:
        """Free the areas that are not borrowed, the view, and the kept entries; later calls allocate again."""
        self._release_free()
        self._drop_view()
        self._drop_kept()

    def free_memory(self) -> None:
        """As `Spare.free_memory`: frees the areas that are not borrowed."""
        self._release_free()

    def _release_free(self) -> None:
        for area in self._free:
            area.release()
        self._free = []
