"""What does a copy in a few bits lose, and what do the entries that are fetched give back? (SpeCache, section 4)"""

from __future__ import annotations

import argparse
from typing import Any

from .common import Rows, Study, judged, main
from .teacher_forced import compare, contenders_of, means, setting_argument, text_arguments

_COPIES = {"1 bit, g=32": (1, 32), "1 bit, g=64": (1, 64), "2 bits": (2, 64), "4 bits": (4, 64)}
_LEAST = {"1 bit, g=32": 5.0, "1 bit, g=64": 3.0, "2 bits": 1.8}
_PLAIN = "eval.baselines.plain_low_bit:PlainLowBitCache"


def _usual() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (bits, group) in _COPIES.items():
        copy = {"cache": "spec", "bits": bits, "quant_group": group}
        found |= {name: copy, f"{name}, alone": {**copy, "num_selected": 0}}
        found[f"{name}, topped up"] = {**copy, "top_up": "always"}
        if bits == 1:
            found[f"{name}, KIVI, alone"] = {**copy, "cache": _PLAIN, "num_selected": 0}
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=48, samples=4)
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, **loaded: Any) -> dict[str, Any]:
    compare(arguments, rows, contenders_of(arguments, _usual()), **loaded)
    table = means(rows.rows)
    promised = [
        (f"KL of {name}, without fetching over with", _over(table, f"{name}, alone", name), least)
        for name, least in _LEAST.items()
    ]
    topped = _over(table, "2 bits, alone", "2 bits, topped up")
    promised.append(("KL of 2 bits, without fetching over topped up", topped, 20.0))
    return {"contenders": table, "must_reach": [judged(said, ratio, least=least) for said, ratio, least in promised]}


def _over(table: dict[str, dict[str, Any]], one: str, other: str) -> float | None:
    return table[one]["kl"] / table[other]["kl"] if one in table and other in table else None


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes, table = figure.subplots(), summary["contenders"]
    axes.barh(range(len(table)), [row["kl"] for row in table.values()])
    axes.set_yticks(range(len(table)), table)
    axes.invert_yaxis()
    axes.set(xlabel="KL to DynamicCache, nats", xscale="log")
    axes.grid(alpha=0.3, axis="x")


STUDY = Study(
    "low_bit_quality", __doc__, run, plot, arguments, {"tokens": 1536, "steps": 8, "samples": 1}, size=(8.0, 5.0)
)

if __name__ == "__main__":
    main(STUDY)
