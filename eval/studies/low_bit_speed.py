"""What does a guess beside each token take, and what does it save where entries are far? (SpeCache, table 6)"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from ..bench_text import run as in_turns
from ..bench_text import text_rows
from ..profiles import PROFILES
from .common import Rows, Study, judged, main

OURS: dict[str, dict[str, Any]] = {
    "the copy alone": {"cache": "spec", "num_selected": 0},
    "with a guess": {"cache": "spec"},
    "without": {"cache": "spec", "speculative": False},
    "topped up": {"cache": "spec", "top_up": "always"},
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=7936, help="of the history")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--devices", nargs="+", choices=PROFILES, default=list(PROFILES), help="that entries come from")


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each device and contender; `loaded`: a model and its tokenizer in the place of the default one."""
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    text = text_rows(sample_ids(None, tokenizer)[0], 1, arguments.tokens + arguments.steps + 1)
    for device in arguments.devices:
        if rows.has(device=device):
            continue
        sizes = arguments.tokens, arguments.steps, arguments.tokens
        options: dict[str, Any] = {"shared_prefill": True, "path": arguments.path, "profile": device}
        for name, row in in_turns(model, text, *sizes, OURS, (), turn=4, **options).items():
            rows.add(device=device, name=name, **row)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds of a step by device and contender; and what a guess takes and saves."""
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        seconds.setdefault(row["device"], {})[row["name"]] = row["median_seconds"]
    reached = []
    for device, of in seconds.items():
        saved, taken = of["without"] / of["with a guess"], of["with a guess"] / of["the copy alone"]
        slow = device != "own"
        reached.append(judged(f"{device}: a step without a guess over with one", saved, least=1.3 if slow else None))
        reached.append(judged(f"{device}: with one over the copy alone", taken, most=None if slow else 1.5))
    return {"seconds": seconds, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes, seconds = figure.subplots(), found["seconds"]
    for place, name in enumerate(OURS):
        at = [number + place / (len(OURS) + 1) for number in range(len(seconds))]
        axes.bar(at, [1e3 * of[name] for of in seconds.values()], 1 / (len(OURS) + 1), align="edge", label=name)
    axes.set_xticks([number + 0.4 for number in range(len(seconds))], seconds)
    axes.set(ylabel="ms a step")
    axes.legend()


STUDY = Study(
    "low_bit_speed", __doc__, run, plot, arguments, {"tokens": 1024, "steps": 20, "devices": ["own", "emmc"]}
)

if __name__ == "__main__":
    main(STUDY)
