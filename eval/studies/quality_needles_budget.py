"""How small may the budget be before planted facts are lost? Needles at shares of the full KV, against DynamicCache."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_offload_cache.console import load_default_model

from ..needles import make_needles
from .common import Rows, Study, judged, main
from .found_facts import REFERENCE, ask, lost
from .teacher_forced import contenders_of, setting_argument

PROMISED = "1/13"
"""Share of the full KV at which at most one fact in twenty may be lost."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=7168, help="of a document")
    parser.add_argument("--samples", type=int, default=20, help="documents")
    parser.add_argument("--facts", type=int, default=1, help="in a document, of which one is asked for")
    parser.add_argument("--seed", type=int, default=0, help="of texts and facts")
    parser.add_argument("--known", action="store_true", help="ask only what DynamicCache answers")
    shares = ["1/4", "1/6.5", "1/13", "1/20", "1/34"]
    parser.add_argument("--memory", nargs="+", default=shares, help="budgets: shares of the full KV, or sizes")
    setting_argument(parser)


def run(arguments: argparse.Namespace, rows: Rows, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    if model is None:
        model, tokenizer = load_default_model(torch.bfloat16)
    contenders = contenders_of(arguments, {share: {"memory": share} for share in arguments.memory})
    needles = make_needles(tokenizer, arguments.samples, arguments.tokens, arguments.seed, arguments.facts)
    ask(arguments, rows, contenders, needles, model, tokenizer)
    table = lost(rows.rows)
    facts = "" if arguments.facts == 1 else f", one among {arguments.facts}"
    figure = f"facts lost at {PROMISED} of the full KV, {arguments.tokens} tokens, {arguments.samples} samples{facts}"
    share = table[PROMISED]["lost_share"] if PROMISED in table else None
    return {"contenders": table, "must_reach": [judged(figure, share, most=0.05)]}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    table = {name: row for name, row in summary["contenders"].items() if name != REFERENCE}
    shares = [float("nan") if row["lost_share"] is None else 100 * row["lost_share"] for row in table.values()]
    axes.plot(range(len(table)), shares, marker="o", label="lost of those that DynamicCache answers")
    axes.axhline(5, color="grey", linestyle=":", label="1 in 20")
    axes.set_xticks(range(len(table)), table)
    of = summary["contenders"][REFERENCE]
    axes.set(xlabel="memory, of the full KV", ylabel="facts lost, %", ylim=(-2, 102))
    axes.set_title(f"DynamicCache answers {of['answered']} of {of['asked']}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()


STUDY = Study(
    "quality_needles_budget", __doc__, run, plot, arguments,
    {"tokens": 1536, "samples": 3, "memory": ["1/4", "1/13"]},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
