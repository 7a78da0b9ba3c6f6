"""All benchmarks, one after the other, each in a process of its own; one JSON, one table of what was promised."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent

_TREE = "tree, a tenth"
_A_TENTH = "--set", f"{_TREE}:cache=abstract-tree,num_selected=null"
_FETCHED, _ALONE = "1 bit", "1 bit, alone"
_COPY = "cache=spec,bits=1,quant_group=32"
_ONE_BIT = "--set", f"{_FETCHED}:{_COPY}", "--set", f"{_ALONE}:{_COPY},num_selected=0"
_JOBS: dict[str, tuple[list[str], list[str]]] = {
    "text": (["-m", "eval.bench_text"], ["--quick"]),
    "text, whole": (["-m", "eval.bench_text", "--chunk", "7936", "--steps", "32"], ["--quick"]),
    "text, 32K": (["-m", "eval.bench_decode", "--text"], ["--quick"]),
    "text, 32K, batch 4": (["-m", "eval.bench_decode", "--text", "--batch", "4", "--repetitions", "2"], ["--quick"]),
    "engines": (["-m", "eval.engines"], ["--file-mib", "16", "--trials", "5"]),
    "memory": (["-m", "eval.memory"], ["--tokens", "2048"]),
    "decode": (["-m", "eval.bench_decode", "--targets"], ["--quick"]),
    "needles": (["-m", "eval.needles"], ["--samples", "2", "--tokens", "1024"]),
    "needles_budget": (["-m", "eval.studies.quality_needles_budget"], ["--quick"]),
    "mass": (["-m", "eval.studies.quality_mass"], ["--quick"]),
    "chunks": (["-m", "eval.studies.quality_chunks"], ["--quick"]),
    "chunks, speed": (["-m", "eval.studies.speed_chunks"], ["--quick"]),
    "chunks, parts": (["-m", "eval.studies.speed_ablation"], ["--quick"]),
    "chunks, growth": (["-m", "eval.studies.speed_growth"], ["--quick"]),
    "chunks, one fact": (["-m", "eval.studies.quality_needles_budget", "--known", *_A_TENTH], ["--quick"]),
    "chunks, one of four": (
        ["-m", "eval.studies.quality_needles_budget", "--known", "--facts", "4", *_A_TENTH], ["--quick"],
    ),
    "memory, tree": (["-m", "eval.memory", "--cache", "abstract-tree"], ["--tokens", "2048"]),
    "long outputs": (["-m", "eval.studies.long_decode"], ["--quick"]),
    "long outputs, growth": (["-m", "eval.studies.long_growth"], ["--quick"]),
    "long outputs, equal mass": (["-m", "eval.studies.long_equal_mass"], ["--quick"]),
    "long outputs, reads": (["-m", "eval.studies.cluster_reads"], ["--quick"]),
    "memory, clusters": (["-m", "eval.memory", "--cache", "cluster"], ["--tokens", "2048"]),
    "low bits": (["-m", "eval.studies.low_bit_quality"], ["--quick"]),
    "low bits, hits": (["-m", "eval.studies.low_bit_hits"], ["--quick"]),
    "low bits, speed": (["-m", "eval.studies.low_bit_speed"], ["--quick"]),
    "low bits, attention": (["-m", "eval.studies.low_bit_attention"], ["--quick"]),
    "low bits, one fact": (["-m", "eval.studies.quality_needles_budget", "--known", *_ONE_BIT], ["--quick"]),
    "low bits, one of four": (
        ["-m", "eval.studies.quality_needles_budget", "--known", "--facts", "4", *_ONE_BIT], ["--quick"],
    ),
    "memory, low bits": (["-m", "eval.memory", "--cache", "spec", "--budget", "1/5"], ["--tokens", "2048"]),
    "streaming": (["-m", "eval.studies.stream_speed"], ["--quick"]),
    "streaming, quality": (["-m", "eval.studies.stream_quality"], ["--quick"]),
    "streaming, plans": (["-m", "eval.studies.stream_plan"], ["--quick"]),
    "streaming, costs": (["-m", "eval.studies.stream_costs"], ["--quick"]),
    "streaming, requests": (["-m", "eval.studies.stream_requests"], ["--quick"]),
    "compress": (["-m", "eval.studies.speed_compress"], ["--quick"]),
    "reuse": (["-m", "eval.studies.quality_reuse"], ["--quick"]),
    "contexts": (["-m", "eval.bench_contexts"], ["--quick"]),
    "walk": (["tests/walk.py"], ["llama", "qwen3", "gpt_neox"]),
}
"""Name -> command, and what --quick adds to it."""


@dataclass(frozen=True)
class Promise:
    """A figure that the project promises: where it is in the results, and which values keep the promise."""

    figure: str
    target: str
    job: str
    value: Callable[[dict[str, Any]], Any]
    met: Callable[[Any], bool]


def _lost_share(method: str) -> Callable[[dict[str, Any]], float]:
    return lambda found: found["methods"][method]["lost"] / max(1, found["methods"][method]["of"])


def _found_by(name: str) -> Callable[[dict[str, Any]], float | None]:
    def share(found: dict[str, Any]) -> float | None:
        row = found["summary"]["contenders"][name]
        return None if row["lost_share"] is None else 1 - row["lost_share"]

    return share


def _first_token(found: dict[str, Any]) -> float:
    return found["first_token"]["one_token"]["faster_than_dynamic"]


def _added_by_forks(found: dict[str, Any]) -> float:
    return found["first_token"]["forks"]["added_share"]


def _over_full_cache(found: dict[str, Any]) -> float:
    """tokens/s on text at a thirteenth of the memory, over the faster of the caches that hold everything."""
    rows = _rows_of_text(found)
    return min(rows[name]["median_seconds"] for name in ("DynamicCache", "StaticCache")) / _ours(rows)["median_seconds"]


def _rows_of_text(found: dict[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = found["rows"] if "rows" in found else found["runs"][0]["rows"]
    return rows


def _ours(rows: dict[str, Any]) -> dict[str, Any]:
    """At a thirteenth of the memory."""
    row: dict[str, Any] = rows["1/13"] if "1/13" in rows else rows["DiskSwapCache"]
    return row


def _of_ours(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: _ours(_rows_of_text(found))[field]


def _difference(found: dict[str, Any]) -> float:
    return found["difference"]


def _prefill_ratio(found: dict[str, Any]) -> float:
    rows = _rows_of_text(found)
    return _ours(rows)["prefill_seconds"] / rows["DynamicCache"]["prefill_seconds"]


PROMISES: tuple[Promise, ...] = (
    Promise("tokens/s over the faster full cache, text, 8K, 1/13", ">= 1x", "text", _over_full_cache, lambda v: v >= 1),
    Promise("the same at 32K", ">= 1.6x", "text, 32K", _over_full_cache, lambda v: v >= 1.6),
    Promise("the same at 32K, batch 4", ">= 2.5x", "text, 32K, batch 4", _over_full_cache, lambda v: v >= 2.5),
    Promise("hit rate, text, 8K, 1/13", ">= 0.3", "text", _of_ours("hit_rate"), lambda v: v >= 0.3),
    Promise("the same at 32K", ">= 0.8", "text, 32K", _of_ours("hit_rate"), lambda v: v >= 0.8),
    Promise("first 16 steps over settled", "<= 1.1x", "text", _of_ours("first_over_settled"), lambda v: v <= 1.1),
    Promise("prefill over DynamicCache, 8K, pieces", "<= 1.1x", "text", _prefill_ratio, lambda v: v <= 1.1),
    Promise("the same, whole", "<= 1.05x", "text, whole", _prefill_ratio, lambda v: v <= 1.05),
    Promise("architectures exact", ">= 130", "walk", lambda r: r["exact"], lambda v: v >= 130),
    Promise("architectures wrong", "0", "walk", lambda r: r["wrong"], lambda v: v == 0),
    Promise("architectures tagged throughout", ">= 105", "walk", lambda r: r["tagged_throughout"], lambda v: v >= 105),
    Promise("largest logit deviation, sd", "<= 0.002", "walk", lambda r: r["max_deviation"], lambda v: v <= 2e-3),
    Promise("needles lost", "<= 1/20", "needles", _lost_share("default"), lambda v: v <= 0.05),
    Promise("needles lost, paper's selection", "-", "needles", _lost_share("paper"), lambda v: True),
    Promise("needles lost, random selection", "-", "needles", _lost_share("random"), lambda v: True),
    Promise("peak memory over full KV", "<= 1/6", "memory", lambda r: r["share_of_full_kv"], lambda v: v <= 1 / 6),
    Promise("first token, saved context over prefill", ">= 20x", "contexts", _first_token, lambda v: v >= 20),
    Promise("its growth over the lengths", "< 2x", "contexts", lambda r: r["growth"]["growth"], lambda v: v < 2),
    Promise("8 forks and their answers, of the disk", "< 5%", "contexts", _added_by_forks, lambda v: v < 0.05),
    Promise("checking reads, of a step", "< 3%", "contexts", lambda r: r["checking"]["cost"], lambda v: v < 0.03),
    Promise("one fact, found by the tree", ">= .95", "chunks, one fact", _found_by(_TREE), lambda v: v >= 0.95),
    Promise("one among four", ">= .9", "chunks, one of four", _found_by(_TREE), lambda v: v >= 0.9),
    Promise("one fact, 1 bit", ">= .95", "low bits, one fact", _found_by(_FETCHED), lambda v: v >= 0.95),
    Promise("one among four", ">= .9", "low bits, one of four", _found_by(_FETCHED), lambda v: v >= 0.9),
    Promise("one fact, 1 bit, the copy alone", "-", "low bits, one fact", _found_by(_ALONE), lambda v: True),
    Promise("one among four", "-", "low bits, one of four", _found_by(_ALONE), lambda v: True),
    Promise("account of the tree against process", "within 5%", "memory, tree", _difference, lambda v: abs(v) <= 0.05),
    Promise("account of clusters, process", "within 5%", "memory, clusters", _difference, lambda v: abs(v) <= 0.05),
    Promise("account of low bits, process", "within 5%", "memory, low bits", _difference, lambda v: abs(v) <= 0.05),
    Promise("account against process", "within 5%", "memory", _difference, lambda v: abs(v) <= 0.05),
)  # fmt: skip


def run_job(name: str, quick: bool, path: str | None = None) -> dict[str, Any]:
    """One benchmark in a child process; its JSON, and "seconds"; "error" with the end of its output if it failed."""
    command, quickly = _JOBS[name]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000"}
    environment["HF_HUB_OFFLINE"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "result.json")
        arguments = [*command, *(quickly if quick else []), "--json", str(target)]
        if path and name != "walk":
            arguments += ["--path", path]
        start = time.perf_counter()
        call = [sys.executable, *arguments]
        done = subprocess.run(call, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
        if not target.exists():
            return {"error": f"exit status {done.returncode}: {done.stderr[-2000:]}", "seconds": seconds}
        return {**json.loads(target.read_text()), "seconds": seconds}


def judge(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The promises with what was measured, and those that a benchmark judged itself ("must_reach" in its result); "met"
    is None where there is no target or no result."""
    rows = []
    for promise in PROMISES:
        found = results.get(promise.job)
        if found is None:
            continue
        row: dict[str, Any] = {"figure": promise.figure, "target": promise.target, "measured": None, "met": None}
        if "error" not in found:
            row["measured"] = promise.value(found)
            judges = promise.target != "-" and row["measured"] is not None
            row["met"] = bool(promise.met(row["measured"])) if judges else None
        rows.append(row)
    for found in results.values():
        own = found.get("must_reach") or found.get("summary", {}).get("must_reach", ())
        rows += [{**row, "target": _bounds(row)} for row in own]
    return rows


