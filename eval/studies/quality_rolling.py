"""What is the rolling buffer (section 3.4.1) worth? Decoding with it and without: KL, agreement and planted facts.

Without it the latest tokens that fill no sealed group are not attended to, but for the current one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_offload_cache.console import load_default_model

from ..needles import make_needles
from .common import Rows, Study, main
from .found_facts import ask, lost
from .teacher_forced import Contender, compare, means, text_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=48, samples=4)
    parser.add_argument("--facts", type=int, default=6, help="documents with a planted fact; 0: none")
    parser.add_argument("--fact-tokens", type=int, default=4096, help="of such a document")
    parser.add_argument("--recent", type=int, nargs="+", default=[32, 1], help="num_recent; 1: unsealed tokens alone")


def run(arguments: argparse.Namespace, rows: Rows, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    if model is None:
        model, tokenizer = load_default_model(torch.bfloat16)
    contenders = {
        f"{'on' if rolling else 'off'}, {recent} recent": Contender({"num_recent": recent}, rolling)
        for recent in arguments.recent
        for rolling in (True, False)
    }
    compare(arguments, rows, contenders, model, tokenizer)
    texts = [row for row in rows.rows if "kl" in row]
    needles = make_needles(tokenizer, arguments.facts, arguments.fact_tokens)
    ask(arguments, rows, contenders, needles, model, tokenizer, facts=True)
    return {"contenders": means(texts), "facts": lost(rows.where(facts=True))}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    table = summary["contenders"]
    colours = ["tab:blue" if name.startswith("on") else "tab:orange" for name in table]
    ticks = {"kl": "KL to DynamicCache, nats a token", "top1": "top-1 agreement", "answered": "planted facts answered"}
    if not summary["facts"]:
        ticks["answered"] = "planted facts: none asked"
    for axes, (field, label) in zip(figure.subplots(1, 3), ticks.items(), strict=True):
        source = summary["facts"] if field == "answered" else table
        heights = [source[name][field] if name in source else 0 for name in table]
        bars = axes.bar(range(len(table)), heights, color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.set_xticks(range(len(table)), [name.replace(", ", "\n") for name in table])
        axes.set_title(label, fontsize="medium")
        axes.margins(y=0.1)


STUDY = Study(
    "quality_rolling", __doc__, run, plot, arguments,
    {"tokens": 1280, "steps": 6, "samples": 1, "facts": 1, "fact_tokens": 1024}, size=(10.0, 4.0),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
