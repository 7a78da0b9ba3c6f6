"""A page's Python blocks run one after the other in one namespace, as a reader's session has one.

Sybil finds and runs them: it knows Markdown, needs no formatter of its own beside ruff, and its errors name the line of
the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser


@dataclass(frozen=True)
class Setting:
    """How a page is changed, and what its blocks have beside what all have."""

    replaced: dict[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def of(self, page: str) -> str:
        """The page, changed. Raises `AssertionError` where it has nothing of the kind."""
        for old, new in self.replaced.items():
            assert old in page, old
            page = page.replace(old, new)
        return page


def run_page(page: str, path: str, namespace: dict[str, Any]) -> int:
    """How many blocks ran. Raises what a block raises, with its line."""
    document = Document(page, path)
    for region in PythonCodeBlockParser()(document):
        document.add(region)
    document.namespace.update(namespace)
    ran = 0
    for example in document.examples():
        example.evaluate()
        ran += 1
    document.namespace.clear()
    return ran
