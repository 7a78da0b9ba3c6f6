"""Every Python block of the pages and of the README runs, on a tiny model. What commands do is in `test_commands`."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from nothing_left import no_threads_and_descriptors
from page_model import TEXT
from page_run import run_page
from page_settings import SETTINGS, as_it_is
from site_pages import DOCS, FRONT, PAGES, ROOT, blocks, name, text

README = FRONT[0]
WITH_PYTHON = [path for path in (*PAGES, README) if blocks(path, "python")]

SKIPPED = {
    "docs/batch-inference.md": ["starts Ray, which takes half a minute; the block below has what its workers do"],
}
"""What no test runs, and why, as the pages say it."""


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_runs(
    path: Path, folder: Path, session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no thread and no descriptor."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))  # which dataclasses look for
    with SETTINGS.get(name(path), as_it_is)(session, monkeypatch) as setting:
        namespace = {"__name__": "page", "name": str(folder), "text": TEXT}
        if path not in (README, DOCS / "quickstart.md"):  # which make these themselves
            namespace |= session
        with no_threads_and_descriptors():
            ran, skipped = run_page(setting.of(text(path)), name(path), namespace | setting.names)
        assert skipped == SKIPPED.get(name(path), [])
        assert ran == len(blocks(path, "python"))  # where one is skipped, what says so counts


@pytest.mark.parametrize("path", sorted(SKIPPED))
def test_what_is_skipped_is_python(path: str) -> None:
    for block in blocks(ROOT / path, "python"):
        ast.parse(block)


def test_a_block_that_fails_is_told_with_its_line() -> None:
    page = "# One\n\n```python\na = 1\n```\n\nand\n\n```python\nassert a == 2\n```\n"
    with pytest.raises(AssertionError) as raised:
        run_page(page, "one.md", {})
    assert raised.traceback[-1].lineno == 9 and str(raised.traceback[-1].path).endswith("one.md")
