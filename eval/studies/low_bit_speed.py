"""What does guessing the next token cost, and what does it save where entries are far? (SpeCache, table 6)"""

from __future__ import annotations

import argparse
from typing import Any

from ..bench_text import on_text
from ..profiles import PROFILES
from .common import Rows, Study, main
from .contexts import default_model

OURS: dict[str, dict[str, Any]] = {
    "the copy alone": {"cache": "spec", "num_selected": 0},
    "with a guess": {"cache": "spec"},
    "without": {"cache": "spec", "speculative": False},
    "topped up": {"cache": "spec", "top_up": "always"},
}


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each device and contender; the summary has median seconds of a step."""
    loaded = default_model(loaded)
    for device in arguments.devices:
        if not rows.has(device=device):
            found = on_text(loaded, arguments, OURS, turn=4, profile=device)
            for name, row in found.items():
                rows.add(device=device, name=name, **row)
    seconds: dict[str, dict[str, float]] = {}
    for row in rows.rows:
        seconds.setdefault(row["device"], {})[row["name"]] = row["median_seconds"]
    return {"seconds": seconds}


STUDY = Study(
    "low_bit_speed", __doc__, run,
    {
        "tokens": (7936, "tokens of history"),
        "steps": (48, "decoding steps"),
        "devices": (list(PROFILES), "devices that entries are read from", PROFILES),
    },
    {"tokens": 1024, "steps": 20, "devices": ["own", "emmc"]},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
