"""How does the time of a step grow with the output, with clusters that adapt, that do not, and none? (DynaKV, sections
8.2 and 8.4)"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Any

import numpy as np
from transformers import DynamicCache

from ..bench_text import DYNAMIC
from ..contenders import in_turns
from .common import Rows, Study, main
from .contexts import default_model
from .long_contender import LongContender
from .long_decode import AT_ONCE, USUAL, opened
from .teacher_forced import contenders_of

_CALL = 32
"""Tokens of a call by which the output grows between two marks: as many as join clusters as decoded ones do."""
SETTLES = 16
"""Steps of a mark before those that count: slots fill."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each contender, `DynamicCache` included, and mark. Tokens between marks are fed in calls of
    `_CALL`, with exact attention, and join clusters. `ms` is the mean, because some steps settle clusters and most do
    not; `adapting` is the share of these steps that adapting takes. Reads, bytes and hits are of the same steps."""
    if rows.rows:
        return summary(rows.rows)
    loaded, marks = default_model(loaded), sorted(arguments.marks)
    held, usual = arguments.prompt + marks[-1] + arguments.steps + SETTLES, dict(USUAL)
    del usual[AT_ONCE]
    with contextlib.ExitStack() as stack:
        each = [
            stack.enter_context(opened(name, fields, loaded, arguments, held))
            for name, fields in contenders_of(arguments, usual).items()
        ]
        full = DynamicCache(config=loaded[0].config)
        each.insert(0, LongContender(DYNAMIC, loaded[0], full, each[0].ids, arguments.prompt))
        for mark in marks:
            rows.say(f"until {mark:,} tokens are decoded, in calls of {_CALL}")
            for one in each:
                while one.place < arguments.prompt + mark:
                    one.feed(min(one.place + _CALL, arguments.prompt + mark))
            for one, step in in_turns(each, arguments.steps + SETTLES, 8):
                one.step()
                if step == SETTLES - 1:
                    one.restart()
            for one in each:
                row: dict[str, Any] = {"ms": 1e3 * statistics.mean(one.seconds)}
                row["quartiles"] = (np.quantile(one.seconds, (0.25, 0.5, 0.75)) * 1e3).tolist()
                row |= {"adapting": one.settling / sum(one.seconds)} if one.clustered else {}
                row |= one.spent()
                rows.add(name=one.name, generated=mark, **row)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ms a step by contender and mark."""
    table: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["generated"]):
        table.setdefault(row["name"], {})[str(row["generated"])] = row["ms"]
    return {"ms": table}


STUDY = Study(
    "long_growth", __doc__, run,
    {
        "prompt": (512, "prefilled tokens"),
        "marks": ([1024, 2048, 4096, 8192, 16384], "decoded tokens at which steps are timed"),
        "steps": (64, "timed steps at each mark, whole groups"),
    },
    {"prompt": 320, "marks": [64, 128], "steps": 16}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
