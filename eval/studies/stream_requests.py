"""Several requests at once over one link and on one machine: how long until each has its first token? (SparKV, section
VI)"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.streaming import Costs, Line

from ..bucket_server import BucketServer, bucket_server
from .common import Rows, Study, judged, main
from .stream_speed import CONTENDERS, OURS, SPLIT, first_token, ids_of, prepare, study_costs


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096, help="of the context")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--balances", type=float, nargs="+", default=[1 / 3, 1.0, 3.0],
                        help="of one request: seconds of streaming alone over those of a prefill")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16", help="of the model")


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """A row for each balance, repeat and contender. A request is a process with one thread; the fixed split is the best
    for its part of the link and of the processors."""
    model, tokenizer = load_default_model(getattr(torch, arguments.dtype))
    with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
        place = Path(folder, "published")
        ids = ids_of(model, tokenizer, arguments.tokens)
        line, nbytes, prefill = prepare(model, ids, arguments.tokens, place, arguments.chunk, folder)
        slower = max(1.0, arguments.requests / (os.cpu_count() or 1)) * torch.get_num_threads()
        shared = Line(line.fixed * slower, line.slope * slower)
        layers = model.config.num_hidden_layers
        del model
        with bucket_server(place, lambda at: 1e9) as server:
            for repeat in range(arguments.repeats):
                for balance in arguments.balances:
                    mean = nbytes / (balance * prefill)
                    sizes = arguments.tokens, arguments.chunk, layers, nbytes
                    costs = study_costs(shared, *sizes, mean / arguments.requests)
                    server.rate = lambda at, mean=mean: mean
                    for name in CONTENDERS:
                        if rows.has(name=name, balance=balance, repeat=repeat):
                            continue
                        took = _together(name, arguments, server, costs, folder)
                        key = {"name": name, "balance": balance, "repeat": repeat}
                        rows.add(**key, seconds=statistics.mean(took), longest=max(took), each=took)
    return summary(rows.rows)


def _together(
    name: str, arguments: argparse.Namespace, server: BucketServer, costs: Costs, folder: str
) -> list[float]:
    told = {
        "name": name, "tokens": arguments.tokens, "dtype": arguments.dtype, "url": server.url, "folder": folder,
        "costs": [one.tolist() for one in (costs.computed, costs.projected, costs.streamed)],
    }  # fmt: skip
    command = [sys.executable, "-m", "eval.studies.stream_requests", "--request", json.dumps(told)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(arguments.requests)]
    try:
        for child in children:
            while child.stdout.readline().strip() != "ready":
                if child.poll() is not None:
                    raise RuntimeError(f"a request ended with {child.returncode} before it began")
        server.restart()
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        found = [child.communicate(timeout=1200)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [float(out.strip().splitlines()[-1]) for out in found]


def _request(told: dict[str, Any]) -> None:
    """In a process of its own: say that all is loaded, wait for a line, and say how long it took."""
    import numpy as np

    torch.set_num_threads(1)
    model, tokenizer = load_default_model(getattr(torch, told["dtype"]))
    ids = ids_of(model, tokenizer, told["tokens"])
    with torch.no_grad():
        model(ids[:, :64])
    costs = Costs(*(np.array(one) for one in told["costs"]))
    print("ready", flush=True)
    sys.stdin.readline()
    seconds, _ = first_token(told["name"], model, ids, told["tokens"], told["url"], costs, told["folder"])
    print(seconds, flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    table: dict[str, dict[str, float]] = {}
    for balance in dict.fromkeys(row["balance"] for row in rows):
        own = [row for row in rows if row["balance"] == balance]
        table[f"{balance:.3g}"] = {
            name: statistics.mean(row["seconds"] for row in own if row["name"] == name)
            for name in dict.fromkeys(row["name"] for row in own)
        }
    over = [of[SPLIT] / of[OURS] for of in table.values() if SPLIT in of and OURS in of]
    reached = [judged(f"{SPLIT} over ours, mean", statistics.mean(over) if over else None, least=1.2)]
    return {"seconds": table, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes, table = figure.subplots(), found["seconds"]
    for place, name in enumerate(CONTENDERS):
        at = [number + place / (len(CONTENDERS) + 1) for number in range(len(table))]
        axes.bar(at, [of[name] for of in table.values()], 1 / (len(CONTENDERS) + 1), align="edge", label=name)
    axes.set_xticks([number + 0.4 for number in range(len(table))], table)
    axes.set(xlabel="streaming over prefill, of one request", ylabel="seconds to the first token")
    axes.legend()


STUDY = Study("stream_requests", __doc__, run, plot, arguments, {"tokens": 2048, "balances": [1.0], "requests": 2})

if __name__ == "__main__":
    if sys.argv[1:2] == ["--request"]:
        _request(json.loads(sys.argv[2]))
    else:
        main(STUDY)
