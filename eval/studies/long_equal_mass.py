"""What does a step over a long output take where all attend to as much of the attention mass? (DynaKV, section 8.2)"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import numpy as np
import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from ..bench_text import text_rows
from ..profiles import PROFILES, throttle
from .common import Rows, Study, judged, main
from .contexts import open_cache
from .long_contender import LongContender
from .long_decode import ADAPTIVE, LOCAL, ROWS, STATIC, fields_of
from .long_decode import USUAL as _DECODED
from .long_growth import SETTLES, grow_to, in_turns, timed_row
from .teacher_forced import contenders_of, setting_argument

_SELECTED = {ADAPTIVE: (400,), STATIC: (400, 800, 1600), LOCAL: (400, 800, 1600), ROWS: (100, 200, 400)}
USUAL = {
    f"{name}, {count}": {**_DECODED[name], "num_selected": count} for name, own in _SELECTED.items() for count in own
}
"""Each with several numbers of tokens that it attends to: between these its time is told at the mass of the first."""
_LEAST = {STATIC: 1.4, LOCAL: 1.2, ROWS: 2.0}
"""How many times longer a step is asked to take."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are prefilled")
    parser.add_argument("--generated", type=int, default=4096, help="tokens decoded before the steps that are timed")
    parser.add_argument("--steps", type=int, default=64, help="steps that are timed, whole groups")
    parser.add_argument("--looks", type=int, default=8, help="steps after them of which the attention is looked at")
    parser.add_argument("--profile", choices=PROFILES, default="own", help="the device that the disk stands in for")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each contender; `loaded`: a model and its tokenizer in the place of the default one."""
    if rows.rows:
        return summary(rows.rows)
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    held = arguments.prompt + arguments.generated + SETTLES + arguments.steps + arguments.looks
    ids = text_rows(sample_ids(None, tokenizer)[0], 1, held + 1)
    with contextlib.ExitStack() as stack:
        each = []
        for name, contender in contenders_of(arguments, USUAL).items():
            fields = fields_of(contender.fields, arguments.prompt, held)
            cache = stack.enter_context(open_cache(model, fields, held + 8, arguments.path))
            throttle(cache, PROFILES[arguments.profile])
            each.append(LongContender(name, model, cache, ids, arguments.prompt))
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
    """By contender mass, milliseconds and MB; and of each kind the time at the mass of the adaptive one, on straight
    lines between its own, over that one's: where even its most tokens have less mass, what these take, at least."""
    table = {row["name"]: {key: row[key] for key in ("mass", "ms", "MB")} for row in rows}
    reached = []
    (first, *_) = (row for row in rows if row["name"].startswith(ADAPTIVE))
    for kind, least in _LEAST.items():
        own = sorted((row["mass"], row["ms"]) for row in rows if row["name"].startswith(f"{kind},"))
        if own:
            reaches = own[-1][0] >= first["mass"]
            measured = float(np.interp(first["mass"], *zip(*own, strict=True))) / first["ms"]
            figure = f"a step of {kind} over one of {ADAPTIVE}, {'at equal mass' if reaches else 'with less mass'}"
            reached.append(judged(figure, measured, least=least))
    return {"contenders": table, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    for kind in _SELECTED:
        own = sorted((row["mass"], row["ms"], row["name"]) for row in rows if row["name"].startswith(f"{kind},"))
        if own:
            mass, ms, names = zip(*own, strict=True)
            axes.plot(mass, ms, marker="o", label=kind)
            for one in own:
                axes.annotate(one[2].split(", ")[-1], one[:2], fontsize="small")
    axes.set(xlabel="attention mass captured, outside sinks and tail", ylabel="ms a step", ylim=(0, None))
    axes.legend()


STUDY = Study(
    "long_equal_mass", __doc__, run, plot, arguments, {"prompt": 320, "generated": 128, "steps": 16, "looks": 2}
)

if __name__ == "__main__":
    main(STUDY)
