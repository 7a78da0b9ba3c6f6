"""Every Python block of the pages and of the README runs, on a tiny model. What commands do is in `test_commands`."""

from __future__ import annotations

import ast
import gc
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from page_model import TEXT
from page_run import run_page
from page_settings import SETTINGS, as_it_is
from site_pages import DOCS, FRONT, PAGES, ROOT, blocks, name, text

README = FRONT[0]
WITH_PYTHON = [path for path in (*PAGES, README) if blocks(path, "python")]

SKIPPED = {
    "docs/batch-inference.md": ["starts Ray, which takes half a minute; the block below has what its workers do"],
    "docs/streaming.md": ["needs an object store and a web server; the block below it does the same with a folder"],
}
"""What no test runs, and why, as the pages say it."""


def resources() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_runs(
    path: Path, folder: Path, session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no thread and no descriptor."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))  # which dataclasses look for
    with SETTINGS.get(name(path), as_it_is)(session, monkeypatch) as setting:
        before = resources()
        namespace = {"__name__": "page", "name": str(folder), "text": TEXT}
        if path not in (README, DOCS / "quickstart.md"):  # which make these themselves
            namespace |= session
        ran, skipped = run_page(setting.of(text(path)), name(path), namespace | setting.names)
        assert skipped == SKIPPED.get(name(path), [])
        assert ran == len(blocks(path, "python"))  # where one is skipped, what says so counts
        assert resources() == before


@pytest.mark.parametrize("path", sorted(SKIPPED))
def test_what_is_skipped_is_python(path: str) -> None:
    for block in blocks(ROOT / path, "python"):
        ast.parse(block)


def test_a_block_that_fails_is_told_with_its_line() -> None:
    page = "# One\n\n```python\na = 1\n```\n\nand\n\n```python\nassert a == 2\n```\n"
    with pytest.raises(AssertionError) as raised:
        run_page(page, "one.md", {})
    assert raised.traceback[-1].lineno == 9 and str(raised.traceback[-1].path).endswith("one.md")
