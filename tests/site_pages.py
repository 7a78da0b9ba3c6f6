"""The pages of the documentation, as they are read: with the files that they include."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FRONT = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")

_INCLUDED = re.compile(r'^--8<-- "([^":]+):?(\w*)"$', re.MULTILINE)
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\|(.*)\|$")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text(path: Path) -> str:
    """The page with what it includes."""

    def included(match: re.Match[str]) -> str:
        found = (ROOT / match[1]).read_text().rstrip("\n")
        if match[2]:  # a part of it, between two marks
            found = found.split(f"[start:{match[2]}] -->\n")[1].split(f"\n<!-- --8<-- [end:{match[2]}]")[0]
        return found

    return _INCLUDED.sub(included, path.read_text())


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [block for kind, block in _FENCED.findall(text(path)) if kind == language]


def commands(path: Path) -> list[list[str]]:
    """The words of each command of a page, without variables that are set before it and the environment's folder."""
    lines = "\n".join(blocks(path, "sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line.removeprefix(".venv/bin/"), comments=True) for line in lines]
    return [list(dropwhile(re.compile(r"[A-Z_]+=").match, words)) for words in found if words]


def prose(path: Path) -> str:
    """The page without its blocks, on one line."""
    return " ".join(_FENCED.sub("", text(path)).split())


def tables(page: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Of each table its heads and its rows, cell by cell."""
    lines: list[list[str]] = []
    for line in [*page.splitlines(), ""]:
        row = _ROW.match(line)
        if row:
            lines.append([cell.strip() for cell in row[1].split("|")])
        elif lines:
            yield lines[0], lines[2:]
            lines = []


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def section(page: str, heading: str) -> str:
    """What stands below a heading, down to the next of its level or higher. Raises `ValueError` where it is not."""
    lines = page.splitlines()
    start = next((at for at, line in enumerate(lines) if line.lstrip("#") == f" {heading}" and line[0] == "#"), None)
    if start is None:
        raise ValueError(f"there is no heading {heading!r}")
    level = len(lines[start].split()[0])
    rest = lines[start + 1 :]
    end = next((at for at, line in enumerate(rest) if re.match(rf"#{{1,{level}}} ", line)), len(rest))
    return "\n".join(rest[:end])
