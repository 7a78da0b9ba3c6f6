"""`hf-offload-cache inspect`, `ls`, `rm` and `verify`: saved contexts. The answer goes to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import parse_size
from ..errors import ContextError, StoreError
from ..report.progress import Progress
from ..report.report import size_text
from .arguments import add_verb, age, cell, complain, new_table, printable, stdout_console

if TYPE_CHECKING:
    from ..contexts.listing import Entry
    from ..contexts.verify import VerifyResult

_INSPECT_KEYS = """\
--json prints one object: path, damage (text, or null), cache, tokens (per sequence), sequences, layers (an object: kind
to number), record_bytes, state_bytes, disk_bytes (all files), shared_bytes (the part that other contexts share),
freed_bytes (what removing it frees), created (ISO 8601), last_used, age_seconds, library, format_version, encrypted,
config, identity; with --text also text (a list, one string per sequence).

Exit codes: 0 no damage in manifest and sizes (`verify` reads everything), 1 damaged, 2 not a context."""

_LS_KEYS = """\
--json prints one object: folder; total_bytes (disk space, shared data counted once); contexts, the most recently used
first, each with name, path, cache, tokens (per sequence), sequences, bytes (disk space), freed_bytes (what removing it
frees), encrypted, created and last_used (ISO 8601), damage (text, or null). If a manifest cannot be read, that
context's cache, tokens, sequences, encrypted and created are null.

