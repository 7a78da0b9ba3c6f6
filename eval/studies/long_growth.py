"""How does the time of a step grow with the output, with clusters that adapt, that do not, and none? (DynaKV, sections
8.2 and 8.4)

`--of mass --marks 4096 --looks 8`: how long does a step take at equal attention mass? Each contender has several
numbers of selected tokens, between which its time is interpolated.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Any

import numpy as np
from transformers import DynamicCache

from hf_offload_cache.core import SelectiveCache

from ..bench_text import DYNAMIC
from ..profiles import PROFILES
from .common import Rows, Study, main
from .contexts import default_model
from .long_contender import LongContender, clusters_of
from .long_decode import ADAPTIVE, LOCAL, ROWS, STATIC, opened
from .long_decode import USUAL as _DECODED
from .teacher_forced import contenders_of

_SELECTED = {ADAPTIVE: (400,), STATIC: (400, 800, 1600), LOCAL: (400, 800, 1600), ROWS: (100, 200, 400)}
OF = {
    "time": {name: _DECODED[name] for name in _SELECTED},
    "mass": {
        f"{name}, {count}": {**_DECODED[name], "num_selected": count}
        for name, counts in _SELECTED.items()
        for count in counts
    },
}
_CALL = 32
"""Tokens of a call by which the output grows between two marks: as many as join clusters as decoded ones do."""
_TURN = 8
SETTLES = 16
"""Steps of a mark before those that count: slots fill."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each contender, `DynamicCache` included, and mark. Tokens between marks are fed in calls of
    `_CALL`, with exact attention, and join clusters."""
    if rows.rows:
        return summary(rows.rows)
    loaded, marks = default_model(loaded), sorted(arguments.marks)
    held = arguments.prompt + marks[-1] + arguments.steps + SETTLES + arguments.looks
    with contextlib.ExitStack() as stack:
        each = [
            stack.enter_context(opened(name, fields, loaded, arguments, held, arguments.profile))
            for name, fields in contenders_of(arguments, OF[arguments.of]).items()
        ]
        model = loaded[0]
        full = LongContender(DYNAMIC, model, DynamicCache(config=model.config), each[0].ids, arguments.prompt)
        each.insert(0, full)
        for mark in marks:
            rows.say(f"until {mark:,} tokens are decoded, in calls of {_CALL}")
            grow_to(each, arguments.prompt + mark)
            in_turns(each, arguments.steps)
            for one in each:
                row = timed_row(one)
                for _ in range(arguments.looks):
                    one.look()
                if one.mass:
                    row["mass"], row["oracle"] = np.mean(one.mass, (0, 1)).tolist()
                rows.add(name=one.name, generated=mark, **row)
    return summary(rows.rows)


def grow_to(each: list[LongContender], length: int) -> None:
    """Let each hold so many tokens, which come in calls of `_CALL`."""
    for one in each:
        while one.place < length:
            last = min(one.place + _CALL, length)
            one.feed(one.place, last)
            one.place = last


def in_turns(each: list[LongContender], steps: int) -> None:
    """So many steps of each, after those in which slots fill, a few at a time."""
    timed = steps + SETTLES
    for first in range(0, timed, _TURN):
        for one in each if first // _TURN % 2 == 0 else each[::-1]:
            for step in range(first, min(first + _TURN, timed)):
                one.step()
                if step == SETTLES - 1:
                    one.restart()


def timed_row(one: LongContender) -> dict[str, Any]:
    """Of the steps since `restart`: milliseconds, in the mean, since some steps settle clusters and most do not, and
    quartiles; the share of them that adapting took, MB read a step."""
    row: dict[str, Any] = {"ms": 1e3 * statistics.mean(one.seconds)}
    row["quartiles"] = (np.quantile(one.seconds, (0.25, 0.5, 0.75)) * 1e3).tolist()
    row |= {"MB": one.grown("bytes_read") / 1e6} if isinstance(one.cache, SelectiveCache) else {}
    clusters = [clusters_of(layer, 0)[2] for layer in one.clustered]
    if clusters:
        row["adapting"] = one.settling.seconds / sum(one.seconds)
        row |= {"clusters": statistics.mean(count for _, count in clusters)}
        row |= {"tables_MB": sum(layer.history.tables_nbytes for layer in one.clustered) / 1e6}
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ms a step by contender and mark, and the slope per 1,000 tokens; and, where masses are known, `over_adaptive`."""
    table: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        same = sorted((row["generated"], row["ms"]) for row in rows if row["name"] == name)
        at, ms = np.array(same).T
        table[name] = {str(mark): milliseconds for mark, milliseconds in same}
        if len(same) > 1:
            table[name]["slope"] = float(np.polyfit(at / 1e3, ms, 1)[0])
    known = [row for row in rows if "mass" in row]
    return {"ms": table, **({"over adaptive": over_adaptive(known)} if known else {})}


def over_adaptive(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The time of each kind, interpolated at the adaptive one's mass, over the adaptive one's. A kind that does not
    reach that mass is compared at its largest."""
    first = next(row for row in rows if row["name"].startswith(ADAPTIVE))
    over = {}
    for kind in (STATIC, LOCAL, ROWS):
        points = sorted((row["mass"], row["ms"]) for row in rows if row["name"].startswith(f"{kind},"))
        if points:
            at = "at equal mass" if points[-1][0] >= first["mass"] else "with less mass"
            over[f"{kind}, {at}"] = float(np.interp(first["mass"], *zip(*points, strict=True))) / first["ms"]
    return over


STUDY = Study(
    "long_growth", __doc__, run,
    {
        "of": ("time", "contenders", OF),
        "prompt": (512, "prefilled tokens"),
        "marks": ([1024, 2048, 4096, 8192, 16384], "decoded tokens at which steps are timed"),
        "steps": (64, "timed steps at each mark, whole groups"),
        "looks": (0, "steps after these whose attention is looked at"),
        "profile": ("own", "device", PROFILES),
    },
    {"prompt": 320, "marks": [64, 128], "steps": 16}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
