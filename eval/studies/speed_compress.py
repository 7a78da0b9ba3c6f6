"""What share of the reads should be in 4 bits, over a link of which bandwidth? (LeoAM, figure 13)"""

from __future__ import annotations

import argparse
from typing import Any

from ..bench_text import on_text
from ..profiles import Profile
from .common import Rows, Study, main
from .contexts import default_model

SHARES: tuple[float | str, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, "auto")


def link(megabytes: int) -> Profile:
    """A link limited by its bandwidth: 20 us to the first byte, 32 requests at once."""
    return Profile(f"{megabytes} MB/s", megabytes * 1e6, 20e-6, 32)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each link and share; the summary has idle seconds a step, waiting and unpacking."""
    loaded = default_model(loaded)
    # early steps read nothing ahead
    same = {"cache": "abstract-tree", "memory": arguments.memory, "look_ahead": True, "early_steps": 0}
    ours = {str(share): {**same, "compress": share} for share in SHARES}
    for megabytes in arguments.links:
        if rows.has(link=megabytes):
            continue
        for name, row in on_text(loaded, arguments, ours, turn=4, profile=link(megabytes)).items():
            if name in ours:
                idle = row["waited_seconds"] + row["unpack_seconds"]
                rows.add(link=megabytes, share=name, idle_seconds=idle, **row)
    seconds: dict[str, dict[str, float]] = {}
    for row in rows.rows:
        seconds.setdefault(f"{row['link']} MB/s", {})[row["share"]] = row["idle_seconds"]
    return {"idle": seconds}


STUDY = Study(
    "speed_compress", __doc__, run,
    {
        "tokens": (7936, "tokens of history"),
        "steps": (64, "decoding steps"),
        "links": ([100, 200, 400, 800], "MB/s"),
        "memory": ("1/6", "memory budget, of the full KV"),
    },
    {"tokens": 1024, "steps": 24, "links": [100]},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
