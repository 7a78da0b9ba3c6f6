"""Streams of a device that only counts: queues that run late, in any order that waits and events allow. No tests.

Without a seed, everything runs at once. With one, each stream lags behind by a number of operations that changes at
random: often, or with other seeds so rarely that a stream with little work does none of it until something waits.
Memory whose values are not defined yet is all NaN or -1: results, the host's side of a copy until it has run, and
memory that was freed while another stream uses it. A wait that is missing then changes values.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

CUDA = torch.device("cuda", 0)
PACKAGE = "/hf_offload_cache/"
MODEL = "model"
BEHIND = (0, 2, 8, 32)
"""Operations that a stream may lag behind."""


def leaves(tree: Any) -> list[Any]:
    """What tuples, lists and dictionaries within `tree` hold, as `torch.utils._pytree` finds it, in less time."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return [tree]
    found: list[Any] = []
    for one in tree:
        if isinstance(one, (tuple, list, dict)):
            found += leaves(one)
        else:
            found.append(one)
    return found


@dataclass
class Counts:
    """Of everything since the last `clear`, by "file:function"; "model" is everything outside the library."""

    launches: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    blocking: Counter[str] = field(default_factory=Counter)
    """Copies that the host waited for, because their memory on the host is not pinned."""
    to_device_bytes: Counter[str] = field(default_factory=Counter)
    to_host_bytes: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def add(self, kind: str, count: int = 1, nbytes: int = 0) -> None:
        caller, captured = _caller(), QUEUES.capture
        if kind == "syncs" and captured is not None and captured.thread is threading.current_thread():
            raise RuntimeError(f"{caller} waits while a stream is captured")
        getattr(self, kind)[caller] += count
        if nbytes:
            getattr(self, f"{kind}_bytes")[caller] += nbytes

    def copied(self, kind: str, nbytes: int, waits: bool) -> None:
        self.add(kind, nbytes=nbytes)
        if waits:
            self.add("syncs")
            self.add("blocking")


COUNTS = Counts()


def _caller() -> str:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if (name := _CALLERS.get(code, "")) == "":
            name = _CALLERS[code] = _of_package(code)
        if name is not None:
            return name
        frame = frame.f_back
    return MODEL


_CALLERS: dict[types.CodeType, str | None] = {}
"""`_of_package` of what was asked for before: each operation asks for dozens."""


def _of_package(code: types.CodeType) -> str | None:
    """ "file:function" of a function of the library; "model" of one of pytest's, which the library does not call; None
    for any other."""
    name = code.co_filename
    if "/_pytest/" in name:
        return MODEL
    here = PACKAGE in name and "site-packages" not in name
    return f"{name.split(PACKAGE, 1)[1]}:{code.co_name}" if here else None


