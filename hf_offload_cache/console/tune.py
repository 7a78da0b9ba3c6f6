"""`hf-offload-cache tune`: measure model, machine and disk, and write the fields that suit them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .arguments import (
    add_cache_arguments,
    add_model_arguments,
    add_verb,
    check_writable,
    new_console,
    positive,
    read_text,
    write_json,
)


class SampleFileError(OSError):
    """The sample text is missing, unreadable, or not UTF-8 text."""


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "tune", run, "choose the fields that suit this model, machine and disk",
        "Measure what a cache's fields cost and keep, on sample text, on this disk and machine. Write the best fields "
        "for each batch size and context as JSON, for DiskSwapCache(model, config=FILE) or the cache that you name.",
        max_context="--context", max_batch="--batch", texts="--text",
    )  # fmt: skip
    add_model_arguments(parser)
    add_cache_arguments(parser)
    add = parser.add_argument
    add("--memory", metavar="SIZE", required=True,
        help="memory limit at the largest context and batch: bytes, 300MiB, or 1/13 of the full KV cache")  # fmt: skip
    add("--context", metavar="N", type=positive, required=True, help="largest context, in tokens per sequence")
    add("--batch", metavar="N", type=positive, default=1, help="largest batch, in sequences (default: %(default)s)")
    add("--out", metavar="FILE", type=Path, required=True,
        help="JSON file to write; an adapter of truncated keys is written next to it")  # fmt: skip
    add("--text", metavar="FILE", type=Path, help="sample text, UTF-8 (default: Python's help texts)")
    add("--compare", action="store_true",
        help="measure all caches at this memory limit instead, for offload_cache(measured=FILE) and plan --measured")
    add("--quick", action="store_true",
        help="coarser: under 3 minutes instead of under 30 for a small model")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    text = None if arguments.text is None else read_text(arguments.text, "--text", SampleFileError)
    check_writable(arguments.out, "--out")

    from . import named_cache

    named_cache.check_folder(arguments.path)
    return _compare(arguments, text) if arguments.compare else _tune(arguments, text)


def _tune(arguments: argparse.Namespace, text: str | None) -> int:
    from ..tuning.tuner import tunable, tune
    from . import named_cache

    cache = tunable(arguments.cache or named_cache.default_for(None))
    model, tokenizer = named_cache.load_for(arguments)
    tuned = tune(
        model, tokenizer, cache=cache, memory=arguments.memory, max_context=arguments.context,
        max_batch=arguments.batch, texts=text, path=arguments.path, quick=arguments.quick, **dict(arguments.fields),
    )  # fmt: skip
    tuned.save(arguments.out)
    console = new_console(stderr=True)
    console.print(_corners(tuned.rows))
    for left_out in tuned.values["left_out"]:
        console.print(f"left out: {left_out['why']}", highlight=False)
    print(f"wrote {arguments.out} ({len(tuned.rows)} rows, {tuned.values['seconds']:.0f} s)", file=sys.stderr)
    return 0


def _compare(arguments: argparse.Namespace, text: str | None) -> int:
    """Measure all caches; the table goes to stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..tuning.measure_caches import measure_caches
    from . import named_cache

    for name, given in (("--cache", arguments.cache is not None), ("--batch", arguments.batch != 1)):
        if given:
            raise ConfigError(f"{name} and --compare: all caches are measured, one sequence each: leave one out")
    model, tokenizer = named_cache.load_for(arguments)
    quick: dict[str, Any] = {"samples": 1, "steps": 24} if arguments.quick else {}
    measured = measure_caches(
        model, tokenizer, memory=arguments.memory, max_context=arguments.context, texts=text, path=arguments.path,
        **quick, **dict(arguments.fields),
    )  # fmt: skip
    write_json(arguments.out, measured, "--out")
    table = Table("cache", box=SIMPLE_HEAD, title=f"{arguments.context:,} tokens, {arguments.memory}")
    for name in ("KL, nats", "perplexity ratio", "ms per step"):
        table.add_column(name, justify="right")
    for cell in measured["cells"]:
        figures = f"{cell['kl']:.4f}", f"{cell['perplexity']:.4f}", f"{1e3 * cell['seconds']:.1f}"
        table.add_row(cell["cache"], *figures)
    console = new_console(highlight=False)
    console.print(table)
    for reason in measured["refused"]:
        console.print(f"left out: {reason}", markup=False)
    if measured["reference"] != "DynamicCache":
        console.print(f"distances are from {measured['reference']}, whose tokens are DynamicCache's")
    if len(measured["turns"]) > 1:
        groups = "; then ".join(", ".join(names) for names in measured["turns"])
        console.print(f"not all in turns, because memory cannot hold all at once: {groups}")
    print(f"wrote {arguments.out}", file=sys.stderr)
    return 0


def _corners(rows: list[dict[str, Any]]) -> Any:
    """A table of the rows with the smallest and largest batch and context."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    tried = "tried" in rows[0]
    cells_of, means = (_tried, "step: ms at batch 1") if tried else (_solved, "I/O, block: ms per layer")
    keys = "" if tried else "keys: bytes of codes, or rank; "
    table = Table(title=f"smallest and largest ({keys}{means}; memory: MiB)", box=SIMPLE_HEAD, collapse_padding=True)
    for name in ("batch", "context", *cells_of(rows[0]), "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    sizes = {name: [row[name] for row in rows] for name in ("batch", "context")}
    for row in rows:
        if all(row[name] in (min(values), max(values)) for name, values in sizes.items()):
            memory = f"{row['planned_bytes'] / 2**20:.1f}"
            table.add_row(str(row["batch"]), str(row["context"]), *cells_of(row).values(), memory)
    return table


def _solved(row: dict[str, Any]) -> dict[str, str]:
    """Cells of a row that the solver chose."""
    fields = row["fields"]
    return {
        "group": str(fields["group_size"]),
        "keys": f"{fields['summary_bytes']} B" if "summary_bytes" in fields else f"rank {fields['rank']}",
        "reuse": str(fields["reuse_capacity"]),
        "hits": f"{row['reuse_rate']:.0%}",
        "I/O": f"{row['io_seconds'] * 1e3:.2f}",
        "block": f"{row['model_seconds'] * 1e3:.2f}",
        "hidden": f"{row['hidden_share']:.0%}" + ("" if row["hidden"] else " (no)"),
    }


def _tried(row: dict[str, Any]) -> dict[str, str]:
    """Cells of a row that was chosen by trying."""
    return {
        "tried": ", ".join(f"{name}={value}" for name, value in row["tried"].items()) or "(for_budget's)",
        "step": f"{row['seconds'] * 1e3:.0f}",
        "KL, text": f"{row['text_distance']:.3f}",
        "KL, recital": f"{row['recital_distance']:.3f}",
    }
