"""The console: `hf-offload-cache VERB`. The answer goes to stdout; progress, tables and errors go to stderr.

Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 130 interrupted. Expected errors are one line.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from rich.console import Console

    from .generation import Answer

_PROG = "hf-offload-cache"


class PromptFileError(OSError):
    """The prompt file is missing, unreadable, empty or not UTF-8 text."""


class OutputFileError(OSError):
    """The file for the figures cannot be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code. `argv` None: the process's own arguments."""
    arguments = _parser().parse_args(argv)  # exits with 2 and one line by itself
    _set_wait_policy(restart=argv is None)
    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except KeyboardInterrupt:
        print(f"\n{_PROG}: interrupted", file=sys.stderr)
        return 130
    except _expected() as error:
        print(f"{_PROG}: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, (RuntimeError, errors.StoreError)) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROG, description="Long contexts with the KV cache on disk.")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_generate(verbs.add_parser("generate", help="answer a question about a document"))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Answer a question about a document; print what the cache held, read and waited for."
    add = parser.add_argument
    add("--model", metavar="ID_OR_PATH", help="hub name or folder (default: SmolLM2-135M-Instruct from a package)")
    add("--cache", choices=("disk-swap", "dynamic"), default="disk-swap", help="default: %(default)s")
    add("--set", metavar="FIELD=VALUE", action="append", default=[], type=_assignment, dest="fields",
        help="a field of the cache's configuration, e.g. num_selected=400; repeatable")  # fmt: skip
    add("--prompt-file", metavar="FILE", required=True, type=Path, help="the document, UTF-8 text")
    add("--question", metavar="TEXT", required=True)
    add("--max-new-tokens", metavar="N", type=_positive, default=64, help="default: %(default)s")
    add("--prefill-chunk", metavar="N", type=_positive, default=1024, help="tokens a call (default: %(default)s)")
    add("--path", metavar="DIR", help="folder on the disk to use (default: the temporary folder)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="default: %(default)s")
    add("--device", help="e.g. cpu or cuda:0 (default: cuda where there is one)")
    add("--compare", action="store_true", help="run DynamicCache as well and print both, side by side")
    add("--json", metavar="FILE", type=Path, help="write answers and reports as JSON")
    parser.set_defaults(run=_generate, parser=parser)


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.compare and arguments.cache == "dynamic":
        arguments.parser.error("--compare sets another cache beside DynamicCache: name one with --cache")
    document = _read_document(arguments.prompt_file)
    if arguments.json is not None:
        _check_writable(arguments.json)

    from rich.console import Console

    from . import generation

    fields = dict(arguments.fields)
    generation.check_fields(arguments.cache, fields, arguments.path)
    console = Console(stderr=True)
    console.print(f"loading {arguments.model or 'the default model'} ...", highlight=False)
    model, tokenizer = generation.load(arguments.model, arguments.dtype, arguments.device)
    input_ids = generation.build_prompt(tokenizer, document, arguments.question)
    generation.check_length(model, input_ids.shape[1], arguments.max_new_tokens)
    answers: list[Answer] = []
    for name in ("dynamic", arguments.cache) if arguments.compare else (arguments.cache,):
        own = {"path": arguments.path, "fields": fields} if name == arguments.cache else {}
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
        try:
            arguments.json.write_text(json.dumps([answer.to_dict() for answer in answers], indent=2) + "\n")
        except OSError as error:
            raise OutputFileError(f"--json {str(arguments.json)!r} cannot be written: {error.strerror}") from error
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

    from .report import _share, _size

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


def _check_writable(path: Path) -> None:
    """Before minutes of work; nothing is created or changed."""
    if not path.parent.is_dir():
        raise OutputFileError(f"--json {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputFileError(f"--json {str(path)!r} cannot be written: it is a folder, or not permitted")


def _assignment(text: str) -> tuple[str, Any]:
    """FIELD=VALUE; the value is JSON, a Python literal, or else the text itself (engine=mapped needs no quotes)."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be FIELD=VALUE, such as num_selected=400, got {text!r}")
    for parse in (json.loads, ast.literal_eval):
        try:
            return name, parse(value)
        except (ValueError, SyntaxError):
            continue
    return name, value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _expected() -> tuple[type[Exception], ...]:
    """The errors that are a user's to mend: those this library names. Others keep their traceback."""
    from .default_model import DefaultModelMissingError
    from .generation import ModelLoadError, PromptTooLongError

    named = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*named, PromptFileError, OutputFileError, DefaultModelMissingError, ModelLoadError, PromptTooLongError)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _set_wait_policy(restart: bool) -> None:
    """OpenMP reads the policy once, as torch is imported: where torch is there already, this process starts anew."""
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if restart and "torch" in sys.modules:
        os.execv(sys.executable, [sys.executable, "-m", "hf_offload_cache.cli", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
