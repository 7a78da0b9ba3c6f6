"""CUDA graphs of a device that only counts: recorded operations that run again. No tests in here.

A capture raises `RuntimeError` for what a real one forbids: waits of the host, values of the device that it reads,
copies of memory that is not pinned, allocation of pinned memory, and work on a stream that did not fork from the
capturing one. What it records has not run; a replay runs it in the order of the capture, on the current stream and on
the same memory, and counts as one launch. A replay raises if memory from outside was freed since the capture.

Not seen: dependencies between the streams of a graph, and memory of the graph that it uses twice.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fake_streams import COUNTS, QUEUES, Event, Memory, Stream, current, on
from torch.utils._pytree import tree_flatten


class Capture:
    """Work that the thread that began it gives to its streams."""

    def __init__(self, stream: Stream) -> None:
        self.streams, self.joined = {stream}, {stream}
        self.stream, self.thread = stream, threading.current_thread()
        self.work: list[Callable[[], object]] = []
        self.made: list[torch.Tensor] = []
        """Memory that the work fills."""
        self.outside: dict[int, weakref.ref[Memory]] = {}

    def record(self, stream: Stream, work: Callable[[], object] | Event, tensors: Any) -> None:
        """Record work that uses `tensors`, or that `stream` waits for an event."""
        if isinstance(work, Event):
            if work.capture is not self:
                raise RuntimeError("a capture waits for work that is not captured")
            self.streams.add(stream)
            if stream is self.stream and work.stream is not None:
                self.joined.add(work.stream)
            return
        if stream not in self.streams:
            raise RuntimeError("work on a stream that did not fork from the one that captures")
        if stream is not self.stream:
            self.joined.discard(stream)
        for one in tree_flatten(tensors)[0]:
            if (memory := getattr(one, "memory", None)) is not None and memory.capture is not self:
                self.outside[id(memory)] = weakref.ref(memory)
        self.work.append(work)


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.captured: Capture | None = None

    def replay(self) -> None:
        captured = self.captured
        if captured is None:
            raise RuntimeError("replay without a capture")
        memories = [one() for one in captured.outside.values()]
        if any(memory is None for memory in memories):
            raise RuntimeError("a graph uses memory that was freed since its capture")
        COUNTS.add("launches")
        stream = current()
        for memory in memories:
            memory.use(stream)  # type: ignore[union-attr]
        stream.give(functools.partial(_undefine, captured.made))
        for work in captured.work:
            stream.give(work)

    def reset(self) -> None:
        self.captured = None

    def pool(self) -> tuple[int, int]:
        return 0, 1


def _undefine(made: list[torch.Tensor]) -> None:
    """Fill the memory of a graph, so that what is read before it is computed again is seen."""
    for tensor in made:
        tensor.fill_(torch.nan if tensor.is_floating_point() else tensor.dtype == torch.bool or -1)


@contextlib.contextmanager
def graph(
    cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """As `torch.cuda.graph`."""
    torch.cuda.synchronize()
    captured = Capture(stream or Stream())
    with on(captured.stream):
        QUEUES.capture = captured
        try:
            yield
        finally:
            QUEUES.capture = None
    if captured.joined != captured.streams:
        raise RuntimeError("a capture ends before its streams have joined")
    cuda_graph.captured = captured


def capturing() -> Capture | None:
    """The capture of this thread."""
    captured: Capture | None = QUEUES.capture
    return captured if captured is not None and captured.thread is threading.current_thread() else None


def refuse(what: str) -> None:
    """Raise within a capture, which forbids `what`."""
    if capturing() is not None:
        raise RuntimeError(f"{what} is not possible while a stream is captured")
