"""How much of each selection is in memory already? Reuse rate over inputs, and overlap of successive selections.

The paper's table 5 (reuse rate: min, max and spread over inputs) and figure 8 (overlap between steps).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from .common import Rows, Study, judged, main
from .teacher_forced import compare, contenders_of, setting_argument, text_arguments

USUAL: dict[str, dict[str, Any]] = {"default": {}}


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=7168, steps=64, samples=12)
    parser.add_argument("--reuse", type=int, default=400, help="reuse_capacity: tokens a layer")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, **loaded: Any) -> dict[str, Any]:
    contenders = contenders_of(arguments, USUAL, reuse_capacity=arguments.reuse)
    compare(arguments, rows, contenders, **loaded)
    table = {name: spread(rows.where(name=name)) for name in contenders}
    figure = f"reuse rate, {arguments.tokens} tokens of text, {arguments.reuse} reuse tokens a layer"
    return {"contenders": table, "must_reach": [judged(figure, table[next(iter(table))]["mean"], least=0.7)]}


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the inputs' reuse rates (resident before the step's prefetch, over selected; the first step, which finds
    nothing, counts): mean, least, most, standard deviation. And of the overlap, the mean; by layer as well."""
    rates = [row["hit_rate"] for row in rows if row["hit_rate"] is not None]
    if not rates:
        raise ValueError("nothing was selected: the contexts are shorter than num_selected; give more --tokens")
    found: dict[str, Any] = {"inputs": len(rates), "mean": float(np.mean(rates)), "least": min(rates)}
    found |= {"most": max(rates), "deviation": float(np.std(rates))}
    found["overlap"] = float(np.mean([row["overlap"] for row in rows]))
    for field in ("layer_hits", "layer_overlap"):
        found[field] = np.mean([[np.nan if v is None else v for v in row[field]] for row in rows], 0).tolist()
    return found


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    for index, (name, row) in enumerate(summary["contenders"].items()):
        colour = f"C{index}"
        rates = [one["hit_rate"] for one in rows if one["name"] == name]
        left.plot([index] * len(rates), rates, "o", color=colour, alpha=0.5)
        left.plot([index - 0.2, index + 0.2], [row["mean"]] * 2, color=colour)
        right.plot(row["layer_hits"], marker="o", color=colour, label=f"{name}: in memory before the step")
        label = f"{name}: selected in the step before"
        right.plot(row["layer_overlap"], marker=".", linestyle="--", color=colour, label=label)
    left.axhline(0.7, color="grey", linestyle=":")
    left.set_xticks(range(len(summary["contenders"])), summary["contenders"])
    left.set(ylim=(0, 1), ylabel="reuse rate, each point an input")
    left.margins(x=0.5)
    right.set(ylim=(0, 1), xlabel="layer", ylabel="share of the selected groups, mean over inputs")
    right.legend(loc="lower right")


STUDY = Study(
    "quality_reuse", __doc__, run, plot, arguments, {"tokens": 1536, "steps": 8, "samples": 2}, size=(10.0, 4.5)
)

if __name__ == "__main__":
    main(STUDY)
