"""What of others may reach a terminal: names and texts that were read from a disk."""

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PIPED_WIDTH = 160
"""Columns of a table that no terminal shows."""


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


def stdout_console() -> Console:
    """For tables on stdout; wide when that is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def age(seconds: float) -> str:
    """Of a time in the past, in the largest unit that it fills."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
