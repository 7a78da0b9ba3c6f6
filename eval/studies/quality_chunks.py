"""How much attention mass do chunks, summaries and the tree lose, compared with judging by all keys?"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, main
from .teacher_forced import compare, contenders_of, means, text_options

_BASELINES, _VARIANTS = "eval.baselines.all_keys:", "eval.baselines.tree_variants:"
_ALONE: dict[str, Any] = {"dense_layers": 0, "early_steps": 0, "look_ahead": False}
_FIXED: dict[str, Any] = {"cache": _BASELINES + "FixedChunksCache", "look_ahead": False}
_BOUNDS: dict[str, Any] = {"cache": _VARIANTS + "BoundsChunksCache", "look_ahead": False}
USUAL: dict[str, dict[str, Any]] = {
    "tree": {"cache": "abstract-tree", "look_ahead": False},
    "tree alone": {"cache": "abstract-tree", **_ALONE},
    "tree alone, by bounds": {"cache": _VARIANTS + "BoundsTreeCache", **_ALONE},
    "tree alone, halves judged": {"cache": _VARIANTS + "DescendingTreeCache", **_ALONE},
    "tree alone, all halves judged": {"cache": _VARIANTS + "AllHalvesTreeCache", **_ALONE},
    "fixed chunks of 64": _FIXED,
    "fixed chunks of 64, four times as many": {**_FIXED, "num_selected": 1600},
    "fixed chunks of 64, by bounds": _BOUNDS,
    "fixed chunks of 16": {**_FIXED, "chunk_size": 16},
    "fixed chunks of 16, by bounds": {**_BOUNDS, "chunk_size": 16},
    "all keys": {"cache": _BASELINES + "TokenJudgedCache"},
    "all keys, by chunk": {"cache": _BASELINES + "ChunkJudgedCache"},
}


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    compare(arguments, rows, contenders_of(arguments, USUAL, engine="memory"), loaded)
    return {"contenders": means(rows.rows)}


STUDY = Study(
    "quality_chunks", __doc__, run, text_options(tokens=4096, steps=32, samples=4),
    {"tokens": 2304, "steps": 8, "samples": 1}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
