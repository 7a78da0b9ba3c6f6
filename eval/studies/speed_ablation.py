"""What is each part of `AbstractTreeCache` worth, in time and in what is attended to? (LeoAM, section 6.3)"""

from __future__ import annotations

import argparse
from typing import Any

from ..bench_text import DYNAMIC
from ..profiles import PROFILES
from .common import Rows, Study, judged, main
from .speed_chunks import in_each_setting

_FIXED = {"cache": "eval.baselines.all_keys:FixedChunksCache"}
_DESCENDING = {"cache": "eval.baselines.tree_variants:DescendingTreeCache"}
_TREE = {"cache": "abstract-tree"}
_COMPRESSED = {"compress": "auto"}
ARMS: dict[str, dict[str, Any]] = {
    "none": {"cache": "eval.baselines.all_keys:TokenJudgedCache"},
    "abstracts": _FIXED,
    "abstracts, compressed": {**_FIXED, **_COMPRESSED},
    "abstracts, four times as many": {**_FIXED, "num_selected": 1600},
    "abstracts, halves judged": _DESCENDING,
    "abstracts, tokens judged": _TREE,
    "all": {**_TREE, **_COMPRESSED},
}
"""Of LeoAM's parts: abstracts rank chunks, which are attended to whole (LKA), 400 tokens, or all of the 1,600 that the
others bring; of these the best tokens are found, by halves of chunks as in the paper (IAKM), or by their keys as here;
part of what is read comes in 4 bits (DTP). All within one budget, but for the first, which brings all keys and judges
each token."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=7936, help="of the history")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=["own", "emmc"])
    parser.add_argument("--memory", default="1/6")


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each arm, disk and batch; `loaded`: a model and its tokenizer in the place of the default one."""
    within = {name: {**fields, "memory": arguments.memory} for name, fields in ARMS.items()}
    within["none"] = ARMS["none"]
    in_each_setting(arguments, rows, within, (DYNAMIC,), loaded)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By disk and batch, of each arm: milliseconds a step, MB read and the KL from `DynamicCache`; and what each part
    gains where it is added."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for row in (row for row in rows if row["contender"] in ARMS):
        figures = {"ms": 1e3 * row["median_seconds"], "MB": row["bytes_read_a_step"] / 1e6, "kl": row["kl"]}
        table.setdefault(f"{row['profile']}, batch {row['batch']}", {})[row["contender"]] = figures
    reached = []
    for setting, arms in table.items():
        for part, before, after, of in (
            ("abstracts", "none", "abstracts", "ms"),
            ("halves judged", "abstracts", "abstracts, halves judged", "kl"),
            ("tokens judged", "abstracts", "abstracts, tokens judged", "kl"),
            ("tokens judged by their keys", "abstracts, halves judged", "abstracts, tokens judged", "ms"),
            ("compressed", "abstracts, tokens judged", "all", "ms"),
        ):
            gain = 1 - arms[after][of] / arms[before][of]
            reached.append(judged(f"{setting}: less {of} by {part}", gain, least=0.0))
    flat = {f"{setting}, {name}": figures for setting, arms in table.items() for name, figures in arms.items()}
    return {"arms": flat, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """The time of a step, a group of bars for each disk and batch; and the distance to `DynamicCache` beside it."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    settings = list(dict.fromkeys((row["profile"], row["batch"]) for row in rows))
    wide = 1 / (len(ARMS) + 1)
    for place, name in enumerate(ARMS):
        own = [row for row in rows if row["contender"] == name]
        heights = [1e3 * row["median_seconds"] for row in own]
        left.bar([at + place * wide for at in range(len(settings))], heights, wide, label=name)
        right.bar(place, sum(row["kl"] for row in own) / len(own))
    left.set_xticks([at + 0.3 for at in range(len(settings))], [f"{disk}, batch {batch}" for disk, batch in settings])
    left.set_ylabel("ms a step")
    right.set(ylabel="KL from DynamicCache, nats, mean", xticks=[])
    figure.legend(loc="outside upper center", ncols=3)


STUDY = Study(
    "speed_ablation", __doc__, run, plot, arguments,
    {"tokens": 1024, "steps": 24, "batches": [1], "profiles": ["own"]}, size=(10.0, 4.5),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
