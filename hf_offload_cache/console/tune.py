"""`hf-offload-cache tune`: measure model, machine and disk, and write the fields that suit them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .arguments import (
    add_cache_argument,
    add_field_argument,
    add_model_arguments,
    check_writable,
    new_console,
    positive,
    read_text,
)


class SampleFileError(OSError):
    """The sample text is missing, unreadable, or not UTF-8 text."""


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser("tune", help="choose the fields that suit this model, machine and disk")
    parser.description = (
        "Measure on sample text, this disk and this machine what the fields of a cache cost and keep; write the best "
        "for each batch size and context as JSON, for DiskSwapCache(model, config=FILE) or the cache that was named."
    )
    add_model_arguments(parser)
    add_cache_argument(parser)
    add_field_argument(parser)
    add = parser.add_argument
    add("--memory", metavar="SIZE", required=True,
        help="of the cache at the largest context and batch: bytes, 300MiB, or 1/13 of the full KV")  # fmt: skip
    add("--context", metavar="N", type=positive, required=True, help="tokens a sequence, the most")
    add("--batch", metavar="N", type=positive, default=1, help="sequences, the most (default: %(default)s)")
    add("--out", metavar="FILE", type=Path, required=True, help="the JSON; an adapter of truncated keys goes beside it")
    add("--text", metavar="FILE", type=Path, help="sample text, UTF-8 (default: Python's help texts)")
    add("--compare", action="store_true",
        help="measure all caches in this memory instead, for offload_cache(measured=FILE) and plan --measured")
    add("--quick", action="store_true", help="under 3 minutes for a small model instead of under 30, and coarser")
    parser.set_defaults(run=run, parser=parser)
    parser.set_defaults(argument_names={"max_context": "--context", "max_batch": "--batch", "texts": "--text"})


def run(arguments: argparse.Namespace) -> int:
    text = None if arguments.text is None else read_text(arguments.text, "--text", SampleFileError)
    check_writable(arguments.out, "--out")


    from ..tuning.tuner import tunable, tune
    from . import named_cache

    named_cache.check_folder(arguments.path)
    if arguments.compare:
        return _compare(arguments, text)
    measured = tunable(arguments.cache or named_cache.default_for(None))
    console = new_console(stderr=True)
    console.print(f"loading {arguments.model or 'the default model'} ...", highlight=False)
    model, tokenizer = named_cache.load(arguments.model, arguments.dtype, arguments.device)
    tuned = tune(
        model, tokenizer, cache=measured, memory=arguments.memory, max_context=arguments.context,
        max_batch=arguments.batch, texts=text, path=arguments.path, quick=arguments.quick, **dict(arguments.fields),
    )  # fmt: skip
    tuned.save(arguments.out)
    console.print(_table(tuned.rows))
    for left in tuned.values["left_out"]:
        console.print(f"left out: {left['why']}", highlight=False)
    print(f"wrote {arguments.out} ({len(tuned.rows)} rows, {tuned.values['seconds']:.0f} s)", file=sys.stderr)
    return 0


def _compare(arguments: argparse.Namespace, text: str | None) -> int:
    """All caches; the table goes to stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..errors import ConfigError
    from ..tuning.measure_caches import measure_caches
    from . import named_cache
    from .arguments import write_json

    for name, given in (("--cache", arguments.cache is not None), ("--batch", arguments.batch != 1)):
        if given:
            raise ConfigError(f"{name} and --compare: all caches are measured, of one sequence: leave one of both out")
    model, tokenizer = named_cache.load(arguments.model, arguments.dtype, arguments.device)
    quick: dict[str, Any] = {"samples": 1, "steps": 24} if arguments.quick else {}
    found = measure_caches(
        model, tokenizer, memory=arguments.memory, max_context=arguments.context, texts=text, path=arguments.path,
        **quick, **dict(arguments.fields),
    )  # fmt: skip
    write_json(arguments.out, found)
    table = Table("cache", box=SIMPLE_HEAD, title=f"{arguments.context:,} tokens, {arguments.memory}")
    for name in ("num_selected", "KL, nats", "perplexity ratio", "ms a step"):
        table.add_column(name, justify="right")
    for cell in found["cells"]:
        step = f"{1e3 * cell['seconds']:.1f}"
        wider = str(cell.get("num_selected", ""))
        table.add_row(cell["cache"], wider, f"{cell['kl']:.4f}", f"{cell['perplexity']:.4f}", step)
    console = new_console(highlight=False)
    console.print(table)
    for refused in found["refused"]:
        console.print(f"left out: {refused}", markup=False)
    if found["reference"] != "DynamicCache":
        console.print(f"distances are from {found['reference']}, which says what DynamicCache would")
    if len(found["turns"]) > 1:
        groups = "; then ".join(", ".join(names) for names in found["turns"])
        console.print(f"not all in turns, since memory does not hold all at once: {groups}")
    print(f"wrote {arguments.out}", file=sys.stderr)
    return 0


def _table(rows: list[dict[str, Any]]) -> Any:
    """The corners of the grid: least and most of batch and context, as columns of one table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    tried = "tried" in rows[0]
    cells_of, means = (_tried, "step: ms at batch 1") if tried else (_solved, "I/O, block: ms a layer")
    keys = "" if tried else "keys: bytes of codes, or rank; "
    table = Table(title=f"smallest and largest ({keys}{means}; memory: MiB)", box=SIMPLE_HEAD, collapse_padding=True)
    for name in ("batch", "context", *cells_of(rows[0]), "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    ends = [{row[name] for row in rows} for name in ("batch", "context")]
    for row in rows:
        if all(row[name] in (min(end), max(end)) for name, end in zip(("batch", "context"), ends, strict=True)):
            memory = f"{row['planned_bytes'] / 2**20:.1f}"
            table.add_row(str(row["batch"]), str(row["context"]), *cells_of(row).values(), memory)
    return table


def _solved(row: dict[str, Any]) -> dict[str, str]:
    """Of a row that the solver decided."""
    fields = row["fields"]
    return {
        "group": str(fields["group_size"]),
        "keys": _size(fields),
        "reuse": str(fields["reuse_capacity"]),
        "hits": f"{row['reuse_rate']:.0%}",
        "I/O": f"{row['io_seconds'] * 1e3:.2f}",
        "block": f"{row['model_seconds'] * 1e3:.2f}",
        "hidden": f"{row['hidden_share']:.0%}" + ("" if row["hidden"] else " (no)"),
    }


def _tried(row: dict[str, Any]) -> dict[str, str]:
    """Of a row that was found by trying."""
    return {
        "tried": ", ".join(f"{name}={value}" for name, value in row["tried"].items()) or "(for_budget's)",
        "step": f"{row['seconds'] * 1e3:.0f}",
        "KL, text": f"{row['text_distance']:.3f}",
        "KL, recital": f"{row['recital_distance']:.3f}",
    }


def _size(fields: dict[str, Any]) -> str:
    """Of compact keys."""
    return f"{fields['summary_bytes']} B" if "summary_bytes" in fields else f"rank {fields['rank']}"
