"""Rate over the tokens of a group, and how much of the device is used (KVSwap, section 6 and figure 12)."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..contenders import NO_REUSE
from ..disk import raw_rate
from ..profiles import PROFILES
from .common import Rows, Study, main
from .speed_throughput import QUICK, add_rows, common_arguments, measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """A row for each group size, without reuse; "utilisation" is the store's rate with overlap off over the device's
    best, that of raw random reads of 1 MiB."""
    profile = PROFILES[arguments.profile]
    best = profile.rate(1 << 20) if profile else raw_rate(1 << 20, arguments.path)["bytes_per_second"]
    for group in arguments.groups:
        if not rows.has(group_size=group):
            fields = {"reuse_capacity": 0, "group_size": group}
            result = measured(
                arguments, arguments.tokens, arguments.batch, (NO_REUSE,), memory=Fraction(1, 13), fields=fields
            )
            rate = result["rows"][NO_REUSE]["off"]["store_bytes_per_second"]
            add_rows(rows, result, group_size=group, utilisation=rate / best)
    return {"best_bytes_per_second": best, "utilisation": {str(r["group_size"]): r["utilisation"] for r in rows.rows}}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Figure) -> None:
    """Tokens a second over the group size, with the device's utilisation beside each point."""
    axes = figure.subplots()
    for mode in ("on", "off"):
        axes.plot(
            [row["group_size"] for row in rows], [row[f"tokens_per_second_{mode}"] for row in rows], marker="o",
            label=f"overlap {mode}",
        )  # fmt: skip
    for row in rows:
        axes.annotate(f"{row['utilisation']:.0%}", (row["group_size"], row["tokens_per_second_off"]))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens a group (share of the device's best rate beside)")
    axes.set_ylabel("tokens/s, no reuse")
    axes.legend()


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8)


STUDY = Study(
    "speed_group",
    "How do the rate and the use of the device grow with the tokens of a group?",
    run,
    plot,
    arguments,
    {**QUICK, "groups": [1, 4], "tokens": 4096, "batch": 1},
)

if __name__ == "__main__":
    main(STUDY)
