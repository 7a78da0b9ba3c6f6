"""What does a copy in a few bits lose, and what do fetched entries give back? (SpeCache, section 4)"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, main
from .teacher_forced import compare, contenders_of, means, text_options

_COPIES = {"1 bit, g=32": (1, 32), "1 bit, g=64": (1, 64), "2 bits": (2, 64), "4 bits": (4, 64)}


def _usual() -> dict[str, dict[str, Any]]:
    usual: dict[str, dict[str, Any]] = {}
    for name, (bits, group) in _COPIES.items():
        copy = {"cache": "spec", "bits": bits, "quant_group": group}
        usual |= {name: copy, f"{name}, alone": {**copy, "num_selected": 0}}
        usual[f"{name}, topped up"] = {**copy, "top_up": "always"}
        if bits == 1:
            plain = "eval.baselines.plain_low_bit:PlainLowBitCache"
            usual[f"{name}, KIVI, alone"] = {**copy, "cache": plain, "num_selected": 0}
    return usual


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    compare(arguments, rows, contenders_of(arguments, _usual()), loaded)
    return {"contenders": means(rows.rows)}


STUDY = Study(
    "low_bit_quality", __doc__, run, text_options(tokens=4096, steps=48, samples=4),
    {"tokens": 1536, "steps": 8, "samples": 1}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
