"""What does a step of clusters that follow the output take, as the output grows, beside clusters that do not follow it
and beside none? (DynaKV, sections 8.2 and 8.4)"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from ..bench_text import DYNAMIC, text_rows
from .common import Rows, Study, judged, main
from .contexts import open_cache
from .long_contender import LongContender, clusters_of
from .long_decode import ADAPTIVE, LOCAL, ROWS, STATIC, fields_of
from .long_decode import USUAL as _DECODED
from .teacher_forced import contenders_of, setting_argument

USUAL = {name: _DECODED[name] for name in (ADAPTIVE, STATIC, LOCAL, ROWS)}
_LEAST = {STATIC: 1.4, LOCAL: 1.2, ROWS: 2.0}
"""How many times longer a step is asked to take, at the last mark."""
_CALL = 32
"""Tokens of a call by which the output grows between two marks: as many as join clusters as decoded ones do."""
_TURN = 8
SETTLES = 16
"""Steps of a mark before those that count: slots fill."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are prefilled")
    parser.add_argument("--marks", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="tokens decoded")
    parser.add_argument("--steps", type=int, default=64, help="steps that are timed at each mark, whole groups")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each contender and mark, `DynamicCache` among them; `loaded`: a model and its tokenizer in the place of
    the default one. Tokens between marks come in calls of `_CALL`, whose attention is exact: they join clusters, which
    are read when too much waits for them."""
    if rows.rows:
        return summary(rows.rows)
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    marks = sorted(arguments.marks)
    held = arguments.prompt + marks[-1] + arguments.steps + SETTLES
    ids = text_rows(sample_ids(None, tokenizer)[0], 1, held + 1)
    with contextlib.ExitStack() as stack:
        each = [LongContender(DYNAMIC, model, DynamicCache(config=model.config), ids, arguments.prompt)]
        for name, contender in contenders_of(arguments, USUAL).items():
            fields = fields_of(contender.fields, arguments.prompt, held)
            cache = stack.enter_context(open_cache(model, fields, held + 8, arguments.path))
            each.append(LongContender(name, model, cache, ids, arguments.prompt))
        for mark in marks:
            rows.say(f"until {mark:,} tokens are decoded, in calls of {_CALL}")
            grow_to(each, arguments.prompt + mark)
            in_turns(each, arguments.steps)
            for one in each:
                rows.add(name=one.name, generated=mark, **timed_row(one))
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
    clusters = [clusters_of(layer, 0)[2] for layer in one.clustered]
    if clusters:
        row |= {"adapting": one.settling.seconds / sum(one.seconds), "MB": one.grown("bytes_read") / 1e6}
        row |= {"clusters": statistics.mean(count for _, count in clusters)}
        row |= {"tables_MB": sum(layer.history.tables_nbytes for layer in one.clustered) / 1e6}
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By contender ms a step at each mark, and what 1,000 more tokens cost at each end: linear growth has these equal,
    and less at the last is less than linear."""
    reached, table = [], dict[str, dict[str, float]]()
    for name in dict.fromkeys(row["name"] for row in rows):
        own = sorted((row for row in rows if row["name"] == name), key=lambda row: row["generated"])
        at, ms = np.array([row["generated"] for row in own]), np.array([row["ms"] for row in own])
        table[name] = {str(mark): float(one) for mark, one in zip(at, ms, strict=True)}
        if len(own) > 1:
            table[name]["slope"] = float(np.polyfit(at / 1e3, ms, 1)[0])
            grown = ms[-1] / ms[0] / (at[-1] / at[0])
            reached += [judged(f"{name}: growth of a step over that of the output", float(grown), most=1.0)]
    last = str(max(row["generated"] for row in rows))
    for name, least in _LEAST.items():
        if {ADAPTIVE, name} <= set(table):
            measured = table[name][last] / table[ADAPTIVE][last]
            reached += [judged(f"a step of {name} over one of {ADAPTIVE}, {last} tokens", measured, least=least)]
    return {"ms": table, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        low, middle, high = np.array([row["quartiles"] for row in own]).T
        around = [middle - low, high - middle]
        (line, *_) = axes.errorbar([row["generated"] for row in own], middle, around, marker="o", capsize=3, label=name)
        axes.plot([row["generated"] for row in own], [row["ms"] for row in own], "--", color=line.get_color())
    axes.set(xlabel="tokens decoded", ylabel="ms a step: quartiles, dashed the mean", ylim=(0, None))
    axes.legend()


STUDY = Study("long_growth", __doc__, run, plot, arguments, {"prompt": 320, "marks": [64, 128], "steps": 16})

if __name__ == "__main__":
    main(STUDY)