class Queues:
    """The streams of the device, and the order in which they run."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.begin(None)

    def begin(self, seed: int | None) -> None:
        """Begin anew, in the order of a seed; None: each operation runs at once."""
        self.random = None if seed is None else random.Random(seed)
        self.changes = 0.0 if self.random is None else self.random.choice((0.1, 0.003))
        self.capture: Any = None
        self.streams: list[Stream] = []
        self.of_thread = threading.local()
        self.default = Stream(queues=self)

    def advance(self) -> None:
        """Run what is further behind than each stream may be now and waits for nothing."""
        for stream in self.streams:
            if self.random is not None and self.random.random() < self.changes:
                stream.behind = self.random.choice(BEHIND)
            while len(stream.queue) > stream.behind and not stream.blocked:
                stream.step()

    def run_all(self) -> None:
        for stream in list(self.streams):
            stream.run()


class Stream:
    """Work in its order. An operation is a function, or the place in another stream's work to wait for."""

    device = CUDA

    def __init__(self, *_: Any, queues: Queues | None = None, **__: Any) -> None:
        """Of whatever device."""
        self.queues = QUEUES if queues is None else queues
        self.queue: deque[Callable[[], object] | Event] = deque()
        self.given = self.done = 0
        self.behind = 0 if self.queues.random is None else self.queues.random.choice(BEHIND)
        self.queues.streams.append(self)

    def give(self, work: Callable[[], object] | Event, *tensors: Any) -> None:
        """Append work that uses these tensors; a capture records it instead."""
        captured = self.queues.capture
        if captured is not None and captured.thread is threading.current_thread():
            captured.record(self, work, tensors)
            return
        with self.queues.lock:
            self.use(*tensors)
            self.queue.append(work)
            self.given += 1
            self.queues.advance()

    def use(self, *tensors: Any) -> None:
        """Note the device's memory behind `tensors` as used here."""
        for one in leaves(tensors):
            if hasattr(one, "memory"):
                one.memory.use(self)

    @property
    def blocked(self) -> bool:
        return isinstance(self.queue[0], Event) and not self.queue[0].query()

    def step(self) -> None:
        """Run the next operation, after what it waits for."""
        work = self.queue.popleft()
        if isinstance(work, Event):
            work.run()
        else:
            # Memory made in any mode, and nothing of the device: the work is given tensors of the CPU.
            with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableTorchDispatch():
                work()
        self.done += 1

    def run(self, count: int | None = None) -> None:
        """Run the first `count` operations of all that were ever given; None: all."""
        with self.queues.lock:
            while self.done < (self.given if count is None else count):
                self.step()

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Any) -> None:
        event.check()
        self.give(event.copy())

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        COUNTS.add("syncs")
        self.run()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        """With whatever options."""
        self.stream: Stream | None = None
        self.place = 0
        self.capture: Any = None

    def copy(self) -> Event:
        """The same place, also when this event is recorded again."""
        event = Event()
        event.stream, event.place, event.capture = self.stream, self.place, self.capture
        return event

    def check(self) -> None:
        """Raise if it was recorded in a capture and this is not in it: it has no place in a stream then."""
        if self.capture is not None and self.capture is not QUEUES.capture:
            raise RuntimeError("an event of a capture is waited for outside it")

    def run(self) -> None:
        self.check()
        if self.stream is not None:
            self.stream.run(self.place)

    def record(self, stream: Any = None) -> None:
        self.stream = stream or current()
        self.place, self.capture = self.stream.given, self.stream.queues.capture

    def wait(self, stream: Any = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():  # others may wait
            COUNTS.add("syncs")
        self.run()

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class Memory:
    """A storage of the device, until its last tensor is dropped."""

    known: ClassVar[weakref.WeakValueDictionary[int, Memory]] = weakref.WeakValueDictionary()

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._stream, self.capture = current(), QUEUES.capture
        self._others: set[Stream] = set()
        self._recorded: set[Stream] = set()

    @staticmethod
    def of(inner: torch.Tensor) -> Memory:
        storage = inner.untyped_storage()
        memory = Memory.known.get(storage.data_ptr()) if storage.nbytes() else None
        if memory is None:
            memory = Memory(storage)
            if storage.nbytes():
                Memory.known[storage.data_ptr()] = memory
        return memory

    def use(self, stream: Stream) -> None:
        if stream is self._stream:
            return
        if not self._others:
            freed = weakref.finalize(self, _freed, self._storage, self._stream, self._others, self._recorded)
            freed.atexit = False
        self._others.add(stream)

    def record(self, stream: Stream) -> None:
        """Let the memory be used again only after the stream's work until then."""
        self._recorded.add(stream)


def _freed(storage: torch.UntypedStorage, stream: Stream, others: set[Stream], recorded: set[Stream]) -> None:
    """Let the later work of `stream` write to the memory, as it may."""
    if others - recorded and stream.queues.random is not None:
        with stream.queues.lock:  # runs nothing, since it may run within another operation
            stream.queue.append(functools.partial(storage.fill_, 255))
            stream.given += 1


QUEUES = Queues()


def current(device: Any = None) -> Stream:
    stream: Stream = getattr(QUEUES.of_thread, "stream", QUEUES.default)
    return stream


@contextlib.contextmanager
def on(stream: Any) -> Iterator[None]:
    """`stream` as the current one of this thread."""
    before, QUEUES.of_thread.stream = current(), stream or current()
    try:
        yield
    finally:
        QUEUES.of_thread.stream = before
