"""The read engines against each other and against the raw disk: random batches, cold, through the prefetcher."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_offload_cache.fetch import Prefetcher
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.report import Progress
from hf_offload_cache.stores import Store, aligned_empty, open_store, probe_direct, probe_uring

from .disk import raw_batch_reads, raw_file

ENGINES = ("uring", "direct", "mapped")
BATCHES = (8, 25, 100, 400)
RECORD_KIB = (4, 12, 16, 64)
WARM_UP = 3


def available(directory: str) -> tuple[str, ...]:
    """Those of `ENGINES` that work in `directory`."""
    missing = {"uring": not probe_uring(directory)[0], "direct": not probe_direct(directory)[0]}
    return tuple(engine for engine in ENGINES if not missing.get(engine))


def measure(
    record_bytes: int,
    batches: tuple[int, ...] = BATCHES,
    directory: str | None = None,
    file_bytes: int = 256 << 20,
    trials: int = 40,
) -> list[dict[str, Any]]:
    """A row an engine and batch size: milliseconds from `read` to the end of `wait` (median, p95), CPU seconds a
    record, the raw ways' medians, and the efficiency: bytes a second over those of the best raw way.

    Every way has a file of random bytes of its own and reads other records in each trial, in no order; they take turns,
    so that a machine that drifts favours none. Every read is cold: it bypasses the page cache ("mapped" drops what it
    has read). The raw ways read every record with a request of its own, the engines adjacent ones with one.
    """
    place = directory or tempfile.gettempdir()
    count = max(max(batches) * 4, file_bytes // record_bytes)
    generator = np.random.default_rng(0)
    rows = []
    with ExitStack() as stack:
        prefetcher = stack.enter_context(closing(Prefetcher(MemoryAccount(), 32 << 20)))
        ways: dict[str, Callable[[np.ndarray], Any]] = {}
        out = aligned_empty(max(batches), record_bytes)
        for engine in available(place):
            store = stack.enter_context(closing(open_store(engine, place, record_bytes, f"{engine} benchmark")))
            _fill(prefetcher, store, count, generator)
            ways[engine] = lambda ids, store=store: prefetcher.read(store, ids, out[: len(ids)]).wait()
        file = stack.enter_context(raw_file(directory, count * record_bytes))
        records = min(count, file.size // record_bytes)
        for name, read in stack.enter_context(raw_batch_reads(file, record_bytes, max(batches))).items():
            ways[name] = lambda ids, read=read: read(ids * record_bytes)
        for batch in batches:
            times: dict[str, list[float]] = {name: [] for name in ways}
            cpu = dict.fromkeys(ways, 0.0)
            for trial in range(trials + WARM_UP):
                for name in generator.permutation(list(ways)).tolist():
                    ids = np.sort(generator.choice(records, batch, replace=False)).astype(np.int64)
                    started, cpu_started = time.perf_counter(), time.process_time()
                    ways[name](ids)
                    if trial >= WARM_UP:
                        times[name].append(1e3 * (time.perf_counter() - started))
                        cpu[name] += time.process_time() - cpu_started
            rows += _rows(times, cpu, batch, record_bytes)
    return rows


def _fill(prefetcher: Prefetcher, store: Store, count: int, generator: np.random.Generator) -> None:
    for part in np.array_split(store.allocate(count), max(1, count * store.record_bytes >> 22)):
        records = aligned_empty(len(part), store.record_bytes)
        records.copy_(torch.from_numpy(generator.integers(0, 256, records.shape, dtype=np.uint8)))
        prefetcher.write(store, part, records)
    prefetcher.flush(store)


def _rows(
    times: dict[str, list[float]], cpu: dict[str, float], batch: int, record_bytes: int
) -> list[dict[str, Any]]:
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    raw = {name: median for name, median in medians.items() if name not in ENGINES}
    return [
        {
            "engine": name,
            "record_kib": record_bytes / 1024,
            "batch": batch,
            "median_ms": medians[name],
            "p95_ms": float(np.percentile(times[name], 95)),
            "cpu_seconds_per_record": cpu[name] / (len(times[name]) * batch),
            "mb_per_second": batch * record_bytes / medians[name] / 1e3,
            "raw_ms": raw,
            "efficiency": min(raw.values()) / medians[name],
        }
        for name in medians
        if name in ENGINES
    ]


def run(directory: str | None = None, file_bytes: int = 256 << 20, trials: int = 40) -> dict[str, Any]:
    """All record sizes, batch sizes and engines. "worst_efficiency": of each engine, over all sizes."""
    rows = []
    with Progress("engines", len(RECORD_KIB), "record sizes") as bar:
        for done, kib in enumerate(RECORD_KIB, 1):
            rows += measure(kib << 10, directory=directory, file_bytes=file_bytes, trials=trials)
            bar.update(done)
    worst = {
        engine: min(row["efficiency"] for row in rows if row["engine"] == engine)
        for engine in dict.fromkeys(row["engine"] for row in rows)
    }
    return {"rows": rows, "worst_efficiency": worst}


def main() -> None:
    """Milliseconds a batch, CPU a record and read efficiency of the engines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--path", help="folder on the disk to measure")
    parser.add_argument("--file-mib", type=int, default=256)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.path, arguments.file_mib << 20, arguments.trials)
    for row in result["rows"]:
        best = min(row["raw_ms"], key=row["raw_ms"].get)
        print(
            f"{row['engine']:6} {row['record_kib']:3.0f} KiB x {row['batch']:3}: {row['median_ms']:6.2f} ms "
            f"(p95 {row['p95_ms']:6.2f}), CPU {1e6 * row['cpu_seconds_per_record']:4.0f} us a record, "
            f"{row['efficiency']:4.0%} of raw ({row['raw_ms'][best]:.2f} ms, {best})"
        )
    for engine, efficiency in result["worst_efficiency"].items():
        print(f"{engine}: {efficiency:.0%} of raw at worst")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
