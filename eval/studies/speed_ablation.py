"""What does each part of `AbstractTreeCache` gain, in time and in fidelity? (LeoAM, section 6.3)"""

from __future__ import annotations

import argparse
from typing import Any

from ..bench_text import DYNAMIC
from .common import Rows, Study, main
from .speed_chunks import OPTIONS, QUICK, in_each_setting

_FIXED = {"cache": "eval.baselines.all_keys:FixedChunksCache"}
_DESCENDING = {"cache": "eval.baselines.tree_variants:DescendingTreeCache"}
_TREE = {"cache": "abstract-tree"}
_COMPRESSED = {"compress": "auto"}
ARMS: dict[str, dict[str, Any]] = {
    "none": {"cache": "eval.baselines.all_keys:TokenJudgedCache"},
    "abstracts": _FIXED,
    "abstracts, compressed": {**_FIXED, **_COMPRESSED},
    "abstracts, four times as many": {**_FIXED, "num_selected": 1600},
    "abstracts, halves judged": _DESCENDING,
    "abstracts, tokens judged": _TREE,
    "all": {**_TREE, **_COMPRESSED},
}
"""Summaries rank chunks (LKA), which are attended to completely: 400 tokens, or the 1,600 that the others read. The
best tokens of these are selected, by halves of chunks as in the paper (IAKM), or by their keys as here.
Part of the reads is in 4 bits (DTP). The first reads all keys and judges each token; all others have the same memory
budget."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each arm, disk and batch; the summary has milliseconds a step, MB read and KL to `DynamicCache`."""
    within = {name: {**fields, "memory": arguments.memory} for name, fields in ARMS.items()}
    within["none"] = ARMS["none"]
    in_each_setting(arguments, rows, within, (DYNAMIC,), loaded)
    arms = {
        f"{row['profile']}, batch {row['batch']}, {row['contender']}": {
            "ms": 1e3 * row["median_seconds"], "MB": row["bytes_read_a_step"] / 1e6, "kl": row["kl"],
        }
        for row in rows.rows
        if row["contender"] in ARMS
    }  # fmt: skip
    return {"arms": arms}


_MEMORY = ("1/6", "memory budget, of the full KV")
STUDY = Study(
    "speed_ablation", __doc__, run,
    {**OPTIONS, "steps": (48, "decoding steps"), "batches": ([1, 4], "rows"), "memory": _MEMORY}, QUICK,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
