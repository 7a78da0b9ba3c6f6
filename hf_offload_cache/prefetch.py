"""Reads ahead and writes behind: the only file with threads or CUDA streams.

The threads run stores' `read` and `write` and copy bytes with numpy, never torch: OpenMP workers and I/O threads get
in each other's way, and a daemon thread inside torch can take the interpreter down at exit.
"""

from __future__ import annotations

import atexit
import errno
import functools
import queue
import threading
import time
import weakref
from itertools import pairwise
from types import TracebackType

import numpy as np
import torch

from hf_offload_cache.errors import CacheClosedError, StoreError
from hf_offload_cache.report import MemoryAccount
from hf_offload_cache.stores.base import Store, aligned_empty, runs
from hf_offload_cache.stores.checks import check_batch, describe

SMALLEST_PIECE_BYTES = 256 * 1024
"""A run of adjacent records is split over threads only into pieces of at least this size."""

WRITE_QUEUE = "write queue"
"""The owner under which queued writes are in the memory account."""


class Ticket:
    """A read under way. Until `wait` returns or raises, `ids` and `out` belong to the prefetcher; then to the caller.

    For the thread that started the read.
    """

    def __init__(self, state: _State, channel: _Channel, pieces: list[_Piece], *, deferred: bool) -> None:
        self._state = state
        self._channel = channel
        self._generation = channel.generation
        self._deferred = pieces if deferred else []
        self._unfinished = len(pieces)
        self._finished: threading.Event | None = threading.Event() if pieces and not deferred else None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def wait(self) -> float:
        """Block until all records are in `out`; the seconds spent here (a mapped gather included).

        Raises the first error of the read, or else of an earlier write to this store that failed and was not reported
        yet. Before it raises, all pieces have finished or were cancelled. Waiting again is cheap, and raises the same.
        """
        start = time.perf_counter()
        if self._finished is not None:
            self._finished.wait()
            self._finished = None
        pieces, self._deferred = self._deferred, []
        for piece in pieces:
            if self._state.closed or self._generation != self._channel.generation:
                self.fail(CacheClosedError("the read was cancelled: its store was reset or closed"))
            self.run(piece)
        if self._error is None and self._channel.failure is not None:
            self.fail(self._state.take_failure(self._channel))
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return time.perf_counter() - start

    def done(self) -> bool:
        """Whether `wait` would return or raise without reading or blocking."""
        return not self._deferred and (self._finished is None or self._finished.is_set())

    def fail(self, error: BaseException | None) -> None:
        """Keep the first `error` for `wait`; pieces that have not started are skipped from now on."""
        if self._error is None and error is not None:
            self._traceback = error.__traceback__
            self._error = error

    def run(self, piece: _Piece) -> None:
        """Read one piece, or skip it after a failure; any thread. Never raises."""
        if self._error is None:
            try:
                piece.store.read(piece.ids, piece.out)
            except BaseException as error:  # whatever it is belongs to whoever waits
                self.fail(error)
        with self._state.changed:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._channel.tickets.discard(self)
                self._state.changed.notify_all()
                if self._finished is not None:
                    self._finished.set()


