"""Every Python block of the pages and of the README runs, on a tiny model. What commands do is in `test_commands`."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from nothing_left import no_threads_and_descriptors
from page_model import TEXT
from page_run import run_page
from page_settings import SETTINGS, as_it_is
from site_pages import DOCS, FRONT, PAGES, blocks, name, text

README = FRONT[0]
ELSEWHERE = DOCS / "batch-inference.md"
"""It starts Ray, and runs where that is started anyhow, in `tests/batch/test_ray_data.py`."""
WITH_PYTHON = [path for path in (*PAGES, README) if blocks(path, "python") and path != ELSEWHERE]


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
            ran = run_page(setting.of(text(path)), name(path), namespace | setting.names)
        assert ran == len(blocks(path, "python"))


def test_a_block_that_fails_is_told_with_its_line() -> None:
    page = "# One\n\n```python\na = 1\n```\n\nand\n\n```python\nassert a == 2\n```\n"
    with pytest.raises(AssertionError) as raised:
        run_page(page, "one.md", {})
    assert raised.traceback[-1].lineno == 9 and str(raised.traceback[-1].path).endswith("one.md")
