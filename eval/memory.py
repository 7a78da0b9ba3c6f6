"""The memory account: how small is the cache, and does the process agree?

A child process drives a cache through a model that itself is next to nothing (`Shape.light`), and compares the account
with the kernel's: anonymous resident memory, plus the pages of the cache's files that are in the page cache.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.core import SelectiveCache
from hf_offload_cache.core.filling import prefill
from hf_offload_cache.registry import cache_class

from .studies.common import Options, one_run, write_json
from .synthetic import Shape, build_model, fill

LEAST_BYTES = 3 << 20
"""Differences below this are noise of the process (Python's objects, thread stacks), whatever the size of the cache."""

_CHILD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_ARENA_MAX": "1",
    # Fixed, so that what is freed goes back to the kernel: glibc raises the threshold as it goes.
    "MALLOC_MMAP_THRESHOLD_": "16384",
    "MALLOC_TRIM_THRESHOLD_": "16384",
}


@dataclass(frozen=True)
class Run:
    """A child's task. `chunk` 0: prefill in one piece; `real`: the embedded model instead of the light one."""

    tokens: int = 7168
    chunk: int = 0
    steps: int = 50
    layers: int = 30
    heads: int = 9
    """Query heads of the light model, a multiple of its three key heads: most of the time of a prefill."""
    real: bool = False
    window: int = 0
    """Tokens that every layer but each fourth sees; 0: all see everything."""
    path: str | None = None
    cache: str = "disk-swap"
    """A name that `cache_class` knows."""
    fields: dict[str, Any] = field(default_factory=dict)
    budget: str | None = None
    """`for_budget`'s memory, for these tokens and steps; None: `fields` alone."""
    filled: bool = False
    """Synthetic keys and values instead of a prefill, which takes minutes at 32K tokens."""


def measure(run: Run) -> dict[str, Any]:
    """Runs a child process; returns what it found (see `child`). Raises `RuntimeError` with its output if it fails."""
    command = [sys.executable, "-m", "eval.memory", "--child", json.dumps(asdict(run))]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **_CHILD_ENVIRONMENT, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def agrees(account: int, measured: int, tolerance: float = 0.05) -> bool:
    """Within `tolerance` of what was measured, or nearer than `LEAST_BYTES`."""
    return abs(account - measured) <= max(tolerance * measured, LEAST_BYTES)


def child(run: Run) -> dict[str, Any]:
    """Prefill and decode; "account" and "measured" bytes after each, and the peak against the full KV. Before that, a
    first cache does the same and is closed, so that torch's and Python's own pools are filled."""
    _whole_pages_only()
    cls = cache_class(run.cache)
    assert issubclass(cls, SelectiveCache)
    model = load_default_model(torch.bfloat16)[0] if run.real else build_model(_light(run), window=run.window)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, run.tokens + run.steps), generator=generator)

    def new_cache() -> SelectiveCache:
        if run.budget is None:
            return cls(model, path=run.path, **run.fields)
        context = run.tokens + run.steps
        return cls.for_budget(model, run.budget, max_context=context, path=run.path, **run.fields)

    with new_cache() as cache:
        _drive(model, cache, ids, run)
    del cache
    before = anonymous_bytes()
    stages: dict[str, Any] = {}
    with new_cache() as cache:

        def note(stage: str) -> None:
            cache.storage.prefetcher.flush()
            account, owners = cache.memory_bytes, cache.report().memory_by_owner
            pages = sum(resident_file_bytes(store) for store in cache.storage.stores)
            pages += sum(resident_bytes(table.descriptor, table.nbytes) for table in cache.storage.tables)
            anonymous = anonymous_bytes() - before
            stages[stage] = {"account": account, "measured": anonymous + pages, "file_pages": pages}
            stages[stage] |= {"difference": account / (anonymous + pages) - 1, "owners": owners}
            stages[stage]["agrees"] = agrees(account, anonymous + pages)

        _drive(model, cache, ids, run, note)
        report = cache.report()
    return {
        **asdict(run), "full_kv_bytes": report.full_kv_bytes, "peak_memory_bytes": report.peak_memory_bytes,
        "share_of_full_kv": report.peak_memory_bytes / report.full_kv_bytes, "store": report.store, "stages": stages,
        "left_after_close": anonymous_bytes() - before,
    }  # fmt: skip


def _light(run: Run) -> Shape:
    return Shape(layers=run.layers, heads=run.heads).light()


def _drive(model: Any, cache: Any, ids: Any, run: Run, note: Callable[[str], None] = lambda stage: None) -> None:
    if run.filled:
        fill(cache, model, _light(run), run.tokens)
    else:
        prefill(model, ids[:, : run.tokens], cache, run.chunk or run.tokens)
    note("prefill")
    prefill(model, ids[:, run.tokens :], cache, 1)
    note("decode")


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process, after what was freed has gone back to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def resident_file_bytes(store: Any) -> int:
    """Bytes of a store's scratch file that are in the page cache."""
    file = getattr(store, "_file", None)
    return resident_bytes(file.fd, file.size) if file is not None and file.size else 0


def resident_bytes(descriptor: int, size: int) -> int:
    """Bytes of a file that are in the page cache, whoever maps them (mincore)."""
    with mmap.mmap(descriptor, size) as mapped:
        flags = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        anchor = ctypes.c_char.from_buffer(mapped)
        try:
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), flags):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del anchor
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def _whole_pages_only() -> None:
    """No transparent huge pages in this process: they make touched memory look larger, by chance of alignment."""
    pr_set_thp_disable = 41
    ctypes.CDLL(None).prctl(pr_set_thp_disable, 1, 0, 0, 0)


OPTIONS: Options = {
    "tokens": (7168, "tokens of the context"),
    "layers": (30, "layers of the model"),
    "real": (False, "also with the default model"),
    "cache": ("disk-swap", "name of a cache"),
    "budget": ("1/13", "of the full KV, for four times as many tokens"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """The account of a cache against the process that holds it: prefill in chunks and in one piece, both engines, and
    four times as many tokens within a budget."""
    arguments = one_run(main.__doc__, OPTIONS, argv)
    tokens = 2048 if arguments.quick else arguments.tokens
    whole = Run(tokens, layers=arguments.layers, path=arguments.path, cache=arguments.cache)
    runs = [
        whole, replace(whole, chunk=1024), replace(whole, chunk=1024, fields={"engine": "mapped"}),
        replace(whole, tokens=4 * tokens + 4096, budget=arguments.budget, filled=True),
        *(replace(whole, chunk=chunk, real=True) for chunk in ((0, 1024) if arguments.real else ())),
    ]  # fmt: skip
    rows = [measure(run) for run in runs]
    stages = [stage["difference"] for row in rows for stage in row["stages"].values()]
    share = max(row["share_of_full_kv"] for row in rows)
    result = {"rows": rows, "share_of_full_kv": share, "difference": max(stages, key=abs)}
    for row in rows:
        how = f"{'real' if row['real'] else 'light'} model, prefill in {row['chunk'] or 'one piece'}, {row['store']}"
        peak = f"peak {row['peak_memory_bytes'] / 2**20:.1f} MiB, 1/{1 / row['share_of_full_kv']:.2f} of the full KV"
        print(f"{how}: {peak}")
        for stage, found in row["stages"].items():
            account, measured = (found[name] / 2**20 for name in ("account", "measured"))
            print(f"  after {stage}: account {account:.2f} MiB, measured {measured:.2f} ({found['difference']:+.1%})")
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Run(**json.loads(sys.argv[2])))))
    else:
        main()
