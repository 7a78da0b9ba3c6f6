"""What chunks, abstracts and the tree cost in what is attended to, beside judging by all keys and by fixed chunks?"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, judged, main
from .teacher_forced import compare, contenders_of, means, setting_argument, text_arguments

_BASELINES, _VARIANTS = "eval.baselines.all_keys:", "eval.baselines.tree_variants:"
_ALONE: dict[str, Any] = {"dense_layers": 0, "early_steps": 0, "look_ahead": False}
USUAL: dict[str, dict[str, Any]] = {
    "tree": {"cache": "abstract-tree", "look_ahead": False},
    "tree alone": {"cache": "abstract-tree", **_ALONE},
    "tree alone, by bounds": {"cache": _VARIANTS + "BoundsTreeCache", **_ALONE},
    "tree alone, halves judged": {"cache": _VARIANTS + "DescendingTreeCache", **_ALONE},
    "tree alone, all halves judged": {"cache": _VARIANTS + "AllHalvesTreeCache", **_ALONE},
    "fixed chunks of 64": {"cache": _BASELINES + "FixedChunksCache", "look_ahead": False},
    "fixed chunks of 64, four times as many": {
        "cache": _BASELINES + "FixedChunksCache", "num_selected": 1600, "look_ahead": False,
    },
    "fixed chunks of 64, by bounds": {"cache": _VARIANTS + "BoundsChunksCache", "look_ahead": False},
    "fixed chunks of 16": {"cache": _BASELINES + "FixedChunksCache", "chunk_size": 16, "look_ahead": False},
    "fixed chunks of 16, by bounds": {"cache": _VARIANTS + "BoundsChunksCache", "chunk_size": 16, "look_ahead": False},
    "all keys": {"cache": _BASELINES + "TokenJudgedCache"},
    "all keys, by chunk": {"cache": _BASELINES + "ChunkJudgedCache"},
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=32, samples=4)
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, **loaded: Any) -> dict[str, Any]:
    compare(arguments, rows, contenders_of(arguments, USUAL, engine="memory"), **loaded)
    table = means(rows.rows)
    reached = []
    if set(USUAL) <= set(table):
        alone, fixed = table["tree alone"], table["fixed chunks of 64"]
        reached = [
            judged("attention mass of the tree, 400 of 4K tokens", table["tree"]["mass"], least=0.88),
            judged("attention mass of the tree without dense layers and early steps", alone["mass"], least=0.88),
            judged(
                "share of the attended that is important, over that of fixed chunks of 64",
                alone["important"] / fixed["important"], least=1.3,
            ),
            judged("judged, over judging all tokens", alone["judged"], most=0.4),
            judged("perplexity of the tree over that of DynamicCache", table["tree"]["perplexity"], most=1.01),
        ]  # fmt: skip
    return {"contenders": table, "must_reach": reached}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    table = summary["contenders"]
    axes = figure.subplots()
    for name, row in table.items():
        label = f"{name}: mean {row['mass']:.3f}, {row['important']:.0%} important, KL {row['kl']:.3f}"
        axes.plot(row["layer_mass"], label=label)
    axes.set(xlabel="layer", ylabel="attention mass captured", ylim=(0, 1.0))
    figure.legend(loc="outside upper center", ncols=2)


STUDY = Study(
    "quality_chunks", __doc__, run, plot, arguments, {"tokens": 2304, "steps": 8, "samples": 1}, size=(10.0, 4.5)
)

if __name__ == "__main__":
    main(STUDY)
