"""What the verbs of the console share: arguments, files to write, and the errors that are theirs."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import os
import re
import select
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ContextError, StoreError
from ..registry import CACHES, cache_class

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class PromptTooLongError(ValueError):
    """Prompt and answer need more positions than the model has; nothing was run."""


class OutputFileError(OSError):
    """The file for the figures cannot be written."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--dtype`, `--device` and `--path`, which every verb that concerns a model has."""
    add = parser.add_argument
    add("--model", metavar="ID_OR_PATH", help="hub name or folder (default: SmolLM2-135M-Instruct from a package)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="default: %(default)s")
    add("--device", help="e.g. cpu or cuda:0 (default: cuda where there is one)")
    add("--path", metavar="DIR", help="folder on the disk to use (default: the temporary folder)")


def add_cache_argument(parser: argparse.ArgumentParser, *others: str) -> None:
    """`--cache NAME`, None where it is left out: of the registry, of `others`, or "module:Class". Checked when it is
    used."""
    names = ", ".join((*CACHES, *others))
    parser.add_argument(
        "--cache", metavar="NAME", help=f"{names}, or module:Class of your own (default: {next(iter(CACHES))})"
    )


def add_field_argument(parser: argparse.ArgumentParser) -> None:
    """`--set FIELD=VALUE`, repeatable: pairs in `arguments.fields`."""
    parser.add_argument(
        "--set", metavar="FIELD=VALUE", action="append", default=[], type=assignment, dest="fields",
        help="a field of the cache's configuration, e.g. num_selected=400; repeatable",
    )  # fmt: skip


def assignment(text: str) -> tuple[str, Any]:
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
    options = {one.dest: one.option_strings[-1] for one in parser._actions if one.option_strings}
    has_fields = options.pop("fields", None) is not None
    options |= parser.get_default("argument_names") or {}
    text, known, rest = text.partition("; known: ")  # names of fields, which are those of --set
    if has_fields:
        text = _LISTED.sub(lambda found: _listed(found[1], given), text)
    text = re.sub(r",? or leave fields to the planner", ", or leave out --set" if given else "", text)
    text = re.sub(r"let `?for_budget`?(\(\))? choose the fields", "leave out --set", text)
    text = re.sub(r"`?(\w+\.)?for_budget\b(\(\))?`?", "`generate --memory`", text)
    for name, option in sorted(options.items(), key=lambda one: -len(one[0])):
        if name in given:
            continue
        if not option:
            text = re.sub(rf" or {name}\b", "", text)
            continue
        if option.startswith("-"):
            text = _named(name).sub(functools.partial(_assigned, option), text)
        text = re.sub(rf"`{name}`", option, text)
        if "_" in name:  # no word of the language
            text = re.sub(rf"(?<![\w.=/'\"-]){name}\b(?!\.?\w|[(/'\"=])", option, text)
        else:
            text = re.sub(rf"(^|: ){name}(?=:| (?:must|is|needs|cannot)\b| ['\"(\d])", rf"\1{option}", text)
            text = re.sub(rf"\b((?i:raise|lower|leave out|give the) ){name}\b(?=[,.;]| or|$)", rf"\1{option}", text)
            text = re.sub(rf"\bleave {name} out\b", f"leave out {option}", text)
    if has_fields and "=" in text:
        for name in sorted(field_names()):
            text = _named(name).sub(functools.partial(_set, name), text)
    return f"{text}{known}{rest}"


_LISTED = re.compile(r" with (\w+=[^,:]+(?:, \w+=[^,:]+)*)(?=:)")
"""Fields that something was planned with."""


def _listed(fields: str, given: dict[str, Any]) -> str:
    """Those of them that the user gave."""
    own = [one for one in fields.split(", ") if one.partition("=")[0] in given]
    return f" with {', '.join(own)}" if own else ""


def _named(name: str) -> re.Pattern[str]:
    """An argument with its value, such as rank=1 or engine="mapped"."""
    return re.compile(rf"(?<![\w.=/'\"-])(?<!--set ){name}=(\"[^\"]*\"|'[^']*'|[\w./+-]*\w)?")


def _value(found: re.Match[str]) -> str:
    return (found[1] or "").strip("'\"")


def _assigned(option: str, found: re.Match[str]) -> str:
    value = _value(found)
    return option if value in ("", "True") else f"{option} {value}"


def _set(field: str, found: re.Match[str]) -> str:
    return f"--set {field}={_value(found)}"


def field_names() -> set[str]:
    """Field names of every registered cache."""
    return {field.name for name in CACHES for field in dataclasses.fields(cache_class(name).config_class)}


def check_writable(path: Path, option: str = "--json") -> None:
    """Before minutes of work; nothing is created or changed."""
    if not path.parent.is_dir():
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: it is a folder, or not permitted")


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


# Output to a terminal or a pipe: tables, names and texts read from a disk, one-line errors

PROGRAM = "hf-offload-cache"

_PIPED_WIDTH = 160
"""Columns of a table that no terminal shows."""


class NobodyReads(BrokenPipeError):
    """stdout or stderr is a pipe whose reader has ended."""


class OutputError(OSError):
    """Output cannot be written to its destination, for example because the disk is full."""


def printable(text: str, keep: str = "") -> str:
    """`text` with every character that moves a cursor, colours, hides or turns text around as an escape such as \\x1b.

    These are all of Unicode's controls, formats, separators of lines, surrogates and private ones but those in `keep`;
    and what stdout's encoding lacks.
    """
    found = "".join(c if c in keep or not _acts(c) else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return found.encode(encoding, "backslashreplace").decode(encoding)


def _acts(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def cell(value: Any) -> Text:
    """A value for a table: printable, and without rich's markup."""
    from rich.text import Text

    return Text(printable(str(value)))


def new_console(**options: Any) -> Console:
    """A rich console in which a pipe without a reader raises an error, as elsewhere, and does not end the process."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            raise  # rich calls this while it handles the error

    return PipedConsole(**options)


def stdout_console() -> Console:
    """For tables on stdout; wide when that is no terminal."""
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
    """Deliver all that was printed. Raises `NobodyReads`, or `OutputError` for a full disk; the remaining output is
    then dropped."""
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
        except (AttributeError, OSError, ValueError):  # there is none, or it is no file
            continue
    for stream in gone:
        _drop(stream)
    return bool(gone)


def _drop(stream: Any) -> None:
    """What `stream` still has, and all that is written to it from now on, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def age(seconds: float) -> str:
    """Of a time in the past, in the largest unit that it fills."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
