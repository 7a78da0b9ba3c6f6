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

from ..errors import ConfigError, ContextError, StoreError
from ..report.progress import Progress
from ..report.report import share_text, size_text
from .arguments import (
    OutputFileError,
    PromptFileError,
    add_cache_arguments,
    add_goal_argument,
    add_model_arguments,
    add_verb,
    check_writable,
    new_console,
    new_table,
    positive,
    printable,
    read_text,
    write_json,
)

if TYPE_CHECKING:
    import torch

    from .answer import Answer


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "generate", run, "answer a question about a document",
        "Answer a question about a document, and print how much memory, disk and time the cache used.",
        max_context="the document's length or --max-new-tokens", max_batch="", encryption_key="--key",
    )  # fmt: skip
    add_model_arguments(parser)
    add_cache_arguments(parser, "dynamic")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-file", metavar="FILE", type=Path, help="the document, UTF-8 text")
    source.add_argument("--context", metavar="DIR", type=Path, help="a context saved with --save: needs no prefill")
    add("--question", metavar="TEXT", required=True)
    add("--max-new-tokens", metavar="N", type=positive, default=64, help="default: %(default)s")
    add("--prefill-chunk", metavar="N", type=positive,
        help="tokens per prefill forward (default: 1024, or all if the model requires it)")  # fmt: skip
    add("--memory", metavar="SIZE",
        help="memory limit: 300MiB, bytes, or a fraction of the full KV cache: 1/13. With a GPU: of device memory, and "
        "--set host_memory=64GiB is the limit of host memory")
    add_goal_argument(parser)
    add("--compare", action="store_true", help="also run DynamicCache, and print both")
    add("--save", metavar="DIR", type=Path, help="save the prefilled document as a context, for other questions")
    add("--overwrite", action="store_true", help="replace an existing context at the --save path")
    add("--key", metavar="FILE", type=Path, help="encryption key of the context: 32 bytes or 64 hex digits")
    add("--json", metavar="FILE", type=Path, help="write answers and reports as JSON")
    add("--trace", metavar="FILE", type=Path, help="write a trace of the cache's activity, for https://ui.perfetto.dev")


