"""The JSON files next to the benchmarks hold the figures that pages quote, with the commands that made them."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (ROOT / "eval").rglob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_figure_has_a_command_and_a_page_that_quotes_it(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for figure in json.loads(path.read_text()):
        assert {"figure", "page", "command", "machine"} <= set(figure) and (figure.get("rows") or figure["values"])
        assert re.match(rf"python -m {re.escape(module)}( |$)", figure["command"]) and find_spec(module)
        assert module in " ".join((ROOT / figure["page"]).read_text().split())
        assert all(len(row) == len(figure["columns"]) for row in figure.get("rows", ()))


def test_every_study_has_its_figure() -> None:
    studies = [path for path in (ROOT / "eval/studies").glob("*.py") if "STUDY = Study(" in path.read_text()]
    assert studies and not [path.name for path in studies if path.with_suffix(".json") not in FILES]
