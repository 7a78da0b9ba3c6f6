"""What the disk gives without this library: random reads by plain threads and by a plain ring. The yardstick."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .raw_ring import RawRing

BatchRead = Callable[[np.ndarray], None]
"""Reads one record at each of the offsets, all of a batch, and returns when the bytes are there."""


@dataclass(frozen=True)
class RawFile:
    """A descriptor for reading, and the number of bytes behind it; `direct`: past the page cache."""

    fd: int
    size: int
    direct: bool


@contextlib.contextmanager
def raw_file(directory: str | None, file_bytes: int) -> Iterator[RawFile]:
    """A file of random bytes, on the disk and not in the page cache. It has no name, and goes at the end."""
    with tempfile.TemporaryFile(dir=directory or tempfile.gettempdir()) as file:
        piece = np.random.default_rng(0).integers(0, 256, min(file_bytes, 16 << 20), dtype=np.uint8).tobytes()
        for _ in range(max(1, file_bytes // len(piece))):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            direct = bool(getattr(os, "O_DIRECT", 0))
        except OSError:
            fd, direct = os.dup(file.fileno()), False
        try:
            yield RawFile(fd, size, direct)
        finally:
            os.close(fd)


def raw_rate(
    record_bytes: int, directory: str | None = None, threads: int = 8, file_bytes: int = 256 << 20, seconds: float = 1.0
) -> dict[str, Any]:
    """Bytes a second of random reads of `record_bytes`, each one `preadv`, `threads` at a time, without a pause.

    Without `O_DIRECT` in `directory` the page cache is dropped before the reads.
    """
    with raw_file(directory, file_bytes) as file:
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            counts = pool.map(
                lambda seed: _read_until(file.fd, record_bytes, file.size, start + seconds, seed), range(threads)
            )
            total = sum(counts)
        rate = total / (time.perf_counter() - start)
    return {"record_bytes": record_bytes, "threads": threads, "direct": file.direct, "bytes_per_second": rate}


def _read_until(fd: int, record_bytes: int, size: int, deadline: float, seed: int) -> int:
    buffer = mmap.mmap(-1, record_bytes)  # starts on a page, as O_DIRECT wants
    generator = np.random.default_rng(seed)
    total = 0
    while time.perf_counter() < deadline:
        for record in generator.integers(0, size // record_bytes, 32).tolist():
            total += os.preadv(fd, [buffer], record * record_bytes)
    return total


@contextlib.contextmanager
def raw_batch_reads(file: RawFile, record_bytes: int, most: int) -> Iterator[dict[str, BatchRead]]:
    """Name -> a way to read a batch of up to `most` records of `file`: 8 and 16 threads, each record one `preadv`;
    and, where the kernel has it, a ring that holds the whole batch, or half of what a device's queue takes."""
    memory = mmap.mmap(-1, most * record_bytes)
    with contextlib.ExitStack() as stack:
        view = stack.enter_context(memoryview(memory))
        pieces = [view[index * record_bytes : (index + 1) * record_bytes] for index in range(most)]
        for piece in pieces:
            stack.enter_context(piece)
        ways: dict[str, BatchRead] = {}
        for threads in (8, 16):
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            ways[f"{threads} threads"] = _by_threads(pool, threads, file.fd, pieces)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        for name, depth in (("ring", 1024), ("ring, 128 at once", 128)):
            with contextlib.suppress(OSError):
                ring = stack.enter_context(RawRing(depth))
                ways[name] = lambda offsets, ring=ring: ring.read(file.fd, offsets, address, record_bytes)
        yield ways


def _by_threads(pool: ThreadPoolExecutor, threads: int, fd: int, pieces: list[memoryview]) -> BatchRead:
    def read(offsets: np.ndarray) -> None:
        where = offsets.tolist()

        def share(part: int) -> None:
            for index in range(part * len(where) // threads, (part + 1) * len(where) // threads):
                os.preadv(fd, [pieces[index]], where[index])

        list(pool.map(share, range(threads)))

    return read


def main() -> None:
    """Prints the raw rate for records of 4 KiB to 1 MiB."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--path", help="folder on the disk to measure")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    for kib in (4, 12, 16, 64, 256, 1024):
        for threads in arguments.threads:
            print(json.dumps(raw_rate(kib << 10, arguments.path, threads)))


if __name__ == "__main__":
    main()
