"""The two read engines against each other: random batches, cold, through the prefetcher as the cache uses it."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from hf_offload_cache.prefetch import Prefetcher
from hf_offload_cache.report import MemoryAccount
from hf_offload_cache.stores.base import aligned_empty
from hf_offload_cache.stores.engines import open_store

ENGINES = ("direct", "mapped")
BATCHES = (8, 25, 64)
RECORD_KIB = (4, 12, 16, 64)


def measure_engine(
    engine: str,
    record_bytes: int,
    batches: tuple[int, ...] = BATCHES,
    directory: str | None = None,
    file_bytes: int = 256 << 20,
    trials: int = 40,
) -> list[dict[str, Any]]:
    """For each batch size: milliseconds from `read` to the end of `wait` (median, p95), and CPU seconds a record.

    Records are random bytes, written first. Both engines leave nothing in the page cache, so every read is cold:
    "direct" bypasses it, "mapped" drops what it has read.
    """
    prefetcher = Prefetcher(MemoryAccount(), 32 << 20)
    store = open_store(engine, directory or tempfile.gettempdir(), record_bytes, f"{engine} benchmark")
    generator = np.random.default_rng(0)
    rows = []
    try:
        count = max(max(batches) * 4, file_bytes // record_bytes)
        for part in np.array_split(store.allocate(count), max(1, count * record_bytes >> 22)):
            records = aligned_empty(len(part), record_bytes)
            records.copy_(torch.from_numpy(generator.integers(0, 256, (len(part), record_bytes), dtype=np.uint8)))
            prefetcher.write(store, part, records)
        prefetcher.flush(store)
        for batch in batches:
            out = aligned_empty(batch, record_bytes)
            times, cpu = [], 0.0
            for trial in range(trials + 3):
                ids = np.sort(generator.choice(count, batch, replace=False)).astype(np.int64)
                started, cpu_started = time.perf_counter(), time.process_time()
                prefetcher.read(store, ids, out).wait()
                if trial >= 3:
                    times.append(1e3 * (time.perf_counter() - started))
                    cpu += time.process_time() - cpu_started
            rows.append(
                {
                    "engine": engine,
                    "record_kib": record_bytes / 1024,
                    "batch": batch,
                    "median_ms": statistics.median(times),
                    "p95_ms": float(np.percentile(times, 95)),
                    "cpu_seconds_per_record": cpu / (trials * batch),
                    "mb_per_second": batch * record_bytes / statistics.median(times) / 1e3,
                }
            )
    finally:
        prefetcher.close()
        store.close()
    return rows


def run(directory: str | None = None, file_bytes: int = 256 << 20, trials: int = 40, rounds: int = 2) -> dict[str, Any]:
    """All sizes and engines, the engines in turns (ABBA), so that a machine that drifts favours neither."""
    jobs = []
    for kib in RECORD_KIB:
        for turn in range(rounds):
            jobs += [(engine, kib << 10, turn) for engine in (ENGINES if turn % 2 == 0 else ENGINES[::-1])]
    rows = []
    for engine, record_bytes, turn in track(jobs, "engines"):
        found = measure_engine(engine, record_bytes, directory=directory, file_bytes=file_bytes, trials=trials)
        rows += [{**row, "round": turn} for row in found]
    return {"rows": rows}


def main() -> None:
    """Milliseconds a batch and CPU a record of both engines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--path", help="folder on the disk to measure")
    parser.add_argument("--file-mib", type=int, default=256)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.path, arguments.file_mib << 20, arguments.trials)
    for row in result["rows"]:
        print(
            f"{row['engine']:7} {row['record_kib']:5.0f} KiB x {row['batch']:3}: {row['median_ms']:7.2f} ms "
            f"(p95 {row['p95_ms']:7.2f}), CPU {1e6 * row['cpu_seconds_per_record']:5.0f} us a record"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
