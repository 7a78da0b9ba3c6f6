"""`hf-offload-cache generate`: answer a question about a document. The answer goes to stdout."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import (
    OutputFileError,
    add_cache_argument,
    add_field_argument,
    add_model_arguments,
    check_writable,
    new_console,
    positive,
    printable,
    read_text,
    write_json,
)

if TYPE_CHECKING:
    import torch

    from ..report.progress import Progress
    from .answer import Answer


# Where `generate` has its document from, and where it keeps it: a file of text, a saved context

class PromptFileError(OSError):
    """The prompt file is missing, unreadable, empty or not UTF-8 text."""


def check_target(arguments: argparse.Namespace) -> None:
    """Before minutes of work; nothing is created or changed."""
    target = arguments.save
    if not target.parent.is_dir():
        raise OutputFileError(f"--save {str(target)!r} cannot be made: there is no folder {str(target.parent)!r}")
    if os.path.lexists(target) and not arguments.overwrite:
        raise OutputFileError(f"--save {str(target)!r} exists already: --overwrite replaces a context")


def save_document(arguments: argparse.Namespace, cache: Any, tokenizer: Any, bar: Progress) -> None:
    try:
        cache.save(arguments.save, overwrite=arguments.overwrite, tokenizer=tokenizer)
    except FileExistsError as error:
        raise OutputFileError(f"--save: {error}") from error
    bar.print(f"saved {cache.tokens:,} tokens in {arguments.save}")


def print_text(text: str, bar: Progress) -> None:
    """Print a piece of the answer to stdout; the bar is gone before the first one."""
    bar.close()
    print(text, end="", flush=True)


def saved_ids(arguments: argparse.Namespace) -> torch.Tensor:
    """The tokens of the context, (1, T). Raises `ContextError`, `EncryptionKeyError`."""
    import torch

    from ..contexts.library import read_ids
    from ..contexts.reader import read_manifest
    from ..errors import ConfigError
    from ..stores.encryption import load_key

    manifest = read_manifest(arguments.context)
    key = None if arguments.key is None else load_key(arguments.key)
    ids = torch.from_numpy(read_ids(arguments.context, manifest, key))
    if ids.shape[0] != 1 or bool((ids < 0).any()):
        raise ConfigError(
            f"--context {str(arguments.context)!r} has several sequences, padding or embeddings, and must hold the "
            "tokens of one document: open it in Python"
        )
    return ids


def read_document(path: Path) -> str:
    """The text of a prompt file. Raises `PromptFileError`."""
    text = read_text(path, "--prompt-file", PromptFileError)
    if not text.strip():
        raise PromptFileError(f"--prompt-file {str(path)!r} has no text ({len(text):,} characters)")
    return text


# Answers to one question, side by side

def comparison(answers: Sequence[Answer]) -> Any:
    """The answers as columns of one table."""
    from rich.table import Table

    from ..report.report import share_text, size_text

    table = Table(title=f"{answers[0].prompt_tokens:,} tokens of prompt", show_lines=False)
    table.add_column("", style="bold")
    for answer in answers:
        table.add_column(answer.cache, overflow="fold")
    reports = [answer.report for answer in answers]
    peaks = [answer.report.peak_memory_bytes if answer.report else answer.memory_bytes for answer in answers]
    rates = [answer.tokens_per_second for answer in answers]
    rows: dict[str, list[str]] = {
        "answer": [answer.text for answer in answers],
        "KV memory": [size_text(answer.memory_bytes) for answer in answers],
        "KV memory, peak": [size_text(peak) for peak in peaks],
        "memory budget": [size_text(r.memory_budget) if r and r.memory_budget else "-" for r in reports],
        "on disk": [size_text(answer.disk_bytes) for answer in answers],
        "tokens/s, decode": [f"{rate:.1f}" if rate else "-" for rate in rates],
        "time to first token": [f"{answer.first_token_seconds:.1f} s" for answer in answers],
        "hit rate, before prefetch": [share_text(r.hit_rate) if r else "-" for r in reports],
        "hit rate, when asked": [share_text(r.prefetch_hit_rate) if r else "-" for r in reports],
        "time waited": [f"{r.stall_seconds:.3f} s" if r else "-" for r in reports],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


_ARGUMENT_NAMES = {
    "max_context": "the document's length or --max-new-tokens", "max_batch": "", "encryption_key": "--key",
}  # fmt: skip


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser("generate", help="answer a question about a document")
    parser.description = "Answer a question about a document; print what the cache held, read and waited for."
    add_model_arguments(parser)
    add_cache_argument(parser, "dynamic")
    add_field_argument(parser)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-file", metavar="FILE", type=Path, help="the document, UTF-8 text")
    source.add_argument("--context", metavar="DIR", type=Path, help="or a context that --save made: no prefill")
    add("--question", metavar="TEXT", required=True)
    add("--max-new-tokens", metavar="N", type=positive, default=64, help="default: %(default)s")
    add("--prefill-chunk", metavar="N", type=positive, help="tokens a call (default: 1024, or all at once)")
    add("--memory", metavar="SIZE", help="the most that the cache may hold: 300MiB, bytes, or of the full KV: 1/13")
    add("--compare", action="store_true", help="run DynamicCache as well and print both, side by side")
    add("--save", metavar="DIR", type=Path, help="keep the prefilled document as a context, for other questions")
    add("--overwrite", action="store_true", help="replace the context that --save finds there")
    add("--key", metavar="FILE", type=Path, help="encryption key of the context: 32 bytes or 64 hex digits")
    add("--json", metavar="FILE", type=Path, help="write answers and reports as JSON")
    add("--trace", metavar="FILE", type=Path, help="write what the cache does and when, for https://ui.perfetto.dev")
    parser.set_defaults(run=run, parser=parser, argument_names=_ARGUMENT_NAMES)


def run(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    text = None if arguments.prompt_file is None else read_document(arguments.prompt_file)
    if arguments.json is not None:
        check_writable(arguments.json)
    if arguments.trace is not None:
        check_writable(arguments.trace, "--trace")
    if arguments.save is not None:
        check_target(arguments)

    import torch

    from ..contexts.library import is_damage
    from ..errors import ContextError, StoreError
    from ..report.progress import Progress
    from ..stores.encryption import load_key
    from . import named_cache
    from .answer import build_prompt, check_length, document_part, generate_answer, prefilled_tokens, question_part

    fields = dict(arguments.fields)
    if arguments.trace is not None:
        fields["trace"] = str(arguments.trace)
    if arguments.key is not None:
        fields["encryption_key"] = str(arguments.key)
    ours_named = arguments.cache or named_cache.default_for(arguments.context)
    named_cache.check_fields(ours_named, fields, arguments.path, arguments.memory)
    saved = None if arguments.context is None else saved_ids(arguments)
    if arguments.key is not None:
        load_key(arguments.key)
    console = new_console(stderr=True)
    console.print(f"loading {arguments.model or 'the default model'} ...", highlight=False)
    model, tokenizer = named_cache.load(arguments.model, arguments.dtype, arguments.device)
    if text is not None and arguments.save is None:
        held, input_ids = 0, build_prompt(tokenizer, text, arguments.question)
    else:
        first = saved if text is None else document_part(tokenizer, text)
        assert first is not None
        rest = question_part(tokenizer, arguments.question)
        held, input_ids = first.shape[1], torch.cat([first, rest], 1)
    check_length(model, input_ids.shape[1], arguments.max_new_tokens)
    own = {"path": arguments.path, "fields": fields, "memory": arguments.memory}
    own["max_context"] = input_ids.shape[1] + arguments.max_new_tokens
    answers: list[Answer] = []

    def answered(name: str, opens: bool) -> Answer:
        ours = name == ours_named
        saves = ours and arguments.save is not None
        # `generate` runs the last tokens of the prompt itself
        bar = Progress("prefill", prefilled_tokens(input_ids.shape[1]) - (held if opens else 0), "tokens")
        started = time.perf_counter()
        if opens:
            made = named_cache.open_cache(name, arguments.context, model, tokenizer, **own)
        else:
            made = named_cache.make_cache(name, model, **(own if ours else {}))
        with made as cache, bar:
            if arguments.compare:
                console.print(f"[bold]{type(cache).__name__}")
            save = functools.partial(save_document, arguments, cache, tokenizer, bar)
            return generate_answer(
                model, tokenizer, input_ids, cache, arguments.max_new_tokens, arguments.prefill_chunk,
                on_progress=bar.update, on_text=functools.partial(print_text, bar=bar),
                pause=(held, save) if saves else None, started=started,
            )  # fmt: skip

    for name in (named_cache.DYNAMIC, ours_named) if arguments.compare else (ours_named,):
        opens = name == ours_named and saved is not None
        try:
            answers.append(answered(name, opens))
        except (ContextError, StoreError) as error:
            if not opens or not is_damage(error):
                raise
            told = f"--context {str(arguments.context)!r} is damaged: its text is prefilled; save it anew ({error})"
            console.print(f"\n{printable(' '.join(told.split()))}", highlight=False, markup=False)
            answers.append(answered(name, opens=False))
        print(flush=True)
    if arguments.compare:
        console.print(comparison(answers))
    if answers[-1].report is not None:
        print(answers[-1].report, file=sys.stderr)
    if arguments.json is not None:
        write_json(arguments.json, [answer.to_dict() for answer in answers])
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Exits with 2 where options contradict each other."""
    error = arguments.parser.error
    if arguments.cache == "dynamic":
        if arguments.compare:
            error("--compare sets another cache beside DynamicCache: name one with --cache")
        for name in ("trace", "save", "context", "key"):
            if getattr(arguments, name) is not None:
                error(f"--{name} is of this library's caches, and --cache dynamic is not one: leave it out")
    if arguments.save is not None and arguments.context is not None:
        error("--save keeps a document that --prompt-file names: with --context it is saved already")
    if arguments.overwrite and arguments.save is None:
        error("--overwrite is for --save: name the folder with it")
