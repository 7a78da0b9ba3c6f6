"""`hf-offload-cache inspect`: what a saved context is of, and what it takes. Tables and text go to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import age, cell, printable, stdout_console

if TYPE_CHECKING:
    from ..contexts.listing import Entry

_KEYS = """\
--json prints one object: path, damage (text, or null), cache, tokens (a sequence), sequences, layers (an object: kind
to number), record_bytes, state_bytes, disk_bytes (all files), shared_bytes (of them, what has other names too),
freed_bytes (what removing it frees), created (ISO 8601), last_used, age_seconds, library, format_version, encrypted,
config, identity; with --text also text (a list, a string a sequence).

Exit codes: 0 nothing is wrong as far as manifest and sizes tell (`verify` reads all of it), 1 damaged, 2 no context."""


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser(
        "inspect", help="what a saved context holds", epilog=_KEYS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = (
        "Show what a saved context is of and what it takes. Of its text nothing, unless --text asks for it."
    )
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path)
    add("--text", action="store_true", help="print the text that it holds, control characters as escapes")
    add("--model", metavar="ID_OR_PATH", help="whose tokenizer --text takes (default: SmolLM2-135M-Instruct's)")
    add("--key", metavar="FILE", type=Path, help="encryption key, for the text of an encrypted context")
    add("--json", action="store_true", help="print JSON instead (see below)")
    parser.set_defaults(run=run, parser=parser, argument_names={"encryption_key": "--key"})


def run(arguments: argparse.Namespace) -> int:
    """0; 1 for a damaged context. Raises `ContextError` where there is none, or its manifest cannot be read."""
    from ..contexts.folder import open_folder
    from ..contexts.listing import look
    from ..errors import ContextError

    entry = look(arguments.directory)
    if entry is None:
        open_folder(arguments.directory).close()  # says what there is instead
        raise ContextError(f"there is no context at {str(arguments.directory)!r} any more")
    if entry.manifest is None:
        raise ContextError(str(entry.damage))
    values = _values(entry)
    if arguments.text:
        values["text"] = _text(entry, arguments)
    if arguments.json:
        print(json.dumps(values, indent=2))
    else:
        _print(values)
    return 0 if entry.damage is None else 1


def _values(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    assert manifest is not None
    created = datetime.fromisoformat(manifest.created)
    created = created if created.tzinfo else created.replace(tzinfo=UTC)
    return {
        "path": str(entry.path),
        "damage": entry.damage,
        "cache": manifest.cache,
        "tokens": manifest.tokens,
        "sequences": manifest.batch,
        "layers": dict(Counter(layer.kind for layer in manifest.layers)),
        "record_bytes": manifest.record_bytes,
        "state_bytes": manifest.state_bytes,
        "disk_bytes": entry.bytes,
        "shared_bytes": entry.bytes - entry.freed_bytes,
        "freed_bytes": entry.freed_bytes,
        "created": manifest.created,
        "last_used": entry.last_used.isoformat(timespec="seconds"),
        "age_seconds": round((datetime.now(UTC) - created).total_seconds()),
        "library": manifest.library,
        "format_version": manifest.version,
        "encrypted": entry.encrypted,
        "config": manifest.config,
        "identity": manifest.identity,
    }


def _print(values: dict[str, Any]) -> None:
    from rich.table import Table

    from ..report.report import size_text

    def model(name: str) -> str:
        return values["identity"].get(name, "?")

    shared = f", {size_text(values['shared_bytes'])} of it shared with others" if values["shared_bytes"] else ""
    records, states = size_text(values["record_bytes"]), size_text(values["state_bytes"])
    rows = {
        "damage": values["damage"],
        "cache": values["cache"],
        "model": f"{model('config.model_type')}, {model('dtype')}, weights {model('weights')[:8]}",
        "holds": f"{values['sequences']} x {values['tokens']:,} tokens",
        "layers": ", ".join(f"{count} {kind}" for kind, count in values["layers"].items()),
        "on disk": f"{size_text(values['disk_bytes'])}{shared}: records {records}, all else {states}",
        "encrypted": "yes" if values["encrypted"] else "no",
        "saved": f"{age(values['age_seconds'])} ago ({values['created']}), by version {values['library']}",
        "used last": values["last_used"],
        "fields": " ".join(f"{name}={value}" for name, value in values["config"].items()),
    }
    table = Table(title=cell(values["path"]), show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, cell(value))
    stdout_console().print(table)
    for index, text in enumerate(values.get("text", [])):
        if len(values["text"]) > 1:
            print(f"--- sequence {index}")
        print(printable(text, keep="\n\t"))


def _text(entry: Entry, arguments: argparse.Namespace) -> list[str]:
    """The text of each sequence, padding left out, embeddings as \"[...]\"."""
    import numpy as np

    from ..contexts.library import read_ids
    from ..model.fingerprint import tokenizer_digest
    from ..stores.encryption import load_key
    from .named_cache import load_tokenizer

    assert entry.manifest is not None
    key = None if arguments.key is None else load_key(arguments.key)
    rows = read_ids(entry.path, entry.manifest, key)
    tokenizer = load_tokenizer(arguments.model)
    made_with = entry.manifest.identity.get("tokenizer")
    if made_with is not None and made_with != tokenizer_digest(tokenizer):
        print("the context was made with another tokenizer: name its model with --model", file=sys.stderr)
    known = np.where(rows < len(tokenizer), rows, -1)  # a tokenizer may fail in any way on others
    return ["[...]".join(str(tokenizer.decode(part)) for part in _split(row[row >= -1].tolist())) for row in known]


def _split(ids: list[int]) -> list[list[int]]:
    """The ids between those that are unknown, or of no token."""
    parts: list[list[int]] = [[]]
    for position, number in enumerate(ids):
        if number >= 0:
            parts[-1].append(number)
        elif position == 0 or ids[position - 1] >= 0:
            parts.append([])
    return parts
