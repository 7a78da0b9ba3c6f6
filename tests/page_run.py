"""A page's Python blocks run one after the other in one namespace, as a reader's session has one.

Sybil finds and runs them: it knows Markdown and skips, needs no formatter of its own beside ruff, and its errors name
the line of the page.
"""

from __future__ import annotations

import unittest
from typing import Any

from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def run_page(page: str, path: str, namespace: dict[str, Any]) -> tuple[int, list[str]]:
    """How many blocks ran, and why others did not. Raises what a block raises, with its line."""
    document = Document(page, path)
    for parser in (PythonCodeBlockParser(), SkipParser()):
        for region in parser(document):
            document.add(region)
    document.namespace.update(namespace)
    ran, skipped = 0, []
    for example in document.examples():
        try:
            example.evaluate()
            ran += 1
        except unittest.SkipTest as reason:
            skipped.append(str(reason))
    document.namespace.clear()
    return ran, skipped
