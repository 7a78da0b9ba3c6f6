"""Shared by the console's verbs: options, errors in terms of options, files to write, and output to a terminal."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import select
import sys
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config import GOALS
from ..errors import ConfigError, ContextError, StoreError
from ..registry import CACHES, cache_class

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


class PromptTooLongError(ValueError):
    """Prompt and answer need more positions than the model has; nothing was run."""


class PromptFileError(OSError):
    """A document is missing, unreadable, empty or not text of its kind."""


class OutputFileError(OSError):
    """The file for the figures cannot be written."""


def add_verb(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    description: str,
    epilog: str | None = None,
    **argument_names: str,
) -> argparse.ArgumentParser:
    """Declare a verb that calls `run`. `argument_names`: see `in_options`."""
    kind = argparse.HelpFormatter if epilog is None else argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=help, epilog=epilog, formatter_class=kind)
    parser.description = description
    parser.set_defaults(run=run, parser=parser, argument_names=argument_names)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser, *others: str) -> None:
    """`--model`, `--dtype`, `--device` and `--path`. `others`: what else names a model for this verb."""
    add, names = parser.add_argument, " or ".join((*others, "Hub name", "folder"))
    add("--model", metavar="ID_OR_PATH", help=f"{names} (default: SmolLM2-135M-Instruct from its package)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="default: %(default)s")
    add("--device", help="e.g. cpu or cuda:0 (default: cuda if available)")
    add("--path", metavar="DIR", help="folder on the disk to use (default: the temporary folder)")


def add_cache_argument(parser: argparse.ArgumentParser, *others: str) -> None:
    """`--cache NAME`: a name of the registry or of `others`, or "module:Class"."""
    text = f"{', '.join((*CACHES, *others))}, or your own as module:Class (default: {next(iter(CACHES))})"
    parser.add_argument("--cache", metavar="NAME", help=text)


def add_cache_arguments(parser: argparse.ArgumentParser, *others: str) -> None:
    """`--cache NAME` and `--set FIELD=VALUE`, whose pairs are `arguments.fields`."""
    add_cache_argument(parser, *others)
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], type=assignment, dest="fields",
        help="set a cache option, e.g. num_selected=400; may be repeated")  # fmt: skip


def add_goal_argument(parser: argparse.ArgumentParser) -> None:
    """`--goal`."""
    add = parser.add_argument
    add("--goal", choices=GOALS,
        help="with --memory: fidelity, for steps closer to full attention, or speed (default: as for_budget)")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """`--memory`, `--goal`, `--floor` and `--strict`, of each request."""
    add = parser.add_argument
    add("--memory", metavar="SIZE",
        help="memory limit per request: 300MiB, bytes, or 1/13 of its full KV cache. With a GPU: of device memory, and "
        "--set host_memory=64GiB is the limit of host memory")
    add_goal_argument(parser)
    add("--floor", metavar="SIZE", help="memory per sequence if that fraction is too small (default: 64MiB)")
    add("--strict", action="store_true", help="raise an error for such a request instead")


def check_floor(floor: object, memory: object, library: object) -> None:
    """Raise `ConfigError` for a --floor without effect. A library needs it where the disk is full."""
    if floor is not None and library is None and "/" not in str(memory):
        raise ConfigError(f"--floor {floor} is for a memory that is a fraction: give --memory 1/13, or leave it out")


def add_library_arguments(parser: argparse.ArgumentParser) -> None:
    """`--library`, `--library-bytes` and `--key`, of all requests, and `--path`."""
    add = parser.add_argument
    add("--path", metavar="DIR", help="folder on the disk to use (default: the library's, or the temporary folder)")
    add("--library", metavar="DIR",
        help="folder of stored contexts: a request begins with the longest prefix that an earlier one has left there")
    add("--library-bytes", metavar="SIZE",
        help="most disk space of the library; the least recently used contexts are removed first (default: 200GB)")
    add("--key", metavar="FILE", type=Path, help="encryption key of the library: 32 bytes or 64 hex digits")


def assignment(text: str) -> tuple[str, Any]:
    """Name and value of FIELD=VALUE; see `field_value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be FIELD=VALUE, such as num_selected=400, got {text!r}")
    return name, field_value(value)


def field_value(text: str) -> Any:
    """The value of JSON, or of a Python literal, or else the text itself: engine=mapped needs no quotes."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 65535, got {text!r}")
    return int(text)


def in_options(text: str, arguments: argparse.Namespace) -> str:
    """A library message in which the called verb's options replace the arguments they stand for.

    An option stands for the argument of its name. The verb's default `argument_names` maps other arguments to an
    option, to another wording if there is no single option, or to "" if the verb does not have them. Cache fields are
    given with `--set`; fields that the user did not set are not listed.
    """
    parser, given = arguments.parser, dict(getattr(arguments, "fields", ()))
    options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    has_fields = options.pop("fields", None) is not None
    options |= parser.get_default("argument_names") or {}
    text, known, names = text.partition("; known: ")  # names of fields, which are those of --set
    if has_fields:
        text = _PLANNED_WITH.sub(lambda match: _given(match[1], given), text)
    text = re.sub(r",? or leave fields to the planner", ", or leave out --set" if given else "", text)
    text = re.sub(r"let `?for_budget`?(\(\))? choose the fields", "leave out --set", text)
    text = re.sub(r"`?(\w+\.)?for_budget\b(\(\))?`?", "`generate --memory`", text)
    for name, option in sorted(options.items(), key=lambda pair: -len(pair[0])):
        if name in given:
            continue
        if not option:
            text = re.sub(rf" or {name}\b", "", text)
            continue
        if option.startswith("-"):
            text = _assigned(text, name, option, flag=True)
        text = re.sub(rf"`{name}`", option, text)
        if "_" in name:  # not an English word
            text = re.sub(rf"(?<![\w.=/'\"-]){name}\b(?!\.?\w|[(/'\"=])", option, text)
        else:
            text = re.sub(rf"(^|: ){name}(?=:| (?:must|is|needs|cannot)\b| ['\"(\d])", rf"\1{option}", text)
            text = re.sub(rf"\b((?i:raise|lower|leave out|give the) ){name}\b(?=[,.;]| or|$)", rf"\1{option}", text)
            text = re.sub(rf"\bleave {name} out\b", f"leave out {option}", text)
    if has_fields and "=" in text:
        for name in sorted({field.name for cache in CACHES for field in fields(cache_class(cache).config_class)}):
            text = _assigned(text, name, f"--set {name}")
    return f"{text}{known}{names}"


_PLANNED_WITH = re.compile(r" with (\w+=[^,:]+(?:, \w+=[^,:]+)*)(?=:)")


def _given(planned_with: str, given: dict[str, Any]) -> str:
    """The fields in `planned_with` that the user set."""
    shown = [field for field in planned_with.split(", ") if field.partition("=")[0] in given]
    return f" with {', '.join(shown)}" if shown else ""


def _assigned(text: str, name: str, option: str, *, flag: bool = False) -> str:
    """`text` with assignments to `name`, such as rank=1 or engine="mapped", as the option and its value."""

    def replacement(match: re.Match[str]) -> str:
        value = (match[1] or "").strip("'\"")
        if not flag:
            return f"{option}={value}"
        return option if value in ("", "True") else f"{option} {value}"

    assigned = rf"(?<![\w.=/'\"-])(?<!--set ){name}=(\"[^\"]*\"|'[^']*'|[\w./+-]*\w)?"
    return re.sub(assigned, replacement, text)


def check_writable(path: Path, option: str = "--json") -> None:
    """Raise `OutputFileError` before minutes of work if `path` cannot be written; nothing is created or changed."""
    if not path.parent.is_dir():
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: it is a folder, or you may not write there")


def write_json(path: Path, values: Any, option: str = "--json") -> None:
    """Write `values`. Raises `OutputFileError`."""
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def read_text(path: Path, option: str, error_class: type[OSError]) -> str:
    """The UTF-8 text of the file that `option` names. Raises `error_class`."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise error_class(f"{option} {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        where = f"byte {error.start:,} is 0x{error.object[error.start]:02x}"
        raise error_class(f"{option} {str(path)!r} is not UTF-8 text: {where}") from error


PROGRAM = "hf-offload-cache"

_PIPED_WIDTH = 160
"""Width of a table that is not on a terminal."""


class NobodyReads(BrokenPipeError):
    """stdout or stderr is a pipe whose reader has ended."""


class OutputError(OSError):
    """Output cannot be written to its destination, for example because the disk is full."""


def printable(text: str, keep: str = "") -> str:
    """`text` with escapes such as \\x1b for characters that move a cursor, colour, hide or reverse text: Unicode's
    controls, formats, line separators, surrogates and private ones, except those in `keep`. Also for characters that
    stdout's encoding lacks."""
    escaped = "".join(c if c in keep or not _acts(c) else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def _acts(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def cell(value: Any) -> Text:
    """A value for a table: printable, and without rich's markup."""
    from rich.text import Text

    return Text(printable(str(value)))


def new_table(*columns: str, right: Collection[str] = (), **options: Any) -> Table:
    """A rich table whose unnamed columns are bold, and whose columns in `right` are aligned to the right."""
    from rich.table import Table

    table = Table(**options)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, style=None if name else "bold", justify=justify, overflow="fold")
    return table


def new_console(**options: Any) -> Console:
    """A rich console in which a pipe without a reader raises an error and does not end the process."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            raise  # rich calls this while it handles the error

    return PipedConsole(**options)


def stdout_console() -> Console:
    """A console for tables on stdout; wide if that is not a terminal."""
    console = new_console(highlight=False)
    return console if console.is_terminal else new_console(highlight=False, width=_PIPED_WIDTH)


def complain(error: BaseException, arguments: argparse.Namespace | None = None) -> None:
    """Print an error to stderr on one line, with the options of the verb that `arguments` belong to."""
    said = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and not error.filename:
        said = " ".join(str(error.strerror).split())  # without the number
    if arguments is not None and not isinstance(error, (ContextError, StoreError)):  # those name parts of files
        said = in_options(said, arguments)
    say(f"{PROGRAM}: {type(error).__name__}: {said}")


def say(line: str) -> None:
    """Print a line to stderr if somebody reads it."""
    try:
        print(printable(line, keep="\n"), file=sys.stderr)
    except OSError:
        _drop(sys.stderr)


def flush() -> None:
    """Flush stdout and stderr. Raises `NobodyReads`, or `OutputError` for a full disk; further output is dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            _drop(stream)
            if isinstance(error, BrokenPipeError):
                raise NobodyReads(*error.args) from error
            raise OutputError(error.errno, f"{name} cannot be written: {error.strerror}") from error


def nobody_reads() -> bool:
    """Whether stdout or stderr is a pipe whose reader has ended; if so, the remaining output is dropped."""
    gone = []
    for stream in (sys.stdout, sys.stderr):
        try:
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                gone.append(stream)
        except (AttributeError, OSError, ValueError):  # it is None, or not a file
            continue
    for stream in gone:
        _drop(stream)
    return bool(gone)


def _drop(stream: Any) -> None:
    """Discard what `stream` has buffered and what is written to it from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)


def age(seconds: float) -> str:
    """A duration in the largest unit that it fills."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
