"""What do places on the disk and the replacement of slots save clusters to read? (DynaKV, sections 5.1 and 6.2)"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from ..bench_text import text_rows
from .common import Rows, Study, judged, main
from .contexts import open_cache
from .long_contender import LongContender
from .teacher_forced import contenders_of, setting_argument

_HALF: dict[str, Any] = {"cache": "cluster", "reuse_capacity": 200}
PLACED, IN_SEQUENCE, ANYWHERE = "placed by queries", "placed in sequence", "placed anywhere"
ALIGNED, LRU, FIFO = "aligned", "lru", "fifo"
USUAL: dict[str, dict[str, Any]] = {
    PLACED: {"cache": "cluster", "reuse_capacity": 0},
    IN_SEQUENCE: {"cache": "eval.baselines.clusters:UnplacedClusterCache", "reuse_capacity": 0},
    ANYWHERE: {"cache": "eval.baselines.clusters:ShuffledClusterCache", "reuse_capacity": 0},
    ALIGNED: _HALF,
    LRU: {**_HALF, "cache": "eval.baselines.clusters:LeastRecentClusterCache"},
    FIFO: {**_HALF, "cache": "eval.baselines.clusters:FirstInClusterCache"},
}
"""Without slots, where clusters lie; with slots for half of what a step attends to, which pages give theirs up."""

_SHOWN = "run", "run_in_sequence", "hit_rate", "bytes_read_a_step"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=4096, help="tokens that are prefilled")
    parser.add_argument("--steps", type=int, default=192, help="tokens decoded after them, teacher-forced")
    parser.add_argument("--every", type=int, default=8, help="steps from one look at what is read to the next")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each contender, one after the other; `loaded`: a model and its tokenizer in the place of the default
    one."""
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    held = arguments.prompt + arguments.steps
    ids = text_rows(sample_ids(None, tokenizer)[0], 1, held + 1)
    for name, contender in contenders_of(arguments, USUAL, look_ahead=False).items():
        if rows.has(name=name):
            continue
        with open_cache(model, contender.fields, held + 8, arguments.path) as cache:
            one = LongContender(name, model, cache, ids, arguments.prompt)
            for step in range(arguments.steps):
                one.look() if step % arguments.every == arguments.every - 1 else one.step()
            row = one.row()
            rows.add(name=name, **{key: row[key] for key in _SHOWN})
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = {row["name"]: {key: value for key, value in row.items() if key != "name"} for row in rows}
    reached = []
    if set(USUAL) <= set(table):
        placed, hits = table[PLACED], {name: table[name]["hit_rate"] for name in (ALIGNED, LRU, FIFO)}
        reached = [
            judged("entries a run over the order of the sequence", placed["run"] / placed["run_in_sequence"], least=3),
            judged("entries a run over clusters anywhere", placed["run"] / table[ANYWHERE]["run"], least=1.3),
            judged("entries a run over clusters in sequence", placed["run"] / table[IN_SEQUENCE]["run"], least=1.0),
            judged("hits of the aligned policy over those of LRU", hits[ALIGNED] / hits[LRU], least=1.05),
            judged("hits of the aligned policy over those of FIFO", hits[ALIGNED] / hits[FIFO], least=1.05),
        ]
    return {"contenders": table, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Entries that lie side by side, and the rate of hits."""
    left, right = figure.subplots(1, 2)
    names = [row["name"] for row in rows]
    left.bar(names, [row["run"] for row in rows])
    left.bar("in sequence", rows[0]["run_in_sequence"])
    left.set_ylabel("entries side by side")
    right.bar(names, [row["hit_rate"] for row in rows])
    right.set_ylabel("hit rate")
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=45)


STUDY = Study("cluster_reads", __doc__, run, plot, arguments, {"prompt": 320, "steps": 32}, size=(9.0, 4.5))

if __name__ == "__main__":
    main(STUDY)
