"""One cache's storage: folder, engine, stores, background reads and writes, account and counters."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ..config import OffloadConfig, parse_size
from ..errors import StalledError
from ..kernels.on_a_device import has_step
from ..memory.account import MemoryAccount, host_side, staged
from ..memory.dry_run import DryRun
from ..memory.plan import LayerPlan
from ..report.counters import Counters
from ..report.trace import NO_TIMELINE, Timeline, Trace
from ..stores.base import FreezableStore, Process, Store, aligned_empty, runs
from ..stores.encryption import load_key, make_guard
from ..stores.engines import DryStore, choose_engine, open_store
from ..stores.layered import LayeredStore
from ..stores.mapped import MappedTable
from ..stores.uring.ring import Ring
from .areas import Outgoing, Staging
from .prefetcher import Prefetcher, Ticket

_LEAST_RUN = 1 << 16
"""Fewest bytes of a copy to a device, on average: the host copies less in about the time that it takes to launch."""
_ALIGNED = 16
"""Bytes that a kernel reads at a time: records begin at a multiple."""


class DryStorage:
    """A cache's storage in a dry run: stores count records and open no file."""

    def __init__(self, config: OffloadConfig, device_type: str) -> None:
        self.account, self.write_queue = DryRun(device_type), parse_size(config.write_queue)
        self._kind = config.engine, config.encryption_key is not None, device_type == "cuda"
        self.stores: list[DryStore] = []
        self.table_bytes = 0
        """Bytes of tables on the disk."""

    def open_store(self, record_bytes: int, name: str) -> DryStore:
        """As `Storage.open_store`."""
        self.stores.append(DryStore(record_bytes, *self._kind))
        return self.stores[-1]

    def open_table(self, name: str, array: np.ndarray) -> np.ndarray:
        """As `Storage.open_table`."""
        self.table_bytes += array.nbytes
        return array

    @property
    def plan(self) -> LayerPlan:
        """The plan of all that was made and declared on this storage."""
        records = sum(store.records * store.record_bytes for store in self.stores)
        return self.account.plan(records + self.table_bytes)


