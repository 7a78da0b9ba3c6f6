"""All benchmarks, one after the other, each in its own process: one JSON file, and a table of what was promised."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent

_TREE, _FETCHED = "tree, a tenth", "1 bit"
_NEEDLES = "-m eval.studies.quality_needles_budget --known --set"
_TENTH = f"{_TREE}:cache=abstract-tree,num_selected=null"
_ONE_BIT = f"{_FETCHED}:cache=spec,bits=1,quant_group=32"
_JOBS: dict[str, list[str]] = {
    "text": ["-m", "eval.bench_text"],
    "text, whole": ["-m", "eval.bench_text", "--chunk", "7936", "--steps", "32"],
    "text, 32K": ["-m", "eval.bench_text", "--tokens", "32768", "--shared-prefill"],
    "text, 32K, batch 4": ["-m", "eval.bench_text", "--tokens", "32768", "--shared-prefill", "--batch", "4"],
    "decode": ["-m", "eval.bench_decode", "--targets"],
    "growth": [*["-m", "eval.bench_decode", "--beyond", "--overlap", "on", "--context", "8192", "131072", "--methods"],
               "AbstractTreeCache", "DiskSwapCache"],
    "contexts": ["-m", "eval.bench_contexts"],
    "memory": ["-m", "eval.memory"],
    "memory, tree": ["-m", "eval.memory", "--cache", "abstract-tree"],
    "memory, clusters": ["-m", "eval.memory", "--cache", "cluster"],
    "memory, low bits": ["-m", "eval.memory", "--cache", "spec", "--budget", "1/5"],
    "needles": ["-m", "eval.studies.quality_needles_budget"],
    "needles, tree": [*_NEEDLES.split(), _TENTH],
    "needles, tree, one of four": [*_NEEDLES.split(), _TENTH, "--needles", "4"],
    "needles, low bits": [*_NEEDLES.split(), _ONE_BIT],
    "needles, low bits, one of four": [*_NEEDLES.split(), _ONE_BIT, "--needles", "4"],
    **{
        name: ["-m", f"eval.studies.{name}"]
        for name in (
            "quality", "long_decode", "long_growth", "native_sparse", "stream_speed", "stream_quality",
        )
    },
    **{f"quality, {of}": ["-m", "eval.studies.quality", "--of", of] for of in ("chunks", "bits", "guess")},
    **{f"speed, {of}": ["-m", "eval.studies.speed", "--of", of] for of in ("parts", "chunks", "links", "guess")},
    "walk": ["tests/walk.py"],
}  # fmt: skip
"""Name -> command. All but the walk know --quick and --path."""


def judged(figure: str, measured: float | None, least: float | None = None, most: float | None = None) -> dict:
    """A promised figure and whether it is met; None if nothing was measured."""
    met = None
    if measured is not None:
        met = (least is None or measured >= least) and (most is None or measured <= most)
    return {"figure": figure, "measured": measured, "at_least": least, "at_most": most, "met": met}


class Promise(NamedTuple):
    """A promised figure, where it is in the results, and its bounds."""

    figure: str
    job: str
    value: Callable[[dict[str, Any]], Any]
    least: float | None = None
    most: float | None = None


def _found_by(name: str) -> Callable[[dict[str, Any]], float | None]:
    def share(result: dict[str, Any]) -> float | None:
        row = result["summary"]["contenders"][name]
        return None if row["lost_share"] is None else 1 - row["lost_share"]

    return share


def _over_full_cache(result: dict[str, Any]) -> float:
    """Tokens/s on text at 1/13 of the memory, over the faster of the caches that hold everything."""
    rows = result["rows"]
    full = min(rows[name]["median_seconds"] for name in ("DynamicCache", "StaticCache"))
    return float(full / rows["1/13"]["median_seconds"])


def _prefill_ratio(result: dict[str, Any]) -> float:
    return float(result["rows"]["1/13"]["prefill_seconds"] / result["rows"]["DynamicCache"]["prefill_seconds"])


def _difference(result: dict[str, Any]) -> float:
    return abs(result["difference"])


def _at(*path: str) -> Callable[[dict[str, Any]], Any]:
    return lambda result: functools.reduce(lambda part, key: part[key], path, result)


PROMISES: tuple[Promise, ...] = (
    Promise("tokens/s over the faster full cache, text, 8K, 1/13", "text", _over_full_cache, 1),
    Promise("the same at 32K", "text, 32K", _over_full_cache, 1.6),
    Promise("the same at 32K, batch 4", "text, 32K, batch 4", _over_full_cache, 2.5),
    Promise("hit rate, text, 8K, 1/13", "text", _at("rows", "1/13", "hit_rate"), 0.3),
    Promise("the same at 32K", "text, 32K", _at("rows", "1/13", "hit_rate"), 0.8),
    Promise("first 16 steps over settled", "text", _at("rows", "1/13", "first_over_settled"), most=1.1),
    Promise("prefill over DynamicCache, 8K, pieces", "text", _prefill_ratio, most=1.1),
    Promise("the same, in one piece", "text, whole", _prefill_ratio, most=1.05),
    Promise("architectures exact", "walk", _at("exact"), 130),
    Promise("architectures wrong", "walk", _at("wrong"), most=0),
    Promise("architectures tagged throughout", "walk", _at("tagged_throughout"), 105),
    Promise("largest logit deviation, sd", "walk", _at("max_deviation"), most=2e-3),
    Promise("peak memory over full KV", "memory", _at("share_of_full_kv"), most=1 / 6),
    Promise("prefill over opening a context", "contexts", _at("first_token", "one_token", "faster_than_dynamic"), 20),
    Promise("its growth over the lengths", "contexts", _at("growth", "growth"), most=2),
    Promise("8 forks with answers, of the disk", "contexts", _at("first_token", "forks", "added_share"), most=0.05),
    Promise("checking reads, of a step", "contexts", _at("checking", "cost"), most=0.03),
    Promise("one needle, tree", "needles, tree", _found_by(_TREE), 0.95),
    Promise("one of four, tree", "needles, tree, one of four", _found_by(_TREE), 0.9),
    Promise("one needle, 1 bit", "needles, low bits", _found_by(_FETCHED), 0.95),
    Promise("one of four, 1 bit", "needles, low bits, one of four", _found_by(_FETCHED), 0.9),
    Promise("memory account against the process", "memory", _difference, most=0.05),
    Promise("the same, tree", "memory, tree", _difference, most=0.05),
    Promise("the same, clusters", "memory, clusters", _difference, most=0.05),
    Promise("the same, low bits", "memory, low bits", _difference, most=0.05),
)  # fmt: skip


def run_job(name: str, quick: bool, path: str | None = None) -> dict[str, Any]:
    """Run one benchmark in a child process: its JSON and "seconds"; "error" with the end of its output if it failed."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "result.json")
        arguments = [*_JOBS[name], "--json", str(target)]
        if name == "walk":
            arguments += ["llama", "qwen3", "gpt_neox"] if quick else []
        else:
            arguments += [*(["--quick"] if quick else []), *(["--path", path] if path else [])]
        start = time.perf_counter()
        call = [sys.executable, *arguments]
        done = subprocess.run(call, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
        if not target.exists():
            return {"error": f"exit status {done.returncode}: {done.stderr[-2000:]}", "seconds": seconds}
        return {**json.loads(target.read_text()), "seconds": seconds}


def judge(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `judged`: the promises whose job ran, and those that a benchmark judged itself ("must_reach")."""
    rows = []
    for promise in PROMISES:
        if (result := results.get(promise.job)) is not None:
            value = None if "error" in result else promise.value(result)
            rows.append(judged(promise.figure, value, promise.least, promise.most))
    for result in results.values():
        rows += result.get("must_reach") or result.get("summary", {}).get("must_reach", ())
    return rows


def machine(path: str | None = None) -> dict[str, Any]:
    """Processor, memory, disk, GPU, versions and date that figures depend on."""
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
        bounds = {">=": row["at_least"], "<=": row["at_most"]}
        target = ", ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
        table.add_row(row["figure"], shown, target, verdict)
    return table


def main() -> int:
    """Runs the benchmarks, writes one JSON and prints one table; 1 where a promise was missed or a benchmark failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that it runs")
    jobs = f"jobs (default: all): {'; '.join(_JOBS)}"
    parser.add_argument("--only", nargs="+", choices=_JOBS, default=list(_JOBS), metavar="JOB", help=jobs)
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
