"""The JSON files next to the benchmarks hold the figures that pages quote, with the commands that made them."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_offload_cache.config import SelectiveConfig
from hf_offload_cache.registry import CACHES, cache_class

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (ROOT / "eval").rglob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_figure_has_a_command_and_a_page_that_quotes_it(path: Path) -> None:
    here = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for figure in json.loads(path.read_text()):
        assert {"figure", "page", "command", "machine"} <= set(figure) and (figure.get("rows") or figure["values"])
        earlier = re.fullmatch(r"made by python -m (eval[.\w]+)( .*)? at commit [0-9a-f]{7}", figure["command"])
        module = earlier[1] if earlier else here
        assert earlier or (re.match(rf"python -m {re.escape(module)}( |$)", figure["command"]) and find_spec(module))
        assert module in " ".join((ROOT / figure["page"]).read_text().split())
        assert all(len(row) == len(figure["columns"]) for row in figure.get("rows", ()))


def test_every_study_has_its_figure() -> None:
    studies = [path for path in (ROOT / "eval/studies").glob("*.py") if "STUDY = Study(" in path.read_text()]
    assert studies and not [path.name for path in studies if path.with_suffix(".json") not in FILES]


LIMITS = {"memory", "max_context", "max_batch", "engine", "verify", "io_timeout", "encryption_key", "trace"}
"""Fields of all caches that set a limit or a safeguard: their effect is not measured in quality or reads."""


def test_every_field_of_a_configuration_has_a_figure() -> None:
    """A row of the study, or a figure that the study's JSON names; a field that is new fails until it has one."""
    measured: dict[str, set[str]] = {}
    for figure in json.loads((ROOT / "eval/studies/quality.json").read_text()):
        if "cache" not in figure:
            continue
        rows = {row[0].partition("=")[0] for row in figure["rows"]}
        measured.setdefault(figure["cache"], set()).update(rows, figure.get("elsewhere", {}))
        for field, other in figure.get("elsewhere", {}).items():
            pages = {one["page"] for one in json.loads((ROOT / other).read_text())}
            assert any(f"`{field}" in (ROOT / page).read_text() for page in pages), (field, other)
    shared = {field.name for field in dataclasses.fields(SelectiveConfig)}
    for name in CACHES:
        assert {field.name for field in dataclasses.fields(cache_class(name).config_class)} - shared <= measured[name]
    assert shared - LIMITS <= measured["disk-swap"]
