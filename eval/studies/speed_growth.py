"""How does the time of a step beyond the model alone grow with the context, at equal memory? (LeoAM, section 4.2)"""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any

from ..compare import SHAPES, compare, setting_of
from ..contenders import METHODS, OWN
from ..profiles import PROFILES
from .common import Rows, Study, main

_ALONE, _SHORT = "the model alone", 64


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each context and method, in turns, and before them one of the model with hardly any history, which
    no disk slows down."""

    def measured(tokens: int, methods: tuple[str, ...], profile: str) -> dict[str, Any]:
        where = {"path": arguments.path, "device": arguments.device, "profile": profile}
        setting = setting_of(arguments.shape, tokens, arguments.batch, memory=Fraction(arguments.memory), **where)
        return compare(setting, methods, ("on",), arguments.steps, arguments.reload_steps, arguments.repetitions)

    for tokens in arguments.context:
        if rows.has(tokens=tokens):
            continue
        alone = measured(_SHORT, ("DynamicCache",), "own")["rows"]["DynamicCache"]
        found = measured(tokens, tuple(arguments.methods), arguments.profile)
        for name, row in {_ALONE: alone, **found["rows"]}.items():
            ms = {"ms": 1e3 * row["on"]["median_seconds"], "p95": 1e3 * row["on"]["p95_seconds"]}
            rows.add(tokens=tokens, method=name, spread=row["on"]["spread"], **ms)
        for name, reason in found["left_out"].items():
            rows.add(tokens=tokens, method=name, left_out=reason)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By method, ms a step beyond the model alone at each context."""
    alone = {row["tokens"]: row["ms"] for row in rows if row["method"] == _ALONE}
    table: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        if row["method"] != _ALONE and "ms" in row:
            table.setdefault(row["method"], {})[str(row["tokens"])] = row["ms"] - alone[row["tokens"]]
    return {"alone_ms": alone, "beyond_ms": table}


STUDY = Study(
    "speed_growth", __doc__, run,
    {
        "shape": ("smollm2", "model shape", SHAPES),
        "profile": ("own", "device", PROFILES),
        "device": ("cpu", "torch device"),
        "steps": (20, "steps of a repetition"),
        "reload_steps": (2, "steps of a repetition, for methods that move everything"),
        "repetitions": (5, "repetitions"),
        "context": ([8192, 131072], "tokens of a sequence"),
        "batch": (1, "sequences"),
        "methods": (["AbstractTreeCache", OWN], "caches", METHODS),
        "memory": ("1/13", "memory budget, of the full KV"),
    },
    {"context": [1024, 2048], "steps": 3, "repetitions": 2},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
