"""What the tests of stores share: engines that work here, system calls that fail, and bytes on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_offload_cache.stores import FreezableStore, RecordFile, open_store, probe_direct, probe_uring
from hf_offload_cache.testing import FreezableStoreTests

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def needs(engine: str, folder: Path) -> str:
    """The engine. Skips the test where it does not work."""
    probe = {"direct": probe_direct, "uring": probe_uring}.get(engine)
    if probe is not None and not probe(folder)[0]:
        pytest.skip(probe(folder)[1])
    return engine


def buffered(patch: pytest.MonkeyPatch) -> None:
    """No file takes O_DIRECT any more."""
    patch.setattr(RecordFile, "try_direct", lambda self: "O_DIRECT refused by this test")


def content_of(store: Any) -> Path:
    """The file that a store's records are in."""
    return Path(f"/proc/self/fd/{store._file.fd}")


def put(store: Any, offset: int, data: bytes) -> None:
    """Other bytes on the disk, behind the store's back."""
    with open(content_of(store), "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(data)
        os.fsync(file.fileno())


def fails(number: int, *, after: int = 0, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A system call that raises this error from the call `after` on, and is `real` before."""
    calls = []

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) > after or real is None:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    return call


def with_free_space(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    real = os.fstatvfs

    def fstatvfs(fd: int) -> os.statvfs_result:
        values = list(real(fd))
        values[1], values[4] = 1, nbytes  # f_frsize, f_bavail
        return os.statvfs_result(values)

    patch.setattr(os, "fstatvfs", fstatvfs)


class OfAnEngine(FreezableStoreTests):
    """The conformance suite for the store that `open_store` makes."""

    engine = "mapped"

    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        engine = needs(self.engine, directory)
        return open_store(engine, directory, record_bytes, "layer 3", guard=self.make_guard())

    def make_guard(self) -> Any:
        return None