class Prefetcher:
    """Starts reads and takes over writes, for the stores of one cache. All methods are for one thread.

    Reads of a store that does not advise are shared by up to `threads` reader threads; writes go to one writer thread
    in the order they came. Threads start when first needed and end with `close`, or soon after this object is gone.
    After `close`, `read`, `write` and `flush` raise `CacheClosedError`.

    A write that failed is reported once, by the next `read`, `write`, `flush` or `Ticket.wait` of that store; reading
    one of its records raises until it is written again.
    """

    def __init__(self, account: MemoryAccount, write_queue_bytes: int, threads: int = 8) -> None:
        if write_queue_bytes < 0:
            raise ValueError(f"write_queue_bytes must not be negative, got {write_queue_bytes}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._state = _State(account, write_queue_bytes)
        self._most_readers = threads
        self._readers: list[threading.Thread] = []
        self._writer: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._at_exit = functools.partial(_end, self._state, self._threads)
        self._stop = weakref.finalize(self, _stop, self._state, self._at_exit)
        atexit.register(self._at_exit)

    def read(self, store: Store, ids: np.ndarray, out: torch.Tensor) -> Ticket:
        """Start reading `ids` (int64; ascending is fastest) into the rows of `out`; both stay as they are until `wait`.

        A record whose write is still queued is copied from the queue, now. A store that advises is advised now and read
        by `Ticket.wait`, on the thread that waits. Raises `StoreError` for a failed write of this store (see above).
        """
        state = self._state
        check_batch(ids, out, store.record_bytes, aligned=True)
        with state.changed:
            state.check_open()
            channel = state.channel(store)
            state.raise_failure(channel, ids)
            queued = [(job, job.records) for job in channel.queued]  # a job lets go of its records when it is done
        missing = _copy_queued(queued, ids, out) if queued else [(0, len(ids))]
        if not store.advises:
            missing = [
                (start + low, start + high)
                for start, stop in missing
                for low, high in _split(ids[start:stop], store.record_bytes, self._most_readers)
            ]
        pieces = [_Piece(store, ids[start:stop], out[start:stop]) for start, stop in missing if stop > start]
        ticket = Ticket(state, channel, pieces, deferred=store.advises)
        if store.advises:
            for piece in pieces:
                store.advise(piece.ids)
        elif pieces:
            while len(self._readers) < min(len(pieces), self._most_readers):
                self._readers.append(_start(f"reader-{len(self._readers)}", state.reads, state))
                self._threads.append(self._readers[-1])
            with state.changed:
                channel.tickets.add(ticket)
            for piece in pieces:
                piece.ticket = ticket
                state.reads.put(piece)
        return ticket

    def write(self, store: Store, ids: np.ndarray, records: torch.Tensor) -> None:
        """Queue `records` (uint8, (n, record_bytes), host memory) to be written to `ids`; takes both over.

        Blocks while the queue would hold more than `write_queue_bytes`; a batch larger than that waits for an empty
        queue. Queued bytes are in the memory account as "write queue". When it raises, nothing was queued.
        """
        state = self._state
        check_batch(ids, records, store.record_bytes)
        job = _Write(store, ids, records)
        with state.changed:
            state.check_open()
            channel = state.channel(store)
            state.raise_failure(channel)
            if job.nbytes == 0:
                return
            while state.queued_bytes and state.queued_bytes + job.nbytes > state.write_queue_bytes:
                state.changed.wait()
                state.check_open()
                state.raise_failure(channel)
            state.queued_bytes += job.nbytes
            state.account.hold(WRITE_QUEUE, job.nbytes)
            channel.queued.append(job)
            channel.lost = [(rest, error) for lost, error in channel.lost if len(rest := np.setdiff1d(lost, ids))]
        if self._writer is None:
            self._writer = _start("writer", state.writes, state)
            self._threads.append(self._writer)
        state.writes.put(job)

    def flush(self, store: Store | None = None) -> None:
        """Block until the writes queued for `store` (None: for all) are done; raises the error of one that failed."""
        state = self._state
        with state.changed:
            state.check_open()
            channels = list(state.channels.values()) if store is None else [state.channel(store)]
            while any(channel.queued for channel in channels):
                state.changed.wait()
                state.check_open()
            for channel in channels:
                state.raise_failure(channel)

    def cancel(self, store: Store) -> None:
        """Drop what is queued for `store` and wait for what is running: nothing touches it from then on.

        For before `Store.close` and before its records are given up: their data, and errors about it, are forgotten.
        Waiting on a read that had not finished raises `CacheClosedError`. The store may be used again afterwards. After
        `close` there is nothing to do.
        """
        state = self._state
        with state.changed:
            channel = state.channel(store)
            channel.generation += 1
            for ticket in channel.tickets:
                ticket.fail(CacheClosedError("the read was cancelled: its store was reset or closed"))
            for job in [job for job in channel.queued if not job.started]:
                state.finish(job, channel)
            while channel.queued or channel.tickets:
                state.changed.wait()
            channel.lost.clear()
            channel.failure = None

    def close(self) -> None:
        """Drop queued writes and reads that have not started, wait for what is running, end the threads. Idempotent."""
        self._stop()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection may close on any thread
                thread.join()
        self._threads.clear()
        self._readers, self._writer = [], None


class Staging:
    """Rows of host memory that reads go to, and on CUDA the same rows in device memory.

    `host` and `device` are uint8 (count, record_bytes); on a CPU they are one tensor. The bytes are held in `account`
    under `owner` until `release`. For the thread that runs the model.
    """

    def __init__(self, count: int, record_bytes: int, device: torch.device, account: MemoryAccount, owner: str) -> None:
        self._cuda = device.type == "cuda"
        self.host = aligned_empty(count, record_bytes, pinned=self._cuda)
        self.device = self.host
        if self._cuda:
            with torch.inference_mode(False):
                self.device = torch.empty_like(self.host, device=device)
            self._stream = torch.cuda.Stream(device)
            self._copied = torch.cuda.Event()
        self._account = account
        self._owner = owner
        self._held_bytes = count * record_bytes * (2 if self._cuda else 1)
        account.hold(owner, self._held_bytes)

    def upload(self, start: int, stop: int) -> None:
        """Bring rows [start, stop) to `device`; what the current stream runs from now on sees them. Does not block.

        The copy waits for what the current stream was given before, which may still read the old rows.
        """
        if not self._cuda or start == stop:
            return
        current = torch.cuda.current_stream(self.device.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self.device[start:stop].copy_(self.host[start:stop], non_blocking=True)
            self._copied.record(self._stream)
        current.wait_event(self._copied)

    def wait_uploaded(self) -> None:
        """Block until every `upload` has read its `host` rows; call before writing to `host` again."""
        if self._cuda:
            self._copied.synchronize()

    def release(self) -> None:
        """Give both buffers back, after the copies under way. Idempotent; no call may follow but `release`."""
        self.wait_uploaded()
        self.host = self.device = torch.empty(0, dtype=torch.uint8)
        self._account.release(self._owner, self._held_bytes)
        self._held_bytes = 0


class _Piece:
    """Part of a read: records that one thread fetches."""

    __slots__ = ("ids", "out", "store", "ticket")

    def __init__(self, store: Store, ids: np.ndarray, out: torch.Tensor) -> None:
        self.store = store
        self.ids = ids
        self.out = out
        self.ticket: Ticket | None = None

    def run(self, state: _State) -> None:
        assert self.ticket is not None
        if state.closed:
            self.ticket.fail(CacheClosedError("the read was cancelled: the cache was closed"))
        self.ticket.run(self)


class _Write:
    """A batch in the write queue."""

    def __init__(self, store: Store, ids: np.ndarray, records: torch.Tensor) -> None:
        self.store: Store | None = store
        self.ids = ids
        self.records = records
        self.nbytes = records.numel()
        self.started = False
        self.lowest, self.highest = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)

    def run(self, state: _State) -> None:
        with state.changed:
            if self.store is None:
                return
            self.started = True
            store = self.store
            channel = state.channel(store)
        error: BaseException | None = None
        if not state.closed:
            try:
                store.write(self.ids, self.records)
            except BaseException as failure:  # kept for whoever uses this store next
                error = failure
        with state.changed:
            state.finish(self, channel)
            if error is not None:
                channel.failure = channel.failure or error
                channel.lost.append((self.ids, error))


class _Channel:
    """What is under way for one store. Guarded by `_State.changed`."""

    def __init__(self) -> None:
        self.queued: list[_Write] = []  # oldest first; the one being written is in it
        self.tickets: set[Ticket] = set()
        self.lost: list[tuple[np.ndarray, BaseException]] = []
        self.failure: BaseException | None = None  # of a write, not yet reported
        self.generation = 0


class _State:
    """What the threads share with the prefetcher, which they do not hold, so that it can be collected."""

    def __init__(self, account: MemoryAccount, write_queue_bytes: int) -> None:
        self.account = account
        self.write_queue_bytes = write_queue_bytes
        self.queued_bytes = 0
        self.closed = False
        self.changed = threading.Condition()
        self.channels: weakref.WeakKeyDictionary[Store, _Channel] = weakref.WeakKeyDictionary()
        self.reads: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self.writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()

    def channel(self, store: Store) -> _Channel:
        channel = self.channels.get(store)
        if channel is None:
            channel = self.channels[store] = _Channel()
        return channel

    def check_open(self) -> None:
        if self.closed:
            raise CacheClosedError("the cache was closed; make a new one")

    def take_failure(self, channel: _Channel) -> BaseException | None:
        with self.changed:
            failure, channel.failure = channel.failure, None
            return failure

    def raise_failure(self, channel: _Channel, ids: np.ndarray | None = None) -> None:
        """Raise for a failed write that was not reported yet, or that one of `ids` was part of."""
        failure = self.take_failure(channel)
        if failure is not None:
            raise failure
        if ids is None:
            return
        for lost, error in channel.lost:
            if len(touched := np.intersect1d(lost, ids)):
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                raise StoreError(number, f"{describe(touched)} could not be written: {error}") from error

    def finish(self, job: _Write, channel: _Channel) -> None:
        """`job` is done with, however it went. With `changed` held."""
        channel.queued.remove(job)
        self.queued_bytes -= job.nbytes
        self.account.release(WRITE_QUEUE, job.nbytes)
        job.store, job.records = None, torch.empty(0, dtype=torch.uint8)
        self.changed.notify_all()

    def stop(self) -> None:
        """Let the threads run out of work and end. Runs in a garbage collection too, so it takes no lock."""
        self.closed = True
        self.reads.put(None)
        self.writes.put(None)


_EXIT_SECONDS = 1.0
"""That the end of the interpreter waits for threads in a read: killed there, one could take the process down."""


def _stop(state: _State, at_exit: functools.partial) -> None:
    """What a prefetcher that is closed or gone leaves to do; takes no lock."""
    atexit.unregister(at_exit)
    state.stop()


def _end(state: _State, threads: list[threading.Thread]) -> None:
    """Before the interpreter ends."""
    state.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _start(role: str, jobs: queue.SimpleQueue, state: _State) -> threading.Thread:
    thread = threading.Thread(target=_serve, args=(jobs, state), name=f"hf_offload_cache-{role}", daemon=True)
    thread.start()
    return thread


def _serve(jobs: queue.SimpleQueue, state: _State) -> None:
    """Run jobs until told to stop."""
    while (job := jobs.get()) is not None:
        job.run(state)
        del job  # it holds a store and memory, and the next may be long in coming
    jobs.put(None)  # for the next thread


def _copy_queued(
    queued: list[tuple[_Write, torch.Tensor]], ids: np.ndarray, out: torch.Tensor
) -> list[tuple[int, int]]:
    """Fill the rows of `out` whose records are in `queued` (oldest first); the ranges of rows that remain."""
    absent = np.ones(len(ids), dtype=bool)
    if len(ids):
        lowest, highest = int(ids.min()), int(ids.max())
        rows = out.numpy()
        for job, records in queued:
            if job.lowest > highest or job.highest < lowest:
                continue
            found = np.isin(ids, job.ids)
            if found.any():
                order = np.argsort(job.ids)
                rows[found] = records.numpy()[order[np.searchsorted(job.ids, ids[found], sorter=order)]]
                absent[found] = False
    positions = np.flatnonzero(absent)
    return [(int(positions[first]), int(positions[stop - 1]) + 1) for first, stop in runs(positions)]


def _split(ids: np.ndarray, record_bytes: int, most: int) -> list[tuple[int, int]]:
    """Half-open ranges of `ids` for up to `most` threads to read: whole runs, or large pieces of long ones."""
    edges = runs(ids)
    if len(edges) >= most:
        stops = np.array([stop for _, stop in edges])
        wanted = np.arange(1, most + 1) * len(ids) // most
        cuts = np.unique(stops[np.searchsorted(stops, wanted)]).tolist()
        return list(pairwise([0, *cuts]))
    smallest = max(1, -(-SMALLEST_PIECE_BYTES // record_bytes))
    pieces = []
    for start, stop in edges:
        count = max(1, min(most // len(edges), (stop - start) // smallest))
        step = -(-(stop - start) // count)
        pieces += [(low, min(low + step, stop)) for low in range(start, stop, step)]
    return pieces
