"""What does judging by summaries save of a step, compared with judging by all keys, by disk and batch?"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from ..bench_text import on_text
from ..profiles import PROFILES
from .common import Options, Rows, Study, main
from .contexts import default_model

_BASELINES = "eval.baselines.all_keys:"
ON_DISK = "tree, 1/13, summaries on disk"
TREES: dict[str, dict[str, Any]] = {
    "tree, 1/13": {"cache": "abstract-tree", "memory": "1/13"},
    "tree, 1/13, num_opened=1000": {"cache": "abstract-tree", "memory": "1/13", "num_opened": 1000},
    ON_DISK: {"cache": "abstract-tree", "memory": "1/13", "abstracts": "disk"},
    "tree, 1/6": {"cache": "abstract-tree", "memory": "1/6"},
    "tree, 1/6, compressed": {"cache": "abstract-tree", "memory": "1/6", "compress": "auto"},
}
BASELINES: dict[str, dict[str, Any]] = {
    "all keys": {"cache": _BASELINES + "TokenJudgedCache"},
    "all keys, ahead, by chunk": {"cache": _BASELINES + "ChunkJudgedCache"},
}
OTHERS: dict[str, dict[str, Any]] = {"fixed chunks": {"cache": _BASELINES + "FixedChunksCache", "reuse_capacity": 0}}
"""The first of the ablation: summaries without a tree."""
OPTIONS: Options = {
    "tokens": (7936, "tokens of history"),
    "steps": (40, "decoding steps"),
    "batches": ([1, 4, 8], "rows"),
    "profiles": (["own", "emmc"], "devices", PROFILES),
}
QUICK: dict[str, Any] = {"tokens": 1024, "steps": 24, "batches": [1], "profiles": ["own"]}


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each contender, disk and batch."""
    in_each_setting(arguments, rows, {**TREES, **OTHERS, **BASELINES}, (), loaded)
    return summary(rows.rows)


def in_each_setting(
    arguments: argparse.Namespace, rows: Rows, contenders: dict[str, dict[str, Any]], in_memory: tuple[str, ...],
    loaded: Any = None,
) -> None:  # fmt: skip
    """Add a row for each contender, the model alone, and caches `in_memory`, on each disk and in each batch."""
    loaded = default_model(loaded)
    for profile in arguments.profiles:
        for batch in arguments.batches:
            if rows.has(profile=profile, batch=batch):
                continue
            found = on_text(loaded, arguments, contenders, in_memory, batch=batch, profile=profile)
            for name, row in found.items():
                rows.add(profile=profile, batch=batch, contender=name, **row)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By disk and batch, speedup over the better baseline that judges by all keys; its mean; and the first steps' time
    over later ones'."""
    seconds = {(row["profile"], row["batch"], row["contender"]): row["median_seconds"] for row in rows}
    faster: dict[str, dict[str, float]] = {}
    names = (*TREES, *OTHERS)
    for profile, batch in dict.fromkeys((row["profile"], row["batch"]) for row in rows):
        best = min(seconds[profile, batch, name] for name in BASELINES)
        faster[f"{profile}, batch {batch}"] = {name: best / seconds[profile, batch, name] for name in names}
    mean = {name: statistics.mean(one[name] for one in faster.values()) for name in names}
    early = {
        name: statistics.mean(row["first_over_settled"] for row in rows if row["contender"] == name) for name in names
    }
    looked = max(row["looked_share"] for row in rows if row["contender"] == ON_DISK)
    looks = {"share of all keys read to select, summaries on disk": looked}
    return {"times faster": faster, "mean": mean, "first 16 steps over later ones": early, **looks}


STUDY = Study("speed_chunks", __doc__, run, OPTIONS, QUICK)

if __name__ == "__main__":
    main(STUDY)
