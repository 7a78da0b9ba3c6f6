"""Measurements of `eval.fidelity` as tables, and as the table that `offload_cache` chooses from."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from hf_offload_cache.registry import CACHES

from . import bench_text
from .studies.contexts import share
from .studies.quality_needles_budget import lost

_MEANS = ("kl", "top1", "perplexity", "mass", "worst", "peak_share", "attended", "hit_rate")
_HEADS = (
    "cache", "memory", "held", "KL", "same token", "perplexity", "mass", "worst layer", "needles", "ms a step",
    "KL, long output",
)  # fmt: skip
LONGEST_NEEDLES = 7168
"""Tokens of the longest context with needles: what is left of 8K is for question and answer."""
Cell = dict[str, Any]


def summarised(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """{"cells": one for each context length and contender, means over texts}."""
    cells = []
    for tokens in sorted({row["tokens"] for row in rows}):
        here = [row for row in rows if row["tokens"] == tokens]
        for name in dict.fromkeys(row["name"] for row in here):
            if name != bench_text.ALONE:
                cells.append(_cell(tokens, name, here))
    return {"cells": cells}


def _cell(tokens: int, name: str, here: list[dict[str, Any]]) -> Cell:
    cache, _, memory = name.rpartition(" ")
    cell: Cell = {"tokens": tokens, "name": name, "cache": cache or name, "memory": memory if cache else "1"}
    own = [row for row in here if row["name"] == name]
    texts = [row for row in own if row["part"] == "text"]
    for part, found in (("", texts), ("long_", [row for row in own if row["part"] == "long"])):
        if any("refused" in row for row in found):
            cell[f"{part}refused"] = True
        for field in _MEANS:
            values = [row[field] for row in found if row.get(field) is not None]
            if values:
                cell[part + field] = float(np.mean(values))
    scored = [row for row in own if row["part"] == "perplexity" and "perplexity" in row]
    if scored:  # of many more tokens than the texts'
        cell["perplexity"] = float(np.mean([row["perplexity"] for row in scored]))
        errors = [row["perplexity"] * row["uncertain"] for row in scored]  # of a ratio, by that of its logarithm
        cell["uncertain"] = float(np.linalg.norm(errors) / len(errors))
    layers = [row["layer_mass"] for row in texts if "layer_mass" in row]
    if layers:
        means = np.mean(layers, 0)
        cell |= {"layer_mass": means.tolist(), "worst": float(means.min()), "worst_layer": int(means.argmin())}
    if not cache:
        cell |= {"kl": 0.0, "top1": 1.0, "perplexity": 1.0, "peak_share": 1.0}
    asked = lost([row for row in here if row["part"] == "needles"])
    if name in asked:
        own_of, beyond = asked[name]["of"], asked[name]["of_refused"]
        cell |= {"needles_refused": beyond} if beyond else {}
        if own_of:  # what was refused was not found; where all was, nothing is known
            cell |= {"found": own_of - asked[name]["lost"], "known": own_of + beyond}
            cell["needle_tokens"] = min(tokens, LONGEST_NEEDLES)
    for row in own:
        if row["part"] == "speed":
            cell |= {"seconds": row["median_seconds"], "quartiles": row["quartiles"]}
    return cell


def _number(cell: Cell, field: str, digits: int) -> str:
    return f"{cell[field]:.{digits}f}" if field in cell else ""


def markdown(summary: dict[str, Any]) -> str:
    """A table for each context length, for people, of the columns of which anything was measured there; a perplexity
    of many tokens has its standard error."""
    file = io.StringIO()
    console = Console(file=file, width=200)
    for tokens in dict.fromkeys(cell["tokens"] for cell in summary["cells"]):
        console.print(f"## {tokens:,} tokens\n")
        rows = []
        for cell in (cell for cell in summary["cells"] if cell["tokens"] == tokens):
            perplexity = _number(cell, "perplexity", 4)
            if "uncertain" in cell:
                perplexity += f" ± {cell['uncertain']:.4f}"
            held = f"1/{1 / cell['peak_share']:.1f}" if cell.get("peak_share") else ""
            needles = f"{cell['found']} of {cell['known']}" if "found" in cell else ""
            if beyond := cell.get("needles_refused"):
                needles = f"{needles} ({beyond} refused)" if needles else "refused"
            step = f"{1e3 * cell['seconds']:.0f}" if "seconds" in cell else ""
            rows.append((
                cell["cache"], cell["memory"], "refused" if cell.get("refused") else held, _number(cell, "kl", 4),
                _number(cell, "top1", 3), perplexity, _number(cell, "mass", 3),
                _number(cell, "worst", 2), needles, step, "refused" if cell.get("long_refused") else
                _number(cell, "long_kl", 4),
            ))  # fmt: skip
        table = Table(box=box.MARKDOWN)
        shown = [any(column) for column in zip(*rows, strict=True)]
        for head in itertools.compress(_HEADS, shown):
            table.add_column(head, no_wrap=True)
        for row in rows:
            table.add_row(*itertools.compress(row, shown))
        console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def shipped(summary: dict[str, Any]) -> dict[str, Any]:
    """Values that the choice of a cache depends on, by context length and share of memory. Needles are of all
    lengths at which each that is compared there was asked, and not refused in all, of those that were at any: a dozen
    of one tell little."""
    kept = ("tokens", "cache", "memory", "kl", "perplexity", "seconds", "long_kl", "long_perplexity")
    cells = [cell for cell in summary["cells"] if cell["cache"] in (*CACHES, "DynamicCache")]
    asked: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in cells:
        if "known" in cell:
            asked.setdefault((cell["cache"], cell["memory"]), {})[cell["tokens"]] = cell
    found = []
    for cell in cells:
        here = {field: cell[field] for field in kept if field in cell}
        row = {field: float(f"{own:.4g}") if isinstance(own, float) else own for field, own in here.items()}
        if len(row) == 3:
            continue
        memory, tokens = cell["memory"], cell["tokens"]
        compared = {one["cache"] for one in cells if (one["memory"], one["tokens"]) == (memory, tokens) and "kl" in one}
        lengths = [asked[cache, memory].keys() for cache in compared if (cache, memory) in asked]
        own = asked.get((cell["cache"], memory), {})
        alike = set(own).intersection(*lengths) if lengths else set()
        if alike:
            row |= {field: sum(own[length][field] for length in alike) for field in ("found", "known")}
            row["needle_tokens"] = sorted(own[length]["needle_tokens"] for length in alike)
        found.append({**row, "memory": share(memory)})
    return {"cells": found}
