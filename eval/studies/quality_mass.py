"""What share of the true attention mass falls on what the cache attends to, layer by layer?"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, main
from .teacher_forced import compare, contenders_of, means, setting_argument, text_arguments

USUAL: dict[str, dict[str, Any]] = {"disk-swap": {}}


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=32, samples=4)
    parser.add_argument("--memory", default="1/13", help="budget: a share of the full KV, a size, or none")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, **loaded: Any) -> dict[str, Any]:
    compare(arguments, rows, contenders_of(arguments, USUAL, memory=arguments.memory), **loaded)
    return {"contenders": means(rows.rows)}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    table = summary["contenders"]
    axes = figure.subplots()
    width = 0.8 / len(table)
    for index, (name, row) in enumerate(table.items()):
        places = [layer + (index + 0.5) * width - 0.4 for layer in range(len(row["layer_mass"]))]
        label = f"{name}: mean {row['mass']:.3f}, worst layer {row['worst']:.3f}"
        axes.bar(places, row["layer_mass"], width, label=label)
    axes.set(xlabel="layer", ylabel="attention mass captured", ylim=(0, 1.0))
    figure.legend(loc="outside upper center", ncols=2)


STUDY = Study(
    "quality_mass", __doc__, run, plot, arguments, {"tokens": 1536, "steps": 8, "samples": 1}, size=(10.0, 4.5)
)

if __name__ == "__main__":
    main(STUDY)
