"""Threads that are made to wait, and stores to read from them. Order is asserted through events, never through time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.stores import MemoryStore, Store, aligned_empty, probe_direct, probe_uring
from hf_offload_cache.testing import RECORD_BYTES, WrapperStore

LONG = 30.0
"""Seconds after which an event that a test waits for counts as never coming."""


class Gate:
    """A place where threads stop until it is opened; counts who came."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._came = threading.Semaphore(0)

    def pass_through(self, *_: Any) -> None:
        self._came.release()
        assert self._open.wait(LONG), "the gate was never opened"

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._came.acquire(timeout=LONG), "a thread never came to the gate"

    def open(self) -> None:
        self._open.set()


class SlowWrites(WrapperStore):
    """Writes stop at a gate; `order` says what was written when."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gate = Gate()
        self.order: list[int] = []

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        self.gate.pass_through()
        self.inner.write(ids, records)
        self.order.append(int(ids[0]))


def skip_without(engine: str, directory: str | Path) -> None:
    """Skip, with the reason, where `engine` does not work in `directory`."""
    probes = {"direct": probe_direct, "uring": probe_uring}
    works, reason = probes[engine](directory) if engine in probes else (True, "")
    if not works:
        pytest.skip(reason)


def memory() -> MemoryStore:
    return MemoryStore(RECORD_BYTES, "layer 3")


def rows(count: int) -> torch.Tensor:
    return aligned_empty(count, RECORD_BYTES).fill_(0xEE)


def threads_of_ours() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("hf_offload_cache-"))


def in_threads(*calls: Callable[[], object]) -> None:
    """Run the calls at once. Raises the first exception of any."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def join_threads() -> None:
    """Wait for the threads that serve reads and writes, `LONG` for each."""
    for thread in threading.enumerate():
        if thread.name.startswith("hf_offload_cache-"):
            thread.join(LONG)


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `call` on a thread; its result or error comes into the list."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, outcome
