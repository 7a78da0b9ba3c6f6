"""What the layers of one cache share: settings, books, the store's folder and the background workers."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ..config import OffloadConfig, parse_size
from ..errors import CacheClosedError, SeamLostError, StalledError
from ..fetch.prefetcher import Prefetcher
from ..fetch.staging import Staging
from ..fetch.ticket import Ticket
from ..memory.account import MemoryAccount
from ..report.counters import Counters
from ..report.timeline import NO_TIMELINE, Timeline
from ..report.trace import Trace
from ..stores.base import Store
from ..stores.encryption import load_key, make_guard
from ..stores.engines import choose_engine, open_store
from ..stores.freezable import FreezableStore
from ..stores.layered import LayeredStore
from ..stores.process import Process
from ..stores.uring.ring import Ring

SEAM_LOST = (
    "something replaced the model's attention implementation while a cache was attached. This step gave no token; "
    "close() the cache, set the implementation first, and construct the cache after"
)


class Shared:
    """Made and closed by the cache; used by the thread that runs the model. A forked child can only close it.

    Raises `StoreError` when `path` cannot hold the store, `ConfigError` when `trace` cannot be written and
    `EncryptionKeyError`, before anything is left behind.
    """

    def __init__(self, config: OffloadConfig, path: str | Path | None) -> None:
        self.config = config
        self.process = Process()
        self.key = None if config.encryption_key is None else load_key(config.encryption_key)
        self.directory = Path(tempfile.gettempdir() if path is None else path).absolute()
        self.engine, self.store_description = choose_engine(config.engine, self.directory)
        self.account = MemoryAccount(None if config.memory is None else parse_size(config.memory, "memory"))
        self.counters = Counters()
        self.timeline: Timeline = NO_TIMELINE if config.trace is None else Trace(config.trace, self.account)
        self.ring = Ring(timeout=config.io_timeout, account=self.account) if self.engine == "uring" else None
        timeline = self.timeline if self.timeline.on else None
        self.prefetcher = Prefetcher(
            self.account, parse_size(config.write_queue), timeline=timeline, timeout=config.io_timeout
        )
        self.stores: list[Store] = []
        self.unseen: int | None = None  # the layer whose keys attention has to see next
        self.closed = False
        self._broken = False
        self.keys_are_shared = False  # some layers attend with the keys of others: several times for one update
        self.front: tuple[int, int] | None = None  # the layer updated last, and what it held before
        self._stream_buffers: list[Staging] = []

    def open_store(self, record_bytes: int, layer_idx: int) -> Store:
        """A new, empty store for one layer."""
        store = self._new_store(record_bytes, f"layer {layer_idx}")
        self.stores.append(store)
        return store

    def _new_store(self, record_bytes: int, name: str) -> FreezableStore:
        guard = make_guard(self.key, self.config.verify)
        return open_store(self.engine, self.directory, record_bytes, name, self.ring, guard)

    def layer_store(self, parts: Sequence[FreezableStore], record_bytes: int, layer_idx: int) -> Store:
        """A store for one layer over the frozen `parts`, which it owns; what is added goes to a store of its own."""
        if not parts:
            return self.open_store(record_bytes, layer_idx)
        store = LayeredStore(parts, functools.partial(self._new_store, record_bytes, f"layer {layer_idx}"))
        self.stores.append(store)
        return store

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

    def reset_counters(self) -> None:
        self.counters = Counters(flight_seen=self.prefetcher.seconds_in_flight)
        self.account.peak = self.account.current
        for store in self.stores:
            store.bytes_read = store.bytes_written = store.reads = 0

    def check_process(self) -> None:
        """Raises `ForkedProcessError` in a child that was forked."""
        self.process.check("this cache")

    def mend(self) -> None:
        """All layers are about to be emptied: forget what was broken. Raises `StalledError` while something that did
        not end in time is still under way."""
        self.check_process()
        self.prefetcher.recover()
        self._broken = False

    @property
    def broken(self) -> bool:
        """The cache is not to be used until `reset`: layers may differ, or something may be under way unknown."""
        return self._broken or self.prefetcher.interrupted_by is not None

    @broken.setter
    def broken(self, value: bool) -> None:
        self._broken = value

    @torch.compiler.disable  # it would warn about os.getpid, which it cannot trace
    def check_open(self) -> None:
        self.check_process()
        if self.closed:
            raise CacheClosedError("this cache is closed and its data is gone: construct a new one")
        trouble = self.prefetcher.interrupted_by
        if isinstance(trouble, StalledError):
            raise RuntimeError(
                f"the device stalled in an earlier step ({trouble.strerror}), or reset() it once the device answers"
            ) from trouble
        if self.broken:
            raise RuntimeError(
                "an earlier forward or change was interrupted: some layers may have it and others not; "
                "reset() the cache, or use a new one"
            )

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """All layers change alike in here, or the cache is not to be used until `reset`."""
        self.check_open()
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def check_front(self, layer_idx: int, length: int) -> None:
        """Layers of one forward are updated in order and all hold the same before it: else one was interrupted."""
        if self.front is not None and layer_idx > self.front[0] and length != self.front[1]:
            self.broken = True
            self.check_open()
        self.front = (layer_idx, length)

    def check_seam(self) -> None:
        """Raise when keys that stand for a history were handed out and no attention of ours saw them."""
        if self.unseen is not None:
            raise SeamLostError(
                f"the keys of layer {self.unseen} did not reach hf_offload_cache's attention: {SEAM_LOST}"
            )

    def wait_for(self, ticket: Ticket, layer_idx: int | None = None) -> None:
        """Wait for a read: in the counters as stalled, on the timeline as "wait". Raises as `Ticket.wait`."""
        with self.timeline.span("wait", layer_idx):
            self.counters.stall_seconds += ticket.wait()

    def stream(
        self, store: Store, ids: np.ndarray, records_at_once: int, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """Records `ids` of `store` in order, as uint8 (n, record_bytes) on `device`, `records_at_once` at a time.

        Double-buffered: the next part is read while the caller works on this one. A part is valid until the next.
        """
        parts = [ids[start : start + records_at_once] for start in range(0, len(ids), records_at_once)]
        if not parts:
            return
        buffers = self._buffers(len(parts[0]), store.record_bytes, device)
        for buffer in buffers:
            buffer.wait_uploaded()
        tickets = [self.prefetcher.read(store, parts[0], buffers[0].host[: len(parts[0])])]
        try:
            for index, part in enumerate(parts):
                if index + 1 < len(parts):
                    following = parts[index + 1]
                    buffers[(index + 1) % 2].wait_uploaded()
                    target = buffers[(index + 1) % 2].host[: len(following)]
                    tickets.append(self.prefetcher.read(store, following, target))
                buffer = buffers[index % 2]
                self.wait_for(tickets.pop(0))
                buffer.upload(0, len(part))
                yield buffer.device[: len(part)]
        finally:
            for ticket in tickets:
                with contextlib.suppress(OSError):  # the first error is on its way to the caller
                    ticket.wait()

    def _buffers(self, count: int, record_bytes: int, device: torch.device) -> list[Staging]:
        fits = self._stream_buffers and (
            self._stream_buffers[0].host.shape[0] >= count
            and self._stream_buffers[0].host.shape[1] == record_bytes
            and self._stream_buffers[0].device.device == device
        )
        if not fits:
            self.release_stream_buffers()
            self._stream_buffers = [
                Staging(count, record_bytes, device, self.account, "stream buffers") for _ in range(2)
            ]
        return self._stream_buffers

    def release_stream_buffers(self) -> None:
        """Give the memory back until the next `stream`."""
        for buffer in self._stream_buffers:
            buffer.release()
        self._stream_buffers = []

    def close(self) -> None:
        """Stop the workers and give back files and buffers. Idempotent.

        Raises `StalledError`, once all is done that can be, for what does not end in time and was not reported before.
        In a forked child nothing is done: what is the parent's goes on, and the child's copies of its descriptors go
        with the objects.
        """
        if self.closed:
            return
        self.closed = True
        self.unseen = None
        if not self.process.is_here:
            return
        with contextlib.ExitStack() as last_first:  # each runs, whatever another raises
            last_first.callback(self.timeline.close)
            last_first.callback(self.release_stream_buffers)
            if self.ring is not None:
                last_first.callback(self.ring.close)
            for store in list(self.stores):
                last_first.callback(self.close_store, store)
            last_first.callback(self.prefetcher.close)
