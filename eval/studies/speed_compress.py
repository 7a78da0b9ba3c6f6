"""Which share of what is read should travel in 4 bits, over a link of which bandwidth? (LeoAM, figure 13)"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from ..bench_text import run as in_turns
from ..bench_text import text_rows
from ..profiles import Profile
from .common import Rows, Study, judged, main

SHARES: tuple[float | str, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, "auto")


def link(megabytes: int) -> Profile:
    """A link that is bound by its bandwidth: 20 us from a request to its first byte, 32 requests at once."""
    return Profile(f"{megabytes} MB/s", megabytes * 1e6, 20e-6, 32)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=7936, help="of the history")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--links", type=int, nargs="+", default=[100, 200, 400, 800], help="MB/s")
    parser.add_argument("--memory", default="1/6")


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each link and share; `loaded`: a model and its tokenizer in the place of the default one."""
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    text = text_rows(sample_ids(None, tokenizer)[0], 1, arguments.tokens + arguments.steps + 1)
    # early steps read nothing ahead
    same = {"cache": "abstract-tree", "memory": arguments.memory, "look_ahead": True, "early_steps": 0}
    ours = {str(share): {**same, "compress": share} for share in SHARES}
    for megabytes in arguments.links:
        if rows.has(link=megabytes):
            continue
        sizes = arguments.tokens, arguments.steps, arguments.tokens
        options: dict[str, Any] = {"shared_prefill": True, "path": arguments.path, "profile": link(megabytes)}
        for name, row in in_turns(model, text, *sizes, ours, (), turn=4, **options).items():
            if name in ours:
                idle = row["waited_seconds"] + row["unpack_seconds"]
                rows.add(link=megabytes, share=name, idle_seconds=idle, **row)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Idle seconds a step, waiting and unpacking, by link and share; whether the solved one has fewer than nothing and
    everything compressed."""
    idle: dict[str, dict[str, float]] = {}
    for row in rows:
        idle.setdefault(f"{row['link']} MB/s", {})[row["share"]] = row["idle_seconds"]
    figure = "idle time of the solved share over the lower of none and all"
    reached = [
        judged(f"{name}: {figure}", of["auto"] / min(of["0.0"], of["1.0"]), most=1.0) for name, of in idle.items()
    ]
    return {"idle": idle, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Idle milliseconds a step over the share, a line a link; a star where it is solved."""
    axes = figure.subplots()
    for name, idle in found["idle"].items():
        given = sorted((float(share), 1e3 * seconds) for share, seconds in idle.items() if share != "auto")
        (line,) = axes.plot(*zip(*given, strict=True), marker="o", label=name)
        solved = [row for row in rows if f"{row['link']} MB/s" == name and row["share"] == "auto"]
        star = {"marker": "*", "markersize": 14, "color": line.get_color()}
        axes.plot(solved[0]["compressed_fraction"], 1e3 * idle["auto"], **star)
    axes.set(xlabel="share that travels in 4 bits", ylabel="ms a step waited and unpacked", ylim=(0, None))
    axes.legend()


STUDY = Study(
    "speed_compress", __doc__, run, plot, arguments, {"tokens": 1024, "steps": 24, "links": [100]}, size=(8.0, 4.5)
)

if __name__ == "__main__":
    main(STUDY)
