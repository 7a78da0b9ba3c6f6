"""Rejects phrases that are never right in README, pages, pictures, metadata, docstrings and errors, in `make lint`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "setup.cfg")
PAGES = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "docs").rglob("*.svg")]
NEVER = {
    r"br(?:ings?|ought)": "read, fetched",
    r"taken in(?! (?:turns|pieces))": "added, ingested",
    r"in the place of": "instead of",
    r"alike|likest": "similar, most similar",
    r"learnt|lessons?|teach(?:es|ing)?|taught": "fitted state, prior",
    r"(?:the )?how manieth": "index",
    r"(?<!io_uring_enter.)(?:is|are|be|been|was|were) refused": "raises `X`",
}
"""Phrase -> what to write, as `english.md` has it."""
PHRASE = re.compile("|".join(rf"\b(?:{one})\b" for one in NEVER).replace(" ", r"\s+"), re.IGNORECASE)
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)


def public(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a public name or of its attributes, and of each string in code."""
    for node in ast.walk(tree):
        inside = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = getattr(node, "name", "").startswith("_")
            inside = [one.value for one in node.body if isinstance(one, ast.Expr) and not hidden]
        elif isinstance(node, ast.Expr):
            inside = []
        yield from (
            (one.lineno, str(one.value)) for one in inside if isinstance(one, ast.Constant) and " " in str(one.value)
        )


def found() -> Iterator[str]:
    """Each phrase found, as `file:line: phrase, better: another`."""
    texts = [(path, 1, path.read_text(encoding="utf-8")) for path in PAGES]
    for path in sorted((ROOT / "hf_offload_cache").rglob("*.py")):
        texts += [(path, *one) for one in public(ast.parse(path.read_text(encoding="utf-8")))]
    for path, line, text in texts:
        prose = NOT_PROSE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
        for match in PHRASE.finditer(prose):
            said = " ".join(match[0].split())
            better = next(word for phrase, word in NEVER.items() if re.fullmatch(phrase, said, re.IGNORECASE))
            at = line + prose.count("\n", 0, match.start())
            yield f"{path.relative_to(ROOT)}:{at}: {said!r}, better: {better}"


if __name__ == "__main__":
    every = list(found())
    print(*every, sep="\n", end="\n" * bool(every))
    sys.exit(bool(every))