Damage is what the manifest and file sizes show; `verify` reads a context in full."""

_VERIFY_KEYS = """\
--json prints one object: path, whole (true or false), files, records and bytes (each as read), findings: each with
kind, file, part, records (numbers within the layer) and problem. Kinds: damaged, missing; and, in an intact context,
marked (an earlier read found damage), foreign (a file that is not the context's) and exposed (others may read it).

Exit codes: 0 intact, 1 damaged or incomplete, 2 not a context, or not the right key."""

_SHOWN = 20
"""Record numbers that a row of the table lists."""


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "inspect", inspect, "what a saved context contains", epilog=_INSPECT_KEYS, encryption_key="--key",
        description="Show a saved context's model, size and fields. Its text is only shown with --text.",
    )  # fmt: skip
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path)
    add("--text", action="store_true", help="print the text, with control characters as escapes")
    add("--model", metavar="ID_OR_PATH", help="model whose tokenizer decodes the text (default: SmolLM2-135M-Instruct)")
    add("--key", metavar="FILE", type=Path, help="encryption key, for the text of an encrypted context")
    add("--json", action="store_true", help="print JSON instead (see below)")

    parser = add_verb(
        verbs, "ls", list_contexts, "list the contexts in a folder", epilog=_LS_KEYS,
        description="List the contexts directly in a folder, the most recently used first.",
    )  # fmt: skip
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path)
    add("--json", action="store_true", help="print JSON instead (see below)")

    parser = add_verb(
        verbs, "rm", remove_contexts, "remove contexts",
        "Remove the named contexts. With --folder and --max-bytes, remove a folder's least recently used contexts "
        "until the others fit the limit. There is no confirmation. Anything that is not a context stays. Caches "
        "that have a removed context open keep it. Exit codes: 0 all were removed, 1 the disk failed, 2 something was "
        "not a context; the others are removed all the same.",
    )  # fmt: skip
    add = parser.add_argument
    add("directories", metavar="DIR", type=Path, nargs="*")
    add("--folder", metavar="FOLDER", type=Path, help="folder whose least recently used contexts are removed")
    add("--max-bytes", metavar="SIZE", help="disk space for the contexts in --folder, e.g. 20GB")
    add("--wipe", action="store_true", help="first overwrite the data that no other context shares")

    parser = add_verb(
        verbs, "verify", verify, "check a saved context", epilog=_VERIFY_KEYS, encryption_key="--key",
        description="Read a saved context in full and list everything that is wrong with it. Needs no model.",
    )  # fmt: skip
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path)
    add("--key", metavar="FILE", type=Path, help="encryption key of an encrypted context")
    add("--json", action="store_true", help="print JSON instead (see below)")


# ---------------------------------------------------------------------------------------------------- inspect


def inspect(arguments: argparse.Namespace) -> int:
    """0; 1 for a damaged context. Raises `ContextError` if there is none, or its manifest cannot be read."""
    from ..contexts.folder import open_folder
    from ..contexts.listing import look

    entry = look(arguments.directory)
    if entry is None:
        open_folder(arguments.directory).close()  # raises with what is there instead
        raise ContextError(f"the context at {str(arguments.directory)!r} was removed meanwhile")
    if entry.manifest is None:
        raise ContextError(str(entry.damage))
    values = _contents(entry)
    if arguments.text:
        values["text"] = _texts(entry, arguments)
    if arguments.json:
        print(json.dumps(values, indent=2))
    else:
        _print_contents(values)
    return 0 if entry.damage is None else 1


def _contents(entry: Entry) -> dict[str, Any]:
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


def _print_contents(values: dict[str, Any]) -> None:
    def model(name: str) -> str:
        return values["identity"].get(name, "?")

    shared = f", {size_text(values['shared_bytes'])} of it shared with others" if values["shared_bytes"] else ""
    records, states = size_text(values["record_bytes"]), size_text(values["state_bytes"])
    rows = {
        "damage": values["damage"],
        "cache": values["cache"],
        "model": f"{model('config.model_type')}, {model('dtype')}, weights {model('weights')[:8]}",
        "contains": f"{values['sequences']} x {values['tokens']:,} tokens",
        "layers": ", ".join(f"{count} {kind}" for kind, count in values["layers"].items()),
        "on disk": f"{size_text(values['disk_bytes'])}{shared}: records {records}, states {states}",
        "encrypted": "yes" if values["encrypted"] else "no",
        "saved": f"{age(values['age_seconds'])} ago ({values['created']}), by version {values['library']}",
        "last used": values["last_used"],
        "fields": " ".join(f"{name}={value}" for name, value in values["config"].items()),
    }
    table = new_table("", "value", title=cell(values["path"]), show_header=False)
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, cell(value))
    stdout_console().print(table)
    for index, text in enumerate(values.get("text", [])):
        if len(values["text"]) > 1:
            print(f"--- sequence {index}")
        print(printable(text, keep="\n\t"))


def _texts(entry: Entry, arguments: argparse.Namespace) -> list[str]:
    """Each sequence's text without its padding, with \"[...]\" for embeddings."""
    import numpy as np

    from ..contexts.library import read_text
    from ..model.fingerprint import tokenizer_digest
    from ..stores.encryption import load_key
    from .named_cache import load_tokenizer

    assert entry.manifest is not None
    key = None if arguments.key is None else load_key(arguments.key)
    rows = read_text(entry.path, entry.manifest, key).ids
    tokenizer = load_tokenizer(arguments.model)
    made_with = entry.manifest.identity.get("tokenizer")
    if made_with is not None and made_with != tokenizer_digest(tokenizer):
        print("the context was made with another tokenizer: pass its model as --model", file=sys.stderr)
    known = np.where(rows < len(tokenizer), rows, -1)  # a tokenizer may fail in any way on others
    return ["[...]".join(str(tokenizer.decode(part)) for part in _split(row[row >= -1].tolist())) for row in known]


def _split(ids: list[int]) -> list[list[int]]:
    """The runs of ids between negative ones."""
    parts: list[list[int]] = [[]]
    for position, number in enumerate(ids):
        if number >= 0:
            parts[-1].append(number)
        elif position == 0 or ids[position - 1] >= 0:
            parts.append([])
    return parts


# ------------------------------------------------------------------------------------------------- ls and rm


def list_contexts(arguments: argparse.Namespace) -> int:
    from ..contexts.listing import listing, total_bytes

    entries = listing(arguments.folder)
    if arguments.json:
        contexts = [_summary(entry) for entry in entries]
        values = {"folder": str(arguments.folder), "total_bytes": total_bytes(entries), "contexts": contexts}
        print(json.dumps(values, indent=2))
    else:
        _print_list(entries, total_bytes(entries))
    return 0


def _summary(entry: Entry) -> dict[str, Any]:
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


def _print_list(entries: list[Entry], total: int) -> None:
    figures = ("tokens", "on disk", "freed by rm", "used")
    table = new_table("context", "cache", "model", *figures, "state", right=figures, box=None, pad_edge=False)
    for entry in entries:
        manifest, contents = entry.manifest, ("?", "?", "?")
        if manifest is not None:
            tokens = f"{manifest.tokens:,}" if manifest.batch == 1 else f"{manifest.batch} x {manifest.tokens:,}"
            contents = (manifest.cache, manifest.identity.get("config.model_type", "?"), tokens)
        used = age((datetime.now(UTC) - entry.last_used).total_seconds()) + " ago"
        state = f"damaged: {entry.damage}" if entry.damage is not None else "encrypted" if entry.encrypted else ""
        sizes = (size_text(entry.bytes), size_text(entry.freed_bytes))
        table.add_row(*map(cell, (entry.name, *contents, *sizes, used, state)))
    if entries:
        stdout_console().print(table)
    print(f"{len(entries)} contexts, {size_text(total)}")


def remove_contexts(arguments: argparse.Namespace) -> int:
    limits = (arguments.folder is not None, arguments.max_bytes is not None)
    if any(limits) and (arguments.directories or not all(limits)):
        arguments.parser.error("--folder and --max-bytes are used together, and without DIR")
    if not any(limits) and not arguments.directories:
        arguments.parser.error("name the contexts to remove, or pass --folder and --max-bytes")
    return _evict(arguments) if any(limits) else _remove(arguments)


def _remove(arguments: argparse.Namespace) -> int:
    from ..contexts.removal import remove

    code = 0
    for directory in arguments.directories:
        try:
            _say_removed(directory, remove(directory, wipe=arguments.wipe))
        except (ContextError, StoreError) as error:
            complain(error, arguments)
            code = max(code, 1 if isinstance(error, StoreError) else 2)
    return code


def _evict(arguments: argparse.Namespace) -> int:
    from ..contexts.listing import evict

    eviction = evict(arguments.folder, parse_size(arguments.max_bytes, "--max-bytes"), wipe=arguments.wipe)
    for entry, freed in eviction.removed:
        _say_removed(entry.path, freed, "" if entry.damage is None else f" (it was damaged: {entry.damage})")
    for _, error in eviction.refused:
        complain(error, arguments)
    total = size_text(sum(freed for _, freed in eviction.removed))
    print(f"freed {total}; the remaining contexts take {size_text(eviction.held_bytes)}")
    return 1 if eviction.refused else 0


def _say_removed(path: Path, freed: int, note: str = "") -> None:
    print(printable(f"removed {path}, which freed {size_text(freed)}{note}"))


# ----------------------------------------------------------------------------------------------------- verify


def verify(arguments: argparse.Namespace) -> int:
    """0: intact; 1: not. Raises the errors of `contexts.verify.verify`."""
    from ..contexts.verify import verify

    with Progress("verify", unit="B") as bar:
        result = verify(arguments.directory, key=arguments.key, progress=bar.update)
    if arguments.json:
        findings = [dataclasses.asdict(finding) for finding in result.findings]
        values = {"path": result.path, "whole": result.whole, "files": result.files, "records": result.records}
        print(json.dumps({**values, "bytes": result.bytes, "findings": findings}, indent=2))
    else:
        _print_findings(result)
    return 0 if result.whole else 1


def _print_findings(result: VerifyResult) -> None:
    if result.findings:
        table = new_table("", "part", "file", "records", "problem", box=None, pad_edge=False)
        for finding in result.findings:
            numbers = ", ".join(map(str, finding.records[:_SHOWN]))
            if (more := len(finding.records) - _SHOWN) > 0:
                numbers += f" and {more:,} more"
            table.add_row(*map(cell, (finding.kind, finding.part, finding.file, numbers, finding.problem)))
        stdout_console().print(table)
    read = f"{result.files} files, {result.records:,} records, {size_text(result.bytes)}"
    print(f"{'intact' if result.whole else 'DAMAGED'}: {read} read")
