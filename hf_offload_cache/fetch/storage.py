"""Where the records of one cache lie, and what brings them: folder, engine, stores, background work, and the books."""

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
from ..memory.account import RECORDS, MemoryAccount
from ..memory.dry_run import DryRun
from ..memory.plan import LayerPlan
from ..report.counters import Counters
from ..report.trace import NO_TIMELINE, Timeline, Trace
from ..stores.base import FreezableStore, Process, Store
from ..stores.encryption import load_key, make_guard
from ..stores.engines import DryStore, choose_engine, open_store
from ..stores.layered import LayeredStore
from ..stores.mapped import MappedTable
from ..stores.uring.ring import Ring
from .areas import Staging
from .prefetcher import Prefetcher, Ticket


class DryStorage:
    """A cache's storage in a dry run: stores count records and open no file."""

    def __init__(self, config: OffloadConfig, device_type: str) -> None:
        self.account, self.write_queue = DryRun(), parse_size(config.write_queue)
        self._kind = config.engine, config.encryption_key is not None, config.records_apart and device_type == "cuda"
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
        """What was made and declared on this storage."""
        records = sum(store.records * store.record_bytes for store in self.stores)
        return self.account.plan(records + self.table_bytes)


class Storage:
    """Made and closed by the cache; used by the thread that runs the model. A forked child can only close it.

    Raises `StoreError` when `path` cannot hold the stores, `ConfigError` when `trace` cannot be written and
    `EncryptionKeyError`, before anything is left behind.

    Attributes:
        directory, engine, description: the folder, how records are read, and why so.
        account, counters, timeline: the books that all parts of the cache write in.
        prefetcher: reads ahead and writes behind.
        write_queue, widest_queue: the most bytes that wait to be written, now and in a prefill.
        stores: those that are open, one a layer.
        tables: those that lie on the disk beside them.
        torn: a signal's exception came while something was changed: what is held cannot be told, until `reset`.
        pinned: stores in host memory that are made from now on are where a GPU reads by itself.
    """

    pinned = False

    def __init__(self, config: OffloadConfig, path: str | Path | None) -> None:
        self.process = Process()
        self.key = None if config.encryption_key is None else load_key(config.encryption_key)
        self.directory = Path(tempfile.gettempdir() if path is None else path).absolute()
        self.engine, self.description = choose_engine(config.engine, self.directory)
        limit = None if config.memory is None else parse_size(config.memory, "memory")
        self.account = MemoryAccount(limit, [RECORDS] if config.records_apart else [])
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
        self._units_seen = (0, 0, 0)  # selected, resident, ready: what the timeline was told of
        self.closed = False
        self.torn = False
        self._verify = config.verify
        self._audits = False
        self.stream_buffers: list[Staging] = []

    # --- stores ------------------------------------------------------------------------------------------------

    def open_store(self, record_bytes: int, name: str) -> Store:
        """A new, empty store; errors call it `name`."""
        store = self._new_store(record_bytes, name)
        self.stores.append(store)
        return store

    def _new_store(self, record_bytes: int, name: str) -> FreezableStore:
        guard = make_guard(self.key, self._verify)
        return open_store(self.engine, self.directory, record_bytes, name, self.ring, guard, pinned=self.pinned)

    def layer_store(self, parts: Sequence[FreezableStore], record_bytes: int, name: str) -> Store:
        """A store over the frozen `parts`, which it owns; what is added goes to a store of its own."""
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
        """Drop what is under way for `store`, and give its file back."""
        if self.closed and store not in self.stores:
            return  # `close` has dealt with it
        try:
            self.prefetcher.cancel(store)
        except StalledError:
            if not self.closed:  # else `close` has said so; whatever is stuck holds the store, and its file with it
                raise
        else:
            store.close()
        if store in self.stores:
            self.stores.remove(store)

    def open_table(self, name: str, array: np.ndarray) -> MappedTable:
        """A copy of `array` on the disk, which goes when nobody has it any more; errors call it `name`."""
        table = MappedTable(self.directory, name, array)
        self.tables.add(table)
        return table

    # --- reading -----------------------------------------------------------------------------------------------

    def wait_for(self, ticket: Ticket, layer_idx: int | None = None) -> None:
        """Wait for a read: in the counters as stalled, on the timeline as "wait". Raises as `Ticket.wait`."""
        if not self.timeline.on:
            self.counters.stall_seconds += ticket.wait()
            return
        with self.timeline.span("wait", layer_idx):
            self.counters.stall_seconds += ticket.wait()

    def stream(
        self, store: Store, ids: np.ndarray, records_at_once: int, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """Records `ids` of `store` in order, as uint8 (n, record_bytes) on `device`, `records_at_once` at a time.

        Double-buffered: the next part is read while the caller works on this one. A part is valid until the next.
        Within `audited`, records that the configuration trusts are checked too.
        """
        parts = [ids[start : start + records_at_once] for start in range(0, len(ids), records_at_once)]
        if not parts:
            return
        buffers = self._buffers(min(2, len(parts)), len(parts[0]) * store.record_bytes, device)
        size = store.record_bytes
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
                yield buffer.upload(len(part), size)
        finally:
            for ticket in tickets:
                with contextlib.suppress(OSError):  # the first error is on its way to the caller
                    ticket.wait()

    @contextlib.contextmanager
    def audited(self) -> Iterator[None]:
        """Within it `stream` checks every record, even with `verify=False`, for callers that write the streamed records
        elsewhere. `stream` then raises `CorruptRecordError`."""
        before, self._audits = self._audits, True
        try:
            yield
        finally:
            self._audits = before

    def _buffers(self, count: int, nbytes: int, device: torch.device) -> list[Staging]:
        """At least `count` buffers of at least `nbytes`. A history of one part needs one."""
        if not all(buffer.fits(nbytes, device) for buffer in self.stream_buffers):
            self.release_stream_buffers()
        while len(self.stream_buffers) < count:
            self.stream_buffers.append(Staging(nbytes, device, self.account, "stream buffers"))
        return self.stream_buffers

    def release_stream_buffers(self) -> None:
        """Give the memory back until the next `stream`."""
        for buffer in self.stream_buffers:
            buffer.release()
        self.stream_buffers = []

    def limit_writes(self, most_bytes: int | None) -> None:
        """Let at most so many bytes wait to be written, None: as many as the configuration says; blocks until no more
        do, in the counters as stalled. Raises `StalledError`, with all as it was."""
        limit = self.widest_queue if most_bytes is None else most_bytes
        if limit != self.write_queue:
            started = time.perf_counter()
            self.prefetcher.limit_writes(limit)
            self.counters.stall_seconds += time.perf_counter() - started
            self.write_queue = limit

    # --- the books ---------------------------------------------------------------------------------------------

    def reset_counters(self) -> None:
        """All figures of the report begin anew."""
        self.counters = Counters(flight_seen=self.prefetcher.seconds_in_flight)
        self._units_seen = (0, 0, 0)
        self.account.peak = self.account.current
        for store in self.stores:
            store.bytes_read = store.bytes_written = store.reads = 0

    def show_counters(self) -> None:
        """On the timeline: what of the units selected since the last call was resident and ready, and what is held."""
        if not self.timeline.on:
            return
        counters = self.counters
        now = (counters.units_selected, counters.units_resident, counters.units_ready)
        selected, resident, ready = (new - old for new, old in zip(now, self._units_seen, strict=True))
        self._units_seen = now
        if selected > 0:
            self.timeline.count("selected units", resident=resident / selected, ready=ready / selected)
        self.timeline.count("memory, bytes", held=self.account.current)

    def check_process(self) -> None:
        """Raises `ForkedProcessError` in a child that was forked."""
        self.process.check("this cache")

    def close(self) -> None:
        """Stop the workers and give back files and buffers. Idempotent.

        Raises `StalledError`, once all is done that can be, for what does not end in time and was not reported before.
        In a forked child nothing is done: what is the parent's goes on, and the child's copies of its descriptors go
        with the objects.
        """
        if self.closed:
            return
        self.closed = True
        if not self.process.is_here:
            return
        with contextlib.ExitStack() as last_first:  # each runs, whatever another raises
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
