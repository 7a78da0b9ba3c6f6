"""What reads do the order on disk and the replacement of slots save clusters? (DynaKV, sections 5.1 and 6.2)"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, main
from .contexts import default_model
from .long_decode import opened
from .teacher_forced import contenders_of

_HALF: dict[str, Any] = {"cache": "cluster", "reuse_capacity": 200}
PLACED, IN_SEQUENCE, ANYWHERE = "placed by queries", "placed in sequence", "placed anywhere"
ALIGNED, LRU, FIFO = "aligned", "lru", "fifo"
USUAL: dict[str, dict[str, Any]] = {
    PLACED: {"cache": "cluster", "reuse_capacity": 0},
    IN_SEQUENCE: {"cache": "eval.baselines.clusters:UnplacedClusterCache", "reuse_capacity": 0},
    ANYWHERE: {"cache": "eval.baselines.clusters:ShuffledClusterCache", "reuse_capacity": 0},
    ALIGNED: _HALF,
    LRU: {**_HALF, "cache": "eval.baselines.clusters:LeastRecentClusterCache"},
    FIFO: {**_HALF, "cache": "eval.baselines.clusters:FirstInClusterCache"},
}
"""Without slots, where clusters lie; with slots for half of what a step attends to, which pages give theirs up."""

_SHOWN = "run", "run_in_sequence", "hit_rate", "bytes_read_a_step"


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each contender, one after the other."""
    loaded, held = default_model(loaded), arguments.prompt + arguments.steps
    for name, fields in contenders_of(arguments, USUAL, look_ahead=False).items():
        if rows.has(name=name):
            continue
        with opened(name, fields, loaded, arguments, held) as one:
            for step in range(arguments.steps):
                one.look() if step % arguments.every == arguments.every - 1 else one.step()
            row = one.row()
            rows.add(name=name, **{key: row[key] for key in _SHOWN})
    return {"contenders": {row["name"]: {key: row[key] for key in _SHOWN} for row in rows.rows}}


STUDY = Study(
    "cluster_reads", __doc__, run,
    {
        "prompt": (4096, "prefilled tokens"),
        "steps": (192, "tokens decoded after them, teacher-forced"),
        "every": (8, "steps from one look at the reads to the next"),
    },
    {"prompt": 320, "steps": 32}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
