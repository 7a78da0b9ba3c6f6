"""What does judging by abstracts save of a step, beside judging by all keys, on which disk and in which batch?"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from ..bench_text import run as in_turns
from ..bench_text import text_rows
from ..profiles import PROFILES
from .common import Rows, Study, judged, main

_BASELINES = "eval.baselines.all_keys:"
ON_DISK = "tree, 1/13, abstracts on the disk"
TREES: dict[str, dict[str, Any]] = {
    "tree, 1/13": {"cache": "abstract-tree", "memory": "1/13"},
    "tree, 1/13, 1000 looked into": {"cache": "abstract-tree", "memory": "1/13", "num_opened": 1000},
    ON_DISK: {"cache": "abstract-tree", "memory": "1/13", "abstracts": "disk"},
    "tree, 1/6": {"cache": "abstract-tree", "memory": "1/6"},
    "tree, 1/6, compressed": {"cache": "abstract-tree", "memory": "1/6", "compress": "auto"},
}
BASELINES: dict[str, dict[str, Any]] = {
    "all keys": {"cache": _BASELINES + "TokenJudgedCache"},
    "all keys, ahead, by chunk": {"cache": _BASELINES + "ChunkJudgedCache"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "fixed chunks": {"cache": _BASELINES + "FixedChunksCache", "reuse_capacity": 0},
}
"""The first of the ablation: abstracts without a tree."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=7936, help="of the history")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=["own", "emmc"])


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each contender, disk and batch; `loaded`: a model and its tokenizer in the place of the default one."""
    in_each_setting(arguments, rows, {**TREES, **OTHERS, **BASELINES}, (), loaded)
    return summary(rows.rows)


def in_each_setting(
    arguments: argparse.Namespace, rows: Rows, contenders: dict[str, dict[str, Any]], in_memory: tuple[str, ...],
    loaded: Any = None,
) -> None:  # fmt: skip
    """A row for each of `contenders` (and the model alone, and those `in_memory`) on each disk, in each batch."""
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    ids = sample_ids(None, tokenizer)[0]
    for profile in arguments.profiles:
        for batch in arguments.batches:
            if rows.has(profile=profile, batch=batch):
                continue
            text = text_rows(ids, batch, arguments.tokens + arguments.steps + 1)
            sizes = arguments.tokens, arguments.steps, arguments.tokens
            options: dict[str, Any] = {"shared_prefill": True, "path": arguments.path, "profile": profile}
            for name, row in in_turns(model, text, *sizes, contenders, in_memory, **options).items():
                rows.add(profile=profile, batch=batch, contender=name, **row)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By disk and batch, how much faster each is than the better of those that judge by all keys; the mean of that, and
    of how long the first steps take over later ones."""
    seconds = {(row["profile"], row["batch"], row["contender"]): row["median_seconds"] for row in rows}
    faster: dict[str, dict[str, float]] = {}
    for profile, batch in dict.fromkeys((row["profile"], row["batch"]) for row in rows):
        best = min(seconds[profile, batch, name] for name in BASELINES)
        faster[f"{profile}, batch {batch}"] = {
            name: best / seconds[profile, batch, name] for name in (*TREES, *OTHERS)
        }
    mean = {name: statistics.mean(one[name] for one in faster.values()) for name in (*TREES, *OTHERS)}
    early = {
        name: statistics.mean(row["first_over_settled"] for row in rows if row["contender"] == name)
        for name in (*TREES, *OTHERS)
    }
    reached = [
        judged(f"{name}: a step over the better of judging by all keys, mean", mean[name], least=3.5) for name in TREES
    ]
    looked = [row["looked_share"] for row in rows if row["contender"] == ON_DISK]
    reached.append(judged("read to choose by, of all keys, abstracts on the disk", max(looked), most=0.05))
    return {"times faster": faster, "mean": mean, "first 16 steps over later ones": early, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Times faster, a group of bars for each disk and batch."""
    axes = figure.subplots()
    settings, names = list(found["times faster"]), (*TREES, *OTHERS)
    wide = 1 / (len(names) + 1)
    for place, name in enumerate(names):
        heights = [found["times faster"][setting][name] for setting in settings]
        axes.bar([at + place * wide for at in range(len(settings))], heights, wide, label=name)
    axes.axhline(3.5, color="gray", linestyle=":")
    axes.set_xticks([at + 0.3 for at in range(len(settings))], settings)
    axes.set_ylabel("times faster than judging by all keys")
    axes.legend()


STUDY = Study(
    "speed_chunks", __doc__, run, plot, arguments,
    {"tokens": 1024, "steps": 24, "batches": [1], "profiles": ["own"]}, size=(10.0, 4.5),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
