"""What share of the attention mass falls on the tokens that a cache attends to?"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, main
from .teacher_forced import compare, contenders_of, means, text_options

USUAL: dict[str, dict[str, Any]] = {
    "DiskSwapCache": {"cache": "disk-swap"},
    "AbstractTreeCache": {"cache": "abstract-tree"},
    "ClusterCache": {"cache": "cluster"},
}


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    compare(arguments, rows, contenders_of(arguments, USUAL, memory=arguments.memory), loaded)
    return {"contenders": means(rows.rows)}


STUDY = Study(
    "quality_mass", __doc__, run,
    {
        **text_options(tokens=4096, steps=32, samples=4),
        "memory": ("1/13", "memory budget: a share of the full KV, a size, or none"),
    },
    {"tokens": 1536, "steps": 8, "samples": 1}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
