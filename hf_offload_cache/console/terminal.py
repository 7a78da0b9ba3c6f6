"""Output to a terminal or a pipe: tables, names and texts read from a disk, one-line errors."""

from __future__ import annotations

import os
import select
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

from ..errors import ContextError, StoreError
from .arguments import in_options

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.text import Text

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
