"""`hf-offload-cache ls` and `rm`: the contexts of a folder, and taking some away. What they say goes to stdout."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import age, cell, complain, printable, stdout_console

if TYPE_CHECKING:
    from ..contexts.listing import Entry

_KEYS = """\
--json prints one object: folder; total_bytes (of disk, what several share counted once); contexts, those used last
first, each with name, path, cache, tokens (a sequence), sequences, bytes (of disk), freed_bytes (what removing it
frees), encrypted, created and last_used (ISO 8601), damage (text, or null). Of a context whose manifest cannot be read
cache, tokens, sequences, encrypted and created are null.

Damage is what manifest and sizes tell; `verify` reads a context in full."""


def add(verbs: Any) -> None:
    """Declare the verbs among the console's `verbs`."""
    parser = verbs.add_parser(
        "ls", help="the contexts in a folder", epilog=_KEYS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = "List the contexts that lie directly in a folder, those used last first."
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON instead (see below)")
    parser.set_defaults(run=list_contexts, parser=parser)

    parser = verbs.add_parser("rm", help="remove contexts")
    parser.description = (
        "Remove the contexts named, or with --folder and --max-bytes the least recently used ones of a folder, until "
        "the rest take no more. Asks nothing. Refuses what is no context. Caches that have one open keep it. Exit "
        "codes: 0 all are gone, 1 the disk failed, 2 something was no context; the others are removed all the same."
    )
    add = parser.add_argument
    add("directories", metavar="DIR", type=Path, nargs="*")
    add("--folder", metavar="FOLDER", type=Path, help="whose least recently used contexts go")
    add("--max-bytes", metavar="SIZE", help="that the contexts in --folder may take, e.g. 20GB")
    add("--wipe", action="store_true", help="overwrite what no other context shares before it goes")
    parser.set_defaults(run=remove_contexts, parser=parser)


def list_contexts(arguments: argparse.Namespace) -> int:
    from ..contexts.listing import listing, total_bytes

    found = listing(arguments.folder)
    if arguments.json:
        contexts = [_values(entry) for entry in found]
        values = {"folder": str(arguments.folder), "total_bytes": total_bytes(found), "contexts": contexts}
        print(json.dumps(values, indent=2))
    else:
        _print(found, total_bytes(found))
    return 0


def _values(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": str(entry.path),
        "cache": entry.cache,
        "tokens": entry.tokens,
        "sequences": entry.batch,
        "bytes": entry.bytes,
        "freed_bytes": entry.freed_bytes,
        "encrypted": entry.encrypted,
        "created": entry.created,
        "last_used": entry.last_used.isoformat(),
        "damage": entry.damage,
    }


def _print(found: list[Entry], total: int) -> None:
    from rich.table import Table

    from ..report.report import size_text

    table = Table(box=None, pad_edge=False)
    for name in ("context", "cache", "model", "tokens", "on disk", "freed by rm", "used", ""):
        right = name in ("tokens", "on disk", "freed by rm", "used")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for entry in found:
        manifest = entry.manifest
        what = ("?", "?", "?")
        if manifest is not None:
            tokens = f"{manifest.tokens:,}" if manifest.batch == 1 else f"{manifest.batch} x {manifest.tokens:,}"
            what = (manifest.cache, manifest.identity.get("config.model_type", "?"), tokens)
        used = age((datetime.now(UTC) - entry.last_used).total_seconds()) + " ago"
        state = f"damaged: {entry.damage}" if entry.damage is not None else "encrypted" if entry.encrypted else ""
        sizes = (size_text(entry.bytes), size_text(entry.freed_bytes))
        table.add_row(*map(cell, (entry.name, *what, *sizes, used, state)))
    console = stdout_console()
    if found:
        console.print(table)
    print(f"{len(found)} contexts, {size_text(total)}")


def remove_contexts(arguments: argparse.Namespace) -> int:
    whole_folder = arguments.folder is not None or arguments.max_bytes is not None
    if whole_folder and (arguments.directories or arguments.folder is None or arguments.max_bytes is None):
        arguments.parser.error("--folder and --max-bytes go together, and without DIR")
    if not whole_folder and not arguments.directories:
        arguments.parser.error("name the contexts to remove, or give --folder and --max-bytes")
    return _evict(arguments) if whole_folder else _remove(arguments)


def _remove(arguments: argparse.Namespace) -> int:
    from ..contexts.removal import remove
    from ..errors import ContextError, StoreError

    code = 0
    for directory in arguments.directories:
        try:
            _say(directory, remove(directory, wipe=arguments.wipe))
        except (ContextError, StoreError) as error:
            complain(error, arguments)
            code = max(code, 1 if isinstance(error, StoreError) else 2)
    return code


def _evict(arguments: argparse.Namespace) -> int:
    from ..config import parse_size
    from ..contexts.listing import evict
    from ..report.report import size_text

    done = evict(arguments.folder, parse_size(arguments.max_bytes, "--max-bytes"), wipe=arguments.wipe)
    for entry, freed in done.removed:
        _say(entry.path, freed, "" if entry.damage is None else f" (it was damaged: {entry.damage})")
    for _, error in done.refused:
        complain(error, arguments)
    print(f"freed {size_text(sum(freed for _, freed in done.removed))}; what stays takes {size_text(done.held_bytes)}")
    return 1 if done.refused else 0


def _say(path: Path, freed: int, note: str = "") -> None:
    from ..report.report import size_text

    print(printable(f"removed {path}, which freed {size_text(freed)}{note}"))