class Storage:
    """Made and closed by the cache; used by the thread that runs the model. A forked child can only close it.

    `device_type`: of the device that attention runs on; `where`: added to the description. Raises `StoreError` if
    `path` cannot contain the stores, `ConfigError` if `trace` cannot be written, and `EncryptionKeyError`; nothing is
    left behind then.

    Attributes:
        directory, engine, description: the folder, how records are read, and the reason.
        account, counters, timeline: memory, figures and trace that all parts of the cache write to.
        prefetcher: prefetches and queued writes.
        write_queue, widest_queue: maximum bytes of queued writes, now and in a prefill.
        stores: the open stores, one a layer.
        tables: the tables on the disk.
        torn: a signal's exception interrupted a change: the contents are uncertain until `reset`.
        pinned: stores in host memory are pinned, so that a GPU reads them by itself.
    """

    def __init__(
        self, config: OffloadConfig, path: str | Path | None, device_type: str = "cpu", where: str | None = None
    ) -> None:
        self.process = Process()
        self.pinned = device_type == "cuda"
        self.key = None if config.encryption_key is None else load_key(config.encryption_key)
        self.directory = Path(tempfile.gettempdir() if path is None else path).absolute()
        self.engine, reason = choose_engine(config.engine, self.directory)
        self.description = reason if where is None else f"{reason}; {where}"
        limit = None if config.memory is None else parse_size(config.memory, "memory")
        host_limit = None if config.host_memory is None else parse_size(config.host_memory, "host_memory")
        self.account = MemoryAccount(limit, host_limit, host_side(device_type, config.records_apart))
        self.counters = Counters()
        self.timeline: Timeline = NO_TIMELINE
        if config.trace is not None:
            self.account.hold("timeline", Trace.HELD_BYTES)
            self.timeline = Trace(config.trace)
        self.ring = Ring(timeout=config.io_timeout, account=self.account) if self.engine == "uring" else None
        timeline = self.timeline if self.timeline.on else None
        self.write_queue = self.widest_queue = parse_size(config.write_queue)
        self.prefetcher = Prefetcher(self.account, self.write_queue, timeline=timeline, timeout=config.io_timeout)
        self.stores: list[Store] = []
        self.tables: weakref.WeakSet[MappedTable] = weakref.WeakSet()
        self._units_seen = (0, 0, 0)  # selected, resident, ready: already on the timeline
        self.closed = False
        self.torn = False
        self._verify = config.verify
        self._audits = False
        self.stream_buffers: list[Staging] = []
        self._outgoing: dict[torch.device, Outgoing] = {}
        self._read_by = set[torch.device]()  # devices that read records in host memory by themselves
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of reads for later steps
        self._copies: weakref.WeakSet[Store] = weakref.WeakSet()  # whose records the writer copies, since `catch_up`

    # --- stores ------------------------------------------------------------------------------------------------

    def open_store(self, record_bytes: int, name: str) -> Store:
        """A new, empty store; errors call it `name`."""
        store = self._new_store(record_bytes, name)
        self.stores.append(store)
        return store

    def _new_store(self, record_bytes: int, name: str) -> FreezableStore:
        guard = make_guard(self.key, self._verify)
        account = self.account if self.pinned else None
        return open_store(self.engine, self.directory, record_bytes, name, self.ring, guard, account)

    def layer_store(self, parts: Sequence[FreezableStore], record_bytes: int, name: str) -> Store:
        """A store over the frozen `parts`, which it owns; new records go to a store of its own."""
        if not parts:
            return self.open_store(record_bytes, name)
        store = LayeredStore(parts, functools.partial(self._new_store, record_bytes, name))
        self.stores.append(store)
        return store

    def on_damage(self, told: Callable[[str], object]) -> None:
        """Register `told` to be called, in any thread, with the reason when an opened file of a context is found
        damaged: once per file. It must not raise."""
        for store in self.stores:
            if isinstance(store, FreezableStore):
                store.on_damage(told)

    def close_store(self, store: Store) -> None:
        """Drop the reads and writes of `store`, and free its file."""
        if self.closed and store not in self.stores:
            return  # `close` has closed it
        try:
            self.prefetcher.cancel(store)
        except StalledError:
            if not self.closed:  # `close` reports it itself; the stuck operation keeps the store and its file
                raise
        else:
            for device in self._read_by:  # its kernels may still read memory that is about to be freed
                torch.cuda.current_stream(device).synchronize()
            for stream in self._streams.values():
                stream.synchronize()
            store.close()
        if store in self.stores:
            self.stores.remove(store)

    def open_table(self, name: str, array: np.ndarray) -> MappedTable:
        """A copy of `array` on the disk, removed with its last reference; errors call it `name`."""
        table = MappedTable(self.directory, name, array)
        self.tables.add(table)
        return table

    # --- writing -----------------------------------------------------------------------------------------------

    def copied_out(
        self, records: torch.Tensor, store: Store, ids: np.ndarray | None = None
    ) -> tuple[torch.Tensor, Callable[[], object] | None]:
        """The `records` (n, record_bytes) of a device in host memory, to write them to `store`, and a callable that
        blocks until they are there, for `Prefetcher.write`. With `ids`, which they will have, in the store's own memory
        where that is possible."""
        if records.device.type != "cuda":
            host = aligned_empty(*records.shape)
            return host.copy_(records), None
        if records.device not in self._outgoing:
            self._outgoing[records.device] = Outgoing(records.device)
        late = store in self._copies  # a copy must not overwrite what comes in place after it
        into = None if ids is None or late else store.in_place(ids)
        if into is None:
            self._copies.add(store)
        return self._outgoing[records.device].copied(records, not store.in_memory, into)

    def write_out(self, records: torch.Tensor, store: Store, ids: np.ndarray) -> None:
        """Write the `records` (n, record_bytes) of a device to `store` as `ids` (n,), ascending: adjacent ones in the
        store's own memory where that is possible. As `Prefetcher.write`, but never blocks there."""
        self.prefetcher.check_written(store, ids[:0])  # before a copy replaces what is stored
        pinned = store.pinned_runs(ids) if store.in_memory and store not in self._copies else None
        each = [len(ids)] if pinned is None else [len(run) for run in pinned]
        for part, there in zip(np.split(ids, np.cumsum(each)[:-1]), records.split(each), strict=True):
            self.prefetcher.write(store, part, *self.copied_out(there, store, part))

    def catch_up(self, store: Store, device: torch.device) -> None:
        """Let work that the current stream of a CUDA device gets from now on read, in host memory, what was written to
        `store`. Blocks only for what the writer copies there."""
        self._read_by.add(device)
        if device in self._outgoing:
            self._outgoing[device].join(torch.cuda.current_stream(device))
        if store in self._copies or device not in self._outgoing:
            self.prefetcher.flush(store)
            self._copies.discard(store)

    def reading_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of a CUDA device on which kernels read records in host memory for later steps, after `catch_up`.
        Stores are closed after its work."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    # --- reading -----------------------------------------------------------------------------------------------

    def read_to(self, store: Store, ids: np.ndarray, device: torch.device) -> torch.Tensor:
        """Records `ids` of `store`, uint8 (n, record_bytes), new, on a CUDA device, which nothing waits for. Each is
        checked, as within `audited`. They are booked as "stream buffers" while the host reads them."""
        nbytes, owners = len(ids) * store.record_bytes, staged("stream buffers", device.type)
        self.account.hold_all(owners, nbytes)
        try:
            host = aligned_empty(len(ids), store.record_bytes, pinned=True)
            self.wait_for(self.prefetcher.read(store, ids, host))
            if isinstance(store, FreezableStore):
                store.verify(ids, host)
            return host.to(device, non_blocking=True)
        finally:
            for owner in owners:
                self.account.release(owner, nbytes)

    def wait_for(self, ticket: Ticket, layer_idx: int | None = None) -> None:
        """Wait for a read; counted as stalled, on the timeline as "wait". Raises as `Ticket.wait` does."""
        if not self.timeline.on:
            self.counters.stall_seconds += ticket.wait()
            return
        with self.timeline.span("wait", layer_idx):
            self.counters.stall_seconds += ticket.wait()

    def stream(
        self, store: Store, ids: np.ndarray, records_at_once: int, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """Records `ids` of `store` in order, as uint8 (n, record_bytes) on `device`, `records_at_once` at a time.

        Double-buffered: the next part is read, and copied to a CUDA device, while the caller works on this one. A part
        is valid until the next one. On a CUDA device, work that the current stream gets before that sees it. Records in
        pinned memory are copied straight from there, or read by a kernel if they are scattered. Within `audited`,
        records that the configuration trusts are checked too.
        """
        parts = [ids[start : start + records_at_once] for start in range(0, len(ids), records_at_once)]
        if not parts:
            return
        size, on_cuda = store.record_bytes, device.type == "cuda"
        buffers = [*self._buffers(2 if on_cuda else min(2, len(parts)), len(parts[0]) * size, device)]
        if on_cuda and len(parts) % 2:
            self.stream_buffers.reverse()  # the next stream begins with the one that is free sooner
        if on_cuda and not self._audits and (pinned := self._pinned(store, parts, device)) is not None:
            if device in self._outgoing:
                for buffer in buffers:
                    self._outgoing[device].join(buffer.stream)
            self._read_by.add(device)
            for index, (part, found) in enumerate(zip(parts, pinned, strict=True)):
                buffer = buffers[index % 2]
                store.count_read(len(runs(part)), len(part) * size)
                try:
                    yield buffer.bring(found, size) if isinstance(found, np.ndarray) else buffer.gather(found)
                finally:
                    buffer.free()
            return
        tickets = [self.prefetcher.read(store, parts[0], buffers[0].host_rows(len(parts[0]), size))]
        audited = store if self._audits and isinstance(store, FreezableStore) else None
        try:
            for index, part in enumerate(parts):
                if index + 1 < len(parts):
                    following = parts[index + 1]
                    rows = buffers[(index + 1) % 2].host_rows(len(following), size)
                    tickets.append(self.prefetcher.read(store, following, rows))
                buffer = buffers[index % 2]
                self.wait_for(tickets.pop(0))
                if audited is not None:
                    audited.verify(part, buffer.host_rows(len(part), size))
                try:
                    yield buffer.upload(len(part), size, freed=True)
                finally:
                    if on_cuda:
                        buffer.free()
        finally:
            for ticket in tickets:
                with contextlib.suppress(OSError):  # the caller gets the first error
                    ticket.wait()

    def _pinned(
        self, store: Store, parts: list[np.ndarray], device: torch.device
    ) -> list[list[torch.Tensor] | np.ndarray] | None:
        """Where the records of each part are in pinned memory: their memory, or the addresses of scattered ones, which
        a kernel of `device` reads. None if some are elsewhere, or still on their way there through the writer's
        thread, or scattered where there is no kernel. Raises the error of a failed write."""
        ids = np.concatenate(parts)
        if not store.in_memory or (store in self._copies and self.prefetcher.is_queued(store, ids)):
            return None
        found: list[list[torch.Tensor] | np.ndarray | None]
        if len(ids) * store.record_bytes >= sum(len(runs(part)) for part in parts) * _LEAST_RUN:
            found = [store.pinned_runs(part) for part in parts]
        elif has_step(device) and not store.record_bytes % _ALIGNED:
            found = [store.addresses(part) for part in parts]
        else:
            return None
        self.prefetcher.check_written(store, ids)
        known = [one for one in found if one is not None]
        return known if len(known) == len(parts) else None

    @contextlib.contextmanager
    def audited(self) -> Iterator[None]:
        """Inside, `stream` checks every record, even with `verify=False`, for callers that write the streamed records
        elsewhere. `stream` then raises `CorruptRecordError`."""
        before, self._audits = self._audits, True
        try:
            yield
        finally:
            self._audits = before

    def _buffers(self, count: int, nbytes: int, device: torch.device) -> list[Staging]:
        """At least `count` buffers of at least `nbytes`. A history of one part needs only one on a CPU. On a CUDA
        device its copy overlaps the work on the history before, which is in the other one."""
        if not all(buffer.fits(nbytes, device) for buffer in self.stream_buffers):
            self.release_stream_buffers()
        while len(self.stream_buffers) < count:
            made = Staging(nbytes, device, self.account, "stream buffers", from_host=False)
            self.stream_buffers.append(made)
        return self.stream_buffers

    def release_stream_buffers(self) -> None:
        """Free the buffers until the next `stream`."""
        for buffer in self.stream_buffers:
            buffer.release()
        self.stream_buffers = []

    def limit_writes(self, most_bytes: int | None) -> None:
        """Limit queued writes to `most_bytes`, None: to the configured number. Blocks, counted as stalled, until the
        queue is that small. Raises `StalledError` with nothing changed."""
        limit = self.widest_queue if most_bytes is None else most_bytes
        if limit != self.write_queue:
            started = time.perf_counter()
            self.prefetcher.limit_writes(limit)
            self.counters.stall_seconds += time.perf_counter() - started
            self.write_queue = limit

    # --- counters ----------------------------------------------------------------------------------------------

    def reset_counters(self) -> None:
        """Restart all figures of the report."""
        self.counters = Counters(flight_seen=self.prefetcher.seconds_in_flight)
        self._units_seen = (0, 0, 0)
        self.account.reset_peaks()
        for store in self.stores:
            store.bytes_read = store.bytes_written = store.reads = 0

    def show_counters(self) -> None:
        """Add to the timeline: resident and ready shares of the units selected since the last call, memory in use."""
        if not self.timeline.on:
            return
        counters = self.counters
        counters.fold()
        now = (counters.units_selected, counters.units_resident, counters.units_ready)
        selected, resident, ready = (new - old for new, old in zip(now, self._units_seen, strict=True))
        self._units_seen = now
        if selected > 0:
            self.timeline.count("selected units", resident=resident / selected, ready=ready / selected)
        self.timeline.count("memory, bytes", held=self.account.current)

    def check_process(self) -> None:
        """Raise `ForkedProcessError` in a forked child."""
        self.process.check("this cache")

    def close(self) -> None:
        """Stop the workers and free files and buffers. Idempotent.

        Raises `StalledError`, after everything else is done, for an operation that does not end in time and was not
        reported before. In a forked child it does nothing: the parent's work continues, and the child's copies of its
        descriptors are closed with the objects.
        """
        if self.closed:
            return
        self.closed = True
        if not self.process.is_here:
            return
        with contextlib.ExitStack() as last_first:  # each callback runs, even if another raises
            last_first.callback(self._close_timeline)
            last_first.callback(self.release_stream_buffers)
            if self.ring is not None:
                last_first.callback(self.ring.close)
            for store in list(self.stores):
                last_first.callback(self.close_store, store)
            last_first.callback(self.prefetcher.close)

    def _close_timeline(self) -> None:
        self.timeline.close()
        if self.timeline is not NO_TIMELINE:
            self.account.release("timeline", Trace.HELD_BYTES)