def _bounds(row: dict[str, Any]) -> str:
    """The target of a row that a benchmark judged itself."""
    signs = {"at_least": ">=", "at_most": "<="}
    return ", ".join(f"{sign} {row[name]:g}" for name, sign in signs.items() if row.get(name) is not None) or "-"


def machine(path: str | None = None) -> dict[str, Any]:
    """What the figures depend on: processor, memory, disk, GPU, versions, date."""
    import torch

    directory = path or tempfile.gettempdir()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "disk": {"path": directory, "file_system": _file_system(directory)},
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "numpy", "hf-offload-cache")},
    }


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _file_system(directory: str) -> str | None:
    found = subprocess.run(["df", "--output=source,fstype", directory], capture_output=True, text=True)
    return found.stdout.splitlines()[-1] if found.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def as_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Figure, measured, target, met or missed."""
    table = Table(title="what was promised")
    for column in ("figure", "measured", "target", ""):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for row in rows:
        value = row["measured"]
        shown = "no result" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
        verdict = {True: "[green]met", False: "[red]missed", None: ""}[row["met"]]
        table.add_row(row["figure"], shown, row["target"], verdict)
    return table


def main() -> int:
    """Runs the benchmarks, writes one JSON and prints one table; 1 where a promise was missed or a benchmark failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, no more")
    parser.add_argument("--only", nargs="+", choices=_JOBS, default=list(_JOBS))
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results")
    parser.add_argument("--path", help="folder on the disk to measure")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    console = Console()
    facts = machine(arguments.path)
    for name in arguments.only:
        console.rule(name)
        results[name] = run_job(name, arguments.quick, arguments.path)
        if "error" in results[name]:
            console.print(results[name]["error"], style="red", markup=False)
    rows = judge(results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"bench-{time.strftime('%Y%m%d-%H%M%S')}{'-quick' if arguments.quick else ''}.json"
    whole = {"machine": facts, "quick": arguments.quick, "promises": rows, "results": results}
    target.write_text(json.dumps(whole, indent=1))
    console.print(as_table(rows))
    console.print(f"{target}", markup=False)
    if arguments.quick:
        return int(any("error" in found for found in results.values()))
    return int(any(row["met"] is False for row in rows) or any("error" in found for found in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
