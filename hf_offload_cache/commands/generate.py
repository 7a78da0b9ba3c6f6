"""`hf-offload-cache generate`: answer a question about a document. The answer goes to stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import add_field_argument, add_model_arguments, check_writable, positive, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..generation import Answer


class PromptFileError(OSError):
    """The prompt file is missing, unreadable, empty or not UTF-8 text."""


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser("generate", help="answer a question about a document")
    parser.description = "Answer a question about a document; print what the cache held, read and waited for."
    add_model_arguments(parser)
    add_field_argument(parser)
    add = parser.add_argument
    add("--cache", choices=("disk-swap", "dynamic"), default="disk-swap", help="default: %(default)s")
    add("--prompt-file", metavar="FILE", required=True, type=Path, help="the document, UTF-8 text")
    add("--question", metavar="TEXT", required=True)
    add("--max-new-tokens", metavar="N", type=positive, default=64, help="default: %(default)s")
    add("--prefill-chunk", metavar="N", type=positive, default=1024, help="tokens a call (default: %(default)s)")
    add("--memory", metavar="SIZE", help="the most that the cache may hold: 300MiB, bytes, or of the full KV: 1/13")
    add("--compare", action="store_true", help="run DynamicCache as well and print both, side by side")
    add("--json", metavar="FILE", type=Path, help="write answers and reports as JSON")
    add("--trace", metavar="FILE", type=Path, help="write what the cache does and when, for https://ui.perfetto.dev")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare and arguments.cache == "dynamic":
        arguments.parser.error("--compare sets another cache beside DynamicCache: name one with --cache")
    document = _read_document(arguments.prompt_file)
    if arguments.json is not None:
        check_writable(arguments.json)
    if arguments.trace is not None:
        if arguments.cache == "dynamic":
            arguments.parser.error("--trace is of this library's caches, and --cache dynamic is not one: leave it out")
        check_writable(arguments.trace, "--trace")

    from rich.console import Console

    from .. import generation

    fields = dict(arguments.fields)
    if arguments.trace is not None:
        fields["trace"] = str(arguments.trace)
    generation.check_fields(arguments.cache, fields, arguments.path, arguments.memory)
    console = Console(stderr=True)
    console.print(f"loading {arguments.model or 'the default model'} ...", highlight=False)
    model, tokenizer = generation.load(arguments.model, arguments.dtype, arguments.device)
    input_ids = generation.build_prompt(tokenizer, document, arguments.question)
    generation.check_length(model, input_ids.shape[1], arguments.max_new_tokens)
    context = input_ids.shape[1] + arguments.max_new_tokens
    answers: list[Answer] = []
    for name in ("dynamic", arguments.cache) if arguments.compare else (arguments.cache,):
        own = {"path": arguments.path, "fields": fields, "memory": arguments.memory, "max_context": context}
        own = own if name == arguments.cache else {}
        bar = _Progress(console, generation.prefilled_tokens(input_ids.shape[1]))
        with generation.make_cache(name, model, **own) as cache, bar:
            if arguments.compare:
                console.print(f"[bold]{type(cache).__name__}")
            answer = generation.generate_answer(
                model, tokenizer, input_ids, cache, arguments.max_new_tokens, arguments.prefill_chunk,
                on_progress=bar.update, on_text=bar.print_text,
            )  # fmt: skip
        print(flush=True)
        answers.append(answer)
    if arguments.compare:
        console.print(_comparison(answers))
    if answers[-1].report is not None:
        print(answers[-1].report, file=sys.stderr)
    if arguments.json is not None:
        write_json(arguments.json, [answer.to_dict() for answer in answers])
    return 0


class _Progress:
    """A bar on stderr while the prompt is prefilled; gone before the first text, which goes to stdout."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # stdout is the answer's alone; a stderr that is no terminal gets no bar
        self._bar = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
        )
        # generate runs the last tokens of the prompt itself
        self._task = self._bar.add_task("prefill, tokens", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def update(self, tokens_done: int) -> None:
        self._bar.update(self._task, completed=tokens_done)

    def print_text(self, text: str) -> None:
        self._remove()
        print(text, end="", flush=True)

    def _remove(self) -> None:
        if self._bar.live.is_started:  # stopping twice prints an empty line
            self._bar.stop()


def _comparison(answers: Sequence[Answer]) -> Any:
    """The answers as columns of one table."""
    from rich.table import Table

    from ..report import _share, _size

    table = Table(title=f"{answers[0].prompt_tokens:,} tokens of prompt", show_lines=False)
    table.add_column("", style="bold")
    for answer in answers:
        table.add_column(answer.cache, overflow="fold")
    reports = [answer.report for answer in answers]
    peaks = [answer.report.peak_memory_bytes if answer.report else answer.memory_bytes for answer in answers]
    rates = [answer.tokens_per_second for answer in answers]
    rows: dict[str, list[str]] = {
        "answer": [answer.text for answer in answers],
        "KV memory": [_size(answer.memory_bytes) for answer in answers],
        "KV memory, peak": [_size(peak) for peak in peaks],
        "memory budget": [_size(r.memory_budget) if r and r.memory_budget else "-" for r in reports],
        "on disk": [_size(answer.disk_bytes) for answer in answers],
        "tokens/s, decode": [f"{rate:.1f}" if rate else "-" for rate in rates],
        "time to first token": [f"{answer.first_token_seconds:.1f} s" for answer in answers],
        "hit rate, before prefetch": [_share(r.hit_rate) if r else "-" for r in reports],
        "hit rate, when asked": [_share(r.prefetch_hit_rate) if r else "-" for r in reports],
        "time waited": [f"{r.stall_seconds:.3f} s" if r else "-" for r in reports],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _read_document(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise PromptFileError(f"--prompt-file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptFileError(
            f"--prompt-file {str(path)!r} is not UTF-8 text: byte {error.start:,} is 0x{error.object[error.start]:02x}"
        ) from error
    if not text.strip():
        raise PromptFileError(f"--prompt-file {str(path)!r} has no text ({len(text):,} characters)")
    return text
