"""What the disk gives without this library: random `O_DIRECT` reads by plain threads. The yardstick of `decode`."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


def raw_rate(
    record_bytes: int, directory: str | None = None, threads: int = 8, file_bytes: int = 256 << 20, seconds: float = 1.0
) -> dict[str, Any]:
    """Bytes a second of random reads of `record_bytes`, each one `preadv`, `threads` at a time.

    The file holds random bytes. Without `O_DIRECT` in `directory` the page cache is dropped before the reads.
    """
    directory = directory or tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=directory) as file:
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
            deadline = time.perf_counter() + seconds
            start = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                counts = pool.map(lambda seed: _read_until(fd, record_bytes, size, deadline, seed), range(threads))
                total = sum(counts)
            rate = total / (time.perf_counter() - start)
        finally:
            os.close(fd)
    return {"record_bytes": record_bytes, "threads": threads, "direct": direct, "bytes_per_second": rate}


def _read_until(fd: int, record_bytes: int, size: int, deadline: float, seed: int) -> int:
    buffer = mmap.mmap(-1, record_bytes)  # starts on a page, as O_DIRECT wants
    generator = np.random.default_rng(seed)
    total = 0
    while time.perf_counter() < deadline:
        for record in generator.integers(0, size // record_bytes, 32).tolist():
            total += os.preadv(fd, [buffer], record * record_bytes)
    return total


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
