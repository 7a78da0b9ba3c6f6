"""What do larger groups cost in accuracy? Mass captured, KL and top-1 agreement to DynamicCache over group_size.

Sinks and the tail are whole groups as well, so larger groups attend to some more tokens: `attended` says how many.
"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, main
from .quality_selected import plot
from .teacher_forced import Contender, compare, means, text_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=32, samples=3)
    parser.add_argument("--values", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="TOKENS")
    parser.add_argument("--num-selected", type=int, default=400)
    parser.add_argument("--budgets", choices=("measured", "uniform"), default="measured")


def run(arguments: argparse.Namespace, rows: Rows, **loaded: Any) -> dict[str, Any]:
    fields = {"num_selected": arguments.num_selected, "layer_budgets": arguments.budgets}
    contenders = {str(size): Contender({**fields, "group_size": size}) for size in arguments.values}
    compare(arguments, rows, contenders, **loaded)
    return {"contenders": means(rows.rows), "over": "group_size"}


STUDY = Study(
    "quality_group", __doc__, run, plot, arguments,
    {"tokens": 1536, "steps": 8, "samples": 1, "values": [1, 8, 64], "num_selected": 200},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