def run(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    text = None if arguments.prompt_file is None else read_document(arguments.prompt_file)
    for option in ("json", "trace"):
        if (path := getattr(arguments, option)) is not None:
            check_writable(path, f"--{option}")
    if arguments.save is not None:
        _check_target(arguments)

    import torch

    from ..contexts.library import is_damage
    from ..stores.encryption import load_key
    from . import named_cache
    from .answer import build_prompt, check_length, document_part, generate_answer, prefilled_tokens, question_part

    fields = dict(arguments.fields)
    if arguments.trace is not None:
        fields["trace"] = str(arguments.trace)
    if arguments.key is not None:
        fields["encryption_key"] = str(arguments.key)
    offloading = arguments.cache or named_cache.default_for(arguments.context)
    named_cache.check_fields(offloading, fields, arguments.path, arguments.memory, arguments.goal)
    saved = None if arguments.context is None else _saved_ids(arguments)
    if arguments.key is not None:
        load_key(arguments.key)
    model, tokenizer = named_cache.load_for(arguments)
    if text is not None and arguments.save is None:
        document_tokens, input_ids = 0, build_prompt(tokenizer, text, arguments.question)
    else:
        document = saved if text is None else document_part(tokenizer, text)
        assert document is not None
        question = question_part(tokenizer, arguments.question)
        document_tokens, input_ids = document.shape[1], torch.cat([document, question], 1)
    check_length(model, input_ids.shape[1], arguments.max_new_tokens)
    settings = {"path": arguments.path, "fields": fields, "memory": arguments.memory}
    settings["max_context"] = input_ids.shape[1] + arguments.max_new_tokens
    console = new_console(stderr=True)

    def answer(name: str, opens: bool) -> Answer:
        # `generate` runs the last tokens of the prompt itself
        bar = Progress("prefill", prefilled_tokens(input_ids.shape[1]) - (document_tokens if opens else 0), "tokens")
        started = time.perf_counter()
        if opens:
            made = named_cache.open_cache(name, arguments.context, model, tokenizer, **settings)
        else:
            own = {**settings, "goal": arguments.goal} if name == offloading else {}
            made = named_cache.make_cache(name, model, **own)
        with made as cache, bar:
            if arguments.compare:
                console.print(f"[bold]{type(cache).__name__}")
            save = functools.partial(_save_document, arguments, cache, tokenizer, bar)
            saves = name == offloading and arguments.save is not None
            return generate_answer(
                model, tokenizer, input_ids, cache, arguments.max_new_tokens, arguments.prefill_chunk,
                on_progress=bar.update, on_text=functools.partial(_print_text, bar=bar),
                pause=(document_tokens, save) if saves else None, started=started,
            )  # fmt: skip

    answers: list[Answer] = []
    for name in (named_cache.DYNAMIC, offloading) if arguments.compare else (offloading,):
        opens = name == offloading and saved is not None
        try:
            answers.append(answer(name, opens))
        except (ContextError, StoreError) as error:
            if not opens or not is_damage(error):
                raise
            note = f"--context {str(arguments.context)!r} is damaged: its text is prefilled; save it anew ({error})"
            console.print(f"\n{printable(' '.join(note.split()))}", highlight=False, markup=False)
            answers.append(answer(name, opens=False))
        print(flush=True)
    if arguments.compare:
        console.print(_comparison(answers))
    if answers[-1].report is not None:
        print(answers[-1].report, file=sys.stderr)
    if arguments.json is not None:
        write_json(arguments.json, [answer.to_dict() for answer in answers])
    return 0


def read_document(path: Path) -> str:
    """The text of a prompt file. Raises `PromptFileError`."""
    text = read_text(path, "--prompt-file", PromptFileError)
    if not text.strip():
        raise PromptFileError(f"--prompt-file {str(path)!r} has no text ({len(text):,} characters)")
    return text


def _check_options(arguments: argparse.Namespace) -> None:
    """Exit with 2 if options contradict each other."""
    error = arguments.parser.error
    if arguments.cache == "dynamic":
        if arguments.compare:
            error("--compare sets another cache next to DynamicCache: name one with --cache")
        for name in ("trace", "save", "context", "key"):
            if getattr(arguments, name) is not None:
                error(f"--{name} needs a cache of this library, and --cache dynamic is not one: leave it out")
    if arguments.save is not None and arguments.context is not None:
        error("--save saves the document of --prompt-file: with --context it is saved already")
    if arguments.goal is not None and (arguments.memory is None or arguments.context is not None):
        error("--goal needs --memory and --prompt-file: it chooses the fields of a new cache for that memory")
    if arguments.overwrite and arguments.save is None:
        error("--overwrite needs --save: name the folder with it")


def _check_target(arguments: argparse.Namespace) -> None:
    """Raise `OutputFileError` before minutes of work; nothing is created or changed."""
    target = arguments.save
    if not target.parent.is_dir():
        raise OutputFileError(f"--save {str(target)!r} cannot be made: there is no folder {str(target.parent)!r}")
    if os.path.lexists(target) and not arguments.overwrite:
        raise OutputFileError(f"--save {str(target)!r} exists already: pass --overwrite to replace a context")


def _saved_ids(arguments: argparse.Namespace) -> torch.Tensor:
    """The context's token ids (1, T). Raises `ContextError`, `EncryptionKeyError`."""
    import torch

    from ..contexts.library import read_text
    from ..contexts.manifest import read_manifest
    from ..stores.encryption import load_key

    manifest = read_manifest(arguments.context)
    key = None if arguments.key is None else load_key(arguments.key)
    ids = torch.from_numpy(read_text(arguments.context, manifest, key).ids)
    if ids.shape[0] != 1 or bool((ids < 0).any()):
        raise ConfigError(
            f"--context {str(arguments.context)!r} must contain the tokens of one document, and has several sequences, "
            "padding or embeddings: open it in Python"
        )
    return ids


def _save_document(arguments: argparse.Namespace, cache: Any, tokenizer: Any, bar: Progress) -> None:
    try:
        cache.save(arguments.save, overwrite=arguments.overwrite, tokenizer=tokenizer)
    except FileExistsError as error:
        raise OutputFileError(f"--save: {error}") from error
    bar.print(f"saved {cache.tokens:,} tokens in {arguments.save}")


def _print_text(text: str, bar: Progress) -> None:
    """Print a piece of the answer to stdout, after removing the bar."""
    bar.close()
    print(text, end="", flush=True)


def _comparison(answers: Sequence[Answer]) -> Any:
    """A table with a column for each answer to the same question."""
    table = new_table("", *(answer.cache for answer in answers), title=f"prompt of {answers[0].prompt_tokens:,} tokens")
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
        "hit rate before prefetch": [share_text(r.hit_rate) if r else "-" for r in reports],
        "hit rate": [share_text(r.prefetch_hit_rate) if r else "-" for r in reports],
        "I/O wait": [f"{r.stall_seconds:.3f} s" if r else "-" for r in reports],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
