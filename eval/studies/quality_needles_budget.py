"""How small may the memory budget be before needles are lost that `DynamicCache` finds?"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch

from hf_offload_cache.console import build_prompt, prefilled_tokens
from hf_offload_cache.core import OffloadCache
from hf_offload_cache.errors import BudgetError

from ..needles import Needle, make_needles
from .common import Rows, Study, judged, main
from .contexts import MODEL, Context, answer, default_model, open_cache, peak_share, prefill, replay
from .teacher_forced import Fields, contenders_of

PROMISED = "1/13"
"""Share of the full KV at which at most one needle in twenty may be lost."""
REFERENCE = "DynamicCache"
"""Name of the contender without fields, which all studies ask as well."""
NEW_TOKENS = 24
"""Most tokens of an answer."""


def ask(
    arguments: argparse.Namespace, rows: Rows, contenders: dict[str, Fields], needles: Iterable[Needle], model: Any,
    tokenizer: Any, **key: Any,
) -> None:  # fmt: skip
    """A row for each needle and contender, `DynamicCache` first; `key` tells these needles' rows from others. A budget
    that is too small is a row with "refused" and no answer. With `arguments.known`, what `DynamicCache` does not answer
    is asked of nobody else."""
    everyone: dict[str, Fields | None] = {REFERENCE: None, **contenders}
    for sample, needle in enumerate(needles):
        left = {name: one for name, one in everyone.items() if not rows.has(sample=sample, name=name, **key)}
        known = rows.where(sample=sample, name=REFERENCE, **key)
        if not left or (getattr(arguments, "known", False) and known and not known[0]["answered"]):
            continue
        ids = build_prompt(tokenizer, needle.document, needle.question).to(model.device)
        context = prefill(model, ids[:, : prefilled_tokens(ids.shape[1])])
        for name, one in left.items():
            row: dict[str, Any] = {"sample": sample, "name": name, **key, "depth": needle.depth}
            row |= {"prompt": ids.shape[1], "code": needle.code}
            room = ids.shape[1] + NEW_TOKENS
            try:
                with open_cache(model, one, room, arguments.path) as cache:
                    row |= _ask_one(cache, model, tokenizer, context, ids, needle.code)
            except BudgetError as error:
                row |= {"answered": None, "refused": str(error)}
            rows.add(**row)
            if name == REFERENCE and not row["answered"] and getattr(arguments, "known", False):
                break


def _ask_one(cache: Any, model: Any, tokenizer: Any, context: Context, ids: torch.Tensor, code: str) -> dict[str, Any]:
    replay(cache, model, context)
    text = answer(model, tokenizer, cache, ids, NEW_TOKENS)
    row: dict[str, Any] = {"answered": code in text, "text": text}
    if isinstance(cache, OffloadCache):
        report = cache.report()
        row |= {"hit_rate": report.hit_rate, "selected_fraction": report.selected_fraction}
        row |= peak_share(cache)
        row["num_selected"] = cache.config.num_selected
    return row


def lost(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By contender: answers, needles lost of those that `DynamicCache` answered, and means. A budget too small for the
    context counts only as "refused" ("of_refused": where `DynamicCache` answered)."""
    known = {_needle(row) for row in rows if row["name"] == REFERENCE and row["answered"]}
    table = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        everything = [row for row in rows if row["name"] == name]
        own = [row for row in everything if row["answered"] is not None]
        missed = sum(_needle(row) in known and not row["answered"] for row in own)
        found: dict[str, Any] = {"asked": len(own), "answered": sum(row["answered"] for row in own)}
        of = len(known & {_needle(row) for row in own})
        found |= {"lost": missed, "of": of, "lost_share": missed / of if of else None}
        found["refused"] = len(everything) - len(own)
        found["of_refused"] = len(known & {_needle(row) for row in everything if row["answered"] is None})
        for field in ("hit_rate", "selected_fraction", "peak_share"):
            values = [row[field] for row in own if row.get(field) is not None]
            found[field] = sum(values) / len(values) if values else None
        table[name] = found
    return table


def _needle(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["prompt"], row["sample"], row["code"], row.get("planted")


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    model, tokenizer = default_model(loaded, arguments.model)
    contenders = contenders_of(arguments, {share: {"memory": share} for share in arguments.memory})
    needles = make_needles(tokenizer, arguments.samples, arguments.tokens, 0, arguments.needles)
    ask(arguments, rows, contenders, needles, model, tokenizer)
    table = lost(rows.rows)
    share = table[PROMISED]["lost_share"] if PROMISED in table else None
    figure = f"needles lost at {PROMISED}, {arguments.tokens} tokens, {arguments.needles} in each document"
    return {"contenders": table, "must_reach": [judged(figure, share, most=0.05)]}


STUDY = Study(
    "quality_needles_budget", __doc__, run,
    {
        "tokens": (7168, "tokens of a document"),
        "samples": (20, "documents"),
        "needles": (1, "needles in a document, of which one is asked for"),
        "known": (False, "ask only what DynamicCache answers"),
        "memory": (["1/4", "1/6.5", "1/13", "1/20", "1/34"], "memory budgets: shares of the full KV, or sizes"),
        **MODEL,
    },
    {"tokens": 1536, "samples": 3, "memory": ["1/4", "1/13"]}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
