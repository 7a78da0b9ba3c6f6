"""How do clusters that follow a long output do beside those that do not, and beside none? (DynaKV, section 8)"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.methods.cluster import ClusterConfig
from hf_offload_cache.tuning import sample_ids

from ..bench_text import text_rows
from .common import Rows, Study, judged, main
from .contexts import open_cache
from .long_contender import LongContender
from .teacher_forced import contenders_of, setting_argument

_BASELINES = "eval.baselines.clusters:"
ADAPTIVE, STATIC, LOCAL, ROWS, AT_ONCE = "adaptive", "static", "local", "token rows", "adaptive, split at once"
USUAL: dict[str, dict[str, Any]] = {
    ADAPTIVE: {"cache": "cluster"},
    STATIC: {"cache": _BASELINES + "StaticClusterCache"},
    LOCAL: {"cache": _BASELINES + "LocalClusterCache"},
    AT_ONCE: {"cache": "cluster", "append_buffer": 0},
    ROWS: {"cache": "disk-swap", "group_size": 1},
}
"""What is decoded joins clusters that are split; or clusters of the prompt, as many from the beginning as the others
come to have; or makes clusters of its own, a window at a time. And joins clusters at once, read for it; or no clusters.
"""


_COLOURED = 10
"""Clusters: of more one cannot tell the colours apart."""


def fields_of(fields: dict[str, Any] | None, prompt: int, held: int) -> dict[str, Any] | None:
    """A contender's fields for `held` tokens after a prompt of so many: clusters of the prompt are from the beginning
    as many as others come to have, as far as there are two keys for each."""
    if fields is not None and fields.get("cache", "").endswith("StaticClusterCache"):
        keys = fields.get("cluster_size") or ClusterConfig().cluster_size
        return {"num_clusters": min(held // keys, prompt // 2), **fields}
    return fields


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are prefilled")
    parser.add_argument("--steps", type=int, default=4096, help="tokens decoded after them, teacher-forced")
    parser.add_argument("--every", type=int, default=64, help="steps from one look at the attention to the next")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each contender, one after the other: `long_growth` times steps in turns. `loaded`: a model and its
    tokenizer in the place of the default one."""
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    held = arguments.prompt + arguments.steps
    ids = text_rows(sample_ids(None, tokenizer)[0], 1, held + 1)
    for name, contender in contenders_of(arguments, USUAL).items():
        if rows.has(name=name):
            continue
        with open_cache(model, fields_of(contender.fields, arguments.prompt, held), held + 8, arguments.path) as cache:
            one = LongContender(name, model, cache, ids, arguments.prompt)
            for step in range(arguments.steps):
                one.look() if step % arguments.every == arguments.every - 1 else one.step()
                if step % 512 == 511:
                    rows.say(f"{name}: {step + 1:,} of {arguments.steps:,} steps, {sum(one.seconds):.0f} s")
            rows.add(name=name, **one.row())
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By contender what was measured, lists by thirds of the decode; and what is asked of the adaptive one."""
    table = {row["name"]: row for row in rows}
    shown: dict[str, dict[str, Any]] = {}
    for name, row in table.items():
        flat = {key: value for key, value in row.items() if isinstance(value, int | float)}
        by_thirds = (key for key in ("ms", "median_ms", "mass", "oracle") if row[key])
        shown[name] = {**flat, **{f"late {key}": row[key][-1] for key in by_thirds}}
    reached = []
    if {ADAPTIVE, STATIC, LOCAL} <= set(table):
        own, static, local = (table[name] for name in (ADAPTIVE, STATIC, LOCAL))
        late = {name: table[name]["mass"][-1] for name in (ADAPTIVE, STATIC, LOCAL)}
        reached += [
            judged("late mass over static", late[ADAPTIVE] / late[STATIC], least=1.3),
            judged("late mass over the better of both", late[ADAPTIVE] / max(late[STATIC], late[LOCAL]), least=1.03),
            judged("variance over static", own["variance"] / static["variance"], most=0.65),
            judged("variance over local", own["variance"] / local["variance"], most=1.0),
            judged("share of the decode spent adapting", own["settling_seconds"] / own["seconds"], most=0.05),
            judged(
                "bytes written again, over moving all that lies behind each entry",
                own["settling_rewritten_bytes"] / own["settling_moved_singly_bytes"], most=1e-3,
            ),
        ]  # fmt: skip
    if ADAPTIVE in table:
        own = table[ADAPTIVE]
        in_sequence = own["run"] / own["run_in_sequence"]
        reached += [judged("entries a run over those in the order of the sequence", in_sequence, least=3.0)]
    if {ADAPTIVE, AT_ONCE} <= set(table):
        read = [table[name]["bytes_read_a_step"] for name in (ADAPTIVE, AT_ONCE)]
        reached += [judged("bytes read over splitting at once", read[0] / read[1], most=0.6)]
    return {"contenders": shown, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Keys by their first two components, those of the largest clusters in a colour each, after the prompt and at the
    end (figure 4 of the paper); and the mass captured, by thirds of the decode."""
    drawn = [row for row in rows if row.get("pictures") and row["name"] in (ADAPTIVE, STATIC, LOCAL)]
    if drawn:
        upper, lower = figure.subfigures(2, 1, height_ratios=(2, 1))
        for column, row in zip(upper.subplots(2, len(drawn), squeeze=False).T, drawn, strict=True):
            for axes, when, picture in zip(column, ("after the prompt", "at the end"), row["pictures"], strict=True):
                at, cluster = np.array(picture["at"]), np.array(picture["cluster"])
                axes.scatter(*at.T, color="lightgrey", s=2)
                largest = np.argsort(-np.bincount(cluster[cluster >= 0]), kind="stable")[:_COLOURED]
                for colour, number in enumerate(largest.tolist()):
                    axes.scatter(*at[cluster == number].T, color=f"C{colour}", s=9)
                axes.set(title=f"{row['name']}, {when}", xticks=[], yticks=[])
    else:
        lower = figure
    axes = lower.subplots()
    for row in rows:
        if row["mass"]:
            axes.plot(("first", "middle", "last"), row["mass"], marker="o", label=row["name"])
    axes.set(ylabel="mass captured", xlabel="third of the decode")
    axes.legend(fontsize="small")


STUDY = Study(
    "long_decode", __doc__, run, plot, arguments, {"prompt": 320, "steps": 96, "every": 16}, size=(10.0, 10.0)
)

if __name__ == "__main__":
    main(STUDY)
