"""`hf-offload-cache verify`: whether every byte of a saved context is what was written. Findings go to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import cell, stdout_console

if TYPE_CHECKING:
    from ..contexts.verify import VerifyResult

_KEYS = """\
--json prints one object: path, whole (true or false), files, records and bytes (that were read), findings: each with
kind, file, part, records (numbers in the layer) and problem. Kinds: damaged, missing; and, of a context that is whole
all the same, foreign (a file that is not the context's) and exposed (others may read it).

Exit codes: 0 whole, 1 damaged or something is missing, 2 no context, or not the right key."""
_SHOWN = 20
"""Records that a row of the table numbers."""


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser(
        "verify", help="check a saved context", epilog=_KEYS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = "Read a saved context in full and list all that is wrong with it. Needs no model."
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path)
    add("--key", metavar="FILE", type=Path, help="of an encrypted context")
    add("--json", action="store_true", help="print JSON instead (see below)")
    parser.set_defaults(run=run, parser=parser, argument_names={"encryption_key": "--key"})


def run(arguments: argparse.Namespace) -> int:
    """0: whole; 1: not. Raises what `contexts.verify.verify` does."""
    from ..contexts.verify import verify
    from ..report.progress import Progress

    with Progress("verify", unit="B") as bar:
        result = verify(arguments.directory, key=arguments.key, progress=bar.update)
    if arguments.json:
        findings = [dataclasses.asdict(finding) for finding in result.findings]
        values = {"path": result.path, "whole": result.whole, "files": result.files, "records": result.records}
        print(json.dumps({**values, "bytes": result.bytes, "findings": findings}, indent=2))
    else:
        _print(result)
    return 0 if result.whole else 1


def _print(result: VerifyResult) -> None:
    from rich.table import Table

    from ..report.report import size_text

    console = stdout_console()
    if result.findings:
        table = Table(box=None, pad_edge=False)
        for name in ("", "part", "file", "records", "problem"):
            table.add_column(name, overflow="fold")
        for finding in result.findings:
            table.add_row(
                *map(cell, (finding.kind, finding.part, finding.file, _numbers(finding.records), finding.problem))
            )
        console.print(table)
    read = f"{result.files} files, {result.records:,} records, {size_text(result.bytes)}"
    print(f"{'whole' if result.whole else 'DAMAGED'}: {read} read")


def _numbers(records: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, records[:_SHOWN]))
    return shown if len(records) <= _SHOWN else f"{shown} and {len(records) - _SHOWN:,} more"
