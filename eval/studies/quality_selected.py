"""How many selected tokens are enough? Mass captured, KL and top-1 agreement to DynamicCache over num_selected."""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, main
from .teacher_forced import Contender, compare, means, text_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=32, samples=3)
    parser.add_argument("--values", type=int, nargs="+", default=[50, 100, 200, 400, 800, 1600], metavar="TOKENS")
    parser.add_argument("--budgets", choices=("measured", "uniform"), default="measured")


def run(arguments: argparse.Namespace, rows: Rows, **loaded: Any) -> dict[str, Any]:
    budgets = arguments.budgets
    contenders = {str(n): Contender({"num_selected": n, "layer_budgets": budgets}) for n in arguments.values}
    compare(arguments, rows, contenders, **loaded)
    return {"contenders": means(rows.rows), "over": "num_selected"}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Mass and agreement on the left, KL on the right, over the numbers that the contenders are named after."""
    table = summary["contenders"]
    values = [int(name) for name in table]
    left, right = figure.subplots(1, 2)
    for field, label in (("mass", "mass, mean"), ("worst", "mass, worst layer"), ("top1", "top-1 agreement")):
        left.plot(values, [row[field] for row in table.values()], marker="o", label=label)
    left.set(ylim=(0, 1.02), ylabel="share")
    left.legend(loc="lower right" if summary["over"] == "num_selected" else "lower left")
    right.plot(values, [row["kl"] for row in table.values()], marker="o", color="tab:red")
    right.set(ylim=(0, None), ylabel="KL to DynamicCache, nats a token")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
        axes.set_xlabel(f"{summary['over']} (tokens)")
        axes.grid(alpha=0.3)


STUDY = Study(
    "quality_selected", __doc__, run, plot, arguments,
    {"tokens": 1536, "steps": 8, "samples": 1, "values": [50, 200, 800]},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
