"""Time of a decoding step by phase, as a table, from the trace that the cache itself writes.

`python -m eval.phases` decodes real text with a real model. A phase is what it takes beyond the phases within it, of
all layers together; medians over the steps after the first ones. A trace adds some 2 ms to a step of 30 layers.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import sample_ids

from .bench_text import FIRST, SHORT, TOKENS, USUAL, Contender, text_rows
from .needles import parse_setting
from .studies.common import Options, one_run
from .studies.contexts import open_cache, prefill, replay

MEANS = {
    "decode": "embedding, logits, and what belongs to no block", "layer": "norms and hooks around attention",
    "attention": "projections, rotary embedding, taking over the call",
    "append": "the step's keys and values into the tail", "summarise": "compact keys of groups that left the tail",
    "rank": "scores of all tokens, and the choice", "gather": "slots, staging and the view",
    "read": "requests of what is missing", "wait": "until it is there",
    "attend": "the model's attention over what was gathered",
    "look ahead": "a guess of the next layer's choice, and its requests", "rest of block": "norms and feed-forward",
}  # fmt: skip
"""Meaning of each phase."""


def phases(events: list[dict[str, Any]], first: int = FIRST) -> dict[str, float]:
    """Milliseconds by phase of a trace's `events`, the median over decoding steps but the first ones; "step" is all."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") == "compute"]
    spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    steps: list[dict[str, float]] = []
    within: list[tuple[float, str, dict[str, float]]] = []  # when what is open ends, its name, and its step
    for event in spans:
        start, duration = float(event["ts"]), float(event["dur"])
        name = re.sub(r"^layer \d+$", "layer", event["name"])
        while within and within[-1][0] <= start + 1e-3:  # both were rounded
            within.pop()
        if name in ("decode", "prefill", "step"):
            own: dict[str, float] = defaultdict(float)
            own["step"] = duration
            if name == "decode":
                steps.append(own)
        elif within:
            own = within[-1][2]
            own[within[-1][1]] -= duration
        else:
            continue
        own[name] += duration
        within.append((start + duration, name, own))
    settled = steps[first:]
    names = dict.fromkeys(name for step in settled for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in settled) / 1e3 for name in names}


OPTIONS: Options = {
    "tokens": (TOKENS, "tokens of history"),
    "steps": (FIRST + 64, "decoding steps"),
    "text": (Path, "UTF-8 file (default: Python's help texts)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """A table by phase of a step of DiskSwapCache on real text."""
    given = one_run(main.__doc__, OPTIONS, argv, settings=True)
    model, tokenizer = load_default_model(torch.bfloat16)
    text = None if given.text is None else given.text.read_text(encoding="utf-8")
    ids = text_rows(sample_ids(text, tokenizer)[0], 1, given.tokens + given.steps + 1)
    alone = Contender("", model, DynamicCache(config=model.config), ids, SHORT)
    alone.prefill(SHORT)
    print(f"reading {given.tokens:,} tokens", file=sys.stderr, flush=True)
    context = prefill(model, ids[:, : given.tokens])
    found: dict[str, dict[str, float]] = {}
    for name, fields in (dict(map(parse_setting, given.set)) or USUAL).items():
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            own = {**fields, "trace": str(trace)}
            with open_cache(model, own, given.tokens + given.steps, given.path) as cache:
                replay(cache, model, context)
                one = Contender(name, model, cache, ids, given.tokens)
                for _ in range(given.steps):
                    one.step()
            found[name] = phases(json.loads(trace.read_text()))
    for _ in range(given.steps):
        alone.step()
    model_alone = 1e3 * statistics.median(alone.seconds[FIRST:])
    table = Table(title=f"ms a step, {given.tokens:,} tokens; the model alone {model_alone:.1f}")
    table.add_column("phase")
    for name in found:
        table.add_column(name, justify="right")
    table.add_column("what it is")
    for phase, meaning in {**MEANS, "step": "all of it"}.items():
        values = [row.get(phase, 0.0) for row in found.values()]
        if any(values):
            table.add_row(phase, *(f"{value:.1f}" for value in values), meaning)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
