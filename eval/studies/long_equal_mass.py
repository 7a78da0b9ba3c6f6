"""How long does a step over a long output take at equal attention mass? (DynaKV, section 8.2)"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import numpy as np

from ..profiles import PROFILES
from .common import Rows, Study, main
from .contexts import default_model
from .long_decode import ADAPTIVE, LOCAL, ROWS, STATIC, opened
from .long_decode import USUAL as _DECODED
from .long_growth import SETTLES, grow_to, in_turns, timed_row
from .teacher_forced import contenders_of

_SELECTED = {ADAPTIVE: (400,), STATIC: (400, 800, 1600), LOCAL: (400, 800, 1600), ROWS: (100, 200, 400)}
USUAL = {
    f"{name}, {count}": {**_DECODED[name], "num_selected": count} for name, own in _SELECTED.items() for count in own
}
"""Each with several numbers of selected tokens, between which its time is interpolated."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each contender."""
    if rows.rows:
        return summary(rows.rows)
    loaded = default_model(loaded)
    held = arguments.prompt + arguments.generated + SETTLES + arguments.steps + arguments.looks
    with contextlib.ExitStack() as stack:
        each = [
            stack.enter_context(opened(name, fields, loaded, arguments, held, arguments.profile))
            for name, fields in contenders_of(arguments, USUAL).items()
        ]
        grow_to(each, arguments.prompt + arguments.generated)
        in_turns(each, arguments.steps)
        for one in each:
            row = timed_row(one)
            row["MB"] = one.grown("bytes_read") / 1e6
            for _ in range(arguments.looks):
                one.look()
            mass, oracle = np.mean(one.mass, (0, 1)).tolist()
            rows.add(name=one.name, mass=mass, oracle=oracle, **row)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mass, milliseconds and MB by contender; and the time of each kind, interpolated at the adaptive one's mass, over
    the adaptive one's. A kind that does not reach that mass is compared at its largest."""
    table = {row["name"]: {key: row[key] for key in ("mass", "ms", "MB")} for row in rows}
    (first, *_) = (row for row in rows if row["name"].startswith(ADAPTIVE))
    over = {}
    for kind in (STATIC, LOCAL, ROWS):
        points = sorted((row["mass"], row["ms"]) for row in rows if row["name"].startswith(f"{kind},"))
        if points:
            at = "at equal mass" if points[-1][0] >= first["mass"] else "with less mass"
            over[f"{kind}, {at}"] = float(np.interp(first["mass"], *zip(*points, strict=True))) / first["ms"]
    return {"contenders": table, "over adaptive": over}


STUDY = Study(
    "long_equal_mass", __doc__, run,
    {
        "prompt": (512, "prefilled tokens"),
        "generated": (4096, "tokens decoded before the timed steps"),
        "steps": (64, "timed steps, whole groups"),
        "looks": (8, "steps after them whose attention is looked at"),
        "profile": ("own", "device", PROFILES),
    },
    {"prompt": 320, "generated": 128, "steps": 16, "looks": 2}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
