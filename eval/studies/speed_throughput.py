"""Tokens a second over batch and context, at equal memory (KVSwap, section 5.2 and table 2 of appendix B)."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..compare import SHAPES, compare, setting_of
from ..contenders import FULL, METHODS, OWN
from ..profiles import PROFILES
from .common import Rows, Study, main

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """What every study of speed can be told."""
    parser.add_argument("--shape", choices=SHAPES, default="replay")
    parser.add_argument("--profile", choices=PROFILES, default="own", help="device to stand in for")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20, help="a repetition")
    parser.add_argument("--reload-steps", type=int, default=2, help="the same of methods that move everything")
    parser.add_argument("--repetitions", type=int, default=5)


def measured(arguments: argparse.Namespace, tokens: int, batch: int, methods: tuple[str, ...],
             overlaps: tuple[str, ...] = ("on", "off"), **setting: Any) -> dict[str, Any]:  # fmt: skip
    """`compare` with a study's arguments."""
    setting |= {"path": arguments.path, "profile": arguments.profile, "device": arguments.device}
    one = setting_of(arguments.shape, tokens, batch, **setting)
    return compare(one, methods, overlaps, arguments.steps, arguments.reload_steps, arguments.repetitions)


def add_rows(rows: Rows, result: dict[str, Any], **key: Any) -> None:
    """A row for each method that ran, and one with "left_out" for each that did not."""
    for method, row in result["rows"].items():
        found: dict[str, Any] = {}
        for mode in ("on", "off"):
            if mode in row:
                found[f"tokens_per_second_{mode}"] = row[mode]["tokens_per_second"]
                found[f"spread_{mode}"] = row[mode]["spread"]
        off = row.get("off", {})
        store = ("store_seconds", "store_bytes_per_second", "mean_request_bytes")
        found |= {name: off[name] for name in store if name in off}
        if "stall_share" in row.get("on", {}):
            found["stall_share"] = row["on"]["stall_share"]
        found |= {name: row.get(name) for name in ("hit_rate", "share_of_full_kv", "share_at_depth", "cold")}
        rows.add(**key, method=method, **found)
    for name, reason in result["left_out"].items():
        rows.add(**key, method=name, left_out=reason)


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """A row for each context, batch and method."""
    for tokens in arguments.context:
        for batch in arguments.batch:
            if rows.has(tokens=tokens, batch=batch):
                continue
            result = measured(arguments, tokens, batch, tuple(arguments.methods), memory=Fraction(arguments.memory))
            add_rows(rows, result, tokens=tokens, batch=batch)
    ran = [row for row in rows.rows if "left_out" not in row]
    return {
        name: {f"{row['tokens']} x {row['batch']}": row["tokens_per_second_on"] for row in ran if row["method"] == name}
        for name in arguments.methods
    }


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Figure) -> None:
    """Tokens a second over the batch, a panel a context."""
    ran = [row for row in rows if "left_out" not in row]
    contexts = sorted({row["tokens"] for row in ran})
    panels = figure.subplots(1, max(1, len(contexts)), squeeze=False, sharey=True)[0]
    for axes, tokens in zip(panels, contexts, strict=False):
        for name in dict.fromkeys(row["method"] for row in ran):
            points = sorted(
                (row["batch"], row["tokens_per_second_on"])
                for row in ran
                if row["method"] == name and row["tokens"] == tokens
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
        axes.set_title(f"{tokens:,} tokens")
        axes.set_xlabel("batch")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    panels[0].set_ylabel("tokens/s, all sequences")
    panels[0].legend()


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 16384, 24576, 32768])
    methods = [OWN, FULL, "InfiniGen*", "InfiniGen*+ru", "ShadowKV"]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=methods)
    parser.add_argument("--memory", default="1/13", help="of the full KV")


QUICK = {"steps": 2, "reload_steps": 1, "repetitions": 1}

STUDY = Study(
    "speed_throughput",
    "Tokens a second over batch and context: how does each method grow?",
    run,
    plot,
    arguments,
    {**QUICK, "batch": [1, 2], "context": [8192], "methods": [OWN, FULL]},
)

if __name__ == "__main__":
    main(STUDY)
