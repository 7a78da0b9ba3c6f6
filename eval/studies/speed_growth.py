"""How does what a step takes beyond the model alone grow with the context, at equal memory? (LeoAM, section 4.2)"""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..contenders import METHODS, OWN
from .common import Rows, Study, judged, main
from .speed_throughput import common_arguments, measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TREE = "AbstractTreeCache"
_ALONE, _SHORT = "the model alone", 64
_LENGTHS = [8192, 131072]


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.set_defaults(shape="smollm2")
    parser.add_argument("--context", type=int, nargs="+", default=_LENGTHS, help="tokens a sequence")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[TREE, OWN])
    parser.add_argument("--memory", default="1/13", help="share of the full KV")


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """A row for each context and method, in turns, and, just before these, one of the model over next to no history:
    what no other disk would slow down."""
    here = argparse.Namespace(**{**vars(arguments), "profile": "own"})
    for tokens in arguments.context:
        if rows.has(tokens=tokens):
            continue
        sizes = {"batch": arguments.batch, "overlaps": ("on",), "memory": Fraction(arguments.memory)}
        alone = measured(here, _SHORT, methods=("DynamicCache",), **sizes)["rows"]["DynamicCache"]
        found = measured(arguments, tokens, methods=tuple(arguments.methods), **sizes)
        for name, row in {_ALONE: alone, **found["rows"]}.items():
            ms = {"ms": 1e3 * row["on"]["median_seconds"], "p95": 1e3 * row["on"]["p95_seconds"]}
            rows.add(tokens=tokens, method=name, spread=row["on"]["spread"], **ms)
        for name, reason in found["left_out"].items():
            rows.add(tokens=tokens, method=name, left_out=reason)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By method, ms a step beyond the model alone at each context, and the last over the first."""
    alone = {row["tokens"]: row["ms"] for row in rows if row["method"] == _ALONE}
    table: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        if row["method"] != _ALONE and "ms" in row:
            table.setdefault(row["method"], {})[str(row["tokens"])] = row["ms"] - alone[row["tokens"]]
    first, last = (table.get(TREE, {}).get(str(tokens)) for tokens in _LENGTHS)
    growth = last / first if first and last else None
    reached = [judged("a step of the tree beyond the model alone, 128K tokens over 8K", growth, most=3.0)]
    return {"alone_ms": alone, "beyond_ms": table, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Figure) -> None:
    axes = figure.subplots()
    for name, beyond in found["beyond_ms"].items():
        axes.plot(list(map(int, beyond)), list(beyond.values()), marker="o", label=name)
    axes.set(xlabel="tokens", ylabel="ms a step beyond the model alone", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.legend()


STUDY = Study("speed_growth", __doc__, run, plot, arguments, {"context": [1024, 2048], "steps": 3, "repetitions": 2})

if __name__ == "__main__":
    main(STUDY)
