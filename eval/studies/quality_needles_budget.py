"""How small may the memory budget be before needles are lost that `DynamicCache` finds?"""

from __future__ import annotations

import argparse
from typing import Any

from ..needles import make_needles
from .common import Rows, Study, judged, main
from .contexts import default_model
from .found_facts import ask, lost
from .teacher_forced import contenders_of

PROMISED = "1/13"
"""Share of the full KV at which at most one needle in twenty may be lost."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    model, tokenizer = default_model(loaded)
    contenders = contenders_of(arguments, {share: {"memory": share} for share in arguments.memory})
    needles = make_needles(tokenizer, arguments.samples, arguments.tokens, arguments.seed, arguments.facts)
    ask(arguments, rows, contenders, needles, model, tokenizer)
    table = lost(rows.rows)
    share = table[PROMISED]["lost_share"] if PROMISED in table else None
    figure = f"needles lost at {PROMISED}, {arguments.tokens} tokens, {arguments.facts} in each document"
    return {"contenders": table, "must_reach": [judged(figure, share, most=0.05)]}


STUDY = Study(
    "quality_needles_budget", __doc__, run,
    {
        "tokens": (7168, "tokens of a document"),
        "samples": (20, "documents"),
        "facts": (1, "needles in a document, of which one is asked for"),
        "seed": (0, "seed of texts and needles"),
        "known": (False, "ask only what DynamicCache answers"),
        "memory": (["1/4", "1/6.5", "1/13", "1/20", "1/34"], "memory budgets: shares of the full KV, or sizes"),
    },
    {"tokens": 1536, "samples": 3, "memory": ["1/4", "1/13"]}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
